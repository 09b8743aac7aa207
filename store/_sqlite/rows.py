"""The SQL of ``sqlite_store``: reading and writing one session's rows inside a transaction that the caller holds."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from pensieve.store._clock import Moment
from pensieve.store._codec import StoredRecord, store_record
from pensieve.store._leases import lapsed
from pensieve.store._listing import Position
from pensieve.store._marks import Marking, markings, markings_of_log
from pensieve.store._rules import Known, Meta, at_head, is_gone
from pensieve.store._salvage import salvaged
from pensieve.store.contract import Key, MarkedTurn, TenantUsage
from pensieve.store.records import Record, State

_ID = "(SELECT id FROM sessions WHERE tenant = ? AND session_id = ?)"
_COUNTED: Final = 1000
"""Up to here it is found out how many sessions carry a label, to begin with the rarest."""

_meta_encoder = msgspec.msgpack.Encoder()
_meta_decoder = msgspec.msgpack.Decoder(Meta)


class DamagedSession(Exception):
    """What the file says of a session cannot be read, or contradicts itself."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


class Rows:
    """Statements over one connection. Raises ``sqlite3`` errors as they come."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def meta(self, key: Key) -> Meta | None:
        """Raises DamagedSession."""
        found = self._one(
            "SELECT meta FROM sessions WHERE tenant = ? AND session_id = ?", key.tenant, key.session_id
        )
        if found is None:
            return None
        meta = _decoded(found[0])
        if meta is None:
            raise DamagedSession(key)
        return meta

    def salvaged(self, key: Key) -> Meta | None:
        """The session's metadata, made up from its log where its row cannot be read: a damaged session."""
        try:
            return self.meta(key)
        except DamagedSession:
            found = self._one(
                "SELECT CAST(update_ms AS INTEGER) FROM sessions WHERE tenant = ? AND session_id = ?",
                *(key.tenant, key.session_id),
            )
            return salvaged(key, list(self.log(key, 0)), update_ms=found[0] if found is not None else 0)

    def put(self, key: Key, meta: Meta) -> None:
        """Insert or replace the session's row; its records stay."""
        self._connection.execute(
            "INSERT INTO sessions (tenant, session_id, update_ms, expire_ms, deleted, leased, meta)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, session_id) DO UPDATE SET"
            " update_ms = excluded.update_ms, expire_ms = excluded.expire_ms, deleted = excluded.deleted,"
            " leased = excluded.leased, meta = excluded.meta",
            (
                key.tenant,
                key.session_id,
                meta.row.update_ms,
                meta.row.expire_ms,
                meta.row.state is State.DELETED,
                meta.lease is not None,
                _meta_encoder.encode(meta),
            ),
        )

    def erase(self, key: Key) -> None:
        """Remove the session with its records and request ids; nothing happens when there is none."""
        self._connection.execute(
            "DELETE FROM sessions WHERE tenant = ? AND session_id = ?", (key.tenant, key.session_id)
        )

    def append(self, key: Key, meta: Meta, record: Record, fingerprint: str | None) -> Meta:
        """Add ``record`` after ``meta``'s head and store ``meta``; with a fingerprint its request id is remembered.

        Raises DamagedSession.
        """
        stored = store_record(record, meta.row.head_hash)
        after = at_head(meta, stored.head_hash)
        self.put(key, after)
        try:
            self._connection.execute(
                f"INSERT INTO records (session, revision, data, crc, head_hash) VALUES ({_ID}, ?, ?, ?, ?)",
                (key.tenant, key.session_id, *stored),
            )
            if record.request_id and fingerprint is not None:
                self._connection.execute(
                    f"INSERT INTO requests (session, request_id, fingerprint, revision) VALUES ({_ID}, ?, ?, ?)",
                    (key.tenant, key.session_id, record.request_id, fingerprint, record.revision),
                )
        except sqlite3.IntegrityError as error:  # the file holds records that the row does not know
            raise DamagedSession(key) from error
        if record.labels is not None or record.revision == 1:
            self._label(key, after)
        self._mark(key, markings(record))
        return after

    def replace(
        self, key: Key, meta: Meta, log: Sequence[StoredRecord], requests: Mapping[str, Known]
    ) -> None:
        """Make the session exactly this, whatever there was."""
        self.erase(key)
        self.put(key, meta)
        self._connection.executemany(
            f"INSERT INTO records (session, revision, data, crc, head_hash) VALUES ({_ID}, ?, ?, ?, ?)",
            ((key.tenant, key.session_id, *entry) for entry in log),
        )
        self._connection.executemany(
            f"INSERT INTO requests (session, request_id, fingerprint, revision) VALUES ({_ID}, ?, ?, ?)",
            ((key.tenant, key.session_id, name, *known) for name, known in requests.items()),
        )
        self._label(key, meta)
        self._mark(key, markings_of_log(log))

    def shrink(self, key: Key, rest: StoredRecord) -> None:
        """Put what is left of an erased record in its place, and forget what its turn was found by."""
        at = (key.tenant, key.session_id, rest.revision)
        self._connection.execute(
            f"UPDATE records SET data = ?, crc = ? WHERE session = {_ID} AND revision = ?",
            (rest.data, rest.crc, *at),
        )
        self._connection.execute(f"DELETE FROM marks WHERE session = {_ID} AND revision = ?", at)

    def known(self, key: Key, request_id: str) -> Known | None:
        """Raises DamagedSession."""
        found = self._one(
            f"SELECT fingerprint, revision FROM requests WHERE session = {_ID} AND request_id = ?",
            key.tenant,
            key.session_id,
            request_id,
        )
        if found is None:
            return None
        fingerprint, revision = found
        if not isinstance(fingerprint, str) or not isinstance(revision, int):
            raise DamagedSession(key)
        return Known(fingerprint, revision)

    def marked(self, tenant: str, name: str, now: Moment, limit: int) -> list[MarkedTurn]:
        """Turns of the tenant's live sessions that are found by ``name``, newest first."""
        found = self._connection.execute(
            "SELECT s.session_id, m.revision FROM marks AS m CROSS JOIN sessions AS s ON s.id = m.session"
            " WHERE m.tenant = ? AND m.found_by = ? AND s.deleted = 0"
            " AND (s.leased = 1 OR s.expire_ms = 0 OR s.expire_ms > ?)"
            " ORDER BY m.time_ms DESC, m.revision DESC LIMIT ?",
            (tenant, name, now.wall_ms, limit),
        )
        return [MarkedTurn(str(session_id), int(revision)) for session_id, revision in found]

    def hash_at(self, key: Key, revision: int) -> str:
        """Chain hash of the record with that revision; "" when there is none."""
        found = self._one(
            f"SELECT head_hash FROM records WHERE session = {_ID} AND revision = ?",
            *(key.tenant, key.session_id, revision),
        )
        return "" if found is None else str(found[0])

    def base(self, key: Key, revision: int) -> list[StoredRecord]:
        """What a slice of the log begins behind: that record without its bytes; nothing when there is none."""
        chain = self.hash_at(key, revision) if revision else ""
        return [StoredRecord(revision, b"", 0, chain)] if chain else []

    def log(self, key: Key, from_revision: int) -> Iterator[StoredRecord]:
        """Records with a revision of at least ``from_revision``, oldest first, each read when it is asked for.

        What is not shaped like a record becomes one that no check accepts.
        """
        cursor = self._connection.execute(
            f"SELECT revision, data, crc, head_hash FROM records WHERE session = {_ID} AND revision >= ?"
            " ORDER BY revision",
            (key.tenant, key.session_id, from_revision),
        )
        return (_shaped(*row) for row in cursor)

    def newest(self, tenant: str, start: Position, labels: dict[str, str], now: Moment) -> Iterator[Meta]:
        """The tenant's live sessions after ``start`` that carry ``labels``, newest update first."""
        place, source, given = "s", "sessions AS s", list[str]()
        conditions = "s.deleted = 0 AND (s.leased = 1 OR s.expire_ms = 0 OR s.expire_ms > ?)"
        if labels:
            first, *others = sorted(labels.items(), key=lambda label: self._carriers(tenant, *label))
            place, source = "l", "labels AS l CROSS JOIN sessions AS s ON s.id = l.session"
            conditions += " AND l.name = ? AND l.value = ?"
            carried = " AND EXISTS (SELECT 1 FROM labels WHERE session = s.id AND name = ? AND value = ?)"
            conditions += carried * len(others)
            given = [text for label in (first, *others) for text in label]
        cursor = self._connection.execute(
            f"SELECT s.session_id, s.meta FROM {source} WHERE {place}.tenant = ?"
            f" AND ({place}.update_ms, {place}.session_id) < (?, ?) AND {conditions}"
            f" ORDER BY {place}.update_ms DESC, {place}.session_id DESC",
            (tenant, start.update_ms, start.session_id, now.wall_ms, *given),
        )
        for session_id, blob in cursor:
            meta = _decoded(blob) or self.salvaged(Key(tenant, str(session_id)))
            if meta is not None and not is_gone(meta, now):
                yield meta

    def usage(self, tenant: str, now: Moment) -> TenantUsage:
        """What the tenant's live sessions take."""
        total = self._one(
            "SELECT CAST(sessions AS INTEGER), CAST(bytes AS INTEGER) FROM tenants WHERE tenant = ?", tenant
        )
        expired = self._one(
            "SELECT COUNT(*), CAST(TOTAL(bytes) AS INTEGER) FROM sessions INDEXED BY sessions_expiring"
            " WHERE expire_ms > 0 AND expire_ms <= ? AND tenant = ? AND deleted = 0",
            *(now.wall_ms, tenant),
        )
        sessions, size = total or (0, 0)
        gone, gone_size = expired or (0, 0)
        return TenantUsage(sessions - gone, size - gone_size)

    def end_leases(self) -> None:
        """Let every lease lapse; the pending turns' seeds stay."""
        rows = self._connection.execute("SELECT meta FROM sessions WHERE leased = 1").fetchall()
        for meta in filter(None, (_decoded(blob) for (blob,) in rows)):
            self.put(Key(meta.row.tenant, meta.row.session_id), lapsed(meta))

    def purge(self, now: Moment, most: int) -> int:
        """Remove up to ``most`` sessions and tombstones whose time is over; returns how many.

        None whose row cannot be read: nobody knows its time.
        """
        over = self._connection.execute(
            "SELECT tenant, session_id, meta FROM sessions WHERE expire_ms > 0 AND expire_ms <= ?"
            " ORDER BY expire_ms LIMIT ?",
            (now.wall_ms, most),
        ).fetchall()
        removed = 0
        for tenant, session_id, blob in over:
            meta = _decoded(blob)
            if meta is not None and is_gone(meta, now):
                self.erase(Key(tenant, session_id))
                removed += 1
        return removed

    def beat(self, now: Moment) -> None:
        """A small change of no meaning: it tells whether changes are possible."""
        self._connection.execute("INSERT OR REPLACE INTO store VALUES ('heartbeat', ?)", (str(now.wall_ms),))

    def _label(self, key: Key, meta: Meta) -> None:
        """Enter the session's labels in the listing, in place of those it had."""
        self._connection.execute(f"DELETE FROM labels WHERE session = {_ID}", (key.tenant, key.session_id))
        self._connection.executemany(
            f"INSERT INTO labels VALUES ({_ID}, ?, ?, ?, ?, ?)",
            [
                (key.tenant, key.session_id, name, value, key.tenant, meta.row.update_ms, key.session_id)
                for name, value in meta.row.labels.items()
            ],
        )

    def _mark(self, key: Key, entries: Iterable[Marking]) -> None:
        self._connection.executemany(
            f"INSERT OR REPLACE INTO marks (session, found_by, time_ms, revision, tenant) VALUES ({_ID}, ?, ?, ?, ?)",
            ((key.tenant, key.session_id, *one, key.tenant) for one in entries),
        )

    def _carriers(self, tenant: str, name: str, value: str) -> int:
        """How many of the tenant's sessions carry the label, counted up to a bound."""
        found = self._one(
            "SELECT COUNT(*) FROM (SELECT 1 FROM labels WHERE tenant = ? AND name = ? AND value = ? LIMIT ?)",
            *(tenant, name, value, _COUNTED),
        )
        return int(found[0]) if found is not None else 0

    def _one(self, statement: str, *values: object) -> tuple[Any, ...] | None:
        found: tuple[Any, ...] | None = self._connection.execute(statement, values).fetchone()
        return found


def _decoded(blob: object) -> Meta | None:
    """None for what is no metadata."""
    try:
        return _meta_decoder.decode(blob) if isinstance(blob, bytes) else None
    except (msgspec.MsgspecError, ValueError):
        return None


def _shaped(revision: object, data: object, crc: object, head_hash: object) -> StoredRecord:
    return StoredRecord(
        revision if isinstance(revision, int) else -1,
        data if isinstance(data, bytes) else b"",
        crc if isinstance(crc, int) else -1,
        head_hash if isinstance(head_hash, str) else "",
    )
