"""The pages of one tier for one or two KV groups: whole units from both ends of one buffer.

Group 0 takes its units from the bottom of the tier, group 1 from the top. The *middle* between the two ends
is free. The *outermost* unit of an end is the one next to the middle. A unit without a page in use is given
back: at once if it is outermost, else when the units beyond it are empty too. *Holes* are the free pages
inside an end::

    byte 0                                                                                        size
    ├── unit 0 ──┼── unit 1 ──┼── unit 2 ──┤           middle           ├─ unit 1 ─┼─ unit 0 ─┤
      group 0 ──▶               outermost                                 outermost  ◀── group 1

A group has L layers and layer pages of B bytes. A unit holds U pages, layer after layer: L·U layer pages.
Each group has a *grid* of layer pages, which begins at byte 0 for group 0 and at byte ``size mod B`` for
group 1. A page's number is the place of its first layer page in that grid; layer l lies l·U places further:

* page s of unit u of group 0 has number ``u·L·U + s``;
* unit k of group 1 occupies bytes ``[size - (k+1)·unit, size - k·unit)``, so its page s has number
  ``size // B - (k+1)·L·U + s``.

A tier with one group is one unit. Its pages have the numbers 0, 1, … and all pages of a layer lie together. An
elastic tier has units with one group too: group 0 alone has them. Memory backs the ends of such a tier, not always its
middle, so each end may have a *limit* beyond which it opens no unit.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

LAYER_BYTES_OF_UNIT: Final = 2 << 20
"""A unit holds this much of each layer. Decode attention takes 1.06 times as long with a quarter of it: the
cost grows with the number of 2 MiB regions that it reads."""
FEWEST_UNITS_ON_GPU: Final = 8
FEWEST_UNITS_ON_CPU: Final = 64
UNCOUNTED_PAGES: Final = 1 << 40
"""Free pages of a group without layers."""
Move = tuple[int, int]
"""(source page, target page) of one group."""


@dataclass(frozen=True, slots=True)
class PageSize:
    """The size of one KV group's pages and units in a tier. A group without layers has pages of 0 bytes."""

    layers: int
    layer_page_bytes: int
    unit_pages: int

    def __post_init__(self) -> None:
        if self.layers != 0 and min(self.layers, self.layer_page_bytes, self.unit_pages) < 1:
            raise ValueError(f"{self} must be positive")

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_page_bytes

    @property
    def unit_bytes(self) -> int:
        return self.unit_pages * self.page_bytes


def unit_pages_for(layers: int, layer_page_bytes: int, tier_bytes: int, *, on_gpu: bool) -> int:
    """Return how many pages a unit of a device tier should hold; at least 1.

    A unit holds 2 MiB of each layer or little more, but takes at most 1/8 of the tier on a GPU, and 1/64 on a
    CPU, where the layout matters less. Host tiers use units of one page: no kernel reads there.
    """
    if not layers:
        return 1
    pages = -(-LAYER_BYTES_OF_UNIT // layer_page_bytes)
    fewest = FEWEST_UNITS_ON_GPU if on_gpu else FEWEST_UNITS_ON_CPU
    return max(min(pages, tier_bytes // fewest // (layers * layer_page_bytes)), 1)


class PagePool:
    """The free and taken pages of a tier. Which page is taken depends only on the calls before.

    A group without layers has one page, number 0. It can be taken without limit, and is not counted.
    """

    def __init__(self, size_bytes: int, groups: Sequence[PageSize], *, elastic: bool = False) -> None:
        """Make an empty tier for one or two groups. A single group's ``unit_pages`` is ignored unless ``elastic``.

        Raises ValueError if no group has layers, or if the tier is too small for a unit of each of two groups. A
        tier of 0 bytes is allowed: it has no pages.
        """
        if not 1 <= len(groups) <= 2:
            raise ValueError(f"a tier has one or two KV groups, not {len(groups)}")
        if not any(group.layers for group in groups):
            raise ValueError("a tier needs a KV group with layers")
        self._packed = len(groups) == 1 and not elastic
        if self._packed:
            groups = (replace(groups[0], unit_pages=max(size_bytes // groups[0].page_bytes, 1)),)
        elif len(groups) > 1 and 0 < size_bytes < (least := sum(group.unit_bytes for group in groups)):
            units = " + ".join(f"{group.unit_bytes:,}" for group in groups)
            raise ValueError(
                f"a tier of {size_bytes:,} bytes is too small: a unit of each group needs {units} = {least:,}"
            )
        self.ceiling_bytes = size_bytes
        """Bytes of the buffer that the pages lie in."""
        self.size_bytes = size_bytes
        """Bytes that pages can be taken from: those of the buffer, or of both limits."""
        self.limits: tuple[int, int] | None = None
        """Bytes within which each end opens units; None: both ends share the whole buffer."""
        self.groups = tuple(groups)
        self.held: defaultdict[int, int] = defaultdict(int)
        """Bytes of the pages in use, by tenant number."""
        self._ends = [_End(group, size_bytes, from_top=number == 1) for number, group in enumerate(groups)]

    # -- counts ------------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return sum(end.used * end.page_bytes for end in self._ends)

    @property
    def free_bytes(self) -> int:
        """Bytes outside of pages in use. A group can take only those that ``free`` counts."""
        return max(self.size_bytes - self.used_bytes, 0)

    @property
    def middle_bytes(self) -> int:
        """Bytes between the ends. Holes are not part of it."""
        middle = self.ceiling_bytes
        for end in self._ends:
            middle -= end.units * end.unit_bytes
        return middle

    @property
    def extents(self) -> tuple[int, int]:
        """Bytes of the units of each end."""
        sizes = [end.units * end.unit_bytes for end in self._ends]
        return sizes[0], sizes[1] if len(sizes) > 1 else 0

    def used(self, group: int = 0) -> int:
        """Return the pages of a group in use; 0 for a group that the tier does not have."""
        return self._ends[group].used if group < len(self._ends) else 0

    def holes(self, group: int = 0) -> int:
        """Return the free pages inside the group's end."""
        return self._ends[group].holes

    def free(self, group: int = 0) -> int:
        """Return the pages that the group can take now: its holes, and all whole units in the middle."""
        end = self._ends[group]
        if not end.page_bytes:
            return UNCOUNTED_PAGES
        return end.holes + self._room(group) // end.unit_bytes * end.unit_pages

    def capacity(self, group: int = 0) -> int:
        """Return the pages that the group would have if it were alone in the tier."""
        end = self._ends[group]
        return end.most_units * end.unit_pages if end.page_bytes else UNCOUNTED_PAGES

    def is_free(self, page: int, group: int = 0) -> bool:
        """Whether the page is one that the group could get now: a hole, or in a unit that the middle has room
        for."""
        end = self._ends[group]
        if not end.page_bytes:
            return page == 0
        unit, slot = end.locate(page)
        if unit < 0 or slot >= end.unit_pages or end.is_taken(unit, slot):
            return False
        return unit < end.units or (unit + 1 - end.units) * end.unit_bytes <= self._room(group)

    def fits(self, pages0: int, pages1: int = 0) -> bool:
        """Whether that many more pages of each group can be taken now, without a move."""
        return self._fits_after(0, self._ends[0].units, pages0, pages1)

    def bytes_for(self, pages0: int, pages1: int = 0) -> int:
        """Return the bytes that these pages of each group take together, in whole units if there are any."""
        return sum(self.ends_for(pages0, pages1))

    def ends_for(self, pages0: int, pages1: int = 0) -> tuple[int, int]:
        """Return the bytes of each end that hold these pages; see ``bytes_for``."""
        one = self._ends[0]
        first = pages0 * one.page_bytes if self._packed else one.units_beyond(pages0) * one.unit_bytes
        if len(self._ends) == 1:
            return first, 0
        other = self._ends[1]
        return first, other.units_beyond(pages1) * other.unit_bytes

    def spare(self, pages0: int, pages1: int = 0) -> int:
        """Return the bytes that are left if the tier holds these pages and nothing else; negative: it cannot."""
        needed = self.ends_for(pages0, pages1)
        if self.limits is None:
            return self.size_bytes - sum(needed)
        left = [limit - num_bytes for limit, num_bytes in zip(self.limits, needed, strict=True)]
        return min(left) if min(left) < 0 else sum(left)

    def shortage(self, pages0: int, pages1: int = 0) -> int:
        """Return how many bytes must be freed before these further pages fit, once moves are made; 0 if they do now."""
        ends = self._ends
        if self.limits is not None:
            wanted = enumerate((pages0, pages1)[: len(ends)])
            return sum(max(pages - self.free(group), 0) * ends[group].page_bytes for group, pages in wanted)
        if len(ends) == 1:
            return max(pages0 - self.free(), 0) * ends[0].page_bytes
        return max(self.bytes_for(ends[0].used + pages0, ends[1].used + pages1) - self.size_bytes, 0)

    def is_short(self, group: int, pages0: int, pages1: int = 0) -> bool:
        """Whether pages of a group must be freed before these further pages fit."""
        if self.limits is None:
            return self.shortage(pages0, pages1) > 0
        return (pages0, pages1)[group] > self.free(group)

    def excess(self, group: int) -> int:
        """Return the pages in use of a group that its limit has no room for."""
        if group >= len(self._ends):
            return 0
        return max(self._ends[group].used - self._units_within(group) * self._ends[group].unit_pages, 0)

    def _room(self, group: int) -> int:
        """Return the bytes by which an end may become longer now."""
        if self.limits is None:
            return self.middle_bytes
        end = self._ends[group]
        return max(self.limits[group] - end.units * end.unit_bytes, 0)

    def _units_within(self, group: int) -> int:
        """Return how many units of a group its limit has room for."""
        end = self._ends[group]
        if self.limits is None or not end.page_bytes:
            return end.units
        return self.limits[group] // end.unit_bytes

    # -- pages -------------------------------------------------------------------------------------------------------

    def limit(self, limits: tuple[int, int] | None) -> None:
        """Set ``limits``. Units in use beyond them stay until their pages are put back or moved."""
        assert limits is None or sum(limits) <= self.ceiling_bytes, f"the ends {limits} meet"
        self.limits = limits
        self.size_bytes = self.ceiling_bytes if limits is None else sum(limits)

    def take(self, group: int = 0, tenant: int = 0) -> int:
        """Take a free page for a tenant. Raises IndexError when there is none: check ``free`` or ``fits`` first.

        The fullest unit goes first, the outermost unit after all others, a new unit last. Ties: the unit nearer
        to the end of the tier. In a unit the lowest number goes first.
        """
        end = self._ends[group]
        if not end.page_bytes:
            return 0
        unit = end.next_unit()
        if unit == end.units and self._room(group) < end.unit_bytes:
            raise IndexError(f"no page of group {group} is free")
        self.held[tenant] += end.page_bytes
        return end.take_in(unit)

    def put_back(self, page: int, group: int = 0, tenant: int = 0) -> None:
        """Return a page of a tenant. Raises ValueError if it is not taken."""
        end = self._ends[group]
        if end.page_bytes:
            end.put_back(page)
            self.held[tenant] -= end.page_bytes

    def shrink(
        self, group: int, pages0: int, pages1: int, movable: Callable[[int], bool], most: int | None = None
    ) -> list[Move]:
        """Move pages of the group's outermost units into holes further in, until ``fits(pages0, pages1)``.

        On return the pool has exchanged the pages already: each target is taken and each source is free, for the
        same tenant. The caller must copy the bytes of each move, and use the new numbers. No page is both a
        source and a target.

        Returns no moves if none is needed, or if moves cannot suffice: ``movable`` forbids a page, or there are
        too few holes. Makes at most ``most`` moves; if more are needed, a later call makes the others.
        """
        end = self._ends[group]
        inner, pages = end.units, 0
        packed = end.units_beyond(end.used + (pages0, pages1)[group])
        if not self._fits_after(group, min(packed, inner), pages0, pages1):
            return []
        while not self._fits_after(group, inner, pages0, pages1):
            inner -= 1
            if not all(map(movable, end.taken_in(inner))):
                return []
            pages += end.in_use(inner)
        return end.move_inwards(inner, pages if most is None else min(most, pages))

    def pack(self, group: int, most: int) -> list[Move]:
        """Move up to ``most`` pages of units beyond the group's limit into holes within it, the outermost first.

        Like ``shrink``, the pool has exchanged the pages on return.
        """
        end, inner = self._ends[group], self._units_within(group)
        if end.units <= inner:
            return []
        within = sum(map(end.in_use, range(inner)))
        return end.move_inwards(inner, min(most, end.used - within, inner * end.unit_pages - within))

    def _fits_after(self, group: int, units: int, pages0: int, pages1: int) -> bool:
        """Whether ``fits`` would hold if the group's pages in use lay in its first ``units`` units."""
        if self.limits is not None:  # each end has room of its own: no move of one helps the other
            wanted = enumerate((pages0, pages1)[: len(self._ends)])
            return all(pages <= self.free(one) for one, pages in wanted)
        left = self.size_bytes
        for number, (end, pages) in enumerate(zip(self._ends, (pages0, pages1), strict=False)):
            kept = units if number == group else end.units
            holes = kept * end.unit_pages - end.used
            left -= (kept + end.units_beyond(pages - holes)) * end.unit_bytes
        return left >= 0


class _End:
    """The units of one group, numbered from its end of the tier, and their pages."""

    def __init__(self, size: PageSize, tier_bytes: int, *, from_top: bool) -> None:
        self.page_bytes, self.unit_pages, self.unit_bytes = size.page_bytes, size.unit_pages, size.unit_bytes
        self.most_units = tier_bytes // size.unit_bytes if size.layers else 0
        self.used = 0
        self._stride = size.layers * size.unit_pages
        """From the first page number of a unit to that of the unit above it."""
        self._direction = -1 if from_top else 1
        self._first = tier_bytes // size.layer_page_bytes - self._stride if from_top and size.layers else 0
        """Number of the first page of unit 0."""
        self._taken = bytearray(self.most_units * size.unit_pages)
        self._in_use: list[int] = []
        """Pages in use by unit, up to the outermost unit."""
        self._fresh: list[int] = []
        """By unit: the slots from here on have not been taken since the unit was last empty."""
        self._returned: dict[int, list[int]] = {}
        """By unit: a heap of the free slots below ``_fresh``."""
        self._open: list[int] = []
        """A heap of (free pages, unit), each as one number: all units with holes but the outermost, and entries
        that are no longer true."""
        self._queued: set[int] = set()
        """The entries of ``_open``: none is in it twice."""

    @property
    def units(self) -> int:
        return len(self._in_use)

    @property
    def holes(self) -> int:
        return len(self._in_use) * self.unit_pages - self.used

    def units_beyond(self, pages: int) -> int:
        """Return the units that hold that many pages; 0 for none and fewer."""
        return -(-pages // self.unit_pages) if pages > 0 else 0

    def locate(self, page: int) -> tuple[int, int]:
        """Return (unit, slot) of a page number. If no page has the number, one of them is out of range."""
        steps, slot = divmod(page - self._first, self._stride)
        return steps * self._direction, slot

    def is_taken(self, unit: int, slot: int) -> bool:
        in_range = 0 <= unit < len(self._in_use) and slot < self.unit_pages
        return in_range and self._taken[unit * self.unit_pages + slot] == 1

    def in_use(self, unit: int) -> int:
        return self._in_use[unit]

    def taken_in(self, unit: int) -> list[int]:
        """Return the pages in use of a unit, ascending."""
        start, first = unit * self.unit_pages, self._first + unit * self._stride * self._direction
        taken = self._taken[start : start + self.unit_pages]
        return [first + slot for slot, flag in enumerate(taken) if flag]

    def next_unit(self) -> int:
        """Return the unit to take the next page from; ``units`` if all units are full."""
        outermost = len(self._in_use) - 1
        while self._open:
            free, unit = divmod(self._open[0], self.most_units)
            if unit < outermost and self.unit_pages - self._in_use[unit] == free:
                return unit
            self._queued.remove(heapq.heappop(self._open))
        return outermost if outermost >= 0 and self._in_use[outermost] < self.unit_pages else outermost + 1

    def take_in(self, unit: int) -> int:
        """Take the lowest free page of a unit that has one, or of the unit after the outermost."""
        if unit == len(self._in_use):
            self._in_use.append(0)
            self._fresh.append(0)
        if returned := self._returned.get(unit):
            slot = heapq.heappop(returned)
        else:
            slot = self._fresh[unit]
            self._fresh[unit] += 1
        self._taken[unit * self.unit_pages + slot] = 1
        self._in_use[unit] += 1
        self.used += 1
        if unit < len(self._in_use) - 1:
            self._queue(unit)
        return self._first + unit * self._stride * self._direction + slot

    def put_back(self, page: int) -> None:
        unit, slot = self.locate(page)
        if not self.is_taken(unit, slot):
            raise ValueError(f"page {page} of {self.most_units * self.unit_pages} is not taken")
        self._taken[unit * self.unit_pages + slot] = 0
        self._in_use[unit] -= 1
        self.used -= 1
        if self._in_use[unit]:
            heapq.heappush(self._returned.setdefault(unit, []), slot)
        else:
            self._fresh[unit] = 0
            self._returned.pop(unit, None)
        if unit < len(self._in_use) - 1:
            self._queue(unit)
        else:
            while self._in_use and not self._in_use[-1]:
                self._in_use.pop()
                self._fresh.pop()

    def move_inwards(self, inner: int, pages: int) -> list[Move]:
        """Move that many pages of the units from ``inner`` on, the outermost first, into the fullest units below
        ``inner``, which have room for them."""
        emptied = reversed(range(inner, self.units))
        sources = list(itertools.islice(itertools.chain.from_iterable(map(self.taken_in, emptied)), pages))
        with_holes = [unit for unit in range(inner) if self._in_use[unit] < self.unit_pages]
        with_holes.sort(key=lambda unit: -self._in_use[unit])
        targets = (unit for unit in with_holes for _ in range(self.unit_pages - self._in_use[unit]))
        moves = []
        for source in sources:
            moves.append((source, self.take_in(next(targets))))
            self.put_back(source)
        return moves

    def _queue(self, unit: int) -> None:
        """Let ``next_unit`` find a unit other than the outermost if it has holes."""
        free = self.unit_pages - self._in_use[unit]
        entry = free * self.most_units + unit
        if free and entry not in self._queued:
            self._queued.add(entry)
            heapq.heappush(self._open, entry)
