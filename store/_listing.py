"""How sessions and turns are found: pages of a listing, and the index of marks.

A listing has the newest update first, ties by session id descending. A cursor names a page's last row. A turn is found
again by its client's mark, alone and with each of its answers. These entries follow from the turn's record, so an
index can be rebuilt from the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pensieve.errors import FailedPrecondition, InvalidArgument
from pensieve.store._codec import StoredRecord, decode_record
from pensieve.store.records import Record, SessionRow, State


class Position(NamedTuple):
    """Sort key of a row. Rows later in the listing compare smaller."""

    update_ms: int
    session_id: str


START = Position(1 << 62, "")


def position_of(row: SessionRow) -> Position:
    return Position(row.update_ms, row.session_id)


def encode_cursor(place: Position) -> str:
    return f"{place.update_ms}.{place.session_id}"


def decode_cursor(cursor: str) -> Position:
    """Return the position that ``cursor`` names. Raises InvalidArgument if ``encode_cursor`` did not make it."""
    if not cursor:
        return START
    stamp, dot, session_id = cursor.partition(".")
    if not (stamp.isascii() and stamp.isdecimal() and len(stamp) <= 16 and dot and session_id):
        raise InvalidArgument.field("page_token", "not a page token of this listing")
    return Position(int(stamp), session_id)


def has_labels(row: SessionRow, labels: Mapping[str, str] | None) -> bool:
    return all(row.labels.get(name) == value for name, value in (labels or {}).items())


def may_be_about(row: SessionRow, subject: str) -> bool:
    """Whether the session is about ``subject``, or damaged and its subject is unknown."""
    theirs = row.config.subject
    return theirs == subject or (row.state is State.DAMAGED and not theirs)


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
