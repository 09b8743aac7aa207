"""Recover all sessions of a damaged history file from the rows that its pages still hold.

Records prove themselves: each has a checksum, and a hash chain joins those of a session. They name their
session by a number; its name is found in its row, in its first record, or in an index. ``rebuild_file`` keeps
the damaged file beside the new one. A crash in between leaves the old file or the new one, whole and on the
disk, and the next start finishes the replacement.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from pensieve.errors import DataLoss, FailedPrecondition
from pensieve.store._codec import FORMAT_ERASED, StoredRecord, verify_next
from pensieve.store._raw import (
    Problem,
    Progress,
    RawSession,
    Remedy,
    examine,
    make_finding,
    plan_fix,
    salvage_meta,
    sort_keys,
    without_lease_holder,
)
from pensieve.store._rules import CommittedRequest, Meta, Moment
from pensieve.store._sqlite import schema
from pensieve.store._sqlite.disk import fsync_path, log_of_changes, size_of
from pensieve.store._sqlite.errors import SQLITE_ERRORS, lenient_text
from pensieve.store._sqlite.pages import PageRow, Pages
from pensieve.store._sqlite.raw_rows import key_from_name, read_row, verified_request
from pensieve.store._sqlite.rows import Rows
from pensieve.store.contract import Key
from pensieve.store.records import State

log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 10.0
"""Interval of progress lines in the log while a file is rebuilt."""
LOST_TENANT: Final = "lost+found"
"""Tenant of sessions that have only records left."""
_PAGES_PER_REPORT: Final = 256

_STAGE: Final = """
CREATE TABLE record (session INTEGER, revision INTEGER, data BLOB, crc INTEGER, hash TEXT, place INTEGER);
CREATE TABLE row (session INTEGER, tenant TEXT, session_id TEXT, crc INTEGER, meta BLOB, place INTEGER);
CREATE TABLE name (session INTEGER, tenant TEXT, session_id TEXT, worth INTEGER);
CREATE TABLE request (session INTEGER, request_id TEXT, fingerprint TEXT, revision INTEGER, place INTEGER);
"""
_INDEXES: Final = """
CREATE INDEX record_session ON record (session, revision);
CREATE INDEX row_session ON row (session);
CREATE INDEX name_session ON name (session);
CREATE INDEX request_session ON request (session);
"""


def hidden_damage(path: Path) -> str:
    """Return the damage that SQLite would not report when it opens the file; "" if none. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(20)
    if head.startswith(b"SQLite format 3\0") and not set(head[18:20]) <= {1, 2}:
        return "its header asks for another version of SQLite"  # SQLite opens such a file read-only
    if not size_of(log_of_changes(path)):
        return ""
    with contextlib.closing(Pages(path)) as pages:
        if pages.has_lost_file or (pages.log_is_cut and _log_has_more(path, pages)):
            return "its write-ahead log is damaged"
    return ""


def _log_has_more(path: Path, pages: Pages) -> bool:
    """Whether the frames that SQLite ignores have anything that may have been acknowledged.

    A power cut in the middle of a change leaves such frames as well, because pages reach the disk in any order.
    """
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None)
        ) as connection:
            connection.text_factory = lenient_text
            rows = (row for row in pages.rows(ignored=True) if row is not None)
            return any(_is_more(connection, row, pages.torn_from) for row in rows)
    except SQLITE_ERRORS:
        return True


def _is_more(connection: sqlite3.Connection, row: PageRow, torn_from: int) -> bool:
    """Whether ``row`` is a sound record that SQLite does not find, or proves one, or a deletion."""
    match row.values:
        case [int(session), int(revision), bytes(data), int(crc), str(chain), *_] if row.is_table_row:
            known = connection.execute(
                "SELECT 1 FROM records WHERE session = ? AND revision = ? AND head_hash = ?",
                (session, revision, chain),
            )
            return zlib.crc32(data) == crc and known.fetchone() is None
        case [
            None,
            str(tenant),
            str(session_id),
            int(),
            int(),
            int(),
            int(),
            bytes(meta),
            _,
            int(crc),
            *_,
        ] if row.is_table_row and row.place < torn_from:
            key = Key(tenant, session_id)
            ignored = read_row(key, crc, meta).meta
            found = connection.execute(
                "SELECT crc, meta FROM sessions WHERE tenant = ? AND session_id = ?", (tenant, session_id)
            ).fetchone()
            known_meta = None if found is None else read_row(key, *found).meta
            return ignored is not None and (known_meta is None or _age(known_meta) < _age(ignored))
    return False


def _age(meta: Meta) -> tuple[int, bool]:
    return meta.row.revision, meta.row.state is State.DELETED


class RecoveredFile:
    """The readable rows of one file, held in a temporary database until ``close``."""

    def __init__(self, path: Path, progress: Callable[[int, int], None] = lambda _done, _of: None) -> None:
        """Read all pages. ``progress``: called with pages read and their number. Raises OSError."""
        self._stage = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._stage.execute("PRAGMA synchronous = OFF")
        self._stage.executescript(_STAGE)
        self._stage.execute("BEGIN")
        self.store_id = ""
        pages, done = Pages(path), 0
        self._torn_from = pages.torn_from
        for row in pages.rows():
            if row is not None:
                self._take(row)
                continue
            done += 1
            if done % _PAGES_PER_REPORT == 0:
                progress(done, len(pages))
        pages.close()
        self._stage.execute("COMMIT")
        self._stage.executescript(_INDEXES)
        self._numbers = self._assign_names()

    def close(self) -> None:
        self._stage.close()

    def keys(self) -> list[Key]:
        return sort_keys(self._numbers)

    def numbers(self) -> dict[Key, int]:
        return self._numbers

    def session(self, key: Key) -> RawSession | None:
        number = self._numbers.get(key)
        if number is None:
            return None
        meta, claimed, problem = self._row(number, key)
        requests = {
            str(name): CommittedRequest(str(fingerprint), int(revision))
            for name, fingerprint, revision in self._stage.execute(
                "SELECT request_id, fingerprint, revision FROM request WHERE session = ? ORDER BY place",
                (number,),
            )
        }
        if meta is not None and meta.row.state is State.DELETED:
            return RawSession(key, meta)
        log = self._log(number, "" if meta is None else meta.row.head_hash)
        if meta is None and not log and not problem:
            return None
        if meta is None:
            lost = make_finding(key, Problem.ROW, problem, Remedy.REBUILD)
            return RawSession(key, None, log, requests, (lost,), claimed=claimed)
        right = {name: known for name, known in requests.items() if known.revision <= meta.row.revision}
        stamp = hashlib.sha1(repr(meta).encode(), usedforsecurity=False).hexdigest()
        return RawSession(key, meta, log, right, (), stamp)

    def _take(self, row: PageRow) -> None:
        """Keep a row of a relevant table; the types of its columns tell the table."""
        match row.values:
            case [int(session), int(revision), bytes(data), int(crc), str(chain), *more] if (
                row.is_table_row and len(more) <= 1 and session > 0 and revision > 0
            ):
                self._keep("record", session, revision, data, crc, chain, row.place)
                key = key_from_name(more[0]) if more else None
                if key is not None:
                    self._keep("name", session, key.tenant, key.session_id, 3)
            case [None, str(tenant), str(session_id), int(), int(), int(), int(), bytes(meta), *more] if (
                row.is_table_row
            ):
                proof = more[1] if len(more) > 1 and isinstance(more[1], int) else None
                self._keep("row", row.rowid, tenant, session_id, proof, meta, row.place)
            case [int(session), str(request_id), str(fingerprint), int(revision), int(crc)] if (
                not row.is_table_row
            ):
                if verified_request(session, request_id, fingerprint, revision, crc) is not None:
                    self._keep("request", session, request_id, fingerprint, revision, row.place)
            case [int(session), str(request_id), str(fingerprint), int(revision)] if not row.is_table_row:
                self._keep("request", session, request_id, fingerprint, revision, row.place)
            case [str(tenant), str(session_id), int(session)] if not row.is_table_row:
                self._keep("name", session, tenant, session_id, 2 + 2 * row.is_whole)
            case [str(tenant), int(), int(), str(session_id), int(session)] if not row.is_table_row:
                self._keep("name", session, tenant, session_id, 2 + 2 * row.is_whole)
            case [int(session), str(), str(), str(tenant), int(), str(session_id)] if not row.is_table_row:
                self._keep("name", session, tenant, session_id, 1)
            case ["store_id", str(store_id)]:
                self.store_id = store_id

    def _keep(self, table: str, *values: object) -> None:
        try:
            self._stage.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)
        except (OverflowError, UnicodeEncodeError):
            return  # not a row that a store wrote

    def _assign_names(self) -> dict[Key, int]:
        """Choose a number for each session's name, and a name for each number that has records."""
        named_by: dict[Key, tuple[int, int, int]] = {}
        """The evidence for the number: worth of the row that names it, number of records; then the number."""
        taken = set[int]()

        def offer(session: int, tenant: object, session_id: object, worth: int) -> None:
            key = Key(str(tenant), str(session_id))
            records = 0
            if worth < 4:
                ((records,),) = self._stage.execute(
                    "SELECT COUNT(DISTINCT revision) FROM record WHERE session = ?", (session,)
                )
                if not records:
                    return
            if key not in named_by or (worth, records) > named_by[key][:2]:
                if key in named_by:
                    taken.discard(named_by[key][2])
                named_by[key] = worth, records, session
                taken.add(session)

        for session, tenant, session_id, crc, blob in self._stage.execute(
            "SELECT session, tenant, session_id, crc, meta FROM row ORDER BY place DESC"
        ):
            if session not in taken and read_row(Key(tenant, session_id), crc, blob).meta is not None:
                offer(session, tenant, session_id, 5)
        names = self._stage.execute(
            "SELECT session, tenant, session_id, worth FROM name UNION SELECT session, tenant, session_id, 1 FROM row"
            " ORDER BY worth DESC"
        ).fetchall()
        for session, tenant, session_id, worth in names:
            if session not in taken:
                offer(session, tenant, session_id, worth)
        have_names = {one[0] for one in names}
        for (session,) in self._stage.execute(
            "SELECT DISTINCT session FROM record ORDER BY session"
        ).fetchall():
            if session not in taken and session not in have_names and self._log(session, "", proven=True):
                named_by[Key(LOST_TENANT, str(session))] = 0, 0, session
        return {key: session for key, (_, _, session) in named_by.items()}

    def _row(self, number: int, key: Key) -> tuple[Meta | None, tuple[int, str] | None, str]:
        """Return the newest sound row; else None, the head that an unsound one claims, and the problem ("" if the
        session was never acknowledged)."""
        sound, claimed, problem = list[tuple[tuple[int, bool], int, Meta]](), None, "its row is missing"
        for tenant, session_id, crc, blob, place in self._stage.execute(
            "SELECT tenant, session_id, crc, meta, place FROM row WHERE session = ? ORDER BY place DESC",
            (number,),
        ):
            read = read_row(key, crc, blob)
            if read.meta is None or (tenant, session_id) != (key.tenant, key.session_id):
                claimed, problem = claimed or read.claimed, read.problem or "its row has another name"
                continue
            row, problem = read.meta.row, ""
            is_deleted = row.state is State.DELETED
            if is_deleted or place < self._torn_from or self._has_head(number, row.head_hash):
                sound.append((_age(read.meta), place, read.meta))
        if sound:
            # A page that was written in part may show an older row in a newer place.
            return max(sound, key=lambda one: one[:2])[-1], None, ""
        return None, claimed, problem

    def _has_head(self, number: int, head_hash: str) -> bool:
        return any(entry.head_hash == head_hash for entry in self._log(number, head_hash))

    def _log(self, number: int, head_hash: str, *, proven: bool = False) -> tuple[StoredRecord, ...]:
        """Return the session's records: the longest chain that can be made, then all others.

        ``proven``: only records with valid checksums.
        """
        found: dict[int, list[StoredRecord]] = {}
        for revision, data, crc, chain, place in self._stage.execute(
            "SELECT revision, data, crc, hash, place FROM record WHERE session = ? ORDER BY revision, place DESC",
            (number,),
        ):
            entry = StoredRecord(revision, data, crc, chain)
            if place >= self._torn_from and zlib.crc32(data) != crc:
                continue
            if entry not in found.setdefault(revision, []):
                found[revision].append(entry)
        for entries in found.values():  # of two versions of a record, the erased one is the later
            entries.sort(key=lambda one: one.data[:1] != bytes((FORMAT_ERASED,)))
        if proven:
            found = {
                revision: sound
                for revision, entries in found.items()
                if (sound := [one for one in entries if zlib.crc32(one.data) == one.crc])
            }
        best: list[StoredRecord] = []
        for first in found.get(1, ()):
            chain_of = list(_chain_from(first, found))
            if chain_of and chain_of[-1].head_hash == head_hash:
                best = chain_of
                break
            best = max(best, chain_of, key=len)
        rest = [
            max(found[revision], key=lambda one: zlib.crc32(one.data) == one.crc)
            for revision in sorted(found)
            if revision > len(best)
        ]
        return (*best, *rest)


def _chain_from(first: StoredRecord, found: dict[int, list[StoredRecord]]) -> Iterator[StoredRecord]:
    """Yield ``first`` and the records that continue its chain; nothing if ``first`` is not sound."""
    entry: StoredRecord | None = first if _continues(1, "", first) else None
    while entry is not None:
        yield entry
        last = entry
        following = found.get(last.revision + 1, ())
        entry = next((one for one in following if _continues(last.revision + 1, last.head_hash, one)), None)


def _continues(revision: int, previous: str, entry: StoredRecord) -> bool:
    try:
        verify_next(Key("", ""), entry, revision, previous)
    except (DataLoss, FailedPrecondition):
        return False
    return True


class RebuiltFile(NamedTuple):
    kept: Path
    sessions: int
    damaged: int
    """Sessions that have lost records."""


class NothingFound(Exception):
    """No session can be read from the file."""


def rebuild_file(
    path: Path, now: Moment, progress: Progress | None = None, *, store_id: str = ""
) -> RebuiltFile:
    """Replace ``path`` with a new file that holds its readable sessions. No connection to it may be open.

    ``store_id``: for a file that has lost its own. Raises NothingFound, OSError, sqlite3's errors without a
    change.
    """
    tell = progress or _log_progress()
    made = path.with_name(f".{path.name}.new")
    recovered = RecoveredFile(path, lambda done, of: tell("reading pages", done, of))
    try:
        keys = recovered.keys()
        if not keys:
            raise NothingFound
        made.unlink(missing_ok=True)
        # Created by hand: SQLite would leave it readable by all until it is whole.
        os.close(os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        damaged = 0
        with contextlib.closing(sqlite3.connect(made, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")  # it is flushed as a whole
            schema.migrate(connection, 0)
            connection.execute("BEGIN IMMEDIATE")
            if known := recovered.store_id or store_id:
                connection.execute("UPDATE store SET value = ? WHERE name = 'store_id'", (known,))
            for number, key in enumerate(keys):
                tell("writing sessions", number, len(keys))
                raw = recovered.session(key)
                if raw is None or (session := proven_session(raw, now)).meta is None:
                    continue
                assert session.meta is not None
                Rows(connection).replace(key, session.meta, session.log, session.requests)
                damaged += session.meta.row.state is State.DAMAGED
            connection.execute("COMMIT")
    finally:
        recovered.close()
    shutil.copymode(path, made)
    found = os.stat(path)
    with contextlib.suppress(PermissionError):
        os.chown(made, found.st_uid, found.st_gid)
    fsync_path(made)
    whole = path.with_name(f".{path.name}.renewed-{found.st_ino}")
    made.rename(whole)
    fsync_path(path.parent)
    kept = _swap_in(path, whole)
    log.error(
        "%s was damaged and was replaced by a new file with its %d sessions; %d of them have lost records; the damaged "
        "file is kept as %s",
        *(path, len(keys), damaged, kept.name),
    )
    return RebuiltFile(kept, len(keys), damaged)


def finish_rebuild(path: Path) -> bool:
    """Finish the replacement of a process that was killed; return whether there was one. Raises OSError."""
    finished = False
    path.with_name(f".{path.name}.new").unlink(missing_ok=True)
    for whole in path.parent.glob(f".{path.name}.renewed-*"):
        if path.exists() and whole.name.endswith(f"-{os.stat(path).st_ino}"):
            log.error("finishing the rebuild of %s that was interrupted", path)
            _swap_in(path, whole)
            finished = True
        else:  # the file it was made from is missing
            whole.unlink(missing_ok=True)
    return finished


def proven_session(raw: RawSession, now: Moment) -> RawSession:
    """Return the session as its records prove it, marked as damaged if it has lost records."""
    try:
        fix = plan_fix(examine(raw), truncate=False, now=now.wall_ms)
    except FailedPrecondition:  # records of a newer program are kept as they are
        fix = None
    session = raw if fix is None else fix.session
    meta = salvage_meta(raw.key, raw.log, update_ms=now.wall_ms) if session.meta is None else session.meta
    return RawSession(session.key, without_lease_holder(meta), session.log, session.requests)


def _swap_in(path: Path, whole: Path) -> Path:
    """Give the new file the name; keep the old one and its WAL under another."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    kept = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    os.link(path, kept)
    changes = log_of_changes(path)
    if size_of(changes):
        os.link(changes, log_of_changes(kept))
    fsync_path(path.parent)
    for beside in (changes, path.with_name(path.name + "-shm")):
        beside.unlink(missing_ok=True)
    whole.rename(path)
    fsync_path(path.parent)
    return kept


def _log_progress() -> Progress:
    last = time.monotonic()

    def tell(what: str, done: int, of: int | None) -> None:
        nonlocal last
        if time.monotonic() - last > LOG_INTERVAL_S:
            last = time.monotonic()
            log.warning("rebuilding the history file: %s, %d of %s", what, done, of)

    return tell
