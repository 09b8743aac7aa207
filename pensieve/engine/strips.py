"""Where the chunks of sessions lie, for people to look at: a strip for each session.

A strip is runs of chunks in one state, in the order of the context: how many, and a letter (``x7h40B3d12``).

===  ==========================================================================
d    on the device
b    on both tiers: the device page can be taken at once
h    on the host
x    dropped: recomputed if its session returns
i    on its way in from the host
o    on its way out to the host
r    being recomputed, or about to be: history that a running turn still lacks
n    being computed, or about to be: input of a running turn
===  ==========================================================================

A capital letter: other sessions own the chunk, too. On its way is what the step under way copies; where steps do not
overlap, what the latest one has copied.

Nothing is kept for it while nobody looks. Who does pays for what has changed since the last look, and for what is in
use: a holder's strip is kept until its chunks change (``EvictionIndex.touch``), and a session that runs has a new one
each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final

from pensieve.core import RequestKey
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, Range, SharedRun
from pensieve.engine.messages import SessionStrip, Strips
from pensieve.engine.plan import Plan
from pensieve.engine.scheduling.request import Request
from pensieve.engine.scheduling.scheduler import Scheduler

READ_BUDGET_S: Final = 0.001
"""How long one look takes at most, and the session beyond that which it has begun."""
_PLACES: Final = {(True, False): "d", (True, True): "b", (False, True): "h", (False, False): "x"}
_NO_PLAN: Final = Plan(0)
_NOTHING: Final[Mapping[int, str]] = {}


class StripReader:
    """One per engine. ``plan``: the one made last, which an engine sets."""

    def __init__(self, scheduler: Scheduler, timer: Callable[[], float] = time.perf_counter) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._size = scheduler.cache.config.chunk_tokens
        self._timer = timer
        self._order: list[CachedSession] = []
        """The sessions there were when the look began."""
        self._began = 0.0
        """When that was. Idle times are up to then: a look in parts must not make the sessions told last look older."""
        self.plan = _NO_PLAN

    def read(self, call: int, at: int, now: float) -> Strips:
        """The strips from ``at`` on, as many as ``READ_BUDGET_S`` allows, one at least."""
        until = self._timer() + READ_BUDGET_S
        if at == 0:
            self._order = list(self._cache.sessions.values())
            self._began = now
        requests = {request.session: request for request in self._scheduler.running}
        spans: dict[RequestKey, list[Range]] = {}
        for span in self.plan.spans:
            spans.setdefault(span.request, []).append((span.start, span.end))
        coming = {copy.dst for copy in self.plan.swap_in}
        going = {copy.dst for copy in self.plan.swap_out}
        strips: list[SessionStrip] = []
        while at < len(self._order):
            session = self._order[at]
            at += 1
            if self._cache.sessions.get(session.key) is session:
                request = requests.get(session.key)
                computed = (
                    _NOTHING if request is None else self._computed(request, spans.get(request.key, ()))
                )
                strip = self._strip(session, coming, going, computed)
                strips.append(_told(session, request, strip, self._began))
                if self._timer() >= until:
                    break
        if at >= len(self._order):
            self._order = []
        return Strips(call, at if self._order else 0, tuple(strips))

    def _computed(self, request: Request, spans: Sequence[Range]) -> dict[int, str]:
        """Which chunks of a running request's context are being computed, or wait for it: their letters."""
        computed: dict[int, str] = {}
        history, prompt = request.history, request.prompt_tokens
        for start, end in chain(request.missing, spans):
            for letter, low, high in (
                ("n", max(start, history), min(end, prompt)),
                ("r", start, min(end, history)),
            ):
                if low < high:
                    computed.update(dict.fromkeys(range(low // self._size, -(-high // self._size)), letter))
        return computed

    def _strip(
        self, session: CachedSession, coming: set[int], going: set[int], computed: Mapping[int, str]
    ) -> str:
        if computed:
            shared, own = session.chunks[: session.shared], session.own_chunks
            return (
                f"{_runs(shared, coming, going, computed)[0].upper()}{_runs(own, coming, going, computed)[0]}"
            )
        parts: list[str] = []
        holders: list[CachedSession | SharedRun] = [*session.shared_runs(), session]
        for holder in holders:
            strip = holder.strip
            if strip is None:
                strip, settled = _runs(holder.own_chunks, coming, going, _NOTHING)
                strip = strip if holder is session else strip.upper()
                holder.strip = strip if settled else None
            parts.append(strip)
        return "".join(parts)


def _runs(
    chunks: Sequence[Chunk], coming: set[int], going: set[int], computed: Mapping[int, str]
) -> tuple[str, bool]:
    """The strip of these chunks, and whether it is true until one of them is touched."""
    parts: list[str] = []
    last, count, settled = "", 0, not computed
    for chunk in chunks:
        device, host = chunk.device, chunk.host
        letter = _PLACES[device != NOWHERE, host != NOWHERE]
        if chunk.pins or device in coming or host in going:
            settled = False
            if device in coming:
                letter = "i"
            elif computed and chunk.index in computed:
                letter = computed[chunk.index]
            elif host in going:
                letter = "o"
        if letter == last:
            count += 1
        else:
            if count:
                parts.append(f"{last}{count}")
            last, count = letter, 1
    if count:
        parts.append(f"{last}{count}")
    return "".join(parts), settled


def _told(session: CachedSession, request: Request | None, strip: str, now: float) -> SessionStrip:
    return SessionStrip(
        session=session.key,
        tokens=len(session.tokens) if request is None else request.length,
        strip=strip,
        idle_s=0.0 if session.running else max(now - session.last_active, 0.0),
        running=session.running,
        warming=session.running and session.warming,
        is_candidate=session.is_candidate,
    )
