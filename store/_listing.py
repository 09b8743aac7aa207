"""Pages of a listing: newest update first, ties by session id descending. A cursor names a page's last row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pensieve.errors import InvalidArgument
from pensieve.store.records import SessionRow, State


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
