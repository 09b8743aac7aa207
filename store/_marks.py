"""Index entries by which a turn is found again: its client's mark, alone and with each of its answers.

All of them follow from the turn's record, so an index can be rebuilt from the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from pensieve.errors import FailedPrecondition
from pensieve.store._codec import StoredRecord, decode_record
from pensieve.store.records import Record


class MarkEntry(NamedTuple):
    found_by: str
    time_ms: int
    revision: int


def found_by(mark: str, answer: str | None) -> str:
    """Return 128 bits (hex) that stand for the mark and the answer, so that the index holds no content."""
    digest = hashlib.blake2b(digest_size=16)
    for text in (mark,) if answer is None else (mark, answer):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def mark_entries(record: Record) -> list[MarkEntry]:
    """Return a record's index entries: for a turn with a mark one, and one for each distinct answer."""
    turn = record.turn
    if turn is None or not turn.mark:
        return []
    texts = [one.text for one in turn.candidates] or [record.items[-1].text]
    names = dict.fromkeys(found_by(turn.mark, text) for text in (None, *texts))
    return [MarkEntry(name, record.time_ms, record.revision) for name in names]


def mark_entries_of_log(log: Sequence[StoredRecord]) -> Iterator[MarkEntry]:
    for entry in log:
        try:
            yield from mark_entries(decode_record(entry.data))
        except (msgspec.MsgspecError, ValueError, FailedPrecondition):
            continue
