"""Where the chunks of sessions are, for display: one strip per session.

A strip lists runs of chunks in one state, in the order of the context, as a letter and a count (``x7h40B3d12``).

===  ==========================================================================
d    on the device
b    on both tiers: the device page can be taken at once
h    on the host
x    dropped: recomputed if its session returns
i    being copied in from the host
o    being copied out to the host
r    being recomputed, or about to be: history that a running turn lacks
n    being computed, or about to be: input of a running turn
===  ==========================================================================

A model with two KV groups has a second strip for each session, of its windows or states: the numbers of slices on the
device, on both tiers, on the host, and left over (``l``: only an earlier turn would read them), as in ``d33h2l1``.

A capital letter: other sessions own the chunk, too. "Being copied" means by the step under way or, where
steps do not overlap, by the latest one.

Strips cost nothing while no client asks for them. A read costs time for the chunks that changed since the
last read, and for running sessions: a holder's strip is cached until its chunks change
(``EvictionIndex.touch``), but a running session's is made anew each time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import Final

from pensieve.core import RequestKey
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, Range, SharedRun
from pensieve.engine.messages import SessionStrip, Strips
from pensieve.engine.plan import Plan
from pensieve.engine.scheduling.request import Request
from pensieve.engine.scheduling.scheduler import Scheduler

READ_BUDGET_S: Final = 0.001
"""Time limit of one read, which is exceeded by at most one session."""
_LETTERS: Final = {(True, False): "d", (True, True): "b", (False, True): "h", (False, False): "x"}
_NO_PLAN: Final = Plan(0)
_NONE_COMPUTED: Final[Mapping[int, str]] = {}


class StripReader:
    """Reads the strips of one engine. ``plan``: the latest plan, set by the engine."""

    def __init__(self, scheduler: Scheduler, timer: Callable[[], float] = time.perf_counter) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._size = scheduler.cache.config.chunk_tokens
        self._timer = timer
        self._order: list[CachedSession] = []
        """The sessions at the start of the read."""
        self._began = 0.0
        """Start of the read, and end of all idle times: a read in parts must not make later sessions look older."""
        self.plan = _NO_PLAN

    def read(self, call: int, at: int, now: float) -> Strips:
        """Return the strips from ``at`` on, at least one, as many as ``READ_BUDGET_S`` allows."""
        until = self._timer() + READ_BUDGET_S
        if at == 0:
            self._order = list(self._cache.sessions.values())
            self._began = now
        requests = {request.session: request for request in self._scheduler.running}
        spans: dict[RequestKey, list[Range]] = {}
        for span in self.plan.spans:
            spans.setdefault(span.request, []).append((span.start, span.end))
        copied_in = {copy.dst for copy in self.plan.swap_in if copy.group == 0}
        copied_out = {copy.dst for copy in self.plan.swap_out if copy.group == 0}
        strips: list[SessionStrip] = []
        while at < len(self._order):
            session = self._order[at]
            at += 1
            if self._cache.sessions.get(session.key) is session:
                request = requests.get(session.key)
                computed = (
                    _NONE_COMPUTED if request is None else self._computed(request, spans.get(request.key, ()))
                )
                strip = self._strip(session, copied_in, copied_out, computed)
                strips.append(_session_strip(session, request, strip, self._began))
                if self._timer() >= until:
                    break
        if at >= len(self._order):
            self._order = []
        return Strips(call, at if self._order else 0, tuple(strips))

    def _computed(self, request: Request, spans: Sequence[Range]) -> dict[int, str]:
        """Return the letters of a running request's chunks that are being computed or wait for it."""
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
        self, session: CachedSession, copied_in: set[int], copied_out: set[int], computed: Mapping[int, str]
    ) -> str:
        if computed:
            shared, _ = _runs(session.chunks[: session.shared], copied_in, copied_out, computed)
            own, _ = _runs(session.own_chunks, copied_in, copied_out, computed)
            return shared.upper() + own
        parts: list[str] = []
        holders: list[CachedSession | SharedRun] = [*session.shared_runs(), session]
        for holder in holders:
            strip = holder.strip
            if strip is None:
                strip, settled = _runs(holder.own_chunks, copied_in, copied_out, _NONE_COMPUTED)
                strip = strip if holder is session else strip.upper()
                holder.strip = strip if settled else None
            parts.append(strip)
        return "".join(parts)


def _runs(
    chunks: Sequence[Chunk], copied_in: set[int], copied_out: set[int], computed: Mapping[int, str]
) -> tuple[str, bool]:
    """Return the strip of these chunks, and whether it stays valid until one of them is touched."""
    letters: list[str] = []
    settled = not computed
    for chunk in chunks:
        device, host = chunk.device, chunk.host
        letter = _LETTERS[device != NOWHERE, host != NOWHERE]
        if chunk.pins or device in copied_in or host in copied_out:
            settled = False
            if device in copied_in:
                letter = "i"
            elif computed and chunk.index in computed:
                letter = computed[chunk.index]
            elif host in copied_out:
                letter = "o"
        letters.append(letter)
    return "".join(f"{letter}{len(list(run))}" for letter, run in groupby(letters)), settled


def _tail(session: CachedSession) -> str:
    """Return the strip of a session's slices of the second group, by place."""
    places: Counter[str] = Counter()
    for chunk in session.chunks if session.two_groups else ():
        part = chunk.other
        if part is not None and part.cached:
            places["l" if part.leftover else _LETTERS[part.device != NOWHERE, part.host != NOWHERE]] += 1
    return "".join(f"{letter}{places[letter]}" for letter in "dbhl" if places[letter])


def _session_strip(session: CachedSession, request: Request | None, strip: str, now: float) -> SessionStrip:
    return SessionStrip(
        session=session.key,
        tokens=len(session.tokens) if request is None else request.length,
        strip=strip,
        idle_s=0.0 if session.running else max(now - session.last_active, 0.0),
        running=session.running,
        warming=session.running and session.warming,
        is_candidate=session.is_candidate,
        tail=_tail(session),
    )
