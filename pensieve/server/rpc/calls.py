"""The calls that are being handled: how many each caller may have, how one is ended from outside, and who counts them.

A caller may begin one more call while it has fewer than ``SHARE`` times as many as there are places left. So one caller
alone gets four fifths of the places, two get four ninths each, and whoever comes new finds one: the dynamic thresholds
of Choudhury and Hahne (1998) for a shared buffer.

The bodies of calls (``BodyGate``): gRPC reads a body into memory only when a handler waits for it, so the number of
places bounds that memory. Headers without a body must not cost others anything. When all places are taken and another
body wants in, the body that is overdue first loses its place, and its call ends. It is overdue after ``PATIENCE_S``
within its caller's share of the places, and after ``HASTE_S`` beyond it. All callers that hold or want a place have the
same share. A body loses its place to callers that hold fewer, and to others of its own caller. A free place goes to the
caller that holds fewest. Connections of one caller divide its share in the same way: many programs may be behind one
address, or one key.

A caller's bodies are taken in at a pace (``BodyRateLimiter``): the work on large ones keeps the event loop from others.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Protocol

import grpc

from pensieve.errors import DeadlineExceeded, PensieveError, ResourceExhausted
from pensieve.server.rpc.auth import Identity

SHARE: Final = 4
CLOCK_SLACK_S: Final = 0.1
_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}
PLACES: Final = 16
"""Bodies at once, of 4 MiB each at most."""
PATIENCE_S: Final = 2.0
HASTE_S: Final = 0.05
LIMIT_S: Final = 30.0
"""No body may take longer, whether anybody wants its place or not."""
RATE: Final = 16 * 2**20
"""Bytes a second of one caller, in the long run."""
BURST: Final = 8 * 2**20
"""Bytes that a caller who has been quiet may send without waiting."""
MAX_TRACKED_CALLERS: Final = 1024
"""Callers of which is remembered what they sent, before those who have been quiet are forgotten."""

Handler = Callable[[Any, Any], Awaitable[Any]]


class RunningCall:
    """One call, as the task that handles it. Made in that task."""

    def __init__(self, identity: Identity, caller: str, connection: str = "") -> None:
        """``caller`` names who shares the limits on calls and bodies with this one. ``connection`` is where it comes
        in, "" where many callers share one."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.identity = identity
        self.caller = caller
        self.connection = connection
        self.error: PensieveError | None = None
        """The call was ended with it."""
        self._over = False

    def end(self, error: PensieveError) -> None:
        """Interrupt the handler; the call ends with ``error``. The first of several errors counts."""
        if self.error is None and not self._over:
            self.error = error
            self._task.cancel()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Where ``end`` works. Raises its error in place of the cancellation that carried it."""
        try:
            yield
        except asyncio.CancelledError:
            if self.error is None:
                raise  # the client's doing, or the server's end
            self._task.uncancel()
            raise self.error from None
        finally:
            self._over = True
        if self.error is not None:
            # Ended in the very step in which the handler returned: the cancellation is still to come.
            self._task.uncancel()
            raise self.error


class RunningCalls:
    """All calls of one server. Used on one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: set[RunningCall] = set()
        self._of_caller: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def admit(self, call: RunningCall) -> Iterator[None]:
        """Count the call. Raises ResourceExhausted when there are too many, or its caller has too many of them."""
        left = self._most - len(self._running)
        if left <= 0 or self._of_caller[call.caller] >= SHARE * left:
            raise ResourceExhausted("too many calls at once", retry_after_s=1.0)
        self._running.add(call)
        self._of_caller[call.caller] += 1
        try:
            yield
        finally:
            self._running.discard(call)
            self._of_caller[call.caller] -= 1
            if not self._of_caller[call.caller]:
                del self._of_caller[call.caller]

    def recheck(self, problem: Callable[[Identity], PensieveError | None]) -> int:
        """End the calls whose credential has become a problem; returns how many."""
        ended = 0
        for call in list(self._running):
            error = problem(call.identity)
            if error is not None:
                call.end(error)
                ended += 1
        return ended


class CallObserver(Protocol):
    """Counts calls. ``method`` is the bare name, ``code`` as gRPC writes it."""

    def call_started(self, method: str) -> None: ...

    def call_handled(self, method: str, code: str, seconds: float) -> None: ...


def observe_calls(handler: Handler, method: str, observer: CallObserver) -> Handler:
    """``handler``, whose calls ``observer`` hears of. ``method``: as the wire names it."""
    name = method.rpartition("/")[2]

    async def counting(requests: Any, context: Any) -> Any:
        began = time.monotonic()
        observer.call_started(name)
        cancelled = False
        try:
            return await handler(requests, context)
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            observer.call_handled(name, _code(context, cancelled), time.monotonic() - began)

    return counting


def _code(context: Any, cancelled: bool) -> str:
    """How the call ended. One that was cancelled has no status: its caller gave up, or its time was over."""
    if cancelled:
        left = context.time_remaining()
        # The caller's clock may be a little ahead: its time began before the call came here.
        return "CANCELLED" if left is None or left > CLOCK_SLACK_S else "DEADLINE_EXCEEDED"
    code: grpc.StatusCode | int | None = context.code()
    name: str = code.name if isinstance(code, grpc.StatusCode) else _NAMES.get(code or 0, "UNKNOWN")
    return name


class BodyRateLimiter:
    """Bytes that each caller may send: a bucket of ``burst`` bytes that fills with ``rate`` bytes a second.

    How large a body is shows when it has been read. So a caller goes into debt first, and then waits; as many bytes as
    its last body had are taken for one that has waited, so that those behind it wait on. Used on one event loop.
    """

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._paid_until: dict[str, float] = {}
        """By caller, on the loop's clock: until then what it has sent is more than the bucket gives."""
        self._last: dict[str, int] = {}
        """Size of each caller's last body."""

    async def reserve(self, caller: str) -> int:
        """Until the caller may send; returns the bytes that were taken for it. ``came`` has to follow."""
        loop = asyncio.get_running_loop()
        expected = 0
        while (until := self._paid_until.get(caller, 0.0)) > loop.time():
            await asyncio.sleep(until - loop.time())
            expected = self._last.get(caller, 0)
        self._take(caller, expected, loop.time())
        return expected

    def settle(self, caller: str, size: int, expected: int) -> None:
        """A body of ``size`` bytes came, for which ``expected`` were taken; 0: none came."""
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
    """A body that is being received, or waits to be."""

    def __init__(self, call: RunningCall) -> None:
        self.call = call
        self.granted = asyncio.get_running_loop().create_future()
        self.since = 0.0
        """When it was granted."""
        self.timer: asyncio.TimerHandle | None = None


class BodyGate:
    """See the module docstring. Used on one event loop."""

    def __init__(
        self,
        places: int = PLACES,
        *,
        patience_s: float = PATIENCE_S,
        haste_s: float = HASTE_S,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._places = places
        self._free = places
        self._patience_s = patience_s
        self._haste_s = haste_s
        self._limit_s = limit_s
        self._held: dict[str, list[_Place]] = {}
        """By caller, oldest first. A place that was lost stays until its call has let go of it."""
        self._waiting: dict[str, list[_Place]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def admit(self, call: RunningCall) -> AsyncIterator[None]:
        """Wait for a place, and hold it. The call is ended from outside when it loses the place."""
        place = _Place(call)
        if self._free and not self._waiting:
            self._grant(place)
        else:
            self._waiting.setdefault(call.caller, []).append(place)
            self._take_from_the_overdue()
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
                self._pass_on()

    def _grant(self, place: _Place) -> None:
        self._free -= 1
        loop = asyncio.get_running_loop()
        place.since = loop.time()
        place.timer = loop.call_at(place.since + self._limit_s, place.call.end, _too_slow())
        self._held.setdefault(place.call.caller, []).append(place)
        if not place.granted.cancelled():  # else its task has yet to hear of it, and then passes the place on
            place.granted.set_result(None)

    def _pass_on(self) -> None:
        """A place is free: it goes to the caller that holds fewest, or to nobody."""
        if self._waiting and self._free:
            caller = min(self._waiting, key=lambda name: len(self._held.get(name, ())))
            held = Counter(one.call.connection for one in self._held.get(caller, ()))
            place = min(self._waiting[caller], key=lambda one: held[one.call.connection])
            _remove(self._waiting, place)
            self._grant(place)
        self._take_from_the_overdue()

    def _take_from_the_overdue(self) -> None:
        """While somebody waits: take a place from whoever is overdue, or come back when somebody is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        now = asyncio.get_running_loop().time()
        due = [(when, place) for place in self._present() if (when := self._due(place))]
        wanted = sum(map(len, self._waiting.values())) - self._leaving()
        for when, place in sorted(due, key=lambda pair: pair[0]):
            if wanted <= 0:
                return
            if when > now:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_at(when, self._take_from_the_overdue)
                return
            place.call.end(_in_the_way())
            wanted -= 1

    def _present(self) -> list[_Place]:
        """The places that somebody who waits may be given."""
        fewest = min(len(self._held.get(caller, ())) for caller in self._waiting)
        return [
            place
            for caller, places in self._held.items()
            if len(places) > fewest or caller in self._waiting
            for place in places
            if place.call.error is None
        ]

    def _leaving(self) -> int:
        """Places that were lost and not yet left."""
        return sum(place.call.error is not None for places in self._held.values() for place in places)

    def _due(self, place: _Place) -> float:
        """When a body is overdue: soon for the oldest of a caller or connection that holds more than its share."""
        caller = place.call.caller
        share = max(1, self._places // len(self._held.keys() | self._waiting.keys()))
        places = [one for one in self._held[caller] if one.call.error is None]
        beyond = place in places[: max(0, len(places) - share)]
        connections = {one.call.connection for one in (*places, *self._waiting.get(caller, ()))}
        share = max(1, share // max(1, len(connections)))
        of_connection = [one for one in places if one.call.connection == place.call.connection]
        beyond = beyond or (
            len(connections) > 1 and place in of_connection[: max(0, len(of_connection) - share)]
        )
        return place.since + (self._haste_s if beyond else self._patience_s)


def _remove(places: dict[str, list[_Place]], place: _Place) -> None:
    of_caller = places[place.call.caller]
    of_caller.remove(place)
    if not of_caller:
        del places[place.call.caller]


def _too_slow() -> PensieveError:
    return DeadlineExceeded("the request's message took too long to arrive", reason="REQUEST_TOO_SLOW")


def _in_the_way() -> PensieveError:
    return ResourceExhausted("too many requests are being received, and this one was slow", retry_after_s=1.0)
