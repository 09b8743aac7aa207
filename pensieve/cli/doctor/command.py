"""``pensieve doctor``: what this machine can do, and what is missing, with the fix."""

from __future__ import annotations

import sys
import textwrap
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.text import Text

from pensieve import extras
from pensieve.cli import output
from pensieve.cli.doctor import checks
from pensieve.cli.doctor import gpu as doctor_gpu
from pensieve.cli.doctor.checks import Check
from pensieve.cli.doctor.ports import port
from pensieve.options import serve as options
from pensieve.options.commands import models

_DEFAULTS = options.ServeOptions()
_NAME: Final = 24
"""Columns of a name."""
_NARROW: Final = 60
_COLOUR = {"ok": "green", "note": "yellow", "fail": "red"}


def examine(resolved: options.ServeOptions) -> list[Check]:
    """Every check, with the addresses, store and model of these options."""
    is_server = extras.installed("server")
    return [
        *checks.system(),
        *checks.packages(),
        *(doctor_gpu.accelerator() if is_server else ()),
        *checks.store(resolved.store),
        *(checks.model(resolved.model) if is_server else ()),
        port("listen", resolved.listen),
        port("admin", resolved.admin),
    ]


def show(findings: list[Check], console: Console) -> None:
    """A paragraph per finding, its fix below it, and one last line with the verdict.

    It is wrapped below itself where the console is narrow.
    """
    area = ""
    for check in findings:
        if check.area != area:
            area = check.area
            console.print(Text(area, style="bold"))
        for number, line in enumerate(_lines(check, console.width)):
            text = Text(line)
            if number == 0:
                text.stylize(_COLOUR[check.state], 0, len(check.state))
            console.print(text, soft_wrap=True)
    blocking = sum(check.state == "fail" for check in findings)
    verdict = "ready" if not blocking else f"{blocking} blocking problem{'s' if blocking > 1 else ''}"
    console.print(Text(verdict, style="red" if blocking else "green"))


def _lines(check: Check, width: int) -> list[str]:
    """The finding in so many columns. Paths and commands are not cut apart: they are there to be copied."""
    head = f"{check.state:5} {check.name}: " if width < _NARROW else f"{check.state:5} {check.name:{_NAME}} "
    left = " " * (6 if width < _NARROW else len(f"{'':5} {'':{_NAME}} "))
    fix = f"fix: {check.fix}" if check.fix and check.state != "ok" else ""
    return [
        line
        for first, text in ((head, check.found), (left, fix))
        for line in textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=left,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


@click.command()
@click.option(
    "--model",
    envvar="PENSIEVE_SERVE_MODEL",
    metavar="MODEL",
    help=f"Folder, GGUF file, hub id, `smollm2` or `demo`.  [default: {_DEFAULTS.model}]",
    shell_complete=models,
)
@click.option(
    "--store",
    envvar="PENSIEVE_SERVE_STORE",
    metavar="URL",
    help="History store to try.  [default: as `pensieve serve`]",
)
@click.option(
    "--listen",
    envvar="PENSIEVE_SERVE_LISTEN",
    metavar="HOST:PORT",
    help=f"gRPC address to try.  [default: {_DEFAULTS.listen}]",
)
@click.option(
    "--admin",
    envvar="PENSIEVE_SERVE_ADMIN",
    metavar="HOST:PORT",
    help=f"Admin address to try.  [default: {_DEFAULTS.admin}]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def doctor(as_json: bool, **given: str | None) -> None:
    """Show what this machine can do, and what is missing, with the fix.

    What the environment sets for `pensieve serve` is looked at as well. Exit code 1 when something would keep
    `pensieve serve` with these options from working.
    """
    # Whether an address is wise to listen on is the server's question; here only whether it can be had.
    resolved = options.resolve({**given, "insecure-i-know": True}).options
    findings = examine(resolved)
    blocking = any(check.state == "fail" for check in findings)
    if as_json:
        report = {"ok": not blocking, "checks": findings}
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        show(findings, output.stdout())
    sys.exit(1 if blocking else 0)
