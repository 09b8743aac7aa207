"""What the commands of ``pensieve store`` found and did, for people and for programs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pensieve.cli import output
from pensieve.store import maintenance
from pensieve.store.maintenance import Copied, Finding, Remedy, Repaired, Survey, TenantTotal, Totals

SHOWN: Final = 100
"""Findings in a table; ``--json`` has them all."""
REDRAW_S: Final = 0.1
_REMEDY = {
    Remedy.REBUILD: Text("repair rebuilds it", style="yellow"),
    Remedy.MARK: Text("repair marks or cuts the session", style="red"),
    Remedy.NONE: Text("restore a backup", style="red"),
}


@contextmanager
def watching() -> Iterator[maintenance.Progress]:
    """A bar on stderr while it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        last = 0.0

        def progress(what: str, done: int, of: int | None) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last > REDRAW_S:
                last = now
                bar.update(task, description=what, completed=done, total=of)

        yield progress


def as_json(value: object) -> None:
    """One JSON object on stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def survey(found: Survey) -> None:
    """What is wrong, and a last line with the verdict."""
    console = output.stdout()
    _findings(console, found.findings)
    wrong = len(found.findings)
    verdict = "sound" if not wrong else f"{wrong} finding{'s' if wrong > 1 else ''}"
    console.print(Text(f"{_amount(found.total)}: {verdict}", style="red" if wrong else "green"))


def repaired(done: Repaired, *, applied: bool) -> None:
    """What was done to each session, or would be, and what is left."""
    console = output.stdout()
    if done.mended:
        table = Table(box=None, pad_edge=False)
        for column in ("session", "done" if applied else "to do"):
            table.add_column(column, overflow="fold")
        for one in done.mended[:SHOWN]:
            table.add_row(Text(f"{one.tenant}/{one.session}"), Text("; ".join(one.actions)))
        console.print(table)
        _more(console, len(done.mended))
    for key in done.busy:
        console.print(Text(f"{key.tenant}/{key.session_id}: in use, left alone; repeat", style="yellow"))
    if done.left:
        console.print(Text("left as it is:"))
        _findings(console, done.left)
    verb = "repaired" if applied else "could be repaired (--apply does it)"
    count = len(done.mended) - len(done.busy)
    text = f"{count} sessions {verb}, {len(done.left)} findings left"
    console.print(Text(text, style="red" if done.left else "green"))


def copied(done: Copied) -> None:
    """What became of the sessions."""
    console = output.stdout()
    for name in done.damaged:
        console.print(Text(f"damaged: {name}", style="yellow"))
    for line in done.conflicts:
        console.print(Text(f"conflict: {line}", style="red"))
    parts = [f"{done.written} sessions written and verified"]
    parts += [f"{done.kept} kept"] if done.kept else []
    parts += [f"{done.expired} expired"] if done.expired else []
    parts += [f"{len(done.conflicts)} conflicts"] if done.conflicts else []
    console.print(Text(", ".join(parts), style="red" if done.conflicts else "green"))


def backed_up(total: Totals, name: str) -> None:
    console = output.stdout()
    console.print(Text(f"{name}: {_amount(total)}"))
    if total.damaged:
        text = f"{total.damaged} sessions are damaged, and are in the backup as they are: see `pensieve store check`"
        console.print(Text(text, style="red"))


def usage(totals: Iterable[TenantTotal]) -> None:
    """A line per tenant."""
    table = Table(box=None, pad_edge=False)
    table.add_column("tenant", overflow="fold")
    for column in ("sessions", "deleted", "records", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in totals:
        total = one.total
        cells = (total.sessions, total.tombstones, total.records, total.bytes)
        table.add_row(Text(one.tenant), *(f"{cell:,}" for cell in cells))
    output.stdout().print(table)


def _findings(console: Console, findings: list[Finding]) -> None:
    if not findings:
        return
    table = Table(box=None, pad_edge=False)
    for column in ("session", "what", "found", "remedy"):
        table.add_column(column, overflow="fold", no_wrap=column == "what")
    for one in findings[:SHOWN]:
        name = f"{one.tenant}/{one.session}" if one.session else "the store"
        table.add_row(Text(name), Text(one.problem.value), Text(one.detail), _REMEDY[one.remedy])
    console.print(table)
    _more(console, len(findings))


def _more(console: Console, number: int) -> None:
    if number > SHOWN:
        console.print(f"and {number - SHOWN} more: --json has them all")


def _amount(total: Totals) -> str:
    return (
        f"{total.sessions} sessions, {total.tombstones} deleted, {total.records} records, {total.bytes} bytes"
    )
