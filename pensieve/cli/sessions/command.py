"""``pensieve sessions``: the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click
from rich.text import Text

from pensieve.cli import completion, output
from pensieve.cli.refusals import misuse, refusal
from pensieve.cli.sessions import found, pages
from pensieve.client import Client, RetryPolicy, Role, SessionInfo, Turn
from pensieve.errors import NotFound, PensieveError
from pensieve.options.serve import ServeOptions

SHOWN_TURNS = 20
_PATIENCE = RetryPolicy(max_wait_s=3.0)
"""Whoever has typed a command wants to know soon that nobody answers."""
Function = Callable[..., Any]


class ListByDefault(click.Group):
    """Without a subcommand it lists: ``pensieve sessions --label k=v``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and (
            not args or (args[0].startswith("-") and args[0] not in ("-h", "--help"))
        ):
            args = ["list", *args]
        return super().parse_args(ctx, args)


class Label(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions
    """``k=v``."""

    name = "K=V"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, wanted = str(value).partition("=")
        if not (key and equals):
            self.fail(f"expected K=V, got {value!r}", param, ctx)
        return key, wanted


def _connection(function: Function) -> Function:
    """The options of every subcommand."""
    options = (
        click.option(
            "--target",
            metavar="HOST:PORT",
            envvar="PENSIEVE_SESSIONS_TARGET",
            default=ServeOptions().listen,
            show_default=True,
            is_eager=True,  # completion of ids asks there
            help="Server to ask.",
        ),
        click.option("--api-key", metavar="KEY", envvar="PENSIEVE_API_KEY", help="Credential for it."),
        click.option(
            "--tls",
            is_flag=True,
            envvar="PENSIEVE_SESSIONS_TLS",
            help="TLS towards it, with the system's root certificates.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@click.group(name="sessions", cls=ListByDefault, context_settings={"help_option_names": ["-h", "--help"]})
def sessions() -> None:
    """List the sessions of a server, show one, erase some. Without a subcommand: list.

    An ID may be its beginning, if only one session begins so.
    """


@sessions.command(name="list")
@_connection
@click.option(
    "--label", "labels", type=Label(), multiple=True, help="Only those with this label; repeatable."
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    metavar="N",
    help="The newest N; 0 is all.",
)
@click.option("--no-residency", is_flag=True, help="Do not ask for each where its context lies.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object for each session, on a line of its own."
)
def list_(
    target: str,
    api_key: str | None,
    tls: bool,
    labels: tuple[tuple[str, str], ...],
    limit: int,
    no_residency: bool,
    as_json: bool,
) -> None:
    """The newest first: age, last use, items, tokens, state, and where the context lies."""
    with _client(target, api_key, tls) as client:
        infos = client.sessions(labels=dict(labels), limit=limit + 1 if limit else None)
        more = bool(limit) and len(infos) > limit
        infos = infos[:limit] if limit else infos
        if not no_residency:
            infos = found.with_residency(client, infos)
    if as_json:
        for info in infos:
            click.echo(json.dumps(found.session_json(info)))
        return
    console = output.stdout()
    if infos:
        for line in pages.listing(infos, datetime.now(UTC), console.width):
            console.print(line)
    else:
        click.echo("no sessions with these labels" if labels else f"no sessions at {target}", err=True)
    if more:
        click.echo(f"the newest {limit}; --limit 0 lists all", err=True)


@sessions.command()
@_connection
@click.argument("session_id", metavar="ID", shell_complete=completion.sessions)
@click.option(
    "--turns",
    type=click.IntRange(min=0),
    default=SHOWN_TURNS,
    show_default=True,
    metavar="N",
    help="Receipts of the latest N turns; 0 is all.",
)
@click.option("--text", is_flag=True, help="What was said, too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(
    target: str, api_key: str | None, tls: bool, session_id: str, turns: int, text: bool, as_json: bool
) -> None:
    """One session, and where the context of each turn came from."""
    with _client(target, api_key, tls) as client:
        info = found.find(client, session_id)
        session = client.session(info.name)
        items = session.items()
        requests = list(
            dict.fromkeys(
                item.request_id for item in items if item.role == Role.ASSISTANT and item.request_id
            )
        )
        told = list(_turns(client, info, requests[-turns:] if turns else requests))
    if as_json:
        document = found.session_json(info) | {"turns": [found.turn_json(turn) for turn in told]}
        document["history"] = [found.item_json(item, text=text) for item in items]
        click.echo(json.dumps(document | ({"system_prompt": info.system_prompt} if text else {})))
        return
    console = output.stdout()
    for name, value in pages.facts(info, datetime.now(UTC)):
        console.print(Text.assemble((f"{name:<9}", "dim"), value))
    if told:
        console.print()
        for line in pages.receipts(told, console.width):
            console.print(line)
        if len(requests) > len(told):
            click.echo(f"{len(told)} of {len(requests)} turns; --turns 0 shows all", err=True)
    if text:
        console.print()
        for line in pages.said(items):
            console.print(line, soft_wrap=True)


@sessions.command()
@_connection
@click.argument("session_ids", metavar="ID…", nargs=-1, required=True, shell_complete=completion.sessions)
@click.option("--yes", is_flag=True, help="Do not ask. Ids are written in full then.")
def delete(target: str, api_key: str | None, tls: bool, session_ids: tuple[str, ...], yes: bool) -> None:
    """Erase sessions with all that was said in them. It cannot be undone."""
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask at; --yes erases without asking")
    with _client(target, api_key, tls) as client:
        # All are found before the first is erased: a mistyped id stops everything.
        infos = {info.name: info for info in (found.find(client, one, whole=yes) for one in session_ids)}
        for info in infos.values():
            about = f"{info.id} ({info.item_count} items, {info.context_tokens} tokens)"
            if yes or click.confirm(f"erase {about}?", err=True):
                client.session(info.name).delete(allow_missing=True)
                click.echo(f"erased {info.id}")


def _turns(client: Client, info: SessionInfo, requests: list[str]) -> Iterator[Turn]:
    """The turns of these request ids; answers that came with an import are of none."""
    session = client.session(info.name)
    for request in requests:
        try:
            yield session.get_turn(request)
        except NotFound:
            continue


@contextmanager
def _client(target: str, api_key: str | None, tls: bool) -> Iterator[Client]:
    """A connection whose failures are one line."""
    try:
        with Client(target, api_key=api_key, tls=tls, timeout=20.0, retry=_PATIENCE) as client:
            yield client
    except PensieveError as error:
        said = refusal(error, target)
        failed = click.ClickException(said if target in said else f"{target}: {said}")
        raise misuse(error) or failed from error
