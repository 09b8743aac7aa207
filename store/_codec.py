"""Bytes of a record, and the proof that a log was not changed: a checksum per record and a hash chain over all.

A stored record is one format byte followed by msgpack. ``crc`` tells which record is bad; the chain (each hash covers
the hash before it and the record's bytes) tells that a record is missing, repeated, swapped or from another history.
What is left of a record after an erasure names the chain hashes before and after it, so that it fits in its place only.
Neither Redis' append-only file nor SQLite's pages carry a checksum over values, so the store brings its own.
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
"""First byte of a stored record. Fields are added under the same number; it grows when meaning changes."""
FORMAT_ERASED: Final = 2
"""First byte of what is left of a record when content was erased: its chain hash is not over these bytes."""

HASH_BYTES = 20
SLICE_BYTES: Final = 512 << 10
"""Size of what one slice of a log reads: some milliseconds of work. The record that exceeds it is the last one."""
ATTEMPTS: Final = 3
"""A session that is replaced by another one while its log is read is read again from the beginning."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class StoredRecord(NamedTuple):
    """One entry of a log as the storage holds it, not verified."""

    revision: int
    data: bytes
    crc: int
    """``zlib.crc32`` of ``data``, unsigned 32 bits."""
    head_hash: str
    """Chain hash (hex) after this record."""


def encode_record(record: Record) -> bytes:
    """The bytes that are stored of ``record``."""
    return bytes((FORMAT if record.erased is None else FORMAT_ERASED,)) + _encoder.encode(record)


def chain_hash(previous: str, data: bytes) -> str:
    """Chain hash (hex) after ``data``; ``previous`` is the hex hash before it, "" for the first record."""
    return hashlib.blake2b(bytes.fromhex(previous) + data, digest_size=HASH_BYTES).hexdigest()


def make_stored_record(record: Record, previous: str) -> StoredRecord:
    """Encode ``record`` as the one after chain hash ``previous``."""
    data = encode_record(record)
    return StoredRecord(record.revision, data, zlib.crc32(data), chain_hash(previous, data))


def make_erased_record(rest: Record) -> StoredRecord:
    """Encode what is left of a record after an erasure; it takes the place of the whole one."""
    assert rest.erased is not None, "only what was erased keeps the chain hash that it had"
    data = encode_record(rest)
    return StoredRecord(rest.revision, data, zlib.crc32(data), rest.erased.chain)


def head_hash_after(record: Record, previous: str) -> str:
    """What a row's ``head_hash`` is after ``record``, appended behind the chain hash ``previous``."""
    return make_stored_record(record, previous).head_hash


def decode_record(data: bytes) -> Record:
    """The inverse of ``encode_record``.

    Raises FailedPrecondition (STORE_VERSION) on the format of a newer program, ``msgspec.MsgspecError`` or ValueError
    on anything else that is not a record.
    """
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
        raise ValueError("the format of the record is not the one that its content has")
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

    ``stored``: the records from ``after_revision`` on, oldest first; it ends before the row's head only where
    ``is_full`` says so. ``head_hash``: the chain hash at ``after_revision`` as the caller knows it, "" if unknown.
    Raises DataLoss: HISTORY_CORRUPT names the bad revision; HISTORY_REGRESSED means that the store is sound but behind
    the caller, or on another branch than the caller.
    """
    if after_revision > row.revision:
        raise wrong_revision(row.revision, after_revision)
    base = ""
    rest = stored
    if after_revision > 0:
        if not stored or stored[0].revision != after_revision:
            raise corrupt(key, after_revision, "is missing")
        base, rest = stored[0].head_hash, stored[1:]
    logged = _verify(key, row, rest, after_revision, base, is_full(rest, limit))
    if head_hash and head_hash != base:
        raise diverged(after_revision)
    return logged


def is_full(entries: Sequence[StoredRecord], limit: int) -> bool:
    """Whether a slice takes no further entry, so that the log may go on behind it."""
    return len(entries) >= limit or sum(len(entry.data) for entry in entries) >= SLICE_BYTES


def cut(entries: Iterable[StoredRecord], limit: int) -> list[StoredRecord]:
    """The first ``entries``, until the slice of them is full."""
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
    """Marks the session damaged where what is done inside finds its log corrupt."""
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
    goes_on: bool,
) -> list[LoggedRecord]:
    """Records from ``after_revision + 1`` on; they must lead from ``base_hash`` to ``row.head_hash``.

    ``goes_on``: they may end before the head.
    """
    expected = after_revision
    running = base_hash
    logged: list[LoggedRecord] = []
    for entry in stored:
        expected += 1
        logged.append(verify_next(key, entry, expected, running))
        running = logged[-1].head_hash
    if expected < row.revision:
        if goes_on:
            return logged
        raise corrupt(key, expected + 1, "is missing")
    if expected > row.revision or running != row.head_hash:
        raise corrupt(key, expected, "is not the one that the session's row names as newest")
    return logged


def verify_next(key: Key, entry: StoredRecord, revision: int, previous: str) -> LoggedRecord:
    """``entry`` as the record of ``revision`` behind the chain hash ``previous``. Raises DataLoss (HISTORY_CORRUPT)."""
    if entry.revision != revision:
        raise corrupt(key, revision, "is missing")
    if zlib.crc32(entry.data) != entry.crc:
        raise corrupt(key, entry.revision, "fails its checksum")
    if entry.data[:1] == bytes((FORMAT_ERASED,)):
        record = _decoded(key, entry)
        if record.erased != Erasure(previous, entry.head_hash):
            raise corrupt(key, entry.revision, "does not continue the chain")
        return LoggedRecord(record, entry.head_hash)
    running = _verified(key, entry, previous)
    return LoggedRecord(_decoded(key, entry), running)


def _verified(key: Key, entry: StoredRecord, previous: str) -> str:
    """The chain hash after ``entry``, which must equal the stored one."""
    try:
        running = chain_hash(previous, entry.data)
    except ValueError as error:
        raise corrupt(key, entry.revision, "follows a chain hash that is none") from error
    if running != entry.head_hash:
        raise corrupt(key, entry.revision, "does not continue the chain")
    return running


def _decoded(key: Key, entry: StoredRecord) -> Record:
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
    """Every record after ``after_revision``, read slice by slice: between two slices others have their turn.

    ``fetch``: reads the first slice after a revision, which has this chain hash ("": not known). Raises what it raises.

    Each slice continues the chain of the one before it, and the last one ends in the row's head: so the result is
    proven as if it had been read at once.
    """
    for attempt in range(ATTEMPTS):
        logged: list[LoggedRecord] = []
        created: int | None = None
        while True:
            at, chain = (
                (logged[-1].record.revision, logged[-1].head_hash) if logged else (after_revision, head_hash)
            )
            try:
                piece = await fetch(at, chain)
            except DataLoss as error:
                if not logged or error.reason != "HISTORY_REGRESSED" or attempt + 1 == ATTEMPTS:
                    raise
                break
            if created not in (None, piece.row.create_ms):
                break
            created = piece.row.create_ms
            logged += piece.records
            if not piece.records or piece.records[-1].record.revision >= piece.row.revision:
                return logged
            await asyncio.sleep(0)
    raise DataLoss("the session was replaced again and again while it was read", reason="HISTORY_REGRESSED")
