"""The SQL of ``sqlite_store``: reading and writing one session's rows inside a transaction that the caller holds."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import msgspec

from pensieve.store._codec import StoredRecord, store_record
from pensieve.store._listing import Position
from pensieve.store._rules import Known, Meta, at_head
from pensieve.store.contract import Key, TenantUsage
from pensieve.store.records import Record, State

_ID = "(SELECT id FROM sessions WHERE tenant = ? AND session_id = ?)"

_meta_encoder = msgspec.msgpack.Encoder()
_meta_decoder = msgspec.msgpack.Decoder(Meta)


class Rows:
    """Statements over one connection. Raises ``sqlite3`` errors as they come."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def meta(self, key: Key) -> Meta | None:
        found = self._one(
            "SELECT meta FROM sessions WHERE tenant = ? AND session_id = ?", key.tenant, key.session_id
        )
        return None if found is None else _meta_decoder.decode(found[0])

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
        """Add ``record`` after ``meta``'s head and store ``meta``; with a fingerprint its request id is remembered."""
        stored = store_record(record, meta.row.head_hash)
        after = at_head(meta, stored.head_hash)
        self.put(key, after)
        self._connection.execute(
            f"INSERT INTO records (session, revision, data, crc, head_hash) VALUES ({_ID}, ?, ?, ?, ?)",
            (key.tenant, key.session_id, *stored),
        )
        if record.request_id and fingerprint is not None:
            self._connection.execute(
                f"INSERT INTO requests (session, request_id, fingerprint, revision) VALUES ({_ID}, ?, ?, ?)",
                (key.tenant, key.session_id, record.request_id, fingerprint, record.revision),
            )
        return after

    def known(self, key: Key, request_id: str) -> Known | None:
        found = self._one(
            f"SELECT fingerprint, revision FROM requests WHERE session = {_ID} AND request_id = ?",
            key.tenant,
            key.session_id,
            request_id,
        )
        return None if found is None else Known(*found)

    def log(self, key: Key, from_revision: int) -> list[StoredRecord]:
        """Records with a revision of at least ``from_revision``, oldest first."""
        cursor = self._connection.execute(
            f"SELECT revision, data, crc, head_hash FROM records WHERE session = {_ID} AND revision >= ?"
            " ORDER BY revision",
            (key.tenant, key.session_id, from_revision),
        )
        return [StoredRecord(*row) for row in cursor]

    def newest(self, tenant: str, start: Position, now: int) -> Iterator[Meta]:
        """The tenant's live sessions after ``start``, newest update first."""
        cursor = self._connection.execute(
            "SELECT meta FROM sessions WHERE tenant = ? AND deleted = 0 AND (update_ms, session_id) < (?, ?)"
            " AND (expire_ms = 0 OR expire_ms > ?) ORDER BY update_ms DESC, session_id DESC",
            (tenant, start.update_ms, start.session_id, now),
        )
        return (_meta_decoder.decode(row[0]) for row in cursor)

    def usage(self, tenant: str, now: int) -> TenantUsage:
        """What the tenant's live sessions take."""
        live = "FROM sessions WHERE tenant = ? AND deleted = 0 AND (expire_ms = 0 OR expire_ms > ?)"
        found = self._one(
            f"SELECT (SELECT COUNT(*) {live}), (SELECT COALESCE(SUM(LENGTH(data)), 0) FROM records"
            f" WHERE session IN (SELECT id {live}))",
            *(tenant, now, tenant, now),
        )
        assert found is not None  # it is one row, whatever there is
        return TenantUsage(*found)

    def end_leases(self) -> None:
        """Let every lease lapse; the pending turns' seeds stay."""
        rows = self._connection.execute("SELECT meta FROM sessions WHERE leased = 1").fetchall()
        for (blob,) in rows:
            meta = _meta_decoder.decode(blob)
            if meta.lease is not None:
                lapsed = msgspec.structs.replace(meta.lease, until_ms=0)
                key = Key(meta.row.tenant, meta.row.session_id)
                self.put(key, msgspec.structs.replace(meta, lease=lapsed))

    def purge(self, now: int) -> int:
        """Remove sessions and tombstones whose time is over; returns how many."""
        cursor = self._connection.execute(
            "DELETE FROM sessions WHERE expire_ms > 0 AND expire_ms <= ?", (now,)
        )
        return cursor.rowcount

    def _one(self, statement: str, *values: object) -> tuple[Any, ...] | None:
        found: tuple[Any, ...] | None = self._connection.execute(statement, values).fetchone()
        return found
