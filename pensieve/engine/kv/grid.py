"""Where pages lie in a tier that has units, and which KV group used each unit last. No torch.

``pensieve.engine.cache.pages`` numbers the pages: number n of a group begins n layer pages into the group's *grid*, and
the page's layer l lies ``l * U`` layer pages further, for units of U pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pensieve.core import Ints
from pensieve.engine.cache.pages import PageSize
from pensieve.model.groups import ALIGNMENT

Indices = npt.NDArray[np.integer[Any]]
"""Page numbers of one group, or indices of pages in a clock."""


NO_PAGES: Final = PageSize(0, 0, 0)
"""The page of a group that does not exist."""


@dataclass(frozen=True, slots=True)
class Grid:
    """One KV group's pages in a tier that two groups share. A group without layers has a grid without pages."""

    size: PageSize
    offset: int
    """Bytes of the tier before page number 0."""
    first: int
    """Number of the first page of the lowest unit."""
    units: int
    """Units that have room in the tier."""

    @classmethod
    def in_tier(cls, tier_bytes: int, size: PageSize, *, from_top: bool) -> Grid:
        """Return the grid of the first group, or of the second, whose units are counted ``from_top``."""
        if size.page_bytes == 0:
            return cls(size, 0, 0, 0)
        if not from_top:
            return cls(size, 0, 0, tier_bytes // size.unit_bytes)
        layer_pages, offset = divmod(tier_bytes, size.layer_page_bytes)
        units, first = divmod(layer_pages, size.layers * size.unit_pages)
        return cls(size, offset, first, units)

    @property
    def stride(self) -> int:
        """Page numbers from a unit's first page to the next unit's."""
        return self.size.layers * self.size.unit_pages

    @property
    def end(self) -> int:
        """All page numbers are less than this."""
        return self.first + (self.units - 1) * self.stride + self.size.unit_pages if self.units else 0

    def address(self, page: int, layer: int = 0) -> int:
        """Return the byte of the tier at which a page begins in a layer, by the layer's number in the group."""
        return self.offset + (page + layer * self.size.unit_pages) * self.size.layer_page_bytes

    def units_of(self, pages: Indices) -> Indices:
        """Return the unit of each page, counted from the lowest."""
        return (pages - self.first) // self.stride

    def is_page(self, pages: Indices) -> bool:
        """Whether all these numbers are numbers of pages."""
        unit, slot = np.divmod(pages - self.first, max(self.stride, 1))
        return bool(((unit >= 0) & (unit < self.units) & (slot < self.size.unit_pages)).all())

    def pages_of(self, units: range) -> slice:
        """Return the page numbers of consecutive units, with the numbers between that no page has."""
        start = self.first + units.start * self.stride
        return slice(start, start + (len(units) - 1) * self.stride + self.size.unit_pages)

    def units_in(self, start: int, stop: int) -> range:
        """Return the units with bytes in ``[start, stop)`` of the tier."""
        if self.units == 0:
            return range(0)
        base, unit = self.address(self.first), self.size.unit_bytes
        return range(max(0, (start - base) // unit), max(0, min(self.units, -(-(stop - base) // unit))))


@dataclass(frozen=True, slots=True)
class TierLayout:
    """Size of a tier, and how its KV groups' pages lie in it."""

    num_bytes: int
    sizes: tuple[PageSize, ...]
    """One for each KV group. A tier of one group is one unit, unless it is elastic."""

    def __post_init__(self) -> None:
        if self.num_bytes % ALIGNMENT and len(self.sizes) > 1:
            raise ValueError(f"a tier of {self.num_bytes} bytes is not a multiple of {ALIGNMENT}")

    @property
    def grids(self) -> tuple[Grid, Grid]:
        """The grids of both groups of a tier; the second has no pages if there is only one."""
        first, second = self.sizes if len(self.sizes) > 1 else (self.sizes[0], NO_PAGES)
        return (
            Grid.in_tier(self.num_bytes, first, from_top=False),
            Grid.in_tier(self.num_bytes, second, from_top=True),
        )


class UnitOwners:
    """Hands clocks over when units of a tier change their KV group.

    Clocks are numbers by page that only grow, such as the ticket of the last copy. All pages of the first group come
    before those of the second in a clock. A page's clocks must tell of all earlier uses of its bytes, under whatever
    page number of whatever group. So before the pages of a unit are used, the unit must be *owned* by their group. A
    group that does not own it takes it: each clock of its pages is raised to the newest of all units of the other
    group that have bytes in common with it, and these are owned no more. So a unit is owned exactly if no unit that
    overlaps it was used since its clocks were raised, and two units that overlap are never both owned.

    The other group's clocks of a whole unit count for each page of the taken one, since a page's bytes are scattered
    over its unit. That may tell of uses that were beside the page, but bytes change groups only in whole units, so
    such uses are long past.
    """

    def __init__(self, grids: tuple[Grid, Grid]) -> None:
        self._grids = grids
        self._owned = tuple(np.zeros(grid.units, dtype=np.bool_) for grid in grids)

    @property
    def second(self) -> int:
        """Index of the second group's page 0 in a clock."""
        return self._grids[0].end

    @property
    def length(self) -> int:
        """Length of a clock."""
        return self._grids[0].end + self._grids[1].end

    def claim(self, indices: Indices, clocks: Sequence[Ints]) -> None:
        """Let the groups of these pages, given by their indices in the clocks, own their units. Call it before the
        clocks of the pages are read or written."""
        if not indices.size:
            return
        of_second = indices >= self.second
        for group, pages in ((0, indices[~of_second]), (1, indices[of_second] - self.second)):
            units = self._grids[group].units_of(pages)
            for unit in np.unique(units[~self._owned[group][units]]).tolist():
                self._take(group, unit, clocks)

    def _take(self, group: int, unit: int, clocks: Sequence[Ints]) -> None:
        grid, other = self._grids[group], self._grids[1 - group]
        start = grid.address(grid.first) + unit * grid.size.unit_bytes
        overlapping = other.units_in(start, start + grid.size.unit_bytes)
        if overlapping:
            base, other_base = (0, self.second)[group], (0, self.second)[1 - group]
            own, theirs = grid.pages_of(range(unit, unit + 1)), other.pages_of(overlapping)
            for clock in clocks:
                mine = clock[base + own.start : base + own.stop]
                newest = clock[other_base + theirs.start : other_base + theirs.stop].max()
                np.maximum(mine, newest, out=mine)
            self._owned[1 - group][overlapping.start : overlapping.stop] = False
        self._owned[group][unit] = True
