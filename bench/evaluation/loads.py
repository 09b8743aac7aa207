"""What is offered to a server in an experiment, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from pensieve.replay.load.generators import CHATS
from pensieve.replay.load.run_in import ENDED_SHARE

HISTORY_S, ANSWER_S = 0.03, 3.0
"""Guesses, rather too long: to compute the history of a conversation; and for an answer."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Turns/s, the most telling first."""

    both: tuple[float, ...]
    """Rates for systems that keep history on the device and in host memory."""
    device: tuple[float, ...]
    """Rates for systems that keep it on the device only."""
    none: tuple[float, ...]
    """Rates for systems that keep it nowhere: two are enough, since how much has to be computed does not depend on the
    rate."""
    offload: tuple[float, ...] = ()
    """Rates for a peer with host memory, where it carries less than what ``both`` has."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is offered, and when it is measured."""

    dataset: str
    """A built-in workload of ``pensieve replay``."""
    think_s: float
    rates: tuple[float, ...]
    """Turns per second, the most telling first: where time is short the last ones are left out."""
    run_in_s: float
    """How long the load has been going on when the replay begins."""
    warm_up_s: float
    window_s: float
    replay: tuple[str, ...] = ()
    """More arguments of ``pensieve replay``."""
    most: float = 0.0
    """The highest rate of all that are compared with this one, if it is not among ``rates``: what is drawn depends on
    it, and all systems get the same conversations."""

    @property
    def measured_s(self) -> float:
        """Seconds from the start of the replay to the end of the window."""
        return self.warm_up_s + self.window_s

    @property
    def point_s(self) -> float:
        """Seconds that one rate is expected to take, without start and end."""
        alive = self.think_s + ANSWER_S
        ended = ENDED_SHARE * self.run_in_s / CHATS[self.dataset].published.turns
        return self.measured_s + HISTORY_S * max(self.rates) * (alive + ended)

    @property
    def conversations(self) -> int:
        """Enough to offer any of the rates until the window ends; a fifth more, since starts are random."""
        turns, rate = CHATS[self.dataset].published.turns, max(self.most, *self.rates)
        return 20 + round(1.2 * rate * (self.run_in_s + self.measured_s) / turns)
