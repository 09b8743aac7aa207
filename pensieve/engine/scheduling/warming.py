"""Warming: bring a session's KV to the device ahead of its turn, at no other session's expense. No torch.

A warm-up is a request that is finished from the start: it samples nothing and leaves when no KV is missing. It
leaves ordinary, unpinned chunks behind. It never enters the queue. It begins when no request waits and free and
reclaimable pages suffice, so that nothing is evicted for it. Chunks on the host are copied in by one step, as for a
turn, while other requests run. Dropped chunks are recomputed only while no turn runs, a few tokens per step. Any new
turn ends a warm-up at once, and so does a generation that needs its pages. KV that it brought by then stays.

The policy learns nothing from a warm-up: the idle period goes on. But for the ranking of its chunks the
session counts as active when it was warmed, with its turn expected ``EXPECTED_S`` later. Otherwise the chunks
of a long idle session would be evicted in the next round. Warming chunks that are already on the device
changes nothing, so a client cannot keep a session there by warming it repeatedly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from pensieve.core import Hints, Sampling, SessionKey
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.messages import Submit, Warm
from pensieve.engine.scheduling.request import Request, session_of

WARM_TOKENS: Final = 512
"""Most tokens of a warm-up in one step: a turn that arrives meanwhile waits for no longer step."""
EXPECTED_S: Final = 30.0
"""Expected time until the turn after a warm-up. Clients warm while people type."""
MOST_PENDING: Final = 64
"""Most pending warm-ups; further ones are refused as ``busy``. Each holds a context."""


class WarmUps:
    """Pending warm-ups. Part of ``Scheduler``, which runs the others."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._pending: dict[SessionKey, Request] = {}
        self.tokens = 0
        """KV-tokens brought to the device since start."""
        self.computed: Counter[str] = Counter()
        """Computed ones among them, by tenant."""

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def ask(self, warm: Warm, ticket: int, now: float, others: Iterable[Request]) -> str:
        """Accept a warm-up; return "" or ``Warmed.refused``. ``others``: all waiting and running requests."""
        session = SessionKey(warm.session)
        others = list(others)
        turns = [request for request in others if not request.warm]
        if any(session_of(request.session) == session for request in turns):
            return "running"
        if session in self._pending or any(request.session == session for request in others):
            return ""  # already pending or running
        if not warm.tokens:
            return "nothing_to_do"
        request = Request.for_warm_up(_submit(warm, ticket), ticket, now)
        request.set_prefix_path(self._cache.prefix_path(session, request.scope, request.tokens))
        needs = self._cache.restore_cost(session, request.tokens, request.path, tenant=request.tenant)
        if not needs.num_bytes and not needs.needs_compute:
            return "nothing_to_do"
        if needs.num_bytes > needs.room:
            return "no_room"
        if (needs.needs_compute and _is_busy(turns)) or len(self._pending) >= MOST_PENDING:
            return "busy"
        self._pending[session] = request
        return ""

    def cancel(self, session: SessionKey | None) -> None:
        """Cancel the pending warm-up of a session, or all."""
        if session is None:
            self._pending.clear()
        else:
            self._pending.pop(session, None)

    def begin(self, now: float, running: Sequence[Request]) -> Request | None:
        """Admit the first warm-up that can begin now; discard those that no longer may. Call only with an
        empty queue."""
        busy = _is_busy(running)
        for session, request in list(self._pending.items()):
            tenant = request.tenant
            needs = self._cache.restore_cost(session, request.context, request.path, tenant=tenant)
            useless = not needs.num_bytes and not needs.needs_compute
            if useless or needs.num_bytes > needs.room or (needs.needs_compute and busy):
                del self._pending[session]
                continue
            later = needs.needs_compute and len(running) > 0  # also because its chunks may be copied now
            if later:
                continue
            context, path = request.context, request.path
            if not self._cache.can_admit(session, context, 0, path=path):
                waits = self._cache.pages_to_pin(session, context, 0, path=path) is None
                if not running and not waits:
                    del self._pending[session]  # one group's end is too short, and no turn asks for more
                continue
            del self._pending[session]
            restore = self._cache.admit(
                session, request.context, 0, now, request.path, warm=True, tenant=tenant
            )
            request.admit(restore, now)
            return request
        return None

    def on_end(self, request: Request) -> None:
        """Count the KV-tokens of a warm-up that ended or was ended."""
        assert request.receipt is not None
        computed = request.receipt.recomputed_tokens - request.num_missing
        self.tokens += request.receipt.swapped_in_tokens + computed
        self.computed[request.tenant] += computed


def _is_busy(requests: Iterable[Request]) -> bool:
    """Whether a turn is under way. One that has ended, and only computes its last token, delays a warm-up by a step."""
    return any(request.finished is None for request in requests)


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
