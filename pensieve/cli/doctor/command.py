"""``pensieve doctor``: what this machine can do, and what is missing, with the fix."""

from __future__ import annotations

import sys

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pensieve.cli.doctor import checks
from pensieve.cli.doctor import gpu as doctor_gpu
from pensieve.cli.doctor.checks import Check
from pensieve.options import serve as options

_DEFAULTS = options.ServeOptions()
_COLOUR = {"ok": "green", "note": "yellow", "fail": "red"}


def examine(resolved: options.ServeOptions) -> list[Check]:
    """Every check, with the addresses, store and model of these options."""
    return [
        *checks.system(),
        *checks.packages(),
        *doctor_gpu.accelerator(),
        *checks.store(resolved.store),
        *checks.model(resolved.model),
        checks.port("listen", resolved.listen),
        checks.port("admin", resolved.admin),
    ]


def show(findings: list[Check], console: Console) -> None:
    """A table, and one last line with the verdict."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "found", "fix"):
        table.add_column(column, overflow="fold", no_wrap=column == "what")
    area = ""
    for check in findings:
        if check.area != area:
            area = check.area
            table.add_row("", Text(area, style="bold"), "", "")
        mark = Text(check.state, style=_COLOUR[check.state])
        fix = check.fix if check.state != "ok" else ""
        table.add_row(mark, Text(f"  {check.name}"), Text(check.found), Text(fix))
    console.print(table)
    blocking = sum(check.state == "fail" for check in findings)
    verdict = "ready" if not blocking else f"{blocking} blocking problem{'s' if blocking > 1 else ''}"
    console.print(Text(verdict, style="red" if blocking else "green"))


@click.command()
@click.option("--model", metavar="MODEL", help=f"Folder, hub id or `demo`.  [default: {_DEFAULTS.model}]")
@click.option("--store", metavar="URL", help="History store to try.  [default: as `pensieve serve`]")
@click.option("--listen", metavar="HOST:PORT", help=f"gRPC address to try.  [default: {_DEFAULTS.listen}]")
@click.option("--admin", metavar="HOST:PORT", help=f"Admin address to try.  [default: {_DEFAULTS.admin}]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def doctor(as_json: bool, **given: str | None) -> None:
    """Show what this machine can do, and what is missing, with the fix.

    Exit code 1 when something would keep `pensieve serve` with these options from working.
    """
    # Whether an address is wise to listen on is the server's question; here only whether it can be had.
    resolved = options.resolve({**given, "insecure-i-know": True}).options
    findings = examine(resolved)
    blocking = any(check.state == "fail" for check in findings)
    if as_json:
        report = {"ok": not blocking, "checks": findings}
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        show(findings, Console(soft_wrap=False))
    sys.exit(1 if blocking else 0)
