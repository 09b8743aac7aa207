"""What is left of a history file after random damage: when it is served, checked, backed up, restored and repaired.

Damages are bits, bytes and pages of any table or index, of the header and of the log of changes, a file that is cut,
and rows that another program deleted. A record is *sound* if each byte of its row is what was written, in the page of
the table and in the pages that continue it. A session is *whole* if all of its records are sound.

python tests/support/store/damage.py --damages 200
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import platform
import random
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from pensieve.core import FinishReason, Role, pack_tokens
from pensieve.errors import PensieveError
from pensieve.store import Began, BeginRequest, Counts, Key, maintenance
from pensieve.store.maintenance import Mode, RawSession, open_backup
from pensieve.store.records import Item, Record, RecordKind, SessionConfig, SessionRow, State, TurnResult
from pensieve.store.sqlite_store import SqliteStore

PAGE = 4096
SESSIONS = 30
ERASED = "SECRET-ERASED-TEXT"
TABLES = ("sessions", "records", "requests", "labels", "marks", "tenants", "store")

Stored = tuple[str, int, str]
"""Session, revision and chain hash of a record: the hash covers its bytes and all before it."""
Extent = tuple[str, int, int]
"""File ("" or "-wal"), where it begins, and how many bytes."""


@dataclass
class Pristine:
    """A history before it is damaged."""

    folder: Path
    logs: dict[str, list[Stored]] = field(default_factory=dict)
    """By session, oldest first."""


@dataclass
class Losses:
    """What must not happen, counted."""

    records: int = 0
    sessions: int = 0
    twice: int = 0
    erased: int = 0
    errors: int = 0
    what: list[str] = field(default_factory=list)

    def add(self, what: str, name: str, count: int = 1) -> None:
        if count:
            setattr(self, what, getattr(self, what) + count)
            self.what.append(f"{name}: {what} {count}")


# ---- a history


def _turn(base: int, request_id: str, text: str) -> Record:
    user = Item(2 * base, Role.USER, text, pack_tokens([1, 2, 3]), request_id)
    reply = Item(2 * base + 1, Role.ASSISTANT, text[::-1], pack_tokens([4, 5]))
    result = TurnResult(base, FinishReason.EOS, seed=7, input_items=1, mark=f"mark-{request_id}")
    return Record(base + 1, RecordKind.TURN, 2, request_id, items=(user, reply), turn=result)


async def _turned(store: SqliteStore, key: Key, base: int, request_id: str, text: str) -> object:
    """Ask for a turn and commit it if it is new, as a server does."""
    begun = await store.begin(
        key, BeginRequest(request_id, f"fp-{request_id}", request_id, "o", "a", 60_000, 1, None, 0)
    )
    if isinstance(begun, Began):
        at = begun.row.revision if base < 0 else base
        counts = Counts(2 * at + 1, 2 * at, 5 * at)
        await store.commit(key, request_id, f"fp-{request_id}", _turn(at, request_id, text), counts)
    return begun


async def make(folder: Path, *, with_log: bool, sessions: int = SESSIONS) -> Pristine:
    """A history file of some sessions; ``with_log``: its newest turns are in its log of changes."""
    chance, made = random.Random(7), Pristine(folder)
    work = folder / "work"
    work.mkdir(parents=True)
    store = SqliteStore(work / "h.db")
    await store.open()
    keys = [Key(f"t{number % 3}", f"s{number:02}") for number in range(sessions)]
    revisions = dict.fromkeys(keys, 1)

    async def turns(key: Key, count: int) -> None:
        for _ in range(count):
            size = chance.choice([20, 300, 1500, 9000])
            base = revisions[key]
            await _turned(
                store, key, base, f"{key.session_id}-r{base}", f"{key.session_id} {base} " + "x" * size
            )
            revisions[key] += 1

    for key in [*keys, Key("t0", "erased")]:
        labels = {"team": key.tenant}
        first = Record(1, RecordKind.CREATE, 1, config=SessionConfig(model="m"), labels=labels)
        row = SessionRow(
            tenant=key.tenant, session_id=key.session_id, config=SessionConfig(model="m"), labels=labels
        )
        await store.create(row, first, "fp")
    await _turned(store, Key("t0", "erased"), 1, "erased-r1", ERASED * 400)
    for key in keys:
        await turns(key, chance.randrange(1, 5))
    await store.delete(Key("t0", "erased"))
    if with_log:
        await store.close()
        await store.open()
        for key in keys[::2]:
            await turns(key, 2)
    for key in keys:
        log = await store.read(key)
        made.logs[key.session_id] = [(key.session_id, one.record.revision, one.head_hash) for one in log]
    if with_log:
        _copied(work, folder)
        await store.close()
    else:
        await store.close()
        _copied(work, folder)
    return made


def _copied(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for suffix in ("", "-wal"):
        if (source / f"h.db{suffix}").exists():
            shutil.copy(source / f"h.db{suffix}", target / f"h.db{suffix}")


# ---- where its records lie


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(at, at + 9):
        value = value << 7 | data[place] & 0x7F
        if data[place] < 0x80:
            return value, place + 1
    return value, at + 9


def _page_extents(folder: Path) -> Callable[[int], Extent]:
    log = (folder / "h.db-wal").read_bytes() if (folder / "h.db-wal").exists() else b""
    newest = {}
    for at in range(32, len(log) - PAGE - 23, PAGE + 24):
        if log[at + 8 : at + 16] != log[16:24]:
            break
        newest[int.from_bytes(log[at : at + 4], "big")] = at + 24
    return lambda number: (
        ("-wal", newest[number], PAGE) if number in newest else ("", (number - 1) * PAGE, PAGE)
    )


def located(folder: Path) -> dict[Stored, list[Extent]]:
    """Every extent of the row of each record. SQLite itself says which pages are the table's (``dbstat``)."""
    extent_of = _page_extents(folder)
    files = {
        suffix: (folder / f"h.db{suffix}").read_bytes()
        for suffix in ("", "-wal")
        if (folder / f"h.db{suffix}").exists()
    }
    with tempfile.TemporaryDirectory() as scratch:
        _copied(folder, Path(scratch))
        with contextlib.closing(sqlite3.connect(Path(scratch) / "h.db")) as connection:
            leaves = [
                number
                for (number,) in connection.execute(
                    "SELECT pageno FROM dbstat WHERE name = 'records' AND pagetype = 'leaf'"
                )
            ]
            rows = {
                rowid: (session_id, revision, chain)
                for rowid, session_id, revision, chain in connection.execute(
                    "SELECT r.rowid, COALESCE(s.session_id, substr(f.named, instr(f.named, ',') + 2, 3)), r.revision,"
                    " r.head_hash FROM records r LEFT JOIN sessions s ON s.id = r.session"
                    " LEFT JOIN records f ON f.session = r.session AND f.revision = 1"
                )
            }
    found: dict[Stored, list[Extent]] = {}
    for number in leaves:
        file, start, _ = extent_of(number)
        page = files[file][start : start + PAGE]
        for index in range(int.from_bytes(page[3:5], "big")):
            at = int.from_bytes(page[8 + 2 * index : 10 + 2 * index], "big")
            length, place = _varint(page, at)
            rowid, place = _varint(page, place)
            least = (PAGE - 12) * 32 // 255 - 23
            local = length
            if length > PAGE - 35:
                fit = least + (length - least) % (PAGE - 4)
                local = fit if fit <= PAGE - 35 else least
            extents = [(file, start + at, place - at + local + (4 if local < length else 0))]
            following = (
                int.from_bytes(page[place + local : place + local + 4], "big") if local < length else 0
            )
            while following:
                extents.append(extent_of(following))
                more, begins, _ = extents[-1]
                following = int.from_bytes(files[more][begins : begins + 4], "big")
            found[rows[rowid]] = extents
    return found


# ---- damage


def damaged(folder: Path, chance: random.Random) -> str:
    """Damage the file in one of many ways, or in two; what was done."""
    ways = [
        _bits,
        _bytes,
        _page_zeroed,
        _page_noise,
        _pages_swapped,
        _cut,
        _header,
        _cell_count,
        _table_page,
        _table_page,
    ]
    if (folder / "h.db-wal").exists():
        ways += [_log_bits, _log_bits, _log_cut]
    return ", ".join(chance.choice(ways)(folder, chance) for _ in range(chance.choice([1, 1, 2])))


def part_zeroed(folder: Path, name: str) -> None:
    """The last page of a table or an index, a leaf, holds nothing but zeros."""
    with contextlib.closing(sqlite3.connect(folder / "h.db")) as connection:
        ((number,),) = connection.execute(
            "SELECT max(pageno) FROM dbstat WHERE name = ? AND pagetype = 'leaf'", (name,)
        )
    _edit(folder / "h.db", (number - 1) * PAGE, bytes(PAGE))


def parts(folder: Path) -> list[str]:
    """All tables and indexes."""
    with contextlib.closing(sqlite3.connect(folder / "h.db")) as connection:
        return [name for (name,) in connection.execute("SELECT DISTINCT name FROM dbstat ORDER BY name")]


def rows_deleted(folder: Path, chance: random.Random) -> str:
    """As another program would: rows are gone, and the indexes agree."""
    table = chance.choice(["sessions", "requests", "marks", "labels", "tenants", "records"])
    with contextlib.closing(sqlite3.connect(folder / "h.db", isolation_level=None)) as connection:
        number = connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        some = chance.choice([1, 3, number])
        identity = {
            "requests": "request_id",
            "marks": "found_by",
            "labels": "session_id",
            "tenants": "tenant",
        }
        column = identity.get(table, "rowid")
        connection.execute(
            f"DELETE FROM {table} WHERE {column} IN (SELECT {column} FROM {table} ORDER BY RANDOM() LIMIT {some})"
            if some < number or table != "records"
            else "DELETE FROM records WHERE revision = 2"
        )
    return f"{some} rows of {table} deleted"


def _edit(path: Path, at: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(new)


def _size(folder: Path, suffix: str = "") -> int:
    return (folder / f"h.db{suffix}").stat().st_size


def _bits(folder: Path, chance: random.Random, suffix: str = "") -> str:
    path, count = folder / f"h.db{suffix}", chance.choice([1, 4, 16])
    for _ in range(count):
        at = chance.randrange(path.stat().st_size)
        _edit(path, at, bytes([path.read_bytes()[at] ^ 1 << chance.randrange(8)]))
    return f"{count} bits{suffix}"


def _bytes(folder: Path, chance: random.Random) -> str:
    at, length = chance.randrange(_size(folder)), chance.choice([16, 200, 2000])
    length = min(length, _size(folder) - at)
    _edit(folder / "h.db", at, chance.randbytes(length))
    return f"{length} bytes"


def _pages(folder: Path) -> int:
    return max(1, _size(folder) // PAGE)


def _page_zeroed(folder: Path, chance: random.Random) -> str:
    _edit(folder / "h.db", chance.randrange(_pages(folder)) * PAGE, bytes(PAGE))
    return "a page zeroed"


def _page_noise(folder: Path, chance: random.Random) -> str:
    _edit(folder / "h.db", chance.randrange(_pages(folder)) * PAGE, chance.randbytes(PAGE))
    return "a page of noise"


def _pages_swapped(folder: Path, chance: random.Random) -> str:
    data = (folder / "h.db").read_bytes()
    one, other = (chance.randrange(_pages(folder)) * PAGE for _ in range(2))
    _edit(folder / "h.db", one, data[other : other + PAGE])
    _edit(folder / "h.db", other, data[one : one + PAGE])
    return "two pages swapped"


def _cut(folder: Path, chance: random.Random) -> str:
    with (folder / "h.db").open("r+b") as file:
        file.truncate(chance.choice([0, chance.randrange(_size(folder)), _size(folder) * 9 // 10]))
    return "cut"


def _header(folder: Path, chance: random.Random) -> str:
    at = chance.choice(
        [chance.randrange(24), chance.randrange(28, 48), chance.randrange(56, 60), *range(16, 24)]
    )
    data = (folder / "h.db").read_bytes()
    if len(data) > at:
        _edit(folder / "h.db", at, bytes([data[at] ^ 1 << chance.randrange(8)]))
    return f"a bit of the header at {at}"


def _cell_count(folder: Path, chance: random.Random) -> str:
    """Rows that are there are not looked at any more."""
    at = chance.randrange(1, max(2, _pages(folder))) * PAGE
    _edit(folder / "h.db", at + 3, chance.choice([b"\0\0", b"\0\1", b"\0\2"]))
    return "a cell count"


def _table_page(folder: Path, chance: random.Random) -> str:
    """A page of a table or an index that is drawn first: most pages are the records'."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(sqlite3.DatabaseError):
        _copied(folder, Path(scratch))
        with contextlib.closing(sqlite3.connect(Path(scratch) / "h.db")) as connection:
            names = [name for (name,) in connection.execute("SELECT DISTINCT name FROM dbstat ORDER BY name")]
            name = chance.choice(names)
            pages = connection.execute(
                "SELECT pageno FROM dbstat WHERE name = ? ORDER BY pageno", (name,)
            ).fetchall()
            number = chance.choice(pages)[0]
        if number * PAGE <= _size(folder):
            at = (number - 1) * PAGE + chance.randrange(PAGE)
            new = [bytes(PAGE), bytes([chance.randrange(256)])][chance.randrange(2)]
            _edit(folder / "h.db", at if len(new) == 1 else (number - 1) * PAGE, new)
            return f"{'a page' if len(new) > 1 else 'a byte'} of {name}"
    return _page_zeroed(folder, chance)


def _log_bits(folder: Path, chance: random.Random) -> str:
    return _bits(folder, chance, "-wal")


def _log_cut(folder: Path, chance: random.Random) -> str:
    with (folder / "h.db-wal").open("r+b") as file:
        file.truncate(chance.randrange(32, _size(folder, "-wal")))
    return "the log of changes cut"


# ---- what is left


def _unchanged(before: dict[str, bytes], after: dict[str, bytes], extents: list[Extent]) -> bool:
    return all(
        before[file][at : at + length] == after.get(file, b"")[at : at + length]
        for file, at, length in extents
    )


def _files(folder: Path) -> dict[str, bytes]:
    return {
        suffix: (folder / f"h.db{suffix}").read_bytes()
        for suffix in ("", "-wal")
        if (folder / f"h.db{suffix}").exists()
    }


async def one(pristine: Pristine, seed: int, folder: Path) -> tuple[str, int, int, Losses]:
    """One damage: what it was, sound records, whole sessions, and what was lost."""
    chance, base = random.Random(seed), folder / "base"
    _copied(pristine.folder, base)
    what = rows_deleted(base, chance) if chance.random() < 0.15 else ""
    extents, before = located(base), _files(base)
    if not what or chance.random() < 0.3:
        what = ", ".join(filter(None, [what, damaged(base, chance)]))
    return what, *await _judged(pristine, folder, extents, before)


async def one_of(pristine: Pristine, damage: Callable[[Path], object], folder: Path) -> Losses:
    """What is lost after this damage to the files of a folder."""
    base = folder / "base"
    _copied(pristine.folder, base)
    extents, before = located(base), _files(base)
    damage(base)
    return (await _judged(pristine, folder, extents, before))[2]


async def _judged(
    pristine: Pristine, folder: Path, extents: dict[Stored, list[Extent]], before: dict[str, bytes]
) -> tuple[int, int, Losses]:
    """Sound records, whole sessions, and what was lost. ``extents``, ``before``: of the files in ``folder/base`` when
    they were not damaged yet."""
    base, losses = folder / "base", Losses()
    after = _files(base)
    sound = {stored for stored, where in extents.items() if _unchanged(before, after, where)}
    whole = {name: log for name, log in pristine.logs.items() if set(log) <= sound}
    for name, work in (("serving", _serving), ("backup", _backup), ("check", _check), ("repair", _repair)):
        _copied(base, folder / name)
        try:
            await work(folder / name, sound, whole, losses)
        except (
            PensieveError,
            OSError,
            sqlite3.Error,
            maintenance.BadBackup,
            maintenance.CopyRefused,
        ) as error:
            if sound:
                losses.add("errors", f"{name}: {type(error).__name__} {error}")
    return len(sound), len(whole), losses


async def _raw(path: Path, mode: Mode = Mode.READ) -> list[RawSession]:
    store = maintenance.open_raw(f"sqlite:///{path}")
    await store.open(mode)
    try:
        return [session for key in await store.keys() if (session := await store.session(key)) is not None]
    finally:
        await store.close()


def _compared(name: str, found: list[RawSession], sound: set[Stored], losses: Losses) -> None:
    there = {(entry.revision, entry.head_hash) for session in found for entry in session.log}
    losses.add("records", name, sum((revision, chain) not in there for _, revision, chain in sound))
    losses.add(
        "erased", name, sum(ERASED.encode() in entry.data for session in found for entry in session.log)
    )


async def _serving(folder: Path, sound: set[Stored], whole: dict[str, list[Stored]], losses: Losses) -> None:
    await _served("serving", folder / "h.db", whole, losses)
    _compared("serving", await _raw(folder / "h.db"), sound, losses)


async def _served(name: str, path: Path, whole: dict[str, list[Stored]], losses: Losses) -> None:
    """Every session whose records are sound is served whole, repeats what it has answered, and takes a turn."""
    store = SqliteStore(path)
    await store.open()
    try:
        for session_id, log in whole.items():
            key = Key(f"t{int(session_id[1:]) % 3}", session_id)
            problem = await _session_served(store, key, log, losses, name)
            losses.add("sessions", f"{name} {session_id} {problem}", int(bool(problem)))
        for tenant in ("t0", "t1", "t2"):
            listed = {row.session_id for row in (await store.list_sessions(tenant, limit=999)).rows}
            by_label = {
                row.session_id
                for row in (await store.list_sessions(tenant, limit=999, labels={"team": tenant})).rows
            }
            ours = {one for one in whole if f"t{int(one[1:]) % 3}" == tenant}
            losses.add("sessions", f"{name} listing", len(ours - listed) + len(ours - by_label))
    finally:
        await store.close()


async def _session_served(store: SqliteStore, key: Key, log: list[Stored], losses: Losses, name: str) -> str:
    try:
        read = [(key.session_id, each.record.revision, each.head_hash) for each in await store.read(key)]
        if read != log or (await store.load(key)).state is not State.ACTIVE:
            return "is not whole"
        for revision in {2, len(log)} if len(log) > 1 else ():
            request_id = f"{key.session_id}-r{revision - 1}"
            await _turned(store, key, -1, request_id, "again")
            marked = await store.find_marked(key.tenant, f"mark-{request_id}", None, limit=9)
            if [(each.session_id, each.revision) for each in marked] != [(key.session_id, revision)]:
                return "is not found by its mark"
        await _turned(store, key, -1, "one more", "and on")
        await _turned(store, key, -1, "one more", "and on")
        ids = Counter(each.record.request_id for each in await store.read(key) if each.record.request_id)
        losses.add("twice", f"{name} {key.session_id}", sum(count - 1 for count in ids.values()))
        return "" if len(await store.read(key)) == len(log) + 1 else "has not grown by its turn"
    except PensieveError as error:
        return str(error)


async def _backup(folder: Path, sound: set[Stored], whole: dict[str, list[Stored]], losses: Losses) -> None:
    before = _files(folder)
    store = maintenance.open_raw(f"sqlite:///{folder}/h.db")
    await store.open(Mode.SNAPSHOT)
    try:
        await maintenance.backup(store, folder / "b.jsonl")
    finally:
        await store.close()
    if {suffix: data for suffix, data in _files(folder).items() if data} != {
        s: d for s, d in before.items() if d
    }:
        losses.add("errors", "a backup changed the file")
    backed = open_backup(folder / "b.jsonl")
    _compared("backup", [session async for session in backed.sessions()], sound, losses)
    target = maintenance.open_raw(f"sqlite:///{folder}/restored.db")
    await target.open(Mode.WRITE)
    try:
        await maintenance.restore(backed, target)
    finally:
        await target.close()
    _compared("restored", await _raw(folder / "restored.db"), sound, losses)
    await _served("restored", folder / "restored.db", whole, losses)


async def _check(folder: Path, _sound: set[Stored], whole: dict[str, list[Stored]], losses: Losses) -> None:
    store = maintenance.open_raw(f"sqlite:///{folder}/h.db")
    await store.open(Mode.READ)
    try:
        found = (await maintenance.check(store)).findings
    finally:
        await store.close()
    lost = {one.session for one in found if one.problem is maintenance.Problem.LOG}
    losses.add("sessions", f"check {lost & set(whole)}", len(lost & set(whole)))


async def _repair(folder: Path, sound: set[Stored], whole: dict[str, list[Stored]], losses: Losses) -> None:
    store = maintenance.open_raw(f"sqlite:///{folder}/h.db")
    await store.open(Mode.EXCLUSIVE)
    try:
        await maintenance.repair(store, apply=True)
    finally:
        await store.close()
    checked = maintenance.open_raw(f"sqlite:///{folder}/h.db")
    await checked.open(Mode.READ)
    try:
        left = (await maintenance.check(checked)).findings
    finally:
        await checked.close()
    wrong = [one.detail for one in left if one.session in whole or one.session == ""]
    losses.add("errors", f"left after repair: {wrong}", len(wrong))
    _compared("repaired", await _raw(folder / "h.db"), sound, losses)
    await _served("repaired", folder / "h.db", whole, losses)


def play(damages: Iterator[int], folder: Path, report: Callable[[str], object]) -> Counter[str]:
    """Each damage of these seeds on a file of its own; sums over all."""

    async def all_of_them() -> Counter[str]:
        made = [await make(folder / f"made{index}", with_log=bool(index)) for index in (0, 1)]
        total: Counter[str] = Counter()
        for seed in damages:
            place = folder / "run"
            what, sound, whole, losses = await one(made[seed % 2], seed, place)
            shutil.rmtree(place)
            total.update(damages=1, sound_records=sound, whole_sessions=whole)
            for name in ("records", "sessions", "twice", "erased", "errors"):
                total[f"lost_{name}" if name in ("records", "sessions") else name] += getattr(losses, name)
            if losses.what:
                report(f"{seed} ({what}): " + "; ".join(losses.what[:4]))
        return total

    waiting: Awaitable[Counter[str]] = all_of_them()
    return asyncio.run(waiting)  # type: ignore[arg-type]


@click.command()
@click.option("--damages", default=200, help="How many.", show_default=True)
@click.option("--first", default=0, help="Seed of the first one.", show_default=True)
def main(damages: int, first: int) -> None:
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        total = play(
            iter(range(first, first + damages)), Path(folder), lambda line: click.echo(line, err=True)
        )
    versions = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    click.echo(json.dumps({**total, **versions, "seconds": round(time.monotonic() - began)}, indent=2))


if __name__ == "__main__":
    main()
