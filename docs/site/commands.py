"""Pages on the options of ``pensieve serve`` and on every command, from the table of options and from click."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from pensieve.cli.main import SUBCOMMANDS, cli
from pensieve.options.serve import ServeOptions
from pensieve.options.table import GROUPS, OPTIONS


def serve_page() -> str:
    """Markdown: the options of ``serve`` below the headings of its help, each with the reason of its default."""
    defaults, by_name = ServeOptions(), {option.name: option for option in OPTIONS}
    lines = [
        "# Options of `pensieve serve`",
        "",
        "Each is a flag, a variable and a key of the file that `--config` names: `--max-running 8`,",
        "`PENSIEVE_SERVE_MAX_RUNNING=8`, `max-running = 8` ([what wins](../install.md#options-from-the-environment)).",
        "[Serving](../serving.md) says what they are for.",
    ]
    others = [name for name in by_name if not any(name in names for names in GROUPS.values())]
    for title, names in [*GROUPS.items(), *([("What `--off NAME` switches off", others)] if others else [])]:
        lines += ["", f"## {title}", "", "| option | | default, and why |", "|---|---|---|"]
        for name in names:
            option = by_name.get(name)
            if option is None:
                continue  # of the command line alone: --help, --config
            default = option.default_text or _shown(getattr(defaults, option.field))
            flag = f"--[no-]{name}" if option.is_switch and option.can_negate else f"--{name}"
            value = f" {option.metavar}" if option.metavar else ""
            lines.append(
                f"| {_flag(flag + value)} | {_cell(option.help)} | {_cell(f'{default}: {option.why}')} |"
            )
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if value is None or value == "":
        return "none"
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def commands_page() -> str:
    """Markdown: every command with its arguments and options."""
    lines = [
        "# Commands",
        "",
        "Every option may be a variable: `PENSIEVE_`, the command, `_`, the option, in capitals. How commands end: "
        "[exit codes](../install.md#how-commands-end).",
    ]
    context = click.Context(cli, info_name="pensieve")
    for name in sorted(["serve", *SUBCOMMANDS]):
        command = cli.get_command(context, name)
        assert command is not None
        lines += _command(command, click.Context(command, parent=context, info_name=name), 2)
    return "\n".join(lines) + "\n"


def _command(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    yield from ("", f"{'#' * level} {context.command_path}", "", _help(command), "")
    usage = " ".join(command.collect_usage_pieces(context))
    yield from ("```", f"{context.command_path} {usage}", "```", "")
    if context.command_path == "pensieve serve":
        yield "Its options have [a page of their own](serve.md)."
        return
    rows = [
        record
        for param in command.get_params(context)
        if not (param.name == "help" and level > 2) and (record := param.get_help_record(context))
    ]
    if rows:
        yield from ("| option | |", "|---|---|")
        yield from (f"| {_flag(flags)} | {_cell(said)} |" for flags, said in rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, parent=context, info_name=name), level + 1)


def _help(command: click.Command) -> str:
    text = inspect.cleandoc(command.help or "").split("\f")[0].replace("``", "`")
    blocks = text.replace("<", "&lt;").split("\n\n")
    shown = (f"```\n{block[1:].strip()}\n```" if block.startswith("\b") else block for block in blocks)
    return "\n\n".join(shown)


def _flag(text: str) -> str:
    return f'<span class="flag">`{text}`</span>'


def _cell(text: str) -> str:
    return (
        " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("``", "`")
    )
