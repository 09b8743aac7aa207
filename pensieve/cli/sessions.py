"""``pensieve sessions``: list, show, erase, export and import a server's sessions."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

import click
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from pensieve.cli import output
from pensieve.cli.output import clean, describe_error, usage_error
from pensieve.client import (
    Client,
    ErasedSession,
    FinishReason,
    Item,
    Residency,
    RetryPolicy,
    Role,
    SessionInfo,
    Turn,
)
from pensieve.errors import InvalidArgument, NotFound, PensieveError
from pensieve.options.commands import complete_session_ids, tls_identity
from pensieve.options.serve import ServeOptions

MAX_MATCHES_SHOWN = 5
"""Most sessions listed for an ambiguous prefix."""


def find_session(client: Client, given: str, *, whole: bool = False) -> SessionInfo:
    """Return the session with this id, or the only one whose id begins with it, including its residency.

    ``whole``: do not accept a prefix. Raises UsageError if no session matches, or several do.
    """
    try:
        return client.session(given).refresh(residency=True)
    except (NotFound, InvalidArgument) as error:  # a short prefix is not a valid id
        if isinstance(error, NotFound) and error.reason != "SESSION_NOT_FOUND":
            raise
    prefix = given.removeprefix("sessions/")
    matches = [info.id for info in client.sessions() if info.id.startswith(prefix)] if prefix else []
    if not matches:
        raise click.UsageError(f"no session {given!r}; `pensieve sessions` lists them")
    if len(matches) > 1:
        more = f" and {len(matches) - MAX_MATCHES_SHOWN} more" if len(matches) > MAX_MATCHES_SHOWN else ""
        raise click.UsageError(
            f"{given!r} is ambiguous: {', '.join(sorted(matches)[:MAX_MATCHES_SHOWN])}{more}"
        )
    if whole:
        raise click.UsageError(f"no session {given!r}; with --yes, write the full id {matches[0]}")
    return client.session(matches[0]).refresh(residency=True)


def with_residency(client: Client, infos: list[SessionInfo]) -> list[SessionInfo]:
    """Return the sessions with their residency, without those deleted meanwhile."""
    found = []
    for info in infos:
        try:
            found.append(client.session(info.name).refresh(residency=True))
        except NotFound:
            continue
    return found


def session_json(info: SessionInfo) -> dict[str, Any]:
    """Return a session's metadata. The system prompt is text, so it is left out."""
    return {
        "id": info.id,
        "state": str(info.state),
        "revision": info.revision,
        "items": info.item_count,
        "context_tokens": info.context_tokens,
        "context_limit": info.context_limit,
        "model": info.model,
        "labels": dict(info.labels),
        "subject": info.subject,
        "created": _time(info.create_time),
        "updated": _time(info.update_time),
        "expires": _time(info.expire_time),
        "forked_from": info.forked_from.removeprefix("sessions/"),
        "running_request": info.active_request_id,
        "residency": _residency(info.residency),
    }


def turn_json(turn: Turn) -> dict[str, Any]:
    usage = turn.usage
    return {
        "request_id": turn.request_id,
        "revision": turn.revision,
        "finish_reason": name_of(turn.finish_reason),
        "candidates": max(len(turn.candidates), 1),
        "context_tokens": usage.context_tokens,
        "device": usage.gpu_cached_tokens,
        "host": usage.swapped_in_tokens,
        "recomputed": usage.recomputed_tokens,
        "new": usage.new_tokens,
        "output_tokens": usage.output_tokens,
        "queue_s": usage.queue_s,
        "restore_s": usage.restore_s,
        "prefill_s": usage.prefill_s,
        "decode_s": usage.decode_s,
    }


def item_json(item: Item, *, text: bool) -> dict[str, Any]:
    """Return one item of the history, with its text only if ``text``."""
    return {
        "item": item.item,
        "role": name_of(item.role),
        "request_id": item.request_id,
        "created": _time(item.create_time),
    } | ({"text": item.text} if text else {})


def name_of(value: FinishReason | Role | int | None) -> str:
    """Return the name in lower case, or the number if this version has no name for it."""
    if value is None:
        return ""
    return value.name.lower() if isinstance(value, FinishReason | Role) else str(value)


def tokens_by_tier(residency: Residency | None) -> Mapping[str, int]:
    """Return tokens by tier; empty if unknown."""
    if residency is None:
        return {}
    return {
        "device": residency.gpu_tokens,
        "host": residency.host_tokens,
        "dropped": residency.dropped_tokens,
    }


def _residency(residency: Residency | None) -> dict[str, Any] | None:
    return {"replica": residency.replica, **tokens_by_tier(residency)} if residency is not None else None


def _time(when: datetime | None) -> str | None:
    return when.isoformat() if when is not None else None


MIDDLE_WIDTH = 80
WIDE_WIDTH = 100


def session_rows(infos: Sequence[SessionInfo], now: datetime, width: int) -> Iterator[Text]:
    """Yield one line per session. A narrow terminal shows fewer columns but never cuts an id, which users copy."""
    columns: dict[str, list[str]] = {"SESSION": [info.id for info in infos]}
    if width >= MIDDLE_WIDTH:
        columns["AGE"] = [_age(info.create_time, now) for info in infos]
    columns["USED"] = [_age(info.update_time, now) for info in infos]
    if width >= MIDDLE_WIDTH:
        columns["ITEMS"] = [output.count(info.item_count) for info in infos]
    columns["TOKENS"] = [output.count(info.context_tokens) for info in infos]
    columns["STATE"] = [state(info) for info in infos]
    columns["CONTEXT"] = [
        describe_tiers(tokens_by_tier(info.residency), short=width < WIDE_WIDTH) for info in infos
    ]
    if width >= WIDE_WIDTH:
        columns["LABELS"] = [output.labels(info.labels) for info in infos]
    yield from _table(columns, width)


def session_facts(info: SessionInfo, now: datetime) -> Iterator[tuple[str, str]]:
    """Yield the metadata of one session as label and text."""
    yield "session", info.id
    yield "state", state(info)
    if info.model:
        yield "model", clean(info.model, lines=False)
    yield "context", f"{info.context_tokens:,} of {info.context_limit:,} tokens, {info.item_count:,} items"
    if info.residency is not None:
        yield (
            "cache",
            f"{describe_tiers(tokens_by_tier(info.residency))} at {clean(info.residency.replica, lines=False)}",
        )
    yield "created", f"{_age(info.create_time, now)} ago, used {_age(info.update_time, now)} ago"
    if info.expire_time is not None:
        yield "expires", f"in {output.age((info.expire_time - now).total_seconds())}"
    if info.subject:
        yield "about", clean(info.subject, lines=False)
    if info.compact_at:
        yield "compacts", f"from {info.compact_at:,} tokens on, keeps {info.keep_turns} turns"
    if info.labels:
        yield "labels", output.labels(info.labels)
    if info.forked_from:
        yield "fork of", f"{info.forked_from.removeprefix('sessions/')}, up to item {info.forked_from_item}"


def receipt_rows(turns: Sequence[Turn], width: int) -> Iterator[Text]:
    """Yield a table of where each turn's context came from."""
    usages = [turn.usage for turn in turns]
    columns = {
        "REV": [str(turn.revision) for turn in turns],
        "CONTEXT": [output.count(usage.context_tokens) for usage in usages],
        "DEVICE": [output.count(usage.gpu_cached_tokens) for usage in usages],
        "HOST": [output.count(usage.swapped_in_tokens) for usage in usages],
        "RECOMP": [output.count(usage.recomputed_tokens) for usage in usages],
        "NEW": [output.count(usage.new_tokens) for usage in usages],
        "ANSWER": [output.count(usage.output_tokens) for usage in usages],
    }
    if width >= MIDDLE_WIDTH:
        columns["FIRST"] = [
            output.seconds(usage.queue_s + usage.restore_s + usage.prefill_s) for usage in usages
        ]
        columns["END"] = [name_of(turn.finish_reason) for turn in turns]
    yield from _table(columns, width, left=("END",))


def history_lines(items: Sequence[Item]) -> Iterator[Text]:
    for item in items:
        yield Text.assemble((f"{item.item} {name_of(item.role)}: ", "bold"), clean(item.text))


def state(info: SessionInfo) -> str:
    """Return the session's state; ``running`` while a turn runs."""
    return "running" if info.active_request_id else str(info.state)


def describe_tiers(tokens: Mapping[str, int], *, short: bool = False) -> str:
    """Return the context's shares by tier: ``device 80 %, dropped 20 %``; ``short``: ``d80 x20``, as in strips."""
    whole = sum(tokens.values())
    if not whole:
        return "–"
    if short:
        letters = {"device": "d", "host": "h", "dropped": "x"}
        return " ".join(f"{letters[at]}{100 * part / whole:.0f}" for at, part in tokens.items() if part)
    return ", ".join(f"{where} {output.share(part, whole)}" for where, part in tokens.items() if part)


def _table(
    columns: Mapping[str, Sequence[str]],
    width: int,
    left: Sequence[str] = ("SESSION", "STATE", "CONTEXT", "LABELS"),
) -> Iterator[Text]:
    """Yield a heading and rows, numbers right-aligned. A line that is too wide is cut at its end."""
    sizes = {name: max(map(cell_len, (name, *cells))) for name, cells in columns.items()}

    def line(cells: Sequence[str], style: str = "") -> Text:
        padded = (
            set_cell_size(cell, size) if name in left else " " * (size - cell_len(cell)) + cell
            for cell, (name, size) in zip(cells, sizes.items(), strict=True)
        )
        text = Text("  ".join(padded).rstrip(), style)
        text.truncate(width, overflow="ellipsis")
        return text

    yield line(tuple(columns), "dim")
    for row in zip(*columns.values(), strict=True):
        yield line(row)


def _age(when: datetime | None, now: datetime) -> str:
    return output.age((now - when.astimezone(UTC)).total_seconds()) if when is not None else "–"


SHOWN_TURNS = 20
_RETRY = RetryPolicy(max_wait_s=3.0)
"""Short retries: a user at a terminal wants to know soon that the server does not answer."""
Function = Callable[..., Any]


class Server(NamedTuple):
    target: str
    api_key: str | None
    tls: bool
    tls_identity: Path | None


class ListByDefault(click.Group):
    """A group that runs ``list`` without a subcommand: ``pensieve sessions --label k=v``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and (
            not args or (args[0].startswith("-") and args[0] not in ("-h", "--help"))
        ):
            args = ["list", *args]
        return super().parse_args(ctx, args)


class Label(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions
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
    """Decorator: add the connection options that every subcommand has."""
    options = (
        click.option(
            "--target",
            metavar="HOST:PORT",
            envvar="PENSIEVE_SESSIONS_TARGET",
            default=ServeOptions().listen,
            show_default=True,
            is_eager=True,  # completion of ids needs it
            help="Address of the server.",
        ),
        click.option("--api-key", metavar="KEY", envvar="PENSIEVE_API_KEY", help="API key for the server."),
        click.option(
            "--tls",
            is_flag=True,
            envvar="PENSIEVE_SESSIONS_TLS",
            help="Use TLS, with the system's root certificates.",
        ),
        tls_identity(envvar="PENSIEVE_SESSIONS_TLS_IDENTITY"),
    )

    @functools.wraps(function)
    def connected(**given: Any) -> Any:
        server = Server(*(given.pop(name) for name in Server._fields))
        return function(server=server, **given)

    for option in reversed(options):
        connected = option(connected)
    return connected


@click.group(name="sessions", cls=ListByDefault, context_settings={"help_option_names": ["-h", "--help"]})
def sessions() -> None:
    """List, show, delete, export and import a server's sessions. Without a subcommand: list.

    An ID may be abbreviated to a unique prefix.
    """


@sessions.command(name="list")
@_connection
@click.option(
    "--label", "labels", type=Label(), multiple=True, help="Only sessions with this label; repeatable."
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    metavar="N",
    help="List the newest N sessions; 0: all.",
)
@click.option("--no-residency", is_flag=True, help="Skip the query of where each context is.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per session and line.")
def list_(
    server: Server,
    labels: tuple[tuple[str, str], ...],
    limit: int,
    no_residency: bool,
    as_json: bool,
) -> None:
    """List sessions, newest first.

    Shows age, last use, items, tokens, state, and where the context is.
    """
    with _client(server) as client:
        infos = client.sessions(labels=dict(labels), limit=limit + 1 if limit else None)
        more = bool(limit) and len(infos) > limit
        infos = infos[:limit] if limit else infos
        if not no_residency:
            infos = with_residency(client, infos)
    if as_json:
        for info in infos:
            click.echo(json.dumps(session_json(info)))
        return
    console = output.stdout()
    if infos:
        for line in session_rows(infos, datetime.now(UTC), console.width):
            console.print(line)
    else:
        click.echo("no sessions with these labels" if labels else f"no sessions at {server.target}", err=True)
    if more:
        click.echo(f"showing the newest {limit}; --limit 0 lists all", err=True)


@sessions.command()
@_connection
@click.argument("session_id", metavar="ID", shell_complete=complete_session_ids)
@click.option(
    "--turns",
    type=click.IntRange(min=0),
    default=SHOWN_TURNS,
    show_default=True,
    metavar="N",
    help="Show the latest N turns; 0: all.",
)
@click.option("--text", is_flag=True, help="Also print the conversation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(server: Server, session_id: str, turns: int, text: bool, as_json: bool) -> None:
    """Show one session, and where the context of each turn came from."""
    with _client(server) as client:
        info = find_session(client, session_id)
        session = client.session(info.name)
        items = session.items()
        requests = list(
            dict.fromkeys(
                item.request_id for item in items if item.role == Role.ASSISTANT and item.request_id
            )
        )
        shown = list(_turns(client, info, requests[-turns:] if turns else requests))
    if as_json:
        document = session_json(info) | {"turns": [turn_json(turn) for turn in shown]}
        document["history"] = [item_json(item, text=text) for item in items]
        click.echo(json.dumps(document | ({"system_prompt": info.system_prompt} if text else {})))
        return
    console = output.stdout()
    for name, value in session_facts(info, datetime.now(UTC)):
        console.print(Text.assemble((f"{name:<9}", "dim"), value))
    if shown:
        console.print()
        for line in receipt_rows(shown, console.width):
            console.print(line)
        if len(requests) > len(shown):
            click.echo(f"showing {len(shown)} of {len(requests)} turns; --turns 0 shows all", err=True)
    if text:
        console.print()
        for line in history_lines(items):
            console.print(line, soft_wrap=True)


@sessions.command()
@_connection
@click.argument("session_ids", metavar="ID…", nargs=-1, required=True, shell_complete=complete_session_ids)
@click.option("--yes", is_flag=True, help="Erase without confirmation; requires full ids.")
def delete(server: Server, session_ids: tuple[str, ...], yes: bool) -> None:
    """Erase sessions and all that was said in them. This cannot be undone."""
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(
            "stdin is not a terminal, so you cannot confirm; --yes and full ids erase without asking"
        )
    with _client(server) as client:
        # Find all before erasing the first: a mistyped id stops everything.
        infos = {
            info.name: info
            for info in (find_session(client, session_id, whole=yes) for session_id in session_ids)
        }
        for info in infos.values():
            about = f"{info.id} ({info.item_count} items, {info.context_tokens} tokens)"
            if yes or click.confirm(f"erase {about}?", err=True):
                client.session(info.name).delete(allow_missing=True)
                click.echo(f"erased {info.id}")


@sessions.command()
@_connection
@click.option("--subject", required=True, metavar="NAME", help="The person whose sessions are erased.")
@click.option("--yes", is_flag=True, help="Erase without confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print the receipt as one JSON object.")
def erase(server: Server, subject: str, yes: bool, as_json: bool) -> None:
    """Erase every session about a person, forks included, and print a receipt.

    Needs a key with the scope erase. Exit code 1 if damaged sessions were left whose subject cannot be read. After
    an error, repeat the command: it erases the rest.
    """
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("stdin is not a terminal, so you cannot confirm; --yes erases without asking")
    with _client(server) as client:
        if not yes:
            count = sum(info.subject == subject for info in client.sessions())
            click.confirm(
                f"erase {count} sessions about {clean(subject, lines=False)}?", err=True, abort=True
            )
        done = client.erase_subject(subject, on_session=None if as_json else _print_erased)
    if as_json:
        click.echo(json.dumps(asdict(done)))
    else:
        click.echo(
            f"{len(done.sessions)} sessions erased; cache cleared at {clean(done.replica, lines=False)}"
        )
    for name in done.undecided:
        click.echo(
            f"left: {name.removeprefix('sessions/')} is damaged, and whom it is about cannot be read",
            err=True,
        )
    if done.remnants:
        click.echo(clean(done.remnants), err=True)
    sys.exit(1 if done.undecided else 0)


def _print_erased(session: ErasedSession) -> None:
    fork = f"fork of {session.forked_from.removeprefix('sessions/')}, " if session.forked_from else ""
    held = f"{session.turns} turns, {session.items} items, {session.tokens} tokens"
    cached = f"{session.dropped_tokens} dropped from the cache"
    damaged = ", damaged" if session.damaged else ""
    click.echo(f"erased {session.name.removeprefix('sessions/')}: {fork}{held}, {cached}{damaged}")


@sessions.command()
@_connection
@click.argument("session_id", metavar="[ID]", required=False, shell_complete=complete_session_ids)
@click.option("--subject", metavar="NAME", help="Instead of an ID: every session about a person.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="Write to a new file, not to stdout."
)
def export(server: Server, session_id: str | None, subject: str | None, out: Path | None) -> None:
    """Write everything that is stored of a session, or about a person, as JSON lines.

    FILE gets its name when it is complete. Only its owner can read it.
    """
    if (session_id is None) == (subject is None):
        raise click.UsageError("give either an ID or --subject")
    with _client(server) as client:
        lines = (
            client.session(find_session(client, session_id).name).export()
            if session_id is not None
            else client.export_subject(subject or "")
        )
        if out is None:
            sys.stdout.buffer.writelines(lines)
            return
        try:
            _write_whole(out, lines)
        except OSError as error:
            raise click.ClickException(f"{error.filename or out}: {error.strerror}") from error


def _write_whole(path: Path, lines: Iterator[bytes]) -> None:
    """Write a new file that gets its name once it is whole. Raises FileExistsError."""
    partial = path.with_name(f".{path.name}.part")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@sessions.command(name="import")
@_connection
@click.argument("file", type=click.File("rb"), metavar="FILE")
@click.option("--id", "session_id", metavar="ID", help="Id of the new session, if FILE has one session.")
@click.option("--new-ids", is_flag=True, help="Let the server choose ids. Otherwise sessions keep theirs.")
def import_(server: Server, file: IO[bytes], session_id: str | None, new_ids: bool) -> None:
    """Create sessions from an export, with their live history; - is stdin.

    A file that was cut short imports nothing. After an error, repeat the command: it imports the rest.
    """
    with _client(server) as client:
        for session in client.import_sessions(file, session_id=session_id, new_ids=new_ids):
            click.echo(f"imported {session.id}")


def _turns(client: Client, info: SessionInfo, requests: list[str]) -> Iterator[Turn]:
    """Yield the turns with these request ids. Imported answers belong to none and are skipped."""
    session = client.session(info.name)
    for request in requests:
        try:
            yield session.get_turn(request)
        except NotFound:
            continue


@contextmanager
def _client(server: Server) -> Iterator[Client]:
    try:
        with Client(
            server.target,
            api_key=server.api_key,
            tls=server.tls,
            credentials=server.tls_identity,
            timeout=20.0,
            retry=_RETRY,
        ) as client:
            yield client
    except PensieveError as error:
        message = describe_error(error, server.target)
        failed = click.ClickException(message if server.target in message else f"{server.target}: {message}")
        raise usage_error(error) or failed from error
