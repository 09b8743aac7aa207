"""How far a stream has come: marks in its work, by ticket. No torch."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol


class Lane(enum.Enum):
    """One of the three streams, each of which does its work in the order in which it was queued."""

    COMPUTE = "compute"
    IN = "h2d"
    """Host pages to device pages."""
    OUT = "d2h"
    """Device pages to host pages."""


class Mark(Protocol):
    """A point in a lane's work; a ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether the work before it is done. Does not wait."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to a later point of the same lane, both of them reached."""
        ...


@dataclass(frozen=True, slots=True)
class LaneWork:
    """A piece of a lane's work."""

    ticket: int
    """Everything of this lane up to this ticket is done when this piece is."""
    end: Mark
    begin: Mark | None = None
    num_bytes: int = 0
    keep: object = None
    """Something that must not be freed before."""


class Timeline:
    """The unfinished work of one lane, with totals of what has finished. Tickets only grow."""

    def __init__(self) -> None:
        self.last = 0
        """Ticket of the work queued last."""
        self.done = 0
        """Ticket up to which the work is known to be done."""
        self.queued_bytes = 0
        self.finished_bytes = 0
        self.finished_seconds = 0.0
        self._works: deque[LaneWork] = deque()

    @property
    def busy(self) -> bool:
        """Whether something was still under way when ``settle`` last looked."""
        return bool(self._works)

    def add(self, work: LaneWork) -> None:
        """The lane's newest piece of work."""
        assert work.ticket >= self.last
        self.last = work.ticket
        self.queued_bytes += work.num_bytes
        self._works.append(work)

    def settle(self) -> None:
        """Strike off what is done. Does not wait."""
        while self._works and self._works[0].end.query():
            work = self._works.popleft()
            self.done = work.ticket
            self.queued_bytes -= work.num_bytes
            if work.begin is not None:
                self.finished_bytes += work.num_bytes
                self.finished_seconds += work.begin.elapsed_time(work.end) / 1e3

    def first_at(self, ticket: int) -> LaneWork | None:
        """The first piece of work with which everything up to ``ticket`` is done; None when it is already."""
        assert ticket <= self.last, f"nobody has queued ticket {ticket} yet"
        self.settle()
        if ticket <= self.done:
            return None
        return next(work for work in self._works if work.ticket >= ticket)
