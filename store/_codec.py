"""Encode records, and verify logs with a checksum per record and a hash chain over all.

A stored record is one format byte followed by msgpack. ``crc`` tells which record is bad; the chain shows
that a record is missing, repeated, swapped or from another history. An erased record names the chain hashes
before and after it, so it fits in its own place only. Redis' append-only file and SQLite's pages carry no
checksum over values, so the store brings its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import msgspec

from pensieve.errors import DataLoss, FailedPrecondition
from pensieve.store._refusals import corrupt, diverged, wrong_revision
from pensieve.store.contract import SLICE_RECORDS, HistoryStore, Key, LoggedRecord, LogSlice
from pensieve.store.records import Erasure, Record, SessionRow

FORMAT = 1
"""First byte of a stored record. New fields keep the number; a change of meaning raises it."""
FORMAT_ERASED: Final = 2
"""First byte of an erased record, whose chain hash is not over its present bytes."""

HASH_BYTES = 20
SLICE_BYTES: Final = 512 << 10
"""Read size of one slice of a log: some milliseconds of work. The record that exceeds it ends the slice."""
READ_ATTEMPTS: Final = 3
"""Attempts to read a log, each from the beginning, while its session keeps being replaced."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class StoredRecord(NamedTuple):
    """One entry of a log as the storage holds it, not verified."""

    revision: int
    data: bytes
    crc: int
    """``zlib.crc32`` of ``data``, unsigned 32 bits."""
    head_hash: str
    """Chain hash (hex)."""


def encode_record(record: Record) -> bytes:
    return bytes((FORMAT if record.erased is None else FORMAT_ERASED,)) + _encoder.encode(record)


def chain_hash(previous: str, data: bytes) -> str:
    """Return the chain hash (hex) after ``data``; ``previous`` is the hash before it, "" for the first record."""
    return hashlib.blake2b(bytes.fromhex(previous) + data, digest_size=HASH_BYTES).hexdigest()


def make_stored_record(record: Record, previous: str) -> StoredRecord:
    data = encode_record(record)
    return StoredRecord(record.revision, data, zlib.crc32(data), chain_hash(previous, data))


def make_erased_record(rest: Record) -> StoredRecord:
    """Encode an erased record, which replaces the whole one in its place."""
    assert rest.erased is not None, "only an erased record keeps its old chain hash"
    data = encode_record(rest)
    return StoredRecord(rest.revision, data, zlib.crc32(data), rest.erased.chain)


def head_hash_after(record: Record, previous: str) -> str:
    """Return a row's ``head_hash`` after ``record`` is appended to chain hash ``previous``."""
    return make_stored_record(record, previous).head_hash


def decode_record(data: bytes) -> Record:
    """Decode a stored record. Raises FailedPrecondition (STORE_VERSION), MsgspecError or ValueError."""
    if not data:
        raise ValueError("empty record")
    if data[0] > FORMAT_ERASED:
        raise FailedPrecondition(
            f"a record has format {data[0]}, this program reads up to {FORMAT_ERASED}: upgrade Pensieve",
            reason="STORE_VERSION",
        )
    if data[0] not in (FORMAT, FORMAT_ERASED):
        raise ValueError(f"unknown record format {data[0]}")
    record = _decoder.decode(data[1:])
    if (record.erased is not None) != (data[0] == FORMAT_ERASED):
        raise ValueError("the record's format byte contradicts its content")
    return record


def read_log(
    key: Key,
    row: SessionRow,
    stored: Sequence[StoredRecord],
    *,
    after_revision: int,
    head_hash: str,
    limit: int = SLICE_RECORDS,
) -> list[LoggedRecord]:
    """Verify and decode one slice of a log: the records after ``after_revision``, at most to the row's head.

    ``stored``: records from ``after_revision`` on; they end before the row's head only if the slice is full.
    ``head_hash``: the caller's chain hash at ``after_revision``, "" if unknown. Raises DataLoss:
    HISTORY_CORRUPT names the bad revision; HISTORY_REGRESSED means a sound log that is behind the caller's,
    or on another branch.
    """
    if after_revision > row.revision:
        raise wrong_revision(row.revision, after_revision)
    base = ""
    rest = stored
    if after_revision > 0:
        if not stored or stored[0].revision != after_revision:
            raise corrupt(key, after_revision, "is missing")
        base, rest = stored[0].head_hash, stored[1:]
    logged = _verify(key, row, rest, after_revision, base, is_slice_full(rest, limit))
    if head_hash and head_hash != base:
        raise diverged(after_revision)
    return logged


def is_slice_full(entries: Sequence[StoredRecord], limit: int) -> bool:
    """Whether the slice is full: the log may continue after it."""
    return len(entries) >= limit or sum(len(entry.data) for entry in entries) >= SLICE_BYTES


def take_slice(entries: Iterable[StoredRecord], limit: int) -> list[StoredRecord]:
    """Take ``entries`` until the slice is full."""
    taken: list[StoredRecord] = []
    size = 0
    for entry in entries:
        taken.append(entry)
        size += len(entry.data)
        if len(taken) >= limit or size >= SLICE_BYTES:
            break
    return taken


@asynccontextmanager
async def marking_damage(store: HistoryStore, key: Key) -> AsyncIterator[None]:
    """Mark the session damaged if the body finds its log corrupt."""
    try:
        yield
    except DataLoss as error:
        if error.reason == "HISTORY_CORRUPT":
            await store.mark_damaged(key)
        raise


def _verify(
    key: Key,
    row: SessionRow,
    stored: Sequence[StoredRecord],
    after_revision: int,
    base_hash: str,
    may_end_early: bool,
) -> list[LoggedRecord]:
    expected = after_revision
    running = base_hash
    logged: list[LoggedRecord] = []
    for entry in stored:
        expected += 1
        logged.append(verify_next(key, entry, expected, running))
        running = logged[-1].head_hash
    if expected < row.revision:
        if may_end_early:
            return logged
        raise corrupt(key, expected + 1, "is missing")
    if expected > row.revision or running != row.head_hash:
        raise corrupt(key, expected, "is not the one that the session's row names as newest")
    return logged


def verify_next(key: Key, entry: StoredRecord, revision: int, previous: str) -> LoggedRecord:
    """Verify ``entry`` as ``revision`` after chain hash ``previous``. Raises DataLoss (HISTORY_CORRUPT)."""
    if entry.revision != revision:
        raise corrupt(key, revision, "is missing")
    if zlib.crc32(entry.data) != entry.crc:
        raise corrupt(key, entry.revision, "fails its checksum")
    if entry.data[:1] == bytes((FORMAT_ERASED,)):
        record = _decode_entry(key, entry)
        if record.erased != Erasure(previous, entry.head_hash):
            raise corrupt(key, entry.revision, "does not continue the chain")
        return LoggedRecord(record, entry.head_hash)
    running = _verify_chain(key, entry, previous)
    return LoggedRecord(_decode_entry(key, entry), running)


def _verify_chain(key: Key, entry: StoredRecord, previous: str) -> str:
    try:
        running = chain_hash(previous, entry.data)
    except ValueError as error:
        raise corrupt(key, entry.revision, "follows an invalid chain hash") from error
    if running != entry.head_hash:
        raise corrupt(key, entry.revision, "does not continue the chain")
    return running


def _decode_entry(key: Key, entry: StoredRecord) -> Record:
    try:
        record = decode_record(entry.data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise corrupt(key, entry.revision, f"cannot be decoded ({type(error).__name__})") from error
    if record.revision != entry.revision:
        raise corrupt(key, entry.revision, f"says it is revision {record.revision}")
    return record


async def read_all_slices(
    fetch: Callable[[int, str], Awaitable[LogSlice]], after_revision: int, head_hash: str
) -> list[LoggedRecord]:
    """Read every record after ``after_revision`` slice by slice, letting other callers run in between.

    Each slice continues the chain of the one before, and the last ends at the row's head, so the result is
    proven as if it had been read at once. ``fetch(revision, chain_hash)`` reads a slice; "": hash unknown.
    """
    for attempt in range(READ_ATTEMPTS):
        logged: list[LoggedRecord] = []
        created: int | None = None
        while True:
            at, chain = (
                (logged[-1].record.revision, logged[-1].head_hash) if logged else (after_revision, head_hash)
            )
            try:
                piece = await fetch(at, chain)
            except DataLoss as error:
                if not logged or error.reason != "HISTORY_REGRESSED" or attempt + 1 == READ_ATTEMPTS:
                    raise
                break
            if created not in (None, piece.row.create_ms):
                break
            created = piece.row.create_ms
            logged += piece.records
            if not piece.records or piece.records[-1].record.revision >= piece.row.revision:
                return logged
            await asyncio.sleep(0)
    raise DataLoss("the session was replaced repeatedly while it was read", reason="HISTORY_REGRESSED")
