"""``pensieve store``: maintain a history store. The commands and their reports, for people and for programs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec
from rich import progress as bars
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pensieve.cli import output
from pensieve.errors import PensieveError
from pensieve.options.serve import default_store
from pensieve.options.values import store_url
from pensieve.store import maintenance
from pensieve.store.contract import Key
from pensieve.store.maintenance import (
    BadBackup,
    CopyRefused,
    CopyResult,
    Finding,
    Mode,
    Progress,
    RawStore,
    Remedy,
    RepairResult,
    Survey,
    TenantTotal,
    Totals,
)

T = TypeVar("T")


class StoreUrl(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions
    """The URL of a store that other processes can open: not ``memory:``."""

    name = "URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RawStore:
        try:
            return maintenance.open_raw(store_url(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class SessionName(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions
    name = "TENANT/ID"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Key:
        tenant, slash, session_id = str(value).rpartition("/")
        if not (slash and session_id):
            self.fail(f"expected TENANT/ID, got {value!r}", param, ctx)
        return Key(tenant, session_id)


class BackupFile(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions
    name = "FILE.jsonl[.gz]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if path.suffix in (".zst", ".xz", ".bz2"):
            self.fail(f"{path}: a backup is plain JSON lines or .gz", param, ctx)
        if path.is_dir() or not path.parent.is_dir():
            self.fail(f"{path}: is a folder, or in a folder that does not exist", param, ctx)
        return path


_STORE = click.option(
    "--store",
    "store",
    type=StoreUrl(),
    default=default_store,
    help="URL of the store, as for `pensieve serve --store`.  [default: as `pensieve serve`]",
)
_SESSION = click.option("--session", "only", type=SessionName(), help="Only this session.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_MERGE = click.option(
    "--merge",
    is_flag=True,
    help="Allow a target store that is not empty; of two copies of a session the longer one is kept.",
)
_SKIP = click.option(
    "--skip-conflicts",
    is_flag=True,
    help="With --merge: skip sessions that conflict. Otherwise nothing is written if one does.",
)


@click.group()
def store() -> None:
    """Maintain a history store: check, repair, back up, restore, move."""


@store.command()
@_STORE
@_SESSION
@_JSON
def check(store: RawStore, only: Key | None, as_json: bool) -> None:
    """Read everything and verify it.

    Verifies checksums and chains of records, item numbers, request ids, listing, expiry, and SQLite's own
    structure. Servers may be running. Exit code 1 if there are findings.
    """

    async def work(progress: Progress) -> Survey:
        async with _open_store(store, Mode.READ):
            return await maintenance.check(store, only, progress)

    found = _run(work)
    if as_json:
        show_as_json({"sound": not found.findings, "total": found.total, "findings": found.findings})
    else:
        show_survey(found)
    sys.exit(1 if found.findings else 0)


@store.command()
@_STORE
@_SESSION
@click.option("--apply", is_flag=True, help="Repair. Otherwise only report what would be done.")
@click.option(
    "--truncate-damaged",
    "cut_to",
    type=BackupFile(),
    help="Truncate damaged sessions after their last sound record; first back them up to FILE.",
)
@_JSON
def repair(store: RawStore, only: Key | None, apply: bool, cut_to: Path | None, as_json: bool) -> None:
    """Repair what can be rebuilt from the records.

    Sessions that cannot be repaired are marked as damaged. Changes nothing without --apply. No server may be
    using a SQLite file; in Redis, sessions in use are skipped. Exit code 1 if problems remain.
    """

    async def work(progress: Progress) -> RepairResult:
        async with _open_store(store, Mode.EXCLUSIVE if apply else Mode.READ):
            return await maintenance.repair(store, apply=apply, cut_to=cut_to, only=only, progress=progress)

    done = _run(work)
    if as_json:
        busy = [{"tenant": key.tenant, "session": key.session_id} for key in done.busy]
        show_as_json({"applied": apply, "mended": done.mended, "busy": busy, "left": done.remaining})
    else:
        show_repaired(done, applied=apply)
    sys.exit(1 if done.remaining else 0)


@store.command()
@click.argument("to", type=BackupFile(), metavar="TO.jsonl[.gz]")
@_STORE
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@_JSON
def backup(to: Path, store: RawStore, force: bool, as_json: bool) -> None:
    """Write everything to one file.

    The file gets its name only when it is complete. Servers may be running. A SQLite store is backed up as of
    one moment, a Redis store session by session. Exit code 1 if there are damaged sessions; they are in the
    backup as they are.
    """

    async def work(progress: Progress) -> Totals:
        async with _open_store(store, Mode.SNAPSHOT):
            return await maintenance.backup(store, to, replace_file=force, progress=progress)

    total = _run(work)
    if as_json:
        show_as_json({"file": str(to), "total": total})
    else:
        show_backed_up(total, to.name)
    sys.exit(1 if total.damaged else 0)


@store.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FROM")
@click.option(
    "--to",
    "target",
    type=StoreUrl(),
    required=True,
    help="URL of the store to restore into, as for `pensieve serve --store`.",
)
@_MERGE
@_SKIP
@_JSON
def restore(source: Path, target: RawStore, merge: bool, skip_conflicts: bool, as_json: bool) -> None:
    """Write a backup to an empty store.

    Verifies the file before, and the store after. Expired sessions are left out. Exit code 1 on conflicts.
    """

    async def work(progress: Progress) -> CopyResult:
        progress("verifying the backup", 0, None)
        whole = maintenance.open_backup(source)
        async with _open_store(target, Mode.WRITE):
            return await maintenance.restore(
                whole, target, merge=merge, skip=skip_conflicts, progress=progress
            )

    _finish_copy(_run(work), as_json)


@store.command()
@click.argument("source", type=StoreUrl(), metavar="FROM_URL")
@click.argument("target", type=StoreUrl(), metavar="TO_URL")
@_MERGE
@_SKIP
@_JSON
def move(source: RawStore, target: RawStore, merge: bool, skip_conflicts: bool, as_json: bool) -> None:
    """Copy one store to another.

    Stop the servers first. Each session is read back and compared at the end. The old store is not changed:
    remove it when the new one is in use.
    """

    async def work(progress: Progress) -> CopyResult:
        async with _open_store(source, Mode.EXCLUSIVE), _open_store(target, Mode.WRITE):
            return await maintenance.move(source, target, merge=merge, skip=skip_conflicts, progress=progress)

    _finish_copy(_run(work), as_json)


@store.command()
@_STORE
@_JSON
def usage(store: RawStore, as_json: bool) -> None:
    """Show the sessions, records and bytes of each tenant."""

    async def work(progress: Progress) -> list[TenantTotal]:
        async with _open_store(store, Mode.READ):
            return await maintenance.usage(store, progress)

    totals = _run(work)
    if as_json:
        show_as_json({"tenants": totals})
    else:
        show_usage(totals)


def _finish_copy(done: CopyResult, as_json: bool) -> None:
    if as_json:
        show_as_json(msgspec.to_builtins(done))
    else:
        show_copied(done)
    sys.exit(1 if done.conflicts else 0)


@asynccontextmanager
async def _open_store(store: RawStore, mode: Mode) -> AsyncIterator[None]:
    try:
        await store.open(mode)
        yield
    finally:
        await store.close()


def _run(work: Callable[[Progress], Coroutine[Any, Any, T]]) -> T:
    """Return the result of ``work``. Expected errors become one line and exit code 1."""
    try:
        with progress_bar() as progress:
            return asyncio.run(work(progress))
    except PensieveError as error:
        raise click.ClickException(error.message) from error
    except (BadBackup, CopyRefused, FileExistsError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename or 'input/output'}: {error.strerror}") from error


MAX_ROWS: Final = 100
REDRAW_S: Final = 0.1
_REMEDY = {
    Remedy.REBUILD: Text("repair rebuilds it", style="yellow"),
    Remedy.MARK: Text("repair marks or truncates the session", style="red"),
    Remedy.NONE: Text("restore a backup", style="red"),
}


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar on stderr if it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        last = 0.0

        def progress(what: str, done: int, of: int | None) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last > REDRAW_S:
                last = now
                bar.update(task, description=what, completed=done, total=of)

        yield progress


def show_as_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def show_survey(found: Survey) -> None:
    console = output.stdout()
    _findings(console, found.findings)
    wrong = len(found.findings)
    verdict = "sound" if not wrong else f"{wrong} finding{'s' if wrong > 1 else ''}"
    console.print(Text(f"{_totals_text(found.total)}: {verdict}", style="red" if wrong else "green"))


def show_repaired(done: RepairResult, *, applied: bool) -> None:
    """Print what was done to each session, or would be, and the remaining findings."""
    console = output.stdout()
    if done.mended:
        table = Table(box=None, pad_edge=False)
        for column in ("session", "done" if applied else "to do"):
            table.add_column(column, overflow="fold")
        for session in done.mended[:MAX_ROWS]:
            table.add_row(Text(f"{session.tenant}/{session.session}"), Text("; ".join(session.actions)))
        console.print(table)
        _print_omitted(console, len(done.mended))
    for key in done.busy:
        console.print(
            Text(f"{key.tenant}/{key.session_id}: in use, skipped; run again later", style="yellow")
        )
    if done.remaining:
        console.print(Text("not repaired:"))
        _findings(console, done.remaining)
    verb = "repaired" if applied else "can be repaired (with --apply)"
    count = len(done.mended) - len(done.busy)
    text = f"{count} sessions {verb}, {len(done.remaining)} findings left"
    console.print(Text(text, style="red" if done.remaining else "green"))


def show_copied(done: CopyResult) -> None:
    console = output.stdout()
    for name in done.damaged:
        console.print(Text(f"damaged: {name}", style="yellow"))
    for line in done.conflicts:
        console.print(Text(f"conflict: {line}", style="red"))
    parts = [f"{done.written} sessions, deleted ones included, written and verified"]
    parts += [f"{done.kept} kept"] if done.kept else []
    parts += [f"{done.expired} expired"] if done.expired else []
    parts += [f"{len(done.conflicts)} conflicts"] if done.conflicts else []
    console.print(Text(", ".join(parts), style="red" if done.conflicts else "green"))


def show_backed_up(total: Totals, name: str) -> None:
    console = output.stdout()
    console.print(Text(f"{name}: {_totals_text(total)}"))
    if total.damaged:
        text = f"{total.damaged} damaged sessions are in the backup as they are: see `pensieve store check`"
        console.print(Text(text, style="red"))


def show_usage(totals: Iterable[TenantTotal]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("tenant", overflow="fold")
    for column in ("sessions", "deleted", "records", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for tenant in totals:
        total = tenant.total
        cells = (total.sessions, total.tombstones, total.records, total.bytes)
        table.add_row(Text(tenant.tenant), *(f"{cell:,}" for cell in cells))
    output.stdout().print(table)


def _findings(console: Console, findings: list[Finding]) -> None:
    if not findings:
        return
    table = Table(box=None, pad_edge=False)
    for column in ("session", "what", "found", "remedy"):
        table.add_column(column, overflow="fold", no_wrap=column == "what")
    for finding in findings[:MAX_ROWS]:
        name = f"{finding.tenant}/{finding.session}" if finding.session else "the store"
        table.add_row(Text(name), Text(finding.problem.value), Text(finding.detail), _REMEDY[finding.remedy])
    console.print(table)
    _print_omitted(console, len(findings))


def _print_omitted(console: Console, number: int) -> None:
    if number > MAX_ROWS:
        console.print(f"and {number - MAX_ROWS} more: --json lists all")


def _totals_text(total: Totals) -> str:
    return (
        f"{total.sessions} sessions, {total.tombstones} deleted, {total.records} records, {total.bytes} bytes"
    )
