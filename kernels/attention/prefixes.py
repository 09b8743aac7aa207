"""Finds spans of a step whose contexts begin with the same pages, where reading those pages once pays. Runs
on the CPU.

Spans that read a common prefix together are a *prefix group*. Each span is in at most one group and reads its
suffix separately. Only page tables are compared, so it does not matter how the sharing came about.
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

MIN_SAVED_US = 20.0
"""Least microseconds per layer that groups must save. Measured on an H200 with 64 to 256 sessions, a step
with prefix groups takes 10 to 30 µs more than memory bandwidth explains: pieces are written, and a separate
launch merges them."""
REREAD_COST = 0.56
"""Relative time of reading keys that others have just read: some of them are in the L2 cache. Measured: 256
sessions on 8192 common tokens took 1464 µs; with pages of their own they would take at least 2596 µs."""
MAX_LEVELS = 8
"""Most levels of nested prefixes to search."""
COMPARED_PAGES = 64
"""Page-table entries that are compared at a time."""


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """The prefix groups of a step of S spans."""

    order: Ints
    """[S]: a permutation of the spans that makes the members of a group adjacent."""
    table: Ints
    """int64 [n, 3], by first span: first span (counted in that order), number of spans, common tokens."""


@dataclass(frozen=True, slots=True)
class PrefixGroupRule:
    """Decides which spans form a prefix group."""

    geometry: Geometry
    page_tokens: int
    least_spans: int = LEAST_SPANS
    least_saved_us: float = MIN_SAVED_US

    def find(self, spans: Spans, pages: npt.NDArray[np.int32]) -> PrefixGroups | None:
        """Return the prefix groups of a step with these spans, or None. A span's page table begins at
        ``pages[spans[:, TABLE]]``. Takes a few microseconds when no two tables begin with the same page."""
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
        search = _Search(
            self,
            spans,
            pages,
            2 * self.geometry.piece or math.lcm(tiles.narrow_concurrent.keys, tiles.wide.keys),
        )
        saved, found = 0.0, list[_Found]()
        for page in np.unique(repeated):
            gain, groups = search.best_groups(np.flatnonzero((first == page) & narrow), 0, MAX_LEVELS)
            saved, found = saved + gain, found + groups
        if not found or saved < self.least_saved_us:
            return None
        return _ordered(found, len(spans))

    def saved_us(self, rows: int, spans: int, tokens: int) -> float:
        """Microseconds per layer saved by reading ``tokens`` once for ``rows`` query rows of ``spans`` spans."""
        apart = REREAD_COST * NARROW_STEP * spans * tokens / 64
        blocks = -(-rows // self.geometry.tiles.wide.rows)
        together = (WIDE_STEP + UNSHARED_STEP) * blocks * tokens / 128
        return (apart - together) * self.geometry.kv_heads / self.geometry.multiprocessors


_Found = tuple[Ints, int]
"""Members of a group, and the tokens that it reads once."""


@dataclass(frozen=True, slots=True)
class _Search:
    """Search through a step's page tables as a tree of prefixes."""

    rule: PrefixGroupRule
    spans: Spans
    pages: npt.NDArray[np.int32]
    unit: int
    """Key tiles of both launches, and fixed pieces, begin at multiples of this many tokens; a common prefix ends at
    such a multiple."""

    def best_groups(self, members: Ints, depth: int, levels: int) -> tuple[float, list[_Found]]:
        """Return the most microseconds that ``members`` can save, and the groups that do so. The members agree in
        their first ``depth`` pages. The result is one group of all of them, or groups with longer prefixes."""
        if len(members) < self.rule.least_spans or not levels:
            return 0.0, []
        # Keys that the first query of a span sees, as tokens and as pages.
        seen = self.spans[members, POSITION] + 1
        visible = -(-seen // self.rule.page_tokens)
        starts = self.spans[members, TABLE]
        depth = self._common_pages(starts, depth, int(visible.min()))
        tokens = min(depth * self.rule.page_tokens, int(seen.min())) // self.unit * self.unit
        rows = int(self.spans[members, Q_LEN].sum()) * self.rule.geometry.groups
        saved = self.rule.saved_us(rows, len(members), tokens)
        longer = members[visible > depth]
        gain, groups = 0.0, list[_Found]()
        if len(longer) >= self.rule.least_spans:
            following = self.pages[self.spans[longer, TABLE] + depth]
            values, counts = np.unique(following, return_counts=True)
            for page in values[counts >= self.rule.least_spans]:
                more, found = self.best_groups(longer[following == page], depth, levels - 1)
                gain, groups = gain + more, groups + found
        if saved > max(gain, 0.0):
            return saved, [(members, tokens)]
        return gain, groups

    def _common_pages(self, starts: Ints, depth: int, end: int) -> int:
        """Return how many of their first ``end`` pages the tables share; the first ``depth`` are known to be equal."""
        while depth < end:
            block = self.pages[starts[:, None] + np.arange(depth, min(end, depth + COMPARED_PAGES))]
            same = (block == block[0]).all(axis=0)
            if not same.all():
                return depth + int(same.argmin())
            depth += block.shape[1]
        return depth


def _ordered(found: list[_Found], spans: int) -> PrefixGroups:
    """Order groups first, longest prefix foremost, then the other spans in their order."""
    found = sorted(found, key=lambda group: -group[1])
    sizes = np.array([len(members) for members, _ in found])
    joined = np.concatenate([members for members, _ in found])
    others = np.ones(spans, np.bool_)
    others[joined] = False
    table = np.stack([np.cumsum(sizes) - sizes, sizes, [tokens for _, tokens in found]], axis=1)
    return PrefixGroups(np.concatenate([joined, np.flatnonzero(others)]), table.astype(np.int64))
