"""Keys and values of ``redis_store``: names of keys, the fields of a session's hash, entries of its stream."""

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
"""For a turn that was begun by a program that kept no length of its lease."""

_json = msgspec.json.Encoder()
_config_decoder = msgspec.json.Decoder(SessionConfig)
_order_decoder = msgspec.json.Decoder(EndOrder)
_labels_decoder = msgspec.json.Decoder(dict[str, str])


def session_keys(key: Key) -> list[str]:
    """KEYS of every script. Quoting keeps ``/`` and braces out of names, so no name can lead to another's keys."""
    base = f"pv1:{{{quote(key.tenant, safe='')}/{quote(key.session_id, safe='')}}}"
    return [f"{base}:m", f"{base}:q", f"{base}:l"]


def index_key(tenant: str) -> str:
    return tenant_keys(tenant)[0]


def tenant_keys(tenant: str) -> list[str]:
    """KEYS of the listing's scripts, in one hash slot. Empty braces would name none; quoting makes no lone ``%``."""
    tag = quote(tenant, safe="") or "%"
    return [f"pv1:{letter}:{{{tag}}}" for letter in "iuebk"]


def indexed_tenant(name: bytes) -> str:
    """The tenant whose index that key is."""
    tag = name.decode().removeprefix("pv1:i:{").removesuffix("}")
    return unquote(tag) if tag != "%" else ""


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


def read_row(key: Key, fields: Fields, now: int) -> SessionRow:
    """As ``parse_row``, of what may have been altered. Raises DataLoss (HISTORY_CORRUPT)."""
    try:
        row = parse_row(key, fields, now)
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise corrupt(key, 0, f"has a row that cannot be read ({type(error).__name__})") from error
    if row.state is State.ACTIVE and not _seal_holds(fields):
        raise corrupt(key, row.revision, "has a row that was altered")
    return row


def damaged_row(key: Key, update_ms: int) -> SessionRow:
    """What a listing shows of a session whose row cannot be read."""
    return SessionRow(tenant=key.tenant, session_id=key.session_id, state=State.DAMAGED, update_ms=update_ms)


def is_sealed(fields: Fields) -> bool:
    """Whether the newest record was written by a program that seals; the docstring of ``scripts`` says what that is."""
    return fields.get(b"seal", b"").partition(b"|")[0] == fields[b"revision"]


def _seal_holds(fields: Fields) -> bool:
    if not is_sealed(fields):
        return True
    _, requests, digest = fields[b"seal"].split(b"|")
    content = b"\0".join([requests, *(fields.get(name.encode(), b"") for name in SEALED)])
    return hashlib.sha1(content, usedforsecurity=False).hexdigest().encode() == digest


def check_requests(key: Key, requests: Fields, logged: Iterable[LoggedRecord]) -> None:
    """Raises DataLoss (HISTORY_CORRUPT) unless ``requests`` has all request ids of a whole log.

    But for that of its creation, which is repeated by the session's id.
    """
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


def log_bytes(entries: Iterable[Any]) -> int:
    """Bytes of the records in XRANGE's reply."""
    return sum(len(stored.data) for stored in parse_log(entries))


def _parse_entry(entry_id: bytes, fields: Fields) -> StoredRecord:
    revision = int(entry_id.partition(b"-")[0])
    crc = fields.get(b"c", b"")
    chain = fields.get(b"h", b"").decode("ascii", errors="replace")
    return StoredRecord(revision, fields.get(b"d", b""), int(crc) if crc.isdigit() else -1, chain)
