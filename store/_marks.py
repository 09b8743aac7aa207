"""By what a turn is found again: the mark that its client gave it, alone and together with each of its answers.

All of it follows from the turn's record, so an index can be made anew from the log.
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
    """An entry of the index, without the session."""

    found_by: str
    time_ms: int
    revision: int


def found_by(mark: str, answer: str | None) -> str:
    """128 bits, hex: what the index holds in place of both, so that it tells nobody what was said."""
    digest = hashlib.blake2b(digest_size=16)
    for text in (mark,) if answer is None else (mark, answer):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def mark_entries(record: Record) -> list[MarkEntry]:
    """What a record adds to the index: of a turn with a mark one entry, and one for each different answer."""
    turn = record.turn
    if turn is None or not turn.mark:
        return []
    texts = [one.text for one in turn.candidates] or [record.items[-1].text]
    names = dict.fromkeys(found_by(turn.mark, text) for text in (None, *texts))
    return [MarkEntry(name, record.time_ms, record.revision) for name in names]


def mark_entries_of_log(log: Sequence[StoredRecord]) -> Iterator[MarkEntry]:
    """Those of all records that can be read."""
    for entry in log:
        try:
            yield from mark_entries(decode_record(entry.data))
        except (msgspec.MsgspecError, ValueError, FailedPrecondition):
            continue
