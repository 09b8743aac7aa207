"""Keys and values of ``redis_store``: key names, the fields of a session's hash, entries of its stream."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from pensieve.store._codec import StoredRecord
from pensieve.store._redis.scripts import SEALED
from pensieve.store._refusals import corrupt
from pensieve.store._rules import ttl_ms
from pensieve.store.contract import Counts, EndOrder, Key, LoggedRecord
from pensieve.store.records import Record, RecordKind, RunningTurn, SessionConfig, SessionRow, State

Fields = Mapping[bytes, bytes]

NO_LEASE = b"%d" % (1 << 60)
"""For a turn begun by an older program, which did not store the lease's length."""

_json = msgspec.json.Encoder()
_config_decoder = msgspec.json.Decoder(SessionConfig)
_order_decoder = msgspec.json.Decoder(EndOrder)
_labels_decoder = msgspec.json.Decoder(dict[str, str])


def session_keys(key: Key) -> list[str]:
    """Return the KEYS of every script. Names are quoted, so none can lead to another session's keys."""
    base = f"pv1:{{{quote(key.tenant, safe='')}/{quote(key.session_id, safe='')}}}"
    return [f"{base}:m", f"{base}:q", f"{base}:l"]


def key_of_name(name: bytes) -> Key | None:
    """Return the session that a key belongs to, or None."""
    text = name.decode("utf-8", errors="replace")
    inside, end, part = text.removeprefix("pv1:{").rpartition("}:")
    tenant, slash, session_id = inside.partition("/")
    if not (end and slash and part in ("m", "q", "l")):
        return None
    return Key(unquote(tenant), unquote(session_id))


def index_key(tenant: str) -> str:
    return tenant_keys(tenant)[0]


def tenant_keys(tenant: str) -> list[str]:
    """KEYS of the listing's scripts, in one hash slot. Empty braces define no slot, so "" becomes ``%``."""
    tag = quote(tenant, safe="") or "%"
    return [f"pv1:{letter}:{{{tag}}}" for letter in "iuebk"]


def indexed_tenant(name: bytes) -> str:
    tag = name.decode().removeprefix("pv1:i:{").removesuffix("}")
    return unquote(tag) if tag != "%" else ""


def create_fields(row: SessionRow) -> list[Any]:
    """Return the fields of a new session that the caller decides, as field, value, field, value, …"""
    return [
        *("head_item", row.head_item, "item_count", row.item_count, "context_tokens", row.context_tokens),
        *("config", _json.encode(row.config), "ttl_ms", ttl_ms(row.config)),
        *("labels", _json.encode(row.labels)),
        *("forked_from", row.forked_from, "forked_from_item", row.forked_from_item),
    ]


def append_args(
    record: Record, fingerprint: str, base_hash: str, stored: StoredRecord, counts: Counts
) -> list[Any]:
    """Return the arguments (ARGV) of COMMIT and APPLY, from the request id on."""
    return [
        *(record.request_id, fingerprint, record.revision, base_hash),
        *(stored.data, stored.crc, stored.head_hash),
        *(counts.head_item, counts.item_count, counts.context_tokens),
        b"" if record.config is None else _json.encode(record.config),
        b"" if record.labels is None else _json.encode(record.labels),
        0 if record.config is None else ttl_ms(record.config),
    ]


def order_text(order: EndOrder) -> bytes:
    return _json.encode(order)


def parse_order(text: bytes) -> EndOrder | None:
    return _order_decoder.decode(text) if text else None


def parse_row(key: Key, fields: Fields, now: int) -> SessionRow:
    """Parse all fields of a session's hash; ``now``: server time in ms."""
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


def read_row(key: Key, fields: Fields, now: int) -> SessionRow:
    """As ``parse_row``, for fields that may have been altered. Raises DataLoss (HISTORY_CORRUPT)."""
    try:
        row = parse_row(key, fields, now)
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise corrupt(key, 0, f"has a row that cannot be read ({type(error).__name__})") from error
    if row.state is State.ACTIVE and not _seal_holds(fields):
        raise corrupt(key, row.revision, "has a row that was altered")
    return row


def damaged_row(key: Key, update_ms: int) -> SessionRow:
    return SessionRow(tenant=key.tenant, session_id=key.session_id, state=State.DAMAGED, update_ms=update_ms)


def is_sealed(fields: Fields) -> bool:
    """Whether the newest record was written by a program that seals (see ``scripts``' docstring)."""
    return fields.get(b"seal", b"").partition(b"|")[0] == fields[b"revision"]


def _seal_holds(fields: Fields) -> bool:
    if not is_sealed(fields):
        return True
    _, requests, digest = fields[b"seal"].split(b"|")
    content = b"\0".join([requests, *(fields.get(name.encode(), b"") for name in SEALED)])
    return hashlib.sha1(content, usedforsecurity=False).hexdigest().encode() == digest


def check_requests(key: Key, requests: Fields, logged: Iterable[LoggedRecord]) -> None:
    """Raise DataLoss unless ``requests`` has all request ids of a whole log, except the creation's."""
    for one in logged:
        name, revision = one.record.request_id, one.record.revision
        if (
            name
            and one.record.kind is not RecordKind.CREATE
            and not requests.get(name.encode(), b"").startswith(b"%d|" % revision)
        ):
            raise corrupt(key, revision, "has lost its request id")


def _running(fields: Fields, now: int) -> RunningTurn | None:
    until = min(int(fields.get(b"run_until_ms", b"0")), now + int(fields.get(b"run_lease_ms", NO_LEASE)))
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
    """Return HGETALL's reply as a map: a script gives a flat list."""
    if isinstance(reply, Mapping):
        return reply
    return dict(zip(reply[::2], reply[1::2], strict=True))


def parse_time(reply: Any) -> int:
    """Return TIME's reply (seconds, microseconds) in ms."""
    seconds, micros = reply
    return int(seconds) * 1000 + int(micros) // 1000


def parse_log(entries: Iterable[Any]) -> list[StoredRecord]:
    """Parse XRANGE's reply. A malformed entry becomes a record that no check accepts."""
    return [_parse_entry(entry_id, as_fields(fields)) for entry_id, fields in entries]


def log_bytes(entries: Iterable[Any]) -> int:
    return sum(len(stored.data) for stored in parse_log(entries))


def _parse_entry(entry_id: bytes, fields: Fields) -> StoredRecord:
    revision = int(entry_id.partition(b"-")[0])
    crc = fields.get(b"c", b"")
    chain = fields.get(b"h", b"").decode("ascii", errors="replace")
    return StoredRecord(revision, fields.get(b"d", b""), int(crc) if crc.isdigit() else -1, chain)
