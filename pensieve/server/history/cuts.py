"""Removing items from a history. Pure functions.

Erasing is a rewind that also removes the content of the cut items from the log. The log may hold a cut item
more than once: a change of the system prompt appends all items again, and a choice appends another answer of
the same turn. So it erases:

* each item that is not live after the rewind and equals a cut one in content and request;
* of a turn whose answer is cut: all its candidates, answers chosen before, annotations and mark.

Items superseded by an earlier change belong to other turns, and stay; so do copies in forks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from pensieve.core import Role
from pensieve.errors import NotFound
from pensieve.store import LoggedRecord
from pensieve.store.records import Erasure, History, Item, Record


def truncated_to(history: History, item: int) -> History:
    """``history`` without the items after ``item``, except the system prompt. Resets the overflow view."""
    item = max(item, system_item(history))
    return replace(history, items=history.truncated(item), hidden_before=0)


def system_item(history: History) -> int:
    """Number of the system prompt's item, if the first live item comes from the session's config; else 0."""
    first = history.items[0] if history.items else None
    is_prompt = first is not None and first.role is Role.SYSTEM and bool(history.config.prompt)
    return first.number if first is not None and is_prompt else 0


def renumbered_view(base: History, moved: list[Item]) -> int | None:
    """The overflow view of ``base`` in the item numbers of ``moved``; None if it has none."""
    if not base.hidden_before:
        return None
    seen = [
        new.number
        for old, new in zip(without_prompt(base), moved, strict=True)
        if old.number >= base.hidden_before
    ]
    return min(seen, default=moved[-1].number + 1 if moved else 0)


def without_prompt(history: History) -> tuple[Item, ...]:
    """The live items except the system prompt's."""
    return history.items[1:] if system_item(history) else history.items


class _CutItems:
    """The items that a rewind cuts off, to be erased wherever the log has them."""

    def __init__(self, base: History, rewind: Record) -> None:
        self._live = {item.number for item in base.apply(rewind, "").items}
        items = [item for item in base.items if item.number not in self._live]
        self._answers = {item.request_id for item in items if _is_answer(item)}
        self._content_keys = {_content_key(item) for item in items}

    def has(self, item: Item) -> bool:
        if item.number in self._live or item.erased:
            return False
        return _content_key(item) in self._content_keys or (
            _is_answer(item) and item.request_id in self._answers
        )


def erasing_record(
    base: History, rewind: Record, log: Sequence[LoggedRecord]
) -> tuple[Record, tuple[Record, ...]]:
    """``rewind`` as an erasing record, and the remains of the records in ``log`` (all up to ``base``) that
    lose content."""
    cut = _CutItems(base, rewind)
    rests, before = [], ""
    for logged in log:
        record = logged.record
        if any(cut.has(item) for item in record.items):
            follows = before if record.erased is None else record.erased.follows
            rests.append(_erased_record(record, cut, Erasure(follows, logged.head_hash)))
        before = logged.head_hash
    return msgspec.structs.replace(rewind, erases=tuple(rest.revision for rest in rests)), tuple(rests)


def check_not_erased(items: Iterable[Item]) -> None:
    """Raises NotFound (CONTENT_ERASED) when an item that a request made was erased."""
    if any(item.erased for item in items):
        raise NotFound(
            "the request was carried out, and its result was erased since; use a new request id to repeat it",
            reason="CONTENT_ERASED",
        )


def _erased_record(record: Record, cut: _CutItems, place: Erasure) -> Record:
    items = tuple(_without_content(item) if cut.has(item) else item for item in record.items)
    turn = record.turn
    if turn is not None and items[-1].erased:
        turn = msgspec.structs.replace(turn, candidates=(), stop_sequence="", annotations={}, mark="")
    return msgspec.structs.replace(record, items=items, turn=turn, erased=place)


def _without_content(item: Item) -> Item:
    return msgspec.structs.replace(item, text="", tokens=b"", prefix_tokens=0, call_id="", erased=True)


def _is_answer(item: Item) -> bool:
    """Whether the model generated it: an imported answer has no finish reason."""
    return item.finish_reason is not None and bool(item.request_id)


def _content_key(item: Item) -> tuple[str, Role, str, str, int]:
    return item.request_id, item.role, item.text, item.call_id, item.create_ms
