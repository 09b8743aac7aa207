"""Progress of a stream: marks in its work, by ticket. No torch."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol


class Lane(enum.Enum):
    """One of the three streams. Each does its work in the order in which it was queued."""

    COMPUTE = "compute"
    IN = "h2d"
    """Host pages to device pages."""
    OUT = "d2h"
    """Device pages to host pages."""


class Mark(Protocol):
    """A point in a lane's work; a ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether the work before this point is done. Does not wait."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from here to a later point of the same lane; both must have been reached."""
        ...


@dataclass(frozen=True, slots=True)
class LaneWork:
    """A piece of work queued on a lane."""

    ticket: int
    """When this piece is done, all work of the lane up to this ticket is."""
    end: Mark
    begin: Mark | None = None
    num_bytes: int = 0
    keep: object = None
    """Object that must stay alive until the work is done."""


class Timeline:
    """The unfinished work of one lane, and totals of the finished work. Tickets only grow."""

    def __init__(self) -> None:
        self.last = 0
        """Ticket of the latest queued work."""
        self.done = 0
        """Ticket up to which all work is known to be done."""
        self.queued_bytes = 0
        self.finished_bytes = 0
        self.finished_seconds = 0.0
        self._works: deque[LaneWork] = deque()

    @property
    def busy(self) -> bool:
        """Whether work was unfinished when ``settle`` was last called."""
        return bool(self._works)

    def add(self, work: LaneWork) -> None:
        """Add the piece of work that was queued last."""
        assert work.ticket >= self.last
        self.last = work.ticket
        self.queued_bytes += work.num_bytes
        self._works.append(work)

    def settle(self) -> None:
        """Remove finished work. Does not wait."""
        while self._works and self._works[0].end.query():
            work = self._works.popleft()
            self.done = work.ticket
            self.queued_bytes -= work.num_bytes
            if work.begin is not None:
                self.finished_bytes += work.num_bytes
                self.finished_seconds += work.begin.elapsed_time(work.end) / 1e3

    def first_at(self, ticket: int) -> LaneWork | None:
        """Return the first piece of work that completes all up to ``ticket``; None when that is done."""
        assert ticket <= self.last, f"ticket {ticket} has not been queued yet"
        self.settle()
        if ticket <= self.done:
            return None
        return next(work for work in self._works if work.ticket >= ticket)
