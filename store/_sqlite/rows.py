"""The SQL of ``sqlite_store``: reads and writes of one session's rows in the caller's transaction."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

import msgspec

from pensieve.errors import FailedPrecondition
from pensieve.store._codec import StoredRecord, make_stored_record
from pensieve.store._listing import MarkEntry, Position, mark_entries, mark_entries_of_log
from pensieve.store._raw import RawSession, examine, plan_fix, salvage_meta
from pensieve.store._rules import CommittedRequest, Meta, Moment, expire_lease, is_gone, with_head_hash
from pensieve.store._sqlite.raw_rows import (
    ORPHANS,
    columns_of,
    crc_of_request,
    crc_of_row,
    find_number,
    key_from_name,
    name_of,
    read_raw,
    read_row,
    to_stored_record,
    verified_request,
)
from pensieve.store.contract import Key, MarkedTurn, TenantUsage
from pensieve.store.records import Record, State

MAX_IDS: Final = 200_000
"""Number of remembered request ids. A session with more ids is read each time."""


class RequestIdCache:
    """Request ids of recently used sessions, by number, so that a miss needs no read of the file.

    A request id that is missing in the file is either new or lost. The sum of checksums in the session's row
    tells which, once all of the session's ids are read. Owned by the file's one writer.
    """

    def __init__(self, most: int = MAX_IDS) -> None:
        self._most = most
        self._sessions: dict[int, tuple[int, set[str]]] = {}
        """Number → sum of checksums and ids; the most recently used session is last."""
        self._count = 0

    def get(self, number: int, requests_sum: int) -> Set[str] | None:
        """Return all ids of the session, or None unless the cached ids have this sum of checksums."""
        found = self._sessions.pop(number, None)
        if found is None:
            return None
        if found[0] != requests_sum:
            self._count -= len(found[1])
            return None
        self._sessions[number] = found
        return found[1]

    def put(self, number: int, requests_sum: int, ids: Iterable[str]) -> None:
        self.forget(number)
        kept = set(ids)
        self._sessions[number] = requests_sum, kept
        self._count += len(kept)
        while self._count > self._most and self._sessions:
            self.forget(next(iter(self._sessions)))

    def add(self, number: int, added: Iterable[tuple[str, int]]) -> None:
        found = self._sessions.get(number)
        if found is not None:
            requests_sum, ids = found
            self._count -= len(ids)
            for request_id, crc in added:
                requests_sum += crc
                ids.add(request_id)
            self._count += len(ids)
            self._sessions[number] = requests_sum, ids

    def forget(self, number: int) -> None:
        found = self._sessions.pop(number, None)
        if found is not None:
            self._count -= len(found[1])


_ID = "(SELECT id FROM sessions WHERE tenant = ? AND session_id = ?)"
_MAX_CARRIERS: Final = 1000
"""Count sessions with a label only up to here, to begin with the rarest label."""

_meta_encoder = msgspec.msgpack.Encoder()


class DamagedSession(Exception):
    """The file contradicts itself about a session. ``Rows.rebuild_derived`` lets its records decide."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


class _Head(NamedTuple):
    """A row of ``sessions`` with a valid checksum."""

    number: int
    requests_sum: int
    meta: Meta


class Rows:
    """Statements over one connection, in one transaction. Raises ``sqlite3`` errors unchanged.

    Derived rows are trusted only as far as a checksum, a count or a sum proves them; else DamagedSession is
    raised.
    """

    def __init__(self, connection: sqlite3.Connection, ids: RequestIdCache | None = None) -> None:
        self._connection = connection
        self._ids = ids
        self._heads: dict[Key, _Head] = {}
        """Rows that this transaction has read or written, so that none is read and verified twice."""
        self._appended: dict[int, list[tuple[str, int]]] = {}
        """Session number → request ids that this transaction adds, with their checksums."""

    def on_commit(self) -> None:
        """Cache the transaction's request ids, now that they are in the file."""
        if self._ids is not None:
            for number, added in self._appended.items():
                self._ids.add(number, added)

    def meta(self, key: Key) -> Meta | None:
        head = self._head(key)
        return None if head is None else head.meta

    def meta_or_salvaged(self, key: Key) -> Meta | None:
        """Return the session's metadata; if its row is unreadable, that of a damaged session from its log."""
        try:
            return self.meta(key)
        except DamagedSession:
            found = self._fetch_one(
                "SELECT CAST(update_ms AS INTEGER) FROM sessions WHERE tenant = ? AND session_id = ?",
                *(key.tenant, key.session_id),
            )
            return salvage_meta(key, list(self.log(key, 0)), update_ms=found[0] if found is not None else 0)

    def rebuild_derived(self, key: Key, now: Moment) -> Meta | None:
        """Rebuild the session's derived rows from its records; return its metadata.

        A session whose records are not whole becomes DAMAGED. The lease in a sound row stays.
        """
        number = find_number(self._connection, key)
        if number is None:
            return None
        raw = read_raw(self._connection, key, number)
        try:
            fix = plan_fix(examine(raw), truncate=False, now=now.wall_ms)
        except FailedPrecondition:  # records of a newer program
            fix = None
        if fix is None and raw.meta is not None:
            return raw.meta
        session = raw if fix is None else fix.session
        meta = session.meta
        if meta is None:
            meta = salvage_meta(key, raw.log, update_ms=now.wall_ms)
        elif raw.meta is not None:
            row = meta.row
            if raw.meta.row.state is State.DAMAGED:  # only ``pensieve store repair`` removes the mark
                row = msgspec.structs.replace(row, state=State.DAMAGED)
            meta = Meta(row, meta.create_fingerprint, raw.meta.lease)
        if session.log == raw.log:
            self._derive(key, number, meta, session)
        else:
            self.replace(key, meta, session.log, session.requests)
        return meta

    def put(self, key: Key, meta: Meta, *, request_crc: int = 0) -> None:
        """Insert or replace the session's row. ``request_crc``: checksum of a request id that is added."""
        blob = _meta_encoder.encode(meta)
        values = (*columns_of(meta), crc_of_row(key, blob), blob, key.tenant, key.session_id)
        changed = self._connection.execute(
            "UPDATE sessions SET requests_sum = requests_sum + ?, update_ms = ?, expire_ms = ?, deleted = ?,"
            " leased = ?, crc = ?, meta = ? WHERE tenant = ? AND session_id = ?",
            (request_crc, *values),
        )
        head = self._heads.get(key)
        if changed.rowcount == 0:
            head = _Head(self._free_number(), 0, meta)
            self._insert(head.number, values)
        if head is not None:
            self._heads[key] = _Head(head.number, head.requests_sum + request_crc, meta)

    def _insert(self, number: int, values: tuple[object, ...]) -> None:
        self._connection.execute(
            "INSERT INTO sessions (id, update_ms, expire_ms, deleted, leased, crc, meta, tenant, session_id)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (number, *values),
        )

    def _free_number(self) -> int:
        """Return a number that no table uses: a lost row may have left its records behind."""
        found = self._fetch_one(
            "SELECT MAX((SELECT COALESCE(MAX(id), 0) FROM sessions), (SELECT COALESCE(MAX(session), 0) FROM records),"
            " (SELECT COALESCE(MAX(session), 0) FROM requests), (SELECT COALESCE(MAX(session), 0) FROM labels),"
            " (SELECT COALESCE(MAX(session), 0) FROM marks))"
        )
        return int(found[0]) + 1 if found is not None else 1

    def erase(self, key: Key) -> None:
        self._heads.pop(key, None)
        self._connection.execute(
            "DELETE FROM sessions WHERE tenant = ? AND session_id = ?", (key.tenant, key.session_id)
        )

    def append(self, key: Key, meta: Meta, record: Record, fingerprint: str | None) -> Meta:
        """Append ``record``, store ``meta``, and with a fingerprint store its request id. Raises DamagedSession."""
        stored = make_stored_record(record, meta.row.head_hash)
        after = with_head_hash(meta, stored.head_hash)
        asked: tuple[object, ...] | None = None
        crc = 0
        if record.request_id and fingerprint is not None:
            number = self._number(key)
            crc = crc_of_request(number, record.request_id, fingerprint, record.revision)
            asked = (number, record.request_id, fingerprint, record.revision, crc)
            self._appended.setdefault(number, []).append((record.request_id, crc))
        self.put(key, after, request_crc=crc)
        try:
            self.insert_records(self._number(key), key, [stored])
            if asked is not None:
                self._connection.execute(
                    "INSERT INTO requests (session, request_id, fingerprint, revision, crc) VALUES (?, ?, ?, ?, ?)",
                    asked,
                )
        except sqlite3.IntegrityError as error:  # the file holds records that the row does not know
            raise DamagedSession(key) from error
        if record.labels is not None or record.revision == 1:
            self._label(key, after)
        marked = mark_entries(record)
        if marked:
            self._mark(self._number(key), key.tenant, marked)
        return after

    def replace(
        self, key: Key, meta: Meta, log: Sequence[StoredRecord], requests: Mapping[str, CommittedRequest]
    ) -> None:
        self.erase(key)
        self.put(key, meta)
        number = self._number(key)
        self.insert_records(number, key, log)
        self._derive(key, number, meta, RawSession(key, meta, tuple(log), requests))

    def insert_records(self, number: int, key: Key, log: Iterable[StoredRecord]) -> None:
        self._connection.executemany(
            "INSERT INTO records (session, revision, data, crc, head_hash, named) VALUES (?, ?, ?, ?, ?, ?)",
            ((number, *entry, name_of(key) if entry.revision == 1 else None) for entry in log),
        )

    def _derive(self, key: Key, number: int, meta: Meta, session: RawSession) -> None:
        """Rebuild the session's row and all derived rows. Its records must be in the file."""
        self._heads.pop(key, None)
        blob = _meta_encoder.encode(meta)
        values = (*columns_of(meta), crc_of_row(key, blob), blob, key.tenant, key.session_id)
        for table in ("requests", "labels", "marks"):
            self._connection.execute(f"DELETE FROM {table} WHERE session = ?", (number,))
        changed = self._connection.execute(
            "UPDATE sessions SET update_ms = ?, expire_ms = ?, deleted = ?, leased = ?, crc = ?, meta = ?,"
            " tenant = ?, session_id = ? WHERE id = ?",
            (*values, number),
        )
        if changed.rowcount == 0:
            self._insert(number, values)
        self._connection.execute(
            "UPDATE records SET named = ? WHERE session = ? AND revision = 1", (name_of(key), number)
        )
        proven = [
            (number, request_id, *known, crc_of_request(number, request_id, *known))
            for request_id, known in session.requests.items()
        ]
        self._connection.executemany(
            "INSERT INTO requests (session, request_id, fingerprint, revision, crc) VALUES (?, ?, ?, ?, ?)",
            proven,
        )
        self._connection.execute(
            "UPDATE sessions SET requests_sum = ?, marks = 0, bytes = ? WHERE id = ?",
            (sum(one[-1] for one in proven), session.size, number),
        )
        if self._ids is not None:
            self._ids.forget(number)
        self._label(key, meta)
        self._mark(number, key.tenant, mark_entries_of_log(session.log))

    def shrink(self, key: Key, rest: StoredRecord) -> None:
        """Replace a record with its erased form, and remove its turn's marks."""
        at = (key.tenant, key.session_id, rest.revision)
        self._connection.execute(
            f"UPDATE records SET data = ?, crc = ? WHERE session = {_ID} AND revision = ?",
            (rest.data, rest.crc, *at),
        )
        gone = self._connection.execute(f"DELETE FROM marks WHERE session = {_ID} AND revision = ?", at)
        self._connection.execute(
            "UPDATE sessions SET marks = marks - ? WHERE id = ?", (gone.rowcount, self._number(key))
        )

    def committed_request(self, key: Key, request_id: str) -> CommittedRequest | None:
        """Return the committed request; None is proven as well. Raises DamagedSession."""
        head = self._head(key)
        if head is None:
            return None
        ids = None if self._ids is None else self._ids.get(head.number, head.requests_sum)
        if ids is not None and request_id not in ids:
            return None
        found = self._fetch_one(
            "SELECT fingerprint, revision, crc FROM requests WHERE session = ? AND request_id = ?",
            *(head.number, request_id),
        )
        if found is not None:
            known = verified_request(head.number, request_id, *found)
        elif ids is None and self._load_ids(head):
            return None
        else:
            known = None
        if known is None:
            raise DamagedSession(key)
        return known

    def _load_ids(self, head: _Head) -> bool:
        """Whether the file has each committed request id of the session. If so, cache them."""
        total, ids = 0, list[str]()
        for request_id, fingerprint, revision, crc in self._connection.execute(
            "SELECT request_id, fingerprint, revision, crc FROM requests WHERE session = ?", (head.number,)
        ):
            if verified_request(head.number, request_id, fingerprint, revision, crc) is None:
                return False
            ids.append(request_id)
            total += crc
        if total != head.requests_sum:
            return False
        if self._ids is not None:
            self._ids.put(head.number, total, ids)
        return True

    def _head(self, key: Key) -> _Head | None:
        known = self._heads.get(key)
        if known is not None:
            return known
        found = self._fetch_one(
            "SELECT id, requests_sum, crc, meta, update_ms, expire_ms, deleted, leased FROM sessions"
            " WHERE tenant = ? AND session_id = ?",
            *(key.tenant, key.session_id),
        )
        if found is None:
            if self._fetch_one("SELECT 1 FROM records WHERE named = ?", name_of(key)) is not None:
                raise DamagedSession(key)
            return None
        number, requests_sum, crc, blob, *columns = found
        meta = read_row(key, crc, blob).meta
        if meta is None or columns_of(meta) != tuple(columns):
            raise DamagedSession(key)
        head = self._heads[key] = _Head(number, requests_sum, meta)
        return head

    def _number(self, key: Key) -> int:
        """Raise DamagedSession if there is no row."""
        if key in self._heads:
            return self._heads[key].number
        found = self._fetch_one(
            "SELECT id FROM sessions WHERE tenant = ? AND session_id = ?", key.tenant, key.session_id
        )
        if found is None:
            raise DamagedSession(key)
        return int(found[0])

    def marked(self, tenant: str, name: str, now: Moment, limit: int) -> list[MarkedTurn]:
        found = self._connection.execute(
            "SELECT s.session_id, m.revision FROM marks AS m CROSS JOIN sessions AS s ON s.id = m.session"
            " WHERE m.tenant = ? AND m.found_by = ? AND s.deleted = 0"
            " AND (s.leased = 1 OR s.expire_ms = 0 OR s.expire_ms > ?)"
            " ORDER BY m.time_ms DESC, m.revision DESC LIMIT ?",
            (tenant, name, now.wall_ms, limit),
        )
        return [MarkedTurn(str(session_id), int(revision)) for session_id, revision in found]

    def hash_at(self, key: Key, revision: int) -> str:
        """Return the chain hash of the record with that revision; "" if there is none."""
        found = self._fetch_one(
            f"SELECT head_hash FROM records WHERE session = {_ID} AND revision = ?",
            *(key.tenant, key.session_id, revision),
        )
        return "" if found is None else str(found[0])

    def base_record(self, key: Key, revision: int) -> list[StoredRecord]:
        """Return the record before a slice of the log, without its bytes."""
        chain = self.hash_at(key, revision) if revision else ""
        return [StoredRecord(revision, b"", 0, chain)] if chain else []

    def log(self, key: Key, from_revision: int) -> Iterator[StoredRecord]:
        """Iterate over records, reading on demand. A malformed row becomes a record that no check accepts."""
        cursor = self._connection.execute(
            f"SELECT revision, data, crc, head_hash FROM records WHERE session = {_ID} AND revision >= ?"
            " ORDER BY revision",
            (key.tenant, key.session_id, from_revision),
        )
        return (to_stored_record(*row) for row in cursor)

    def newest(self, tenant: str, start: Position, labels: dict[str, str], now: Moment) -> Iterator[Meta]:
        """Yield the tenant's live sessions after ``start`` with ``labels``, newest first. Raises DamagedSession."""
        place, source, given = "s", "sessions AS s", list[str]()
        conditions = "s.deleted = 0 AND (s.leased = 1 OR s.expire_ms = 0 OR s.expire_ms > ?)"
        if labels:
            first, *others = sorted(labels.items(), key=lambda label: self._carriers(tenant, *label))
            place, source = "l", "labels AS l CROSS JOIN sessions AS s ON s.id = l.session"
            conditions += " AND l.name = ? AND l.value = ?"
            carried = " AND EXISTS (SELECT 1 FROM labels WHERE session = s.id AND name = ? AND value = ?)"
            conditions += carried * len(others)
            given = [text for label in (first, *others) for text in label]
        return self._present(
            tenant,
            f"{source} WHERE {place}.tenant = ?"
            f" AND ({place}.update_ms, {place}.session_id) < (?, ?) AND {conditions}"
            f" ORDER BY {place}.update_ms DESC, {place}.session_id DESC",
            (tenant, start.update_ms, start.session_id, now.wall_ms, *given),
            now,
        )

    def every(self, tenant: str, now: Moment) -> Iterator[Meta]:
        """Yield the tenant's live sessions, in no order and without an index. Raises DamagedSession, also for a
        session that has records and no row."""
        for _, name in self._connection.execute(ORPHANS).fetchall():
            lost = key_from_name(name)
            if lost is not None and lost.tenant == tenant:
                raise DamagedSession(lost)
        yield from self._present(
            tenant, "sessions AS s NOT INDEXED WHERE s.tenant = ? AND s.deleted = 0", (tenant,), now
        )

    def _present(self, tenant: str, source: str, values: Sequence[object], now: Moment) -> Iterator[Meta]:
        """Yield the verified rows that the rest of a SELECT finds, without expired sessions."""
        cursor = self._connection.execute(
            "SELECT s.session_id, s.meta, s.crc, s.update_ms, s.expire_ms, s.deleted, s.leased"
            f" FROM {source}",
            values,
        )
        with contextlib.closing(cursor):  # an open cursor would keep the next read at this snapshot
            for session_id, blob, crc, *columns in cursor:
                key = Key(tenant, str(session_id))
                meta = read_row(key, crc, blob).meta
                if meta is None or columns_of(meta) != tuple(columns):
                    raise DamagedSession(key)
                if not is_gone(meta, now):
                    yield meta

    def usage(self, tenant: str, now: Moment) -> TenantUsage:
        total = self._fetch_one(
            "SELECT CAST(sessions AS INTEGER), CAST(bytes AS INTEGER) FROM tenants WHERE tenant = ?", tenant
        )
        expired = self._fetch_one(
            "SELECT COUNT(*), CAST(TOTAL(bytes) AS INTEGER) FROM sessions INDEXED BY sessions_expiring"
            " WHERE expire_ms > 0 AND expire_ms <= ? AND tenant = ? AND deleted = 0",
            *(now.wall_ms, tenant),
        )
        sessions, size = total or (0, 0)
        gone, gone_size = expired or (0, 0)
        return TenantUsage(sessions - gone, size - gone_size)

    def end_leases(self) -> list[Key]:
        """Expire every lease; pending turns keep their seeds. Returns the sessions whose rows are damaged."""
        found = self._connection.execute(
            "SELECT tenant, session_id FROM sessions WHERE leased = 1"
        ).fetchall()
        damaged = []
        for tenant, session_id in found:
            key = Key(str(tenant), str(session_id))
            try:
                meta = self.meta(key)
            except DamagedSession:
                damaged.append(key)
                continue
            if meta is not None:
                self.put(key, expire_lease(meta))
        return damaged

    def purge(self, now: Moment, most: int) -> int:
        """Remove up to ``most`` expired sessions and tombstones; return how many.

        A session whose row fails its checksum stays, because its expiry is unknown.
        """
        over = self._connection.execute(
            "SELECT tenant, session_id FROM sessions WHERE expire_ms > 0 AND expire_ms <= ?"
            " ORDER BY expire_ms LIMIT ?",
            (now.wall_ms, most),
        ).fetchall()
        removed = 0
        for tenant, session_id in over:
            key = Key(str(tenant), str(session_id))
            with contextlib.suppress(DamagedSession):
                meta = self.meta(key)
                if meta is not None and is_gone(meta, now):
                    self.erase(key)
                    removed += 1
        return removed

    def beat(self, now: Moment) -> None:
        """Make a small change without meaning, to prove that changes are possible."""
        self._connection.execute("INSERT OR REPLACE INTO store VALUES ('heartbeat', ?)", (str(now.wall_ms),))

    def _label(self, key: Key, meta: Meta) -> None:
        number, row = self._number(key), meta.row
        self._connection.execute("DELETE FROM labels WHERE session = ?", (number,))
        self._connection.executemany(
            "INSERT INTO labels VALUES (?, ?, ?, ?, ?, ?)",
            [
                (number, name, value, key.tenant, row.update_ms, key.session_id)
                for name, value in row.labels.items()
            ],
        )
        self._connection.execute("UPDATE sessions SET labels = ? WHERE id = ?", (len(row.labels), number))

    def _mark(self, number: int, tenant: str, entries: Iterable[MarkEntry]) -> None:
        made = [(number, *one, tenant) for one in entries]
        self._connection.executemany(
            "INSERT OR REPLACE INTO marks (session, found_by, time_ms, revision, tenant) VALUES (?, ?, ?, ?, ?)",
            made,
        )
        self._connection.execute("UPDATE sessions SET marks = marks + ? WHERE id = ?", (len(made), number))

    def _carriers(self, tenant: str, name: str, value: str) -> int:
        """Count the tenant's sessions with the label, up to a bound."""
        found = self._fetch_one(
            "SELECT COUNT(*) FROM (SELECT 1 FROM labels WHERE tenant = ? AND name = ? AND value = ? LIMIT ?)",
            *(tenant, name, value, _MAX_CARRIERS),
        )
        return int(found[0]) if found is not None else 0

    def _fetch_one(self, statement: str, *values: object) -> tuple[Any, ...] | None:
        found: tuple[Any, ...] | None = self._connection.execute(statement, values).fetchone()
        return found
