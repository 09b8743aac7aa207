"""The calls in progress: a limit per caller, ending a call from outside, metrics, and pacing of request bodies.

*Calls.* A caller may begin another call while it has fewer than ``SHARE_FACTOR`` times as many as there are free
places. A single caller gets four fifths of all places, two callers four ninths each, and a new caller always finds
one. These are the dynamic thresholds of Choudhury and Hahne (1998) for a shared buffer.

*Bodies* (``BodyGate``). gRPC reads a body into memory only when a handler waits for it, so limiting the bodies being
read bounds that memory. A caller that sends headers and no body must not block others. When all places are taken and
another call waits, the most overdue body loses its place, and its call ends. A body is overdue after ``OVERDUE_S``
within its caller's share of the places, and after ``OVERDUE_BEYOND_SHARE_S`` beyond it. All callers that hold or want
a place have equal shares. A body loses its place only to callers that hold fewer, or to another call of its own
caller. A free place goes to the caller that holds fewest. A caller's connections divide its share in the same way,
because many programs may use one address or one key.

*Rate* (``BodyRateLimiter``). Each caller's bytes are rate limited: processing large bodies would block the event
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import grpc

from pensieve.errors import DeadlineExceeded, PensieveError, ResourceExhausted
from pensieve.server.operations.metrics import CallMetrics
from pensieve.server.rpc.auth import Identity

SHARE_FACTOR: Final = 4
CLOCK_SLACK_S: Final = 0.1
_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}
MAX_BODIES: Final = 16
"""Bodies being read at once, of at most 4 MiB each."""
OVERDUE_S: Final = 2.0
OVERDUE_BEYOND_SHARE_S: Final = 0.05
BODY_TIMEOUT_S: Final = 30.0
RATE: Final = 16 * 2**20
"""Sustained bytes per second of one caller."""
BURST: Final = 8 * 2**20
"""Bytes that a caller may send at once after a pause."""
MAX_TRACKED_CALLERS: Final = 1024
"""Callers to keep rate limits for, before idle ones are forgotten."""

Handler = Callable[[Any, Any], Awaitable[Any]]


class RunningCall:
    """One call. Create it in the task that handles the call."""

    def __init__(self, identity: Identity, caller: str, connection: str = "") -> None:
        """``caller`` identifies whose limits on calls and bodies apply. ``connection``: "" where many callers share
        one."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.identity = identity
        self.caller = caller
        self.connection = connection
        self.error: PensieveError | None = None
        self._over = False

    def end(self, error: PensieveError) -> None:
        """Cancel the handler; the call fails with ``error``. Of several errors the first counts."""
        if self.error is None and not self._over:
            self.error = error
            self._task.cancel()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Make ``end`` work inside the block. Raises its error instead of the cancellation that carried it."""
        try:
            yield
        except asyncio.CancelledError:
            if self.error is None:
                raise  # cancelled by the client or by the server's end
            self._task.uncancel()
            raise self.error from None
        finally:
            self._over = True
        if self.error is not None:
            # ``end`` was called in the step in which the handler returned: the cancellation is still pending.
            self._task.uncancel()
            raise self.error


class RunningCalls:
    """All calls of one server. Used on one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: set[RunningCall] = set()
        self._per_caller: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def admit(self, call: RunningCall) -> Iterator[None]:
        """Count the call inside the block. Raises ResourceExhausted when the server or the caller has too many."""
        free = self._limit - len(self._running)
        if free <= 0 or self._per_caller[call.caller] >= SHARE_FACTOR * free:
            raise ResourceExhausted("too many calls at once", retry_after_s=1.0)
        self._running.add(call)
        self._per_caller[call.caller] += 1
        try:
            yield
        finally:
            self._running.discard(call)
            self._per_caller[call.caller] -= 1
            if not self._per_caller[call.caller]:
                del self._per_caller[call.caller]

    def end_revoked(self, revocation_error: Callable[[Identity], PensieveError | None]) -> int:
        """End the calls whose credential is no longer valid. Return how many."""
        ended = 0
        for call in list(self._running):
            error = revocation_error(call.identity)
            if error is not None:
                call.end(error)
                ended += 1
        return ended


def count_calls(handler: Handler, method: str, metrics: CallMetrics) -> Handler:
    """Return ``handler`` with its calls counted in ``metrics``. ``method``: the full name."""
    name = method.rpartition("/")[2]

    async def counting(requests: Any, context: Any) -> Any:
        began = time.monotonic()
        metrics.call_started(name)
        cancelled = False
        try:
            return await handler(requests, context)
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            metrics.call_handled(name, _code(context, cancelled), time.monotonic() - began)

    return counting


def _code(context: Any, cancelled: bool) -> str:
    """Return the status code. A cancelled call has none: the caller cancelled, or its deadline passed."""
    if cancelled:
        remaining_s = context.time_remaining()
        # The caller's clock may be a little ahead: its deadline began before the call arrived.
        return "CANCELLED" if remaining_s is None or remaining_s > CLOCK_SLACK_S else "DEADLINE_EXCEEDED"
    code: grpc.StatusCode | int | None = context.code()
    name: str = code.name if isinstance(code, grpc.StatusCode) else _NAMES.get(code or 0, "UNKNOWN")
    return name


class BodyRateLimiter:
    """Rate limit on each caller's bytes: a bucket of ``burst`` bytes, refilled at ``rate`` bytes per second.

    A body's size is known only after it was read. So a caller first overdraws the bucket and then waits. A caller
    that had to wait is charged its last body's size in advance, so that its next calls wait too. Used on one event
    loop.
    """

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._paid_until: dict[str, float] = {}
        """Caller → loop time until which its bucket is overdrawn."""
        self._last: dict[str, int] = {}

    async def reserve(self, caller: str) -> int:
        """Wait until the caller may send. Return the bytes charged in advance, for ``settle``."""
        loop = asyncio.get_running_loop()
        expected = 0
        while (until := self._paid_until.get(caller, 0.0)) > loop.time():
            await asyncio.sleep(until - loop.time())
            expected = self._last.get(caller, 0)
        self._take(caller, expected, loop.time())
        return expected

    def settle(self, caller: str, size: int, expected: int) -> None:
        """Charge the actual ``size`` of a body (0: none came) against the ``expected`` bytes charged before."""
        if size:
            self._last[caller] = size
        self._take(caller, size - expected, asyncio.get_running_loop().time())

    def _take(self, caller: str, size: int, now: float) -> None:
        full = now - self._burst / self._rate
        if caller not in self._paid_until and len(self._paid_until) >= MAX_TRACKED_CALLERS:
            self._paid_until = {name: until for name, until in self._paid_until.items() if until > full}
            self._last = {name: self._last[name] for name in self._paid_until if name in self._last}
        self._paid_until[caller] = max(self._paid_until.get(caller, full), full) + size / self._rate


class _Place:
    """A body that is being read or waits to be."""

    def __init__(self, call: RunningCall) -> None:
        self.call = call
        self.granted = asyncio.get_running_loop().create_future()
        self.since = 0.0
        self.timer: asyncio.TimerHandle | None = None


class BodyGate:
    """Limits the bodies being read at once; the module docstring has the rules. Used on one event loop."""

    def __init__(
        self,
        places: int = MAX_BODIES,
        *,
        patience_s: float = OVERDUE_S,
        haste_s: float = OVERDUE_BEYOND_SHARE_S,
        limit_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._places = places
        self._free = places
        self._patience_s = patience_s
        self._haste_s = haste_s
        self._limit_s = limit_s
        self._held: dict[str, list[_Place]] = {}
        """Caller → its places, oldest first. A place that was lost stays until its call has ended."""
        self._waiting: dict[str, list[_Place]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def admit(self, call: RunningCall) -> AsyncIterator[None]:
        """Wait for a place and hold it inside the block. If the call loses its place, it is ended from outside."""
        place = _Place(call)
        if self._free and not self._waiting:
            self._grant(place)
        else:
            self._waiting.setdefault(call.caller, []).append(place)
            self._reclaim_overdue()
        try:
            await place.granted
            yield
        finally:
            if place.timer is None:
                _remove(self._waiting, place)
            else:
                place.timer.cancel()
                _remove(self._held, place)
                self._free += 1
                self._grant_next()

    def _grant(self, place: _Place) -> None:
        self._free -= 1
        loop = asyncio.get_running_loop()
        place.since = loop.time()
        place.timer = loop.call_at(place.since + self._limit_s, place.call.end, _body_timeout_error())
        self._held.setdefault(place.call.caller, []).append(place)
        if not place.granted.cancelled():  # else its task passes the place on once it runs
            place.granted.set_result(None)

    def _grant_next(self) -> None:
        """Give a free place to the waiting caller that holds fewest."""
        if self._waiting and self._free:
            caller = min(self._waiting, key=lambda name: len(self._held.get(name, ())))
            held = Counter(one.call.connection for one in self._held.get(caller, ()))
            place = min(self._waiting[caller], key=lambda one: held[one.call.connection])
            _remove(self._waiting, place)
            self._grant(place)
        self._reclaim_overdue()

    def _reclaim_overdue(self) -> None:
        """While calls wait, take places from overdue bodies, or set a timer for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        now = asyncio.get_running_loop().time()
        due = [(when, place) for place in self._reclaimable() if (when := self._overdue_at(place))]
        needed = sum(map(len, self._waiting.values())) - self._count_lost()
        for when, place in sorted(due, key=lambda pair: pair[0]):
            if needed <= 0:
                return
            if when > now:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_at(when, self._reclaim_overdue)
                return
            place.call.end(_displaced_error())
            needed -= 1

    def _reclaimable(self) -> list[_Place]:
        fewest = min(len(self._held.get(caller, ())) for caller in self._waiting)
        return [
            place
            for caller, places in self._held.items()
            if len(places) > fewest or caller in self._waiting
            for place in places
            if place.call.error is None
        ]

    def _count_lost(self) -> int:
        return sum(place.call.error is not None for places in self._held.values() for place in places)

    def _overdue_at(self, place: _Place) -> float:
        """Return when a body is overdue: sooner for the oldest of a caller or connection beyond its share."""
        caller = place.call.caller
        share = max(1, self._places // len(self._held.keys() | self._waiting.keys()))
        places = [one for one in self._held[caller] if one.call.error is None]
        beyond_share = place in places[: max(0, len(places) - share)]
        connections = {one.call.connection for one in (*places, *self._waiting.get(caller, ()))}
        share = max(1, share // max(1, len(connections)))
        of_connection = [one for one in places if one.call.connection == place.call.connection]
        beyond_share = beyond_share or (
            len(connections) > 1 and place in of_connection[: max(0, len(of_connection) - share)]
        )
        return place.since + (self._haste_s if beyond_share else self._patience_s)


def _remove(places: dict[str, list[_Place]], place: _Place) -> None:
    of_caller = places[place.call.caller]
    of_caller.remove(place)
    if not of_caller:
        del places[place.call.caller]


def _body_timeout_error() -> PensieveError:
    return DeadlineExceeded("the request's message took too long to arrive", reason="REQUEST_TOO_SLOW")


def _displaced_error() -> PensieveError:
    return ResourceExhausted("too many requests are being received, and this one was slow", retry_after_s=1.0)
