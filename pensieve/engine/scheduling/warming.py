"""Warming: a session's KV is brought to the device ahead of its turn, at nobody else's expense. No torch.

A warm-up is a request that is finished from the start: it samples nothing and leaves as soon as nothing is missing, and
what it leaves behind are ordinary chunks that nothing pins. It is never in the queue. It begins when nobody waits and
free and reclaimable pages are enough, so that nothing is evicted for it. What the host has is copied in by one step, as
for a turn, while others run; what was dropped is recomputed only while no turn runs, a few tokens a step. Any new turn
ends it at once, and so does a generation that needs its pages: what it brought until then stays.

To the policy it is no turn: nothing is learned from it, and the idle period goes on. But for the ranking of its chunks
the session counts as active when it was warmed, and as one that is expected ``EXPECTED_S`` later. Else what has been
idle for long would go again in the next round. Warming what is on the device already changes nothing, so nobody keeps a
session there by warming it again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from pensieve.core import Hints, Sampling, SessionKey
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.messages import Submit, Warm
from pensieve.engine.scheduling.request import Request, session_of

WARM_TOKENS: Final = 512
"""Most tokens of a warm-up in one step: a turn that comes meanwhile waits for no longer step than that."""
EXPECTED_S: Final = 30.0
"""When the turn is expected that a session is warmed for. People are warmed for while they type."""
MOST_PENDING: Final = 64
"""Warm-ups that have not begun; further ones are refused as ``busy``. Each holds a context."""


class WarmUps:
    """The warm-ups of one engine that have not begun. A part of ``Scheduler``, which runs the others."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._pending: dict[SessionKey, Request] = {}
        self.tokens = 0
        """KV-tokens brought to the device since start."""

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def ask(self, warm: Warm, ticket: int, now: float, others: Iterable[Request]) -> str:
        """Take in a wish; returns why it is refused, as ``Warmed`` has it, or "". ``others``: all that wait or run."""
        session = SessionKey(warm.session)
        others = list(others)
        turns = [request for request in others if not request.warm]
        if any(session_of(request.session) == session for request in turns):
            return "running"
        if session in self._pending or any(request.session == session for request in others):
            return ""  # it is in hand
        if not warm.tokens:
            return "nothing_to_do"
        request = Request.for_warm_up(_submit(warm, ticket), ticket, now)
        request.set_prefix_path(self._cache.prefix_path(session, request.scope, request.tokens))
        needs = self._cache.restore_cost(session, request.tokens, request.path, tenant=request.tenant)
        if not needs.pages and not needs.needs_compute:
            return "nothing_to_do"
        if needs.pages > needs.room:
            return "no_room"
        if (needs.needs_compute and turns) or len(self._pending) >= MOST_PENDING:
            return "busy"
        self._pending[session] = request
        return ""

    def cancel(self, session: SessionKey | None) -> None:
        """A session's warm-up, or all, need not begin any more."""
        if session is None:
            self._pending.clear()
        else:
            self._pending.pop(session, None)

    def begin(self, now: float, running: Sequence[Request]) -> Request | None:
        """Admit the first that can begin in the plan in the making; those that must not any more are given up.

        Nobody waits.
        """
        busy = any(not request.warm for request in running)
        for session, request in list(self._pending.items()):
            whose = request.tenant
            needs = self._cache.restore_cost(session, request.context, request.path, tenant=whose)
            useless = not needs.pages and not needs.needs_compute
            if useless or needs.pages > needs.room or (needs.needs_compute and busy):
                del self._pending[session]
                continue
            later = needs.needs_compute and len(running) > 0  # or its chunks are being copied
            if later or not self._cache.can_admit(
                session, request.context, 0, reserve=False, path=request.path
            ):
                continue
            del self._pending[session]
            restore = self._cache.admit(
                session, request.context, 0, now, request.path, warm=True, tenant=whose
            )
            request.admit(restore, now)
            return request
        return None

    def on_end(self, request: Request) -> None:
        """A warm-up has ended, or was ended."""
        assert request.receipt is not None
        brought = request.receipt.swapped_in_tokens + request.receipt.recomputed_tokens
        self.tokens += brought - request.num_missing


def _submit(warm: Warm, ticket: int) -> Submit:
    return Submit(
        request=-1 - ticket,
        session=warm.session,
        tokens=warm.tokens,
        num_new=0,
        sampling=Sampling(),
        scope=warm.scope,
        hints=Hints(next_turn_s=EXPECTED_S),
        qos=warm.qos,
    )
