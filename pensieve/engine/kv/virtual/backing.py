"""Lets a region follow the plans of a worker: memory comes before a plan is queued, and goes after it has been used.

A worker calls, for each plan that says how much memory is to be backed::

    ends = backing.grow(low, high)
    ... queue the plan's copies and its step ...
    backing.shrink(marks)

``marks`` are reached when the plan and all earlier ones have done what they do to the memory beyond ``ends``. A worker
whose plans are done when it calls ``shrink`` has none, and the memory is given back at once. On a GPU a thread waits
for the marks and does the rest, since unmapping takes the host 20 to 50 µs a handle, and the GPU nothing. The same
thread maps ahead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pensieve.engine.kv.virtual.region import Region

log = logging.getLogger(__name__)

POLL_S: Final = 0.001
"""Time between two looks at the marks of a plan that gives memory back."""
QUIET_S: Final = 1.0
"""Memory that was mapped ahead or kept for reuse is given back after this time without a change."""

Ends = tuple[int, int]
"""Bytes from the bottom and from the top of the region."""


class UseMark(Protocol):
    """A point in a stream's work; a ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether the work before this point is done. Does not wait."""
        ...


@dataclass(slots=True)
class _Wanted:
    """The ends that one plan asked for."""

    ends: Ends
    marks: Sequence[UseMark] | None = None
    """None: the plan is not queued yet."""

    def is_done(self) -> bool:
        return self.marks is not None and all(mark.query() for mark in self.marks)


class Backing:
    """A region that follows plans. One thread calls ``grow`` and ``shrink``, in turn and in the order of the plans."""

    def __init__(self, region: Region, *, threaded: bool) -> None:
        """``threaded``: memory is given back, and mapped ahead, by a thread."""
        self.region = region
        self._wanted: deque[_Wanted] = deque()
        """Plans that are under way: the oldest first."""
        self._ends: Ends = 0, 0
        """The ends that the latest finished plan asked for."""
        self._changed = threading.Condition()
        self._news = self._closed = False
        self._last_change = 0.0
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._work, name="device memory", daemon=True)
            self._thread.start()

    def grow(self, low: int, high: int) -> Ends:
        """Back these bytes of each end; return them. When memory does not suffice, return as much of each as was backed
        before: then nothing has grown. Raises RuntimeError when memory could not be given back."""
        with self._changed:
            if self._failure is not None:
                raise RuntimeError("device memory could not be given back") from self._failure
            try:
                self.region.grow(low, high)
            except MemoryError as error:
                low = min(low, max(self.region.low, self.region.permanent))
                high = min(high, self.region.high)
                log.info("the device tier keeps its size: %s", error)
            self._wanted.append(_Wanted((low, high)))
            return low, high

    def shrink(self, marks: Sequence[UseMark] = ()) -> None:
        """Give back what lies beyond the ends of the latest ``grow``, once all marks are reached."""
        with self._changed:
            self._wanted[-1].marks = marks
            self._last_change = time.monotonic()
            self._news = True
            self._changed.notify()
            if self._thread is None:
                self.region.sweep(keep=not self._settle())

    def close(self) -> None:
        """Stop the thread and free the region. No work may use it any more."""
        with self._changed:
            self._closed = self._news = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self.region.free()

    def _settle(self) -> bool:
        """Lower the region to the longest ends that are still of use; return whether plans that have finished made
        the tier smaller. The condition is held."""
        before = sum(self._ends)
        while self._wanted and self._wanted[0].is_done():
            self._ends = self._wanted.popleft().ends
        ends = [self._ends, *(wanted.ends for wanted in self._wanted)]
        self.region.lower(max(low for low, _ in ends), max(high for _, high in ends))
        return sum(self._ends) < before

    def _work(self) -> None:
        try:
            while self._wait():
                with self._changed:
                    is_smaller = self._settle()
                self.region.sweep(keep=not is_smaller)  # kept handles are for the other end
                self.region.map_ahead()
                if not self._wanted and time.monotonic() - self._last_change >= QUIET_S:
                    self.region.trim()
        except Exception as error:
            with self._changed:
                self._failure = error

    def _wait(self) -> bool:
        """Wait until there may be something to do; return False when the region is closed."""
        with self._changed:
            if not self._news:
                quiet = time.monotonic() - self._last_change >= QUIET_S
                self._changed.wait(POLL_S if self._wanted else None if quiet else QUIET_S)
            self._news = False
            return not self._closed
