"""Two copies of one session: which of them goes on."""

from __future__ import annotations

import enum

from pensieve.store._examine import Examined
from pensieve.store._raw import RawSession, is_over, is_running
from pensieve.store.records import State


class MergeChoice(enum.Enum):
    """What becomes of a session that is copied."""

    WRITE = enum.auto()
    KEEP = enum.auto()
    """What is there is the same or newer."""
    CONFLICT = enum.auto()
    EXPIRED = enum.auto()
    """Its time is over."""


def choose(theirs: Examined, ours: Examined | None, *, now: int, alone: bool) -> tuple[MergeChoice, str]:
    """Whether ``theirs`` takes the place of ``ours``; with a conflict, why not.

    The longer of two logs wins if the shorter is its beginning; chain hashes tell. A deletion is a newer state of what
    it deleted. A damaged session gives way to a sound one that has at least what its row names.
    """
    meta = theirs.session.meta
    if is_over(meta, now):
        return MergeChoice.EXPIRED, ""
    if ours is None or is_over(ours.session.meta, now):
        return MergeChoice.WRITE, ""
    if not alone and is_running(ours.session.meta, now):
        return MergeChoice.CONFLICT, "a turn is running"
    if _is_deleted(ours.session):
        return MergeChoice.KEEP, ""
    here = _revision(ours)
    if _is_deleted(theirs.session):
        behind = meta is not None and here <= meta.row.revision
        return (
            (MergeChoice.WRITE, "") if behind else (MergeChoice.CONFLICT, "deleted there, and continued here")
        )
    there = len(theirs.sound)
    if ours.is_broken:
        if _begins(theirs, ours) and not theirs.is_broken and there >= here:
            return MergeChoice.WRITE, ""
        return MergeChoice.CONFLICT, f"damaged here at revision {here}, and the other one ends at {there}"
    if _begins(ours, theirs):
        return MergeChoice.KEEP, ""
    if _begins(theirs, ours):
        return (MergeChoice.CONFLICT, "damaged there") if theirs.is_broken else (MergeChoice.WRITE, "")
    return MergeChoice.CONFLICT, f"two histories under one name, of {here} and {there} revisions"


def _is_deleted(session: RawSession) -> bool:
    return session.meta is not None and session.meta.row.state is State.DELETED


def _revision(examined: Examined) -> int:
    """The one that the row names, which may be more than what is left."""
    meta = examined.session.meta
    return len(examined.sound) if meta is None else meta.row.revision


def _begins(longer: Examined, shorter: Examined) -> bool:
    """Whether ``longer`` has every sound record of ``shorter``."""
    end = len(shorter.sound)
    if end > len(longer.sound):
        return False
    return end == 0 or longer.sound[end - 1].head_hash == shorter.sound[end - 1].head_hash
