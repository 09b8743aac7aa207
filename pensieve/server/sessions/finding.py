"""Finds a turn, in whichever session of the tenant, by the mark that its client gave it and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pensieve.errors import DataLoss, NotFound
from pensieve.server.turns import record as turn_record
from pensieve.server.turns.runner import TurnRunner
from pensieve.server.values import TurnView
from pensieve.store import HistoryStore, Key, MarkedTurn

MOST_LOOKED_AT: Final = 8
"""Of the turns with one mark and one answer; the newest is nearly always the right one."""


@dataclass(frozen=True, slots=True)
class MarkedView:
    """A turn, and which of its candidates the answer is."""

    view: TurnView
    candidate: int


class TurnFinder:
    """See the module docstring. Keeps nothing between calls."""

    def __init__(self, store: HistoryStore, runner: TurnRunner) -> None:
        self._store = store
        self._runner = runner

    async def find(self, tenant: str, mark: str, answer: str | None, request_id: str) -> MarkedView:
        """The newest one, with any answer if that is None.

        Of several sessions the one that has ``request_id``, if any has, goes first.
        Raises NotFound (TURN_NOT_FOUND).
        """
        marked = await self._store.find_marked(tenant, mark, answer, limit=MOST_LOOKED_AT)
        if request_id and len(marked) > 1:
            has_it = [await self._has(Key(tenant, one.session_id), request_id) for one in marked]
            marked = sorted(marked, key=lambda one: not has_it[marked.index(one)])
        for one in marked:
            found = await self._read(Key(tenant, one.session_id), one, mark, answer)
            if found is not None:
                return found
        raise NotFound("no turn has this mark and this answer", reason="TURN_NOT_FOUND")

    async def _has(self, key: Key, request_id: str) -> bool:
        try:
            running = (await self._store.load(key)).running
            # Asked second: a turn that does not run any more has been committed by now, if it ever is.
            committed = await self._store.find_request(key, request_id)
        except NotFound:
            return False
        return committed is not None or (running is not None and running.request_id == request_id)

    async def _read(self, key: Key, one: MarkedTurn, mark: str, answer: str | None) -> MarkedView | None:
        """The turn itself, because the index is a hint; None when it is another, or is not there."""
        try:
            turn = await self._runner.committed_turn(key, one.revision)
        except (NotFound, DataLoss):
            return None  # of a session that nobody can go on with
        if turn is None or turn.record.turn is None or turn.record.turn.mark != mark:
            return None
        view = turn_record.committed_view(key, turn)
        if answer is None:
            return MarkedView(view, view.chosen)
        texts = [each.text for each in view.candidates] or [
            view.output.text if view.output is not None else ""
        ]
        return MarkedView(view, texts.index(answer)) if answer in texts else None
