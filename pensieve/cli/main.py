"""The ``pensieve`` command. Subcommands are imported when needed, so ``--help`` costs no torch.

Exit codes: 0 done, 1 failed, 2 bad option, 130 interrupted. Errors go to stderr, after the command's name.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

import click

from pensieve import __version__, extras
from pensieve.cli import environment
from pensieve.lifeline import terminate_on_eof
from pensieve.options import serve as options
from pensieve.options.commands import GroupedCommand, print_error
from pensieve.options.table import BASIC_OPTIONS, GROUPS


class ErrorOrigin:
    """Records which command an error came from. ``main`` passes it to all contexts as their ``obj``."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._command = ""

    def record(self, error: BaseException, command: str) -> None:
        """Record that ``error`` leaves ``command``, unless it has left another one before."""
        if error is not self._error:
            self._error, self._command = error, command

    def command_of(self, error: BaseException) -> str:
        """Return the command as typed, without arguments; ``pensieve`` if the error came from no subcommand."""
        context = getattr(error, "ctx", None)  # click sets it for errors in the arguments
        if isinstance(context, click.Context):
            return context.command_path
        return self._command if error is self._error else "pensieve"


class RecordingContext(click.Context):
    """A context that records errors in its ``ErrorOrigin``. Click itself names no command for errors at run time."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is not None and isinstance(self.obj, ErrorOrigin):
            self.obj.record(error, self.command_path)
        return super().__exit__(kind, error, trace)


def record_errors(command: click.Command) -> None:
    """Make a command and its subcommands run in recording contexts."""
    command.context_class = RecordingContext
    for inner in getattr(command, "commands", {}).values():
        record_errors(inner)


_WRITE_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a write to stdout when it is a file on a full or failing disk."""
SUBCOMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "chat": (
        "pensieve.cli.chat.command",
        "chat",
        "Chat in the terminal with a server, or with one started for the chat.",
    ),
    "demo": (
        "pensieve.demo.run",
        "demo",
        "See a small model remember. Needs no GPU and no download.",
    ),
    "doctor": (
        "pensieve.cli.doctor",
        "doctor",
        "Check this machine for running a server, and suggest fixes.",
    ),
    "gateway": ("pensieve.cli.gateway", "gateway", "Serve the OpenAI HTTP API in front of a server."),
    "memory": (
        "pensieve.cli.admin",
        "memory",
        "Show or change the size of a server's device cache.",
    ),
    "profile": (
        "pensieve.cli.profile",
        "profile",
        "Measure the cost of recomputing chunks on this machine.",
    ),
    "replay": (
        "pensieve.replay.command",
        "replay",
        "Replay multi-turn conversations against servers; report results.",
    ),
    "sessions": (
        "pensieve.cli.sessions",
        "sessions",
        "List, show, delete, export and import a server's sessions.",
    ),
    "simulate": (
        "pensieve.simulate.command",
        "simulate",
        "Compare eviction policies and plan capacity in simulated time.",
    ),
    "store": (
        "pensieve.cli.store",
        "store",
        "Maintain a history store: check, repair, back up, restore, move.",
    ),
    "top": ("pensieve.cli.top.command", "top", "Show a server's activity live in the terminal."),
}
"""Subcommand → module, attribute, line in ``pensieve --help``."""


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only to run it or to show its help."""

    context_class = RecordingContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *SUBCOMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        environment.ignore_forks()
        environment.silence_grpc()  # both before grpc is imported
        command = self._load(ctx, cmd_name) if cmd_name in SUBCOMMANDS else super().get_command(ctx, cmd_name)
        if command is not None:
            environment.assign_variables(command, cmd_name)
            record_errors(command)
        return command

    def _load(self, ctx: click.Context, cmd_name: str) -> click.Command:
        module, attribute, _ = SUBCOMMANDS[cmd_name]
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            if isinstance(ctx.obj, ErrorOrigin):
                ctx.obj.record(error, f"{ctx.command_path} {cmd_name}")
            raise load_error(f"`pensieve {cmd_name}`", error) from error
        assert isinstance(command, click.Command), f"{module}.{attribute} is no click command"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None:
            for line in environment.misspelt_variables(command, name):
                print_error(line, f"{ctx.command_path} {name}")
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, SUBCOMMANDS[name][2] if name in SUBCOMMANDS else self._short_help(name))
            for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _short_help(self, name: str) -> str:
        return self.commands[name].get_short_help_str(limit=80)


def load_error(what: str, error: ImportError) -> ImportError | click.ClickException:
    """Return the error to raise: it names the extra to install, or points to ``pensieve doctor``."""
    if extras.missing_extra(error) is not None:
        return error
    return click.ClickException(f"cannot load {what}: {error}; `pensieve doctor` shows what is missing")


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Environment variables set options, too: --max-running of `serve` is PENSIEVE_SERVE_MAX_RUNNING, and so on "
    "for every command. A flag takes precedence.",
)
@click.version_option(__version__, prog_name="pensieve")
def cli() -> None:
    """Stateful server for multi-turn conversations with large language models."""


@cli.command(
    cls=GroupedCommand,
    groups=GROUPS,
    first=BASIC_OPTIONS,
    epilog="Environment variables set options, too: PENSIEVE_SERVE_<OPTION>.",
)
@options.serve_flags
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="TOML file of options, named as the flags without dashes. Flags and environment variables take precedence.",
)
@click.option(
    "--print-config",
    is_flag=True,
    allow_from_autoenv=False,
    help="Print each option's value, origin and reason as TOML, then exit.",
)
@click.option(
    "--until-stdin-ends",
    is_flag=True,
    hidden=True,
    allow_from_autoenv=False,
    help="Stop when stdin is closed by the program that owns this server.",
)
@click.pass_context
def serve(
    ctx: click.Context, /, config: Path | None, print_config: bool, until_stdin_ends: bool, **given: Any
) -> None:
    """Run the server.

    When it accepts calls it prints one line: `ready grpc=HOST:PORT admin=HOST:PORT`, followed by
    `http=HOST:PORT` if --http is set. SIGTERM lets running turns finish.
    """
    variables = options.by_name(environment.variables_in_use(ctx))
    resolved = options.resolve(options.by_name(given), config, variables)
    if print_config:
        click.echo(resolved.render())
        return
    extras.require("server")
    try:
        Path.cwd()
    except FileNotFoundError:
        raise click.UsageError("the working folder no longer exists: change to another one") from None
    if until_stdin_ends:
        terminate_on_eof(0)
    gc.disable()  # imports make many objects and hardly any garbage: to look for it takes a sixth of them
    try:
        app = importlib.import_module("pensieve.server.app")
    except ImportError as error:
        raise load_error("the server", error) from error
    if resolved.sources["store"] == "default":
        folder = options.state_directory()
        try:  # Histories are private: other users of the machine may not list or read them.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise click.UsageError(
                f"--store: cannot create the folder {folder}: {error.strerror}; pass --store URL, or set XDG_STATE_HOME"
            ) from error
    ctx.exit(app.run(resolved.options))


def _open_standard_files() -> None:
    """Open closed standard files: otherwise a database would get the number, and the log would go into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    _open_standard_files()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal cannot show become "?"
    origin = ErrorOrigin()
    try:
        code = cli.main(args=arguments, prog_name="pensieve", standalone_mode=False, obj=origin)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        variable = environment.variable_of_error(error)
        message = f"{variable}: {error.message}" if variable else error.format_message()
        print_error(message, origin.command_of(error))
        sys.exit(error.exit_code)
    except ImportError as error:  # some commands import their dependencies late
        line = extras.missing_extra(error)
        if line is None:
            raise
        print_error(line, origin.command_of(error))
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except OSError as error:
        if error.errno not in _WRITE_ERRORS or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that later writes do not fail
        print_error(f"cannot write the output: {error.strerror}", origin.command_of(error))
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
