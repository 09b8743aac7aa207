"""Erasing: a rewind that takes the content of what it cuts off out of the log. Pure functions.

A cut item may be in the log more than once: a change of the system prompt appends all items again, and a choice
appends another answer of the same turn. So all of these are erased:

* each item that is not live after the rewind and says the same as a cut one, for the same request;
* of a turn whose answer is cut: all answers that it drew, also those that were chosen before, and what its client
  had it remember (annotations, mark).

What a rewind, an edit or a regeneration had superseded before belongs to other turns, and stays; so do copies in forks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from pensieve.core import Role
from pensieve.errors import NotFound
from pensieve.store import LoggedRecord
from pensieve.store.records import Erasure, History, Item, Record


class _Cut:
    """What the rewind cuts off, and so what is erased wherever the log has it."""

    def __init__(self, base: History, rewind: Record) -> None:
        self._live = {item.number for item in base.apply(rewind, "").items}
        items = [item for item in base.items if item.number not in self._live]
        self._answers = {item.request_id for item in items if _is_answer(item)}
        self._said = {_said(item) for item in items}

    def has(self, item: Item) -> bool:
        if item.number in self._live or item.erased:
            return False
        return _said(item) in self._said or (_is_answer(item) and item.request_id in self._answers)


def erasing(base: History, rewind: Record, log: Sequence[LoggedRecord]) -> tuple[Record, tuple[Record, ...]]:
    """``rewind`` as the record that erases, and what is left of the records that lose content by it.

    ``log``: all records up to ``base``, on which ``rewind`` is built.
    """
    cut = _Cut(base, rewind)
    rests, before = [], ""
    for logged in log:
        record = logged.record
        if any(cut.has(item) for item in record.items):
            follows = before if record.erased is None else record.erased.follows
            rests.append(_rest(record, cut, Erasure(follows, logged.head_hash)))
        before = logged.head_hash
    return msgspec.structs.replace(rewind, erases=tuple(rest.revision for rest in rests)), tuple(rests)


def check_not_erased(items: Iterable[Item]) -> None:
    """Raises NotFound (CONTENT_ERASED) when one of the items, which a request had made, was erased."""
    if any(item.erased for item in items):
        raise NotFound(
            "the request was carried out, and what it had made was erased since; another request id asks anew",
            reason="CONTENT_ERASED",
        )


def _rest(record: Record, cut: _Cut, place: Erasure) -> Record:
    items = tuple(_without_content(item) if cut.has(item) else item for item in record.items)
    turn = record.turn
    if turn is not None and items[-1].erased:
        turn = msgspec.structs.replace(turn, candidates=(), stop_sequence="", annotations={}, mark="")
    return msgspec.structs.replace(record, items=items, turn=turn, erased=place)


def _without_content(item: Item) -> Item:
    return msgspec.structs.replace(item, text="", tokens=b"", prefix_tokens=0, call_id="", erased=True)


def _is_answer(item: Item) -> bool:
    """Whether the model made it: an imported answer has no reason to have ended."""
    return item.finish_reason is not None and bool(item.request_id)


def _said(item: Item) -> tuple[str, Role, str, str, int]:
    return item.request_id, item.role, item.text, item.call_id, item.create_ms
