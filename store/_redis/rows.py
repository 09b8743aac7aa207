"""Keys and values of ``redis_store``: names of keys, the fields of a session's hash, entries of its stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from pensieve.store._codec import StoredRecord
from pensieve.store._rules import ttl_ms
from pensieve.store.contract import Counts, EndOrder, Key
from pensieve.store.records import Record, RunningTurn, SessionConfig, SessionRow, State

Fields = Mapping[bytes, bytes]

_json = msgspec.json.Encoder()
_config_decoder = msgspec.json.Decoder(SessionConfig)
_order_decoder = msgspec.json.Decoder(EndOrder)
_labels_decoder = msgspec.json.Decoder(dict[str, str])


def session_keys(key: Key) -> list[str]:
    """KEYS of every script. Quoting keeps ``/`` and braces out of names, so no name can lead to another's keys."""
    base = f"pv1:{{{quote(key.tenant, safe='')}/{quote(key.session_id, safe='')}}}"
    return [f"{base}:m", f"{base}:q", f"{base}:l"]


def index_key(tenant: str) -> str:
    return f"pv1:i:{{{quote(tenant, safe='')}}}"


def create_fields(row: SessionRow) -> list[Any]:
    """The fields of a new session that the caller decides, as field, value, field, value, …"""
    return [
        *("head_item", row.head_item, "item_count", row.item_count, "context_tokens", row.context_tokens),
        *(
            "config",
            _json.encode(row.config),
            "ttl_ms",
            ttl_ms(row.config),
            "labels",
            _json.encode(row.labels),
        ),
        *("forked_from", row.forked_from, "forked_from_item", row.forked_from_item),
    ]


def append_args(
    record: Record, fingerprint: str, base_hash: str, stored: StoredRecord, counts: Counts
) -> list[Any]:
    """The arguments (ARGV) of COMMIT and APPLY, from the request id on."""
    return [
        *(record.request_id, fingerprint, record.revision, base_hash),
        *(stored.data, stored.crc, stored.head_hash),
        *(counts.head_item, counts.item_count, counts.context_tokens),
        b"" if record.config is None else _json.encode(record.config),
        b"" if record.labels is None else _json.encode(record.labels),
        0 if record.config is None else ttl_ms(record.config),
    ]


def order_text(order: EndOrder) -> bytes:
    """What ``run_order`` holds."""
    return _json.encode(order)


def parse_order(text: bytes) -> EndOrder | None:
    """The inverse; None when there is none."""
    return _order_decoder.decode(text) if text else None


def parse_row(key: Key, fields: Fields, now: int) -> SessionRow:
    """The session's row at server time ``now`` (ms); ``fields`` is all of its hash."""
    return SessionRow(
        tenant=key.tenant,
        session_id=key.session_id,
        state=State(fields[b"state"].decode()),
        revision=int(fields[b"revision"]),
        head_item=int(fields[b"head_item"]),
        head_hash=fields[b"head_hash"].decode(),
        item_count=int(fields[b"item_count"]),
        context_tokens=int(fields[b"context_tokens"]),
        config=_config_decoder.decode(fields[b"config"]),
        labels=_labels_decoder.decode(fields[b"labels"]),
        create_ms=int(fields[b"create_ms"]),
        update_ms=int(fields[b"update_ms"]),
        expire_ms=int(fields[b"expire_ms"]),
        forked_from=fields[b"forked_from"].decode(),
        forked_from_item=int(fields[b"forked_from_item"]),
        running=_running(fields, now),
    )


def _running(fields: Fields, now: int) -> RunningTurn | None:
    until = int(fields.get(b"run_until_ms", b"0"))
    if until <= now:
        return None
    return RunningTurn(
        request_id=fields[b"run_req"].decode(),
        owner=fields[b"run_owner"].decode(),
        attempt=fields[b"run_attempt"].decode(),
        lease_ms_left=until - now,
        start_ms=int(fields[b"run_start_ms"]),
    )


def as_fields(reply: Any) -> Fields:
    """HGETALL's reply: a map from a client's call, a flat list from inside a script."""
    if isinstance(reply, Mapping):
        return reply
    return dict(zip(reply[::2], reply[1::2], strict=True))


def parse_time(reply: Any) -> int:
    """TIME's reply (seconds, microseconds) in ms."""
    seconds, micros = reply
    return int(seconds) * 1000 + int(micros) // 1000


def parse_log(entries: Iterable[Any]) -> list[StoredRecord]:
    """XRANGE's reply. What is not shaped like a record becomes one that no check accepts."""
    return [_parse_entry(entry_id, as_fields(fields)) for entry_id, fields in entries]


def _parse_entry(entry_id: bytes, fields: Fields) -> StoredRecord:
    revision = int(entry_id.partition(b"-")[0])
    crc = fields.get(b"c", b"")
    chain = fields.get(b"h", b"").decode("ascii", errors="replace")
    return StoredRecord(revision, fields.get(b"d", b""), int(crc) if crc.isdigit() else -1, chain)
