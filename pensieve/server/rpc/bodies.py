"""Bounds how many request bodies are received at once, and divides the places among the callers.

gRPC reads a body into memory only when somebody waits for it, so the places bound that memory. Headers without a body
must not cost others anything: when all places are taken and somebody wants in, the body that is overdue first loses
its place, and its call ends. It is overdue after ``PATIENCE_S`` within its caller's share of the places, which is the
same for all who hold or want one, and after ``HASTE_S`` beyond it. It loses its place to callers that hold fewer,
and to others of its own. A place that is left goes to whoever holds fewest. Connections of one caller divide its share
in the same way: behind one address, or one key, may be many programs.

And a caller's bodies are taken in at a pace (``BodyPace``): what is done with large ones keeps the event loop from
others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from pensieve.errors import DeadlineExceeded, PensieveError, ResourceExhausted
from pensieve.server.rpc.calls import RunningCall

PLACES: Final = 16
"""Of 4 MiB each, at most."""
PATIENCE_S: Final = 2.0
HASTE_S: Final = 0.05
LIMIT_S: Final = 30.0
"""No body may take longer, whether anybody wants its place or not."""
RATE: Final = 16 * 2**20
"""Bytes a second of one caller, in the long run."""
BURST: Final = 8 * 2**20
"""Bytes that a caller who has been quiet may send without waiting."""
KNOWN: Final = 1024
"""Callers of which is remembered what they sent, before those who have been quiet are forgotten."""


class BodyPace:
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

    async def wait(self, caller: str) -> int:
        """Until the caller may send; returns the bytes that were taken for it. ``came`` has to follow."""
        loop = asyncio.get_running_loop()
        expected = 0
        while (until := self._paid_until.get(caller, 0.0)) > loop.time():
            await asyncio.sleep(until - loop.time())
            expected = self._last.get(caller, 0)
        self._take(caller, expected, loop.time())
        return expected

    def came(self, caller: str, size: int, expected: int) -> None:
        """A body of ``size`` bytes came, for which ``expected`` were taken; 0: none came."""
        if size:
            self._last[caller] = size
        self._take(caller, size - expected, asyncio.get_running_loop().time())

    def _take(self, caller: str, size: int, now: float) -> None:
        full = now - self._burst / self._rate
        if caller not in self._paid_until and len(self._paid_until) >= KNOWN:
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
    async def place(self, call: RunningCall) -> AsyncIterator[None]:
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
