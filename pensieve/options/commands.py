"""Shared by all commands of ``pensieve``: grouped help, error messages on stderr, shell completion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click import Context, Parameter
from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
_SHOW_ALL = "pensieve.options.commands.everything"


class GroupedCommand(click.Command):
    """A command whose help groups its options under headings. Ungrouped ones come last, under "Other".

    ``first``: the options that ``--help`` shows; ``--help all`` shows every one. None: both show every one.
    """

    def __init__(
        self,
        *args: Any,
        groups: Mapping[str, Sequence[str]],
        first: Collection[str] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(*args, **others)
        self._groups = groups
        self._first = first

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_SHOW_ALL] = args[-1:] == ["all"] and args[-2:-1] in ([name] for name in ("-h", "--help"))
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                rows[max(param.opts, key=len).lstrip("-")] = record
        shown = set(rows) if self._first is None or ctx.meta.get(_SHOW_ALL) else set(self._first)
        for title, names in self._groups.items():
            if found := [rows[name] for name in names if name in rows and name in shown]:
                with formatter.section(title):
                    formatter.write_dl(found)
        named = {name for names in self._groups.values() for name in names}
        if others := [row for name, row in rows.items() if name not in named]:
            with formatter.section("Other"):
                formatter.write_dl(others)
        if len(shown) < len(rows):
            formatter.write_paragraph()
            formatter.write_text(
                f"`{ctx.command_path} --help all` shows {len(rows) - len(shown)} more options."
            )


def print_error(message: str, command: str | None = None) -> None:
    """Write an error to stderr, after the command as it was typed: ``pensieve store check: …``.

    ``command`` defaults to the running one.
    """
    if command is None:
        command = click.get_current_context().command_path
    click.echo(f"{command}: {message}", err=True)


def complete_words(*words: str, paths: str = "") -> Completer:
    """Return a completer of these words and of paths: ``file`` or ``dir``. It looks only at the typed text."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(word) for word in words if word.startswith(incomplete)]
        return [*found, CompletionItem(incomplete, type=paths)] if paths else found

    return complete


models = complete_words("demo", "smollm2", paths="file")
"""Completer of options that name a model. Does not know hub ids."""


def tls_identity(envvar: str | None = None) -> Callable[[Any], Any]:
    """Return the option ``--tls-identity`` of commands that call a server."""

    def check(ctx: Context, param: Parameter, path: Path | None) -> Path | None:
        if path is not None and not ctx.resilient_parsing:
            from pensieve.client.identity import identity_credentials

            try:
                identity_credentials(path)
            except OSError as error:
                raise click.BadParameter(str(error)) from error
        return path

    return click.option(
        "--tls-identity",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        envvar=envvar,
        callback=check,
        help="PEM file with a certificate and its private key, for a server with --tls-client-ca; implies --tls.",
    )


TIMEOUT_S = 1.0
"""Completion must not keep the user waiting after Tab."""
MAX_IDS = 100


def complete_session_ids(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete ids of sessions at ``--target``; none without a target or if the server does not answer."""
    from pensieve.client import Client, RetryPolicy
    from pensieve.errors import PensieveError

    target = ctx.params.get("target")
    if not target:
        return []
    once = RetryPolicy(max_attempts=1)
    try:
        with Client(
            target,
            api_key=ctx.params.get("api_key"),
            tls=bool(ctx.params.get("tls")),
            credentials=ctx.params.get("tls_identity"),
            timeout=TIMEOUT_S,
            retry=once,
        ) as client:
            ids = [info.name.rpartition("/")[2] for info in client.sessions(limit=MAX_IDS)]
    except (PensieveError, OSError, ValueError):
        return []  # a message would garble the line that is being typed
    return [CompletionItem(session_id) for session_id in ids if session_id.startswith(incomplete)]
