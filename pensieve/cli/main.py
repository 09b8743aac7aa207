"""The ``pensieve`` command. Each subcommand's module is imported when it is asked for: ``--help`` costs no torch.

Exit codes: 0 done, 1 failed, 2 a bad option (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from pensieve import __version__
from pensieve.options import serve as options

LAZY: Final[dict[str, tuple[str, str, str]]] = {
    "chat": (
        "pensieve.cli.chat.command",
        "chat",
        "Chat in the terminal, with a server or with one of its own.",
    ),
    "demo": ("pensieve.demo.run", "demo", "Watch a small model remember: no GPU, no download."),
    "doctor": (
        "pensieve.cli.doctor.command",
        "doctor",
        "Show what this machine can do, and what is missing, with the fix.",
    ),
    "gateway": ("pensieve.cli.gateway", "gateway", "Serve OpenAI's HTTP protocols from a server."),
    "profile": (
        "pensieve.cli.profile",
        "profile",
        "Measure what recomputing a chunk costs here; write JSON.",
    ),
    "replay": (
        "pensieve.replay.command",
        "replay",
        "Replay multi-turn conversations against servers and report.",
    ),
    "simulate": (
        "pensieve.simulate.command",
        "simulate",
        "Compare eviction policies and plan capacity under a virtual clock.",
    ),
    "store": (
        "pensieve.cli.store.command",
        "store",
        "Look after a history store: check, repair, back up, restore, move.",
    ),
}
"""Subcommand → module, attribute, line in ``pensieve --help``."""


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only to run it or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *LAZY])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY:
            return super().get_command(ctx, cmd_name)
        module, attribute, _ = LAZY[cmd_name]
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            raise click.ClickException(
                f"cannot load `pensieve {cmd_name}`: {error}; `pensieve doctor` shows what is missing"
            ) from error
        assert isinstance(command, click.Command), f"{module}.{attribute} is no click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, LAZY[name][2] if name in LAZY else self._own(name)) for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _own(self, name: str) -> str:
        return self.commands[name].get_short_help_str(limit=80)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pensieve")
def cli() -> None:
    """Stateful server for multi-turn conversations with large language models."""


@cli.command(context_settings={"max_content_width": 110})
@options.serve_flags
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="Options as TOML, named as the flags without dashes; a flag wins over the file.",
)
@click.option(
    "--print-config", is_flag=True, help="Print the resolved options and their reasons as TOML, then exit."
)
@click.pass_context
def serve(ctx: click.Context, /, config: Path | None, print_config: bool, **given: Any) -> None:
    """Run the server.

    Prints one line, `ready grpc=HOST:PORT admin=HOST:PORT`, when it accepts calls, with
    `http=HOST:PORT` behind it if there is --http. SIGTERM lets running turns finish.
    """
    resolved = options.resolve(options.by_name(given), config)
    if print_config:
        click.echo(resolved.render())
        return
    try:
        app = importlib.import_module("pensieve.server.app")
    except ImportError as error:
        raise click.ClickException(
            f"cannot load the server: {error}; `pensieve doctor` shows what is missing"
        ) from error
    if resolved.sources["store"] == "default":
        # Histories are private: nobody else on the machine may list or read them.
        options.state_directory().mkdir(mode=0o700, parents=True, exist_ok=True)
    ctx.exit(app.run(resolved.options))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    try:
        code = cli.main(args=arguments, prog_name="pensieve", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        click.echo(f"{context.command_path if context else 'pensieve'}: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
