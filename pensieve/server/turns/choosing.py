"""Another candidate of the latest turn becomes its answer: one record, and a word to the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from pensieve.errors import FailedPrecondition, NotFound, RevisionMismatch, TurnInProgress
from pensieve.server import ids
from pensieve.server.clock import now_ms
from pensieve.server.history.cache import Histories
from pensieve.server.history.rendering import Renderer
from pensieve.server.links.engine_link import EngineLink
from pensieve.server.turns import record as turn_record
from pensieve.server.turns.record import CommittedTurn
from pensieve.server.turns.runner import TurnRunner
from pensieve.server.values import TurnView, fingerprint
from pensieve.store import Counts, HistoryStore, Key

_RACES: Final = 8
"""How often a choice is tried again when another change of the session came first."""


class CandidateChooser:
    """See the module docstring. Keeps nothing between calls."""

    def __init__(
        self,
        store: HistoryStore,
        link: EngineLink,
        histories: Histories,
        renderer: Renderer,
        runner: TurnRunner,
        may_grow: Callable[[str], Awaitable[None]],
    ) -> None:
        """``may_grow`` raises ResourceExhausted for a tenant that stores too much."""
        self._store = store
        self._link = link
        self._histories = histories
        self._renderer = renderer
        self._runner = runner
        self._may_grow = may_grow

    async def choose(
        self, key: Key, request_id: str, candidate: int, expected_revision: int | None
    ) -> TurnView:
        """The turn with that answer. Choosing the one that it has changes nothing, whatever came after the turn.

        Raises NotFound (TURN_NOT_FOUND, CANDIDATE_NOT_FOUND), FailedPrecondition (TURN_NOT_LATEST), ResourceExhausted
        (QUOTA_EXCEEDED: each choice is a record with the answer in it), and what ``HistoryStore.apply`` does:
        TurnInProgress, RevisionMismatch.
        """
        for _ in range(_RACES):
            turn = await self._turn(key, request_id)
            view = turn_record.committed_view(key, turn)
            count = max(1, len(view.candidates))
            if candidate >= count:
                raise turn_record.no_candidate(candidate, count)
            if candidate == view.chosen:
                return view
            if not turn.latest:
                raise FailedPrecondition("the session has changed since this turn", reason="TURN_NOT_LATEST")
            await self._may_grow(key.tenant)
            try:
                chosen = await self._apply(key, turn, candidate, expected_revision)
            except RevisionMismatch:
                if expected_revision is not None:
                    raise
                chosen = None
            if chosen is not None:
                if candidate:  # that of candidate 0 was given up for another's before
                    self._link.choose(ids.session_key(key), candidate)
                return turn_record.committed_view(key, chosen)
        raise RevisionMismatch("the session changes too fast to choose in it")

    async def _turn(self, key: Key, request_id: str) -> CommittedTurn:
        revision = await self._store.find_request(key, request_id)
        turn = None if revision is None else await self._runner.committed_turn(key, revision)
        if turn is None:
            running = (await self._store.load(key)).running
            if running is not None and running.request_id == request_id:
                raise TurnInProgress(
                    "the turn still runs",
                    metadata={"active_request_id": request_id},
                    retry_after_s=running.lease_ms_left / 1000,
                )
            raise NotFound("no such turn in this session", reason="TURN_NOT_FOUND")
        return turn

    async def _apply(
        self, key: Key, turn: CommittedTurn, candidate: int, expected_revision: int | None
    ) -> CommittedTurn | None:
        """The turn with its new answer; None when the session has changed since ``turn`` was read."""
        base = await self._histories.at(key, await self._store.load(key))
        if base.revision != turn.head:
            return None
        record = turn_record.choose(base, turn, candidate, now_ms())
        after = base.apply(record, "")
        counts = Counts(after.head_item, len(after.items), self._renderer.length(after))
        mark = fingerprint("choose", turn.record.request_id, candidate)
        row = await self._store.apply(key, mark, record, counts, expected_revision=expected_revision)
        self._histories.committed(key, base, record, row)
        return CommittedTurn(turn.record, record, head=record.revision, latest=True)
