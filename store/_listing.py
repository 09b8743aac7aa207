"""Pages of a listing: newest update first, ties by session id descending; a cursor names the last row of a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pensieve.errors import InvalidArgument
from pensieve.store.records import SessionRow


class Position(NamedTuple):
    """Sort key of a row; rows that come later in the listing compare smaller."""

    update_ms: int
    session_id: str


BEGINNING = Position(1 << 62, "")
"""Larger than any row's position."""


def position_of(row: SessionRow) -> Position:
    return Position(row.update_ms, row.session_id)


def encode_cursor(place: Position) -> str:
    return f"{place.update_ms}.{place.session_id}"


def decode_cursor(cursor: str) -> Position:
    """The position that a cursor names. Raises InvalidArgument on a text that ``encode_cursor`` did not make."""
    if not cursor:
        return BEGINNING
    stamp, dot, session_id = cursor.partition(".")
    if not (stamp.isascii() and stamp.isdecimal() and len(stamp) <= 16 and dot and session_id):
        raise InvalidArgument.field("page_token", "not a page token of this listing")
    return Position(int(stamp), session_id)


def has_labels(row: SessionRow, labels: Mapping[str, str] | None) -> bool:
    """Whether the row carries every one of ``labels``."""
    return all(row.labels.get(name) == value for name, value in (labels or {}).items())
