"""A backup is whole or not there, and nothing that is not whole is restored."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pensieve.store import Began, CalledOff, Key, open_store
from pensieve.store._codec import StoredRecord, make_stored_record
from pensieve.store._raw import RawSession, no_progress
from pensieve.store._rules import Meta
from pensieve.store.maintenance import (
    BadBackup,
    CopyRefused,
    CopyResult,
    Mode,
    backup,
    check,
    move,
    open_backup,
    open_raw,
    restore,
)
from pensieve.store.maintenance.archive import ArchiveWriter, read_sessions
from pensieve.store.maintenance.copying import copy
from pensieve.store.records import SessionRow, State
from support.processes import until
from support.store.population import Made, populate
from support.store.store_bench import SqliteBench, counts, first_record, key, request, turn_record

MADE = [Made(key("a"), ("turn", "turn")), Made(key("b"), ("turn",)), Made(key("gone"), end="deleted")]


async def filled(path: Path, made: list[Made]) -> str:
    """A file with these sessions; its URL."""
    store = open_store(f"sqlite:///{path}")
    await store.open()
    await populate(store, made)
    await store.close()
    return f"sqlite:///{path}"


async def backed_up(url: str, path: Path) -> Path:
    store = open_raw(url)
    await store.open(Mode.SNAPSHOT)
    try:
        await backup(store, path)
    finally:
        await store.close()
    return path


async def restored(path: Path, url: str, *, merge: bool = False, skip: bool = False) -> CopyResult:
    whole, store = open_backup(path), open_raw(url)
    await store.open(Mode.WRITE)
    try:
        return await restore(whole, store, merge=merge, skip=skip)
    finally:
        await store.close()


async def revisions(url: str) -> dict[str, tuple[int, str]]:
    """Session id → revision, state."""
    store = open_raw(url)
    await store.open(Mode.READ)
    try:
        found = {}
        for at in await store.keys():
            session = await store.session(at)
            assert session is not None and session.meta is not None
            found[at.session_id] = (session.meta.row.revision, session.meta.row.state.value)
        return found
    finally:
        await store.close()


# ---- whole or nothing


async def test_a_backup_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = await backed_up(await filled(tmp_path / "h.db", MADE), tmp_path / "b.jsonl")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(one.name for one in tmp_path.iterdir() if "jsonl" in one.name) == ["b.jsonl"]


async def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    url = await filled(tmp_path / "h.db", MADE)
    (tmp_path / "b.jsonl").write_text("precious")
    with pytest.raises(FileExistsError):
        await backed_up(url, tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_text() == "precious"


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
async def test_a_cut_backup_is_refused(tmp_path: Path, suffix: str) -> None:
    path = await backed_up(await filled(tmp_path / "h.db", MADE), tmp_path / f"b.{suffix}")
    data = path.read_bytes()
    size = len(data)
    lines = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")][:-1] if suffix == "jsonl" else []
    for end in [0, 1, size // 3, size // 2, *lines, size - 9, size - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(BadBackup):
            await restored(path, f"sqlite:///{tmp_path}/new{end}.db")
        assert not (tmp_path / f"new{end}.db").exists()


async def test_a_changed_backup_is_refused(tmp_path: Path) -> None:
    path = await backed_up(await filled(tmp_path / "h.db", MADE), tmp_path / "b.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    changes = [
        lines[:1] + lines[2:],
        [*lines[:2], lines[2], *lines[2:]],
        [*lines, b"more\n"],
        [*lines[:-1], lines[-1], lines[-1]],
        [line.replace(b'"revision":3', b'"revision":2') for line in lines],
        [b'{"line":"pensieve-backup","format":2,"kind":"","store_id":"","made_ms":0}\n', *lines[1:]],
        [b"[]\n"],
    ]
    for number, changed in enumerate(changes):
        assert changed != lines
        path.write_bytes(b"".join(changed))
        with pytest.raises(BadBackup):
            await restored(path, f"sqlite:///{tmp_path}/new{number}.db")
        assert not (tmp_path / f"new{number}.db").exists()


def test_a_killed_backup_leaves_nothing_under_its_name(tmp_path: Path) -> None:
    """Killed in the middle of writing; what is left is a part by name, and another backup is not in its way."""
    script = (
        "import sys, time; from pathlib import Path;"
        "from pensieve.store.maintenance.archive import ArchiveWriter;"
        "writer = ArchiveWriter(Path(sys.argv[1])).__enter__();"
        "writer.begin('sqlite', 'x', 0); writer._out.flush(); time.sleep(100)"
    )
    path = tmp_path / "b.jsonl"
    process = subprocess.Popen([sys.executable, "-c", script, str(path)])
    try:
        until(lambda: any(one.stat().st_size for one in tmp_path.glob(".b.jsonl.*.part")), "nothing written")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not path.exists()
    (part,) = tmp_path.glob(".*.part")
    with pytest.raises(BadBackup):
        list(read_sessions(part))
    with ArchiveWriter(path) as writer:
        writer.begin("sqlite", "x", 0)
        writer.finish()
    assert list(read_sessions(path)) == []


def test_a_backup_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), ArchiveWriter(tmp_path / "b.jsonl") as writer:
        writer.begin("sqlite", "x", 0)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


async def test_packed_and_plain_hold_the_same(tmp_path: Path) -> None:
    url = await filled(tmp_path / "h.db", MADE)
    plain = await backed_up(url, tmp_path / "b.jsonl")
    packed = await backed_up(url, tmp_path / "b.jsonl.gz")
    lines = gzip.decompress(packed.read_bytes()).splitlines()
    assert lines[1:-1] == plain.read_bytes().splitlines()[1:-1]
    assert list(read_sessions(packed)) == list(read_sessions(plain))


async def test_a_backup_is_of_one_moment(tmp_path: Path) -> None:
    """Turns that a server commits while it is read are not in it, in no session."""
    url = await filled(tmp_path / "h.db", MADE)
    server = open_store(url)
    await server.open()
    source = open_raw(url)
    await source.open(Mode.SNAPSHOT)
    await populate(server, [Made(key("new"), ("turn",))])
    await server.begin(key("a"), request("q9", "t9"))
    await backup(source, tmp_path / "b.jsonl")
    await source.close()
    await server.close()
    assert [one.key.session_id for one in read_sessions(tmp_path / "b.jsonl")] == ["a", "b", "gone"]
    await restored(tmp_path / "b.jsonl", f"sqlite:///{tmp_path}/new.db")


# ---- written by an earlier program

PREVIOUS = Path(__file__).parent / "previous" / "backup.jsonl.gz"
"""Eight sessions, by the program before this one: idle, with a turn that waits and one that was called off, marked as
damaged, deleted, with a flipped bit in record 3, one whose row was lost, and one that has lost its first record, too.
"""
DIGESTS = {
    "idle": "93bc96f6a047d521137f1d4eefacc318f97ea2ed",
    "waiting": "2fa46a8a501857998a15d3650c57a70ec20a613b",
    "off": "50340581584604cbcf4c7e7697c2cb3d6aff62e4",
    "marked": "2fa46a8a501857998a15d3650c57a70ec20a613b",
    "flipped": "e23e57e83ba9001f754e092e22ec7b297f49d7b5",
    "rowless": "ee1f3114d25e4b29c2b5df0d389c9b5a904a411f",
}
"""Chain hash of the newest record."""


def test_a_backup_of_an_earlier_program_is_read_as_it_was_written() -> None:
    found = {one.key.session_id: one for one in read_sessions(PREVIOUS)}
    assert {name: one.log[-1].head_hash for name, one in found.items() if name in DIGESTS} == DIGESTS
    assert sorted(set(found) - set(DIGESTS)) == ["gone", "headless"]
    lost = found["headless"]
    assert lost.meta is None and [entry.revision for entry in lost.log] == [2, 3], (
        "damaged, and kept as it was"
    )


async def test_a_backup_of_an_earlier_program_is_restored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    done = await restored(PREVIOUS, url)
    assert (done.written, done.expired, done.conflicts) == (7, 0, [])
    assert done.damaged == ["acme/flipped", "acme/headless: no part of it can be read", "acme/marked"]
    assert await revisions(url) == {
        "idle": (5, "active"),
        "waiting": (2, "active"),
        "off": (2, "active"),
        "marked": (2, "damaged"),
        "gone": (2, "deleted"),
        "flipped": (4, "damaged"),
        "rowless": (3, "active"),
    }
    store = open_store(url)
    await store.open()
    try:
        assert [one.head_hash for one in await store.read(key("idle"))][-1] == DIGESTS["idle"]
        assert (await store.load(key("idle"))).labels == {"updated": "3"}
        assert await store.find_request(key("idle"), "q2") == 4
        outcome = await store.begin(key("waiting"), request("waiting", "again", seed=1))
        assert isinstance(outcome, Began) and outcome.seed == 41
        called_off = request("waiting", "follower", follows=True)
        assert isinstance(await store.begin(key("off", "b/{ü}%"), called_off), CalledOff)
    finally:
        await store.close()


# ---- into a store


async def test_a_store_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    path = await backed_up(await filled(tmp_path / "h.db", MADE), tmp_path / "b.jsonl")
    other = await filled(tmp_path / "other.db", [Made(key("x"))])
    with pytest.raises(CopyRefused, match="1 sessions"):
        await restored(path, other)
    assert await revisions(other) == {"x": (1, "active")}


async def test_merging_keeps_the_longer_of_two_copies(tmp_path: Path) -> None:
    first = await filled(tmp_path / "h.db", MADE)
    old = await backed_up(first, tmp_path / "old.jsonl")
    store = open_store(first)
    await store.open()
    row = await store.load(key("a"))
    await store.begin(key("a"), request("q7", "t7"))
    await store.commit(key("a"), "t7", "fp-q7", turn_record(row.revision, "q7"), counts(4))
    await store.delete(key("b"))
    await store.close()
    new = await backed_up(first, tmp_path / "new.jsonl")

    done = await restored(old, first, merge=True)
    assert (done.written, done.kept, done.conflicts) == (0, 3, [])
    behind = f"sqlite:///{tmp_path}/behind.db"
    await restored(old, behind)
    done = await restored(new, behind, merge=True)
    assert (done.written, done.kept, done.conflicts) == (2, 1, [])
    assert (
        await revisions(behind)
        == await revisions(first)
        == {
            "a": (4, "active"),
            "b": (2, "deleted"),
            "gone": (1, "deleted"),
        }
    )


async def test_a_copy_of_a_file_is_not_moved_into_the_file(tmp_path: Path) -> None:
    """Both call themselves by one name: what was deleted in one would come back from the other."""
    await filled(tmp_path / "h.db", MADE)
    shutil.copy(tmp_path / "h.db", tmp_path / "copy.db")
    source, target = open_raw(f"sqlite:///{tmp_path}/copy.db"), open_raw(f"sqlite:///{tmp_path}/h.db")
    await source.open(Mode.EXCLUSIVE)
    await target.open(Mode.WRITE)
    try:
        with pytest.raises(CopyRefused, match="both are one and the same store"):
            await move(source, target, merge=True)
    finally:
        await source.close()
        await target.close()


class Going:
    """Sessions that are there once, and gone when they are to be compared."""

    def __init__(self, path: Path) -> None:
        self._left = list(read_sessions(path))

    async def sessions(self) -> AsyncIterator[RawSession]:
        left, self._left = self._left, []
        for session in left:
            yield session


async def test_sessions_that_went_away_meanwhile_are_told(tmp_path: Path) -> None:
    """What was written of them could not be compared with where it came from."""
    path = await backed_up(await filled(tmp_path / "h.db", MADE), tmp_path / "b.jsonl")
    store = open_raw(f"sqlite:///{tmp_path}/new.db")
    await store.open(Mode.WRITE)
    try:
        with pytest.raises(CopyRefused, match="went away while they were copied"):
            await copy(Going(path).sessions, store, total=None, merge=False, skip=False, progress=no_progress)
    finally:
        await store.close()
    assert await revisions(f"sqlite:///{tmp_path}/new.db") == {}, "and nothing of them stays"


async def test_a_backup_of_a_newer_program_says_what_to_do(tmp_path: Path) -> None:
    path = await backed_up(await filled(tmp_path / "h.db", MADE), tmp_path / "b.jsonl")
    head, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(head.replace(b'"format":1', b'"format":2') + b"\n" + rest)
    with pytest.raises(BadBackup, match="has format 2, this program reads up to 1: upgrade Pensieve"):
        open_backup(path)


async def test_two_histories_under_one_name_are_a_conflict(tmp_path: Path) -> None:
    path = await backed_up(await filled(tmp_path / "h.db", MADE), tmp_path / "b.jsonl")
    other = [Made(key("a"), ("turn", "rewind")), Made(key("z"))]
    there = await filled(tmp_path / "other.db", other)
    done = await restored(path, there, merge=True)
    assert done.written == 0 and len(done.conflicts) == 1
    assert set(await revisions(there)) == {"a", "z"}, "one conflict: nothing is written"
    done = await restored(path, there, merge=True, skip=True)
    assert done.written == 2 and set(await revisions(there)) == {"a", "b", "gone", "z"}


async def test_a_damaged_session_is_replaced_by_a_sound_copy(tmp_path: Path) -> None:
    there = await filled(tmp_path / "h.db", MADE)
    path = await backed_up(there, tmp_path / "b.jsonl")
    bench = SqliteBench(tmp_path / "h.db")
    bench.damage(key("a"), 2)
    done = await restored(path, there, merge=True)
    assert (done.written, done.conflicts) == (1, [])
    store = open_store(there)
    await store.open()
    assert len(await store.read(key("a"))) == 3
    await store.close()


async def test_an_older_copy_does_not_replace_a_damaged_session(tmp_path: Path) -> None:
    """It lacks what was acknowledged after it: for a person to decide."""
    path = await backed_up(await filled(tmp_path / "h.db", MADE[:1]), tmp_path / "b.jsonl")
    there = await filled(tmp_path / "other.db", [Made(key("a"), ("turn", "turn", "turn"))])
    SqliteBench(tmp_path / "other.db").damage(key("a"), 4)
    done = await restored(path, there, merge=True)
    assert done.conflicts == ["acme/a: damaged in the target at revision 4; the source ends at 3"]


async def test_what_was_damaged_comes_back_marked(tmp_path: Path) -> None:
    url = await filled(tmp_path / "h.db", MADE)
    SqliteBench(tmp_path / "h.db").damage(key("a"), 2)
    path = await backed_up(url, tmp_path / "b.jsonl")
    done = await restored(path, f"sqlite:///{tmp_path}/new.db")
    assert done.damaged == ["acme/a"]
    assert await revisions(f"sqlite:///{tmp_path}/new.db") == {
        "a": (3, "damaged"),
        "b": (2, "active"),
        "gone": (1, "deleted"),
    }


async def test_what_has_expired_is_left_out(tmp_path: Path) -> None:
    record = make_stored_record(first_record(), "")
    with ArchiveWriter(tmp_path / "b.jsonl") as writer:
        writer.begin("sqlite", "x", 0)
        for name, until_ms in (("old", 5), ("new", 1 << 60)):
            row = SessionRow(
                tenant="acme",
                session_id=name,
                state=State.ACTIVE,
                revision=1,
                head_hash=record.head_hash,
                expire_ms=until_ms,
            )
            writer.add(RawSession(Key("acme", name), Meta(row, "fp"), (StoredRecord(*record),)))
        writer.finish()
    done = await restored(tmp_path / "b.jsonl", f"sqlite:///{tmp_path}/new.db")
    assert (done.written, done.expired) == (1, 1)
    assert set(await revisions(f"sqlite:///{tmp_path}/new.db")) == {"new"}


async def test_a_file_of_an_older_program_is_read_as_it_is(tmp_path: Path) -> None:
    """Only a server, or a change, brings it up to date."""
    url = await filled(tmp_path / "h.db", MADE)
    with contextlib.closing(sqlite3.connect(tmp_path / "h.db")) as connection:
        names = [
            row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'")
        ]
        connection.executescript("".join(f"DROP TRIGGER {name};" for name in names))
        connection.executescript(
            "DROP TABLE labels; DROP TABLE tenants; ALTER TABLE sessions DROP COLUMN bytes;"
        )
        connection.execute("PRAGMA user_version = 1")
    store = open_raw(url)
    await store.open(Mode.READ)
    assert (await check(store)).findings == []
    await store.close()
    path = await backed_up(url, tmp_path / "b.jsonl")
    await restored(path, f"sqlite:///{tmp_path}/new.db")
    assert await revisions(f"sqlite:///{tmp_path}/new.db") == await revisions(url)
    with contextlib.closing(sqlite3.connect(tmp_path / "h.db")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
