"""Steps that take evenly more time, one after the other: as contexts grow by a token a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

_ALIKE = 1.01
"""``parts`` tells steps apart when one takes so many times as long as another."""


@dataclass(slots=True)  # not frozen: one is made at each event
class Series:
    """Steps of ``first``, ``first + rise``, ``first + 2 * rise``, … seconds; ``rise`` is less than ``first``."""

    first: float
    rise: float = 0.0

    def last(self, count: int) -> float:
        """Seconds that the last of so many steps takes."""
        return self.first + (count - 1) * self.rise

    def total(self, count: int) -> float:
        """Seconds that so many steps take together."""
        return count * (self.first + self.rise * (count - 1) / 2)

    def until(self, total: float, most: int) -> int:
        """Steps until their sum reaches ``total``: at least one, at most ``most``."""
        if self.total(most) <= total:
            return most
        linear = self.first - self.rise / 2
        count = 2 * total / (linear + math.sqrt(linear * linear + 2 * self.rise * max(total, 0.0)))
        return min(max(math.ceil(count), 1), most)

    def is_even(self, count: int) -> bool:
        """Whether so many steps are nearly equal: one run, for ``parts``."""
        return self.last(count) <= _ALIKE * self.first

    def parts(self, count: int) -> Iterator[tuple[float, int, float]]:
        """Split so many steps into runs of nearly equal ones: (seconds each, how many, seconds until the last ends)."""
        last = self.last(count)
        if self.is_even(count):
            yield (self.first + last) / 2, count, self.total(count)
            return
        runs = min(count, math.ceil(math.log(last / self.first) / math.log(_ALIKE)))
        begin = 0
        for run in range(1, runs + 1):
            end = count * run // runs
            yield self.first + self.rise * (begin + end - 1) / 2, end - begin, self.total(end)
            begin = end
