"""Finds, on the CPU, the spans of a step whose contexts begin with the same pages, where reading those once pays.

Spans that read a beginning together are a *party*. Each span is in one party at most; what it sees behind the beginning
it reads for itself. Nothing but the page tables is looked at, so it does not matter how sharing came about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention.kinds import (
    LEAST_SPANS,
    NARROW_STEP,
    UNSHARED_STEP,
    WIDE_STEP,
    Geometry,
    is_wide,
)
from pensieve.kernels.spans import POSITION, Q_LEN, TABLE, Ints, Spans

LEAST_SAVED_US = 20.0
"""Microseconds per layer that parties must save. Measured on an H200 at 64 to 256 sessions, a step with parties takes
10 to 30 µs more than the memory's rate says: pieces are written, and merged by a launch of its own."""
AGAIN = 0.56
"""Reading keys again that others have just read takes this share of the time: some of them are in the L2 cache.
Measured: 256 sessions on 8192 tokens took 1464 µs where pages of their own would have taken 2596 µs at best."""
MOST_LEVELS = 8
"""Parties are looked for in so many levels of beginnings within beginnings."""
COLUMNS = 64
"""Page-table entries that are compared at a time."""


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """What was found in a step of S spans."""

    order: Ints
    """[S]: a permutation of the spans that puts the members of a party next to each other."""
    table: Ints
    """[n, 3]: one row for each party, in the order of its first span, with spans counted in that order."""


@dataclass(frozen=True, slots=True)
class PrefixGroupRule:
    """When spans make a party."""

    geometry: Geometry
    page_tokens: int
    least_spans: int = LEAST_SPANS
    least_saved_us: float = LEAST_SAVED_US

    def find(self, spans: Spans, pages: npt.NDArray[np.int32]) -> PrefixGroups | None:
        """The parties of a step with these spans, whose page tables begin at ``pages[spans[:, TABLE]]``;
        None without any, which takes a few microseconds to see where no two tables begin with the same page."""
        if len(spans) < self.least_spans or not len(pages):
            return None
        first = pages[spans[:, TABLE]]
        ordered = np.sort(first)
        apart = self.least_spans - 1
        repeated = ordered[apart:][ordered[apart:] == ordered[:-apart]] if apart else ordered
        if not len(repeated):
            return None
        tiles = self.geometry.tiles
        narrow = ~is_wide(spans, self.geometry, tiles.narrow_concurrent) & (spans[:, Q_LEN] > 0)
        search = _Search(self, spans, pages, math.lcm(tiles.narrow_concurrent.keys, tiles.wide.keys))
        saved, found = 0.0, list[_Found]()
        for page in np.unique(repeated):
            gain, parties = search.best(np.flatnonzero((first == page) & narrow), 0, MOST_LEVELS)
            saved, found = saved + gain, found + parties
        if not found or saved < self.least_saved_us:
            return None
        return _arranged(found, len(spans))

    def saved_us(self, rows: int, spans: int, tokens: int) -> float:
        """Microseconds per layer that a party of so many query rows saves by reading ``tokens`` once."""
        apart = AGAIN * NARROW_STEP * spans * tokens / 64
        blocks = -(-rows // self.geometry.tiles.wide.rows)
        together = (WIDE_STEP + UNSHARED_STEP) * blocks * tokens / 128
        return (apart - together) * self.geometry.kv_heads / self.geometry.multiprocessors


_Found = tuple[Ints, int]
"""Members of a party, and tokens that it reads together."""


@dataclass(frozen=True, slots=True)
class _Search:
    """The walk through a step's page tables, a tree of beginnings."""

    rule: PrefixGroupRule
    spans: Spans
    pages: npt.NDArray[np.int32]
    unit: int
    """Key tiles of both launches begin at multiples of so many tokens: what is read together ends there."""

    def best(self, members: Ints, depth: int, levels: int) -> tuple[float, list[_Found]]:
        """What spans that agree in their first ``depth`` pages save at most, and by which parties: by one of all, or by
        those of beginnings that are longer."""
        if len(members) < self.rule.least_spans or not levels:
            return 0.0, []
        # Keys that the first query of a span sees, as whole and partial pages.
        seen = self.spans[members, POSITION] + 1
        visible = -(-seen // self.rule.page_tokens)
        starts = self.spans[members, TABLE]
        depth = self._agree(starts, depth, int(visible.min()))
        tokens = min(depth * self.rule.page_tokens, int(seen.min())) // self.unit * self.unit
        rows = int(self.spans[members, Q_LEN].sum()) * self.rule.geometry.groups
        saved = self.rule.saved_us(rows, len(members), tokens)
        longer = members[visible > depth]
        gain, parties = 0.0, list[_Found]()
        if len(longer) >= self.rule.least_spans:
            following = self.pages[self.spans[longer, TABLE] + depth]
            values, counts = np.unique(following, return_counts=True)
            for page in values[counts >= self.rule.least_spans]:
                more, found = self.best(longer[following == page], depth, levels - 1)
                gain, parties = gain + more, parties + found
        if saved > max(gain, 0.0):
            return saved, [(members, tokens)]
        return gain, parties

    def _agree(self, starts: Ints, depth: int, end: int) -> int:
        """How many of their first ``end`` pages tables have in common, of which they have ``depth`` for sure."""
        while depth < end:
            block = self.pages[starts[:, None] + np.arange(depth, min(end, depth + COLUMNS))]
            same = (block == block[0]).all(axis=0)
            if not same.all():
                return depth + int(same.argmin())
            depth += block.shape[1]
        return depth


def _arranged(found: list[_Found], spans: int) -> PrefixGroups:
    """Parties first, longest beginnings foremost, then the other spans in their order."""
    found = sorted(found, key=lambda party: -party[1])
    sizes = np.array([len(members) for members, _ in found])
    joined = np.concatenate([members for members, _ in found])
    others = np.ones(spans, np.bool_)
    others[joined] = False
    table = np.stack([np.cumsum(sizes) - sizes, sizes, [tokens for _, tokens in found]], axis=1)
    return PrefixGroups(np.concatenate([joined, np.flatnonzero(others)]), table.astype(np.int64))
