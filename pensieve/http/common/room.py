"""Divides the memory for large bodies that are on their way among the callers.

A caller may fill the room while no other wants it. When room is short, the body that is overdue first is given up: soon
where its caller holds more than its share, which is the same for all who hold or want some; else after ``PATIENCE_S``.
A body that has come whole is never given up: it waits for this server, not for its caller.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from pensieve.http.common.failures import HttpFailure

PATIENCE_S: Final = 2.0
HASTE_S: Final = 0.05


class HeldRoom:
    """The room of one body. It holds nothing at first."""

    def __init__(self, holder: str, give_up: Callable[[], None]) -> None:
        """``holder`` names the caller. ``give_up`` ends the reading, which then raises."""
        self.holder = holder
        self.held = 0
        self.since = 0.0
        """When it began to hold something."""
        self.coming = True
        """The body has not come whole."""
        self.given_up = False
        self.give_up = give_up


class BodyRoom:
    """``size`` bytes that callers share. Used on one event loop."""

    def __init__(self, size: int) -> None:
        self.size = self.left = size
        self._places: list[HeldRoom] = []
        """Requests that hold bytes, oldest first."""
        self._of_holder: Counter[str] = Counter()
        self._change = asyncio.Event()

    @contextmanager
    def place(self, holder: str, give_up: Callable[[], None]) -> Iterator[HeldRoom]:
        """A place for one body; what it holds is free again at the end of the block."""
        place = HeldRoom(holder, give_up)
        try:
            yield place
        finally:
            self._leave(place)

    async def take(self, place: HeldRoom, size: int) -> None:
        """Give the place ``size`` more bytes. Raises HttpFailure (429) when there are none."""
        while size > self.left:
            loop = asyncio.get_running_loop()
            due = min(((self._due(one, place), one) for one in self._rivals(place)), key=_when, default=None)
            if due is None:
                raise _full()
            when, rival = due
            if when <= loop.time():
                rival.given_up = True
                self._leave(rival)
                rival.give_up()
                continue
            if rival.holder == place.holder and not is_address(place.holder):
                raise _full()  # its own bodies are in the way: it may wait for them as it likes
            self._change.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(when):
                    await self._change.wait()
        if not place.held:
            place.since = asyncio.get_running_loop().time()
            self._places.append(place)
        self.left -= size
        place.held += size
        self._of_holder[place.holder] += size

    def _rivals(self, place: HeldRoom) -> Iterator[HeldRoom]:
        """Bodies that may have to make way: of the same caller, and of those that hold more."""
        own = self._of_holder[place.holder]
        for one in self._places:
            more = self._of_holder[one.holder] > own
            if one is not place and one.coming and (more or one.holder == place.holder):
                yield one

    def _due(self, one: HeldRoom, wanting: HeldRoom) -> float:
        share = self.size // len(self._of_holder.keys() | {wanting.holder})
        beyond = one.holder != wanting.holder and self._of_holder[one.holder] > share
        return one.since + (HASTE_S if beyond else PATIENCE_S)

    def _leave(self, place: HeldRoom) -> None:
        if not place.held:
            return
        self._places.remove(place)
        self.left += place.held
        self._of_holder[place.holder] -= place.held
        if not self._of_holder[place.holder]:
            del self._of_holder[place.holder]
        place.held = 0
        self._change.set()


def is_address(holder: str) -> bool:
    """Whether the holder is an address: many callers may stand behind one, so each of its bodies counts for itself."""
    return holder.startswith("@")


def _when(due: tuple[float, HeldRoom]) -> float:
    return due[0]


def given_up() -> HttpFailure:
    """What the caller of a body that made way is told."""
    return _overloaded("the body came slowly, and others wanted its room")


def _full() -> HttpFailure:
    return _overloaded("too many large bodies are on their way")


def _overloaded(message: str) -> HttpFailure:
    return HttpFailure(429, message, kind="rate_limit_error", code="server_overloaded", retry_after_s=1.0)
