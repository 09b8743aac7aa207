"""Changes the size of an elastic device tier: which end may reach how far, and what memory backs.

The first group's pages lie at the bottom of the tier's buffer, the second group's at the top (``cache.pages``). Memory
backs both ends; the middle is not backed unless the tier is at its ceiling. Each end has three lengths, in bytes:

* its *aim*: how long it shall be. The aims of both ends add up to the tier's target;
* *backed*: plans made from now on find memory there;
* its *limit*: it opens no unit beyond it. The limit is the smaller of the two above.

Shrinking lowers the aim, and so the limit, at once. Pages beyond it are evicted or moved inwards, some in each plan.
Memory beyond is given up by the plan after which nothing lies there: that plan's copies and all earlier plans still
read it. Pinned pages are never evicted, so an end never has less than running requests hold or were promised.

Growing takes one plan. The plan asks for memory, and its result says how much there is. Only later plans use it.

At the ceiling all of the buffer is backed, so the ends have no limits: units change groups as in a tier of one size.
Pages may then be promised in room that units of the first group still have. The plan that sets limits again makes that
room first: with limits, an end gains room only a plan after the other has given it up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pensieve.engine.cache.evictor import Evictor
from pensieve.engine.cache.tenants import NO_TENANT
from pensieve.engine.cache.tiers import Pages, Tiers

Ends = tuple[int, int]
"""Bytes from the bottom and from the top of one rank's buffer, as in ``Plan.memory``."""
LOPSIDED_SHARE: Final = 8
"""An end with this part of the tier unused gives room to the other end, if that has none."""


class Resizer:
    """Follows a target size. Only it writes the limits of the device tier."""

    def __init__(self, tiers: Tiers, evictor: Evictor, on_evicted: Callable[[], None]) -> None:
        """``on_evicted``: is called after evictions, of which some may have dropped the last chunk of a session."""
        self._tiers, self._evictor, self._pool = tiers, evictor, tiers.device
        self._on_evicted = on_evicted
        self.backed: Ends = (0, 0)
        """Bytes of each end that plans made from now on find backed. At first none: the first plan asks for them."""
        self._aim: Ends = (0, 0)
        self._asked: Ends | None = None
        """The ends that a plan has asked for whose result is not known yet."""
        self.held = 0
        """Bytes that memory backs, as far as results are known."""
        self._pool.limit((0, 0))

    @property
    def free_bytes(self) -> int:
        """Bytes that pages can be taken from without an eviction."""
        return self._pool.free_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of each group, in all."""
        return sum(group.unit_bytes for group in self._pool.groups)

    @property
    def is_waiting(self) -> bool:
        """Whether the result of a plan that changes the memory is not known yet."""
        return self._asked is not None

    @property
    def size(self) -> int:
        """Bytes that are backed or asked for."""
        return sum(self.backed if self._asked is None else self._asked)

    def plan(self, target: int, growth: int, demand: Pages, now: float, most: int) -> Ends | None:
        """Go on towards ``target`` bytes; return what the plan being made must ask of the memory, None: nothing.

        ``growth``: most bytes by which the tier may grow now. ``demand``: pages of each group that a waiting request
        needs pinned, besides those that are. ``most``: pages of each group that may be copied out or dropped, and may
        move. Call it last in a plan, before page tables are made.
        """
        if self._pool.limits is None and target < self._pool.ceiling_bytes:
            self._make_promised_room(now)
        self._adopt_units()
        if not growth:
            # Else each end may wait for memory that does not come, while the other has more than it needs.
            target = min(target, self.size)
        is_whole = sum(self.backed) == self._pool.ceiling_bytes <= target
        self._aim = self.backed if is_whole else self._ends_for(target, demand)
        self._set_limits()
        self._make_fit(now, most)
        if self._asked is not None:
            return None
        kept = [
            max(min(aim, backed), extent)
            for aim, backed, extent in zip(self._aim, self.backed, self._pool.extents, strict=True)
        ]
        lacks = [max(aim - have, 0) for aim, have in zip(self._aim, kept, strict=True)]
        # One end may grow by what the other gives up, and by ``growth``.
        room = max(min(sum(self._aim), sum(self.backed) + growth) - sum(kept), 0)
        if sum(lacks) > room:
            first = lacks[0] * room // sum(lacks)
            lacks = [first, room - first]
        ends = kept[0] + lacks[0], kept[1] + lacks[1]
        if ends == self.backed:
            return None
        self._asked = ends
        self.backed = min(ends[0], self.backed[0]), min(ends[1], self.backed[1])
        self._set_limits()
        return ends

    def on_result(self, backed: Ends | None) -> int:
        """Take in the result of the plan that asked for memory; return how many bytes are missing.

        ``backed``: ``StepResult.memory``; None: all that the plan asked for.
        """
        asked, self._asked = self._asked, None
        assert asked is not None, "no plan has asked for memory"
        backed = asked if backed is None else backed
        self.held = min(sum(backed), self._pool.ceiling_bytes)
        assert backed[0] >= self.backed[0] and backed[1] >= self.backed[1], (
            f"only {backed} bytes are backed, but pages may lie in {self.backed}"
        )
        self.backed = min(asked[0], backed[0]), min(asked[1], backed[1])
        self._set_limits()
        return sum(asked) - sum(self.backed)

    def check(self) -> None:
        """Raise AssertionError if a unit in use, or one that may be opened, lies outside of backed memory."""
        pool, ceiling = self._pool, self._pool.ceiling_bytes
        assert sum(self.backed) <= ceiling and self.size <= ceiling, f"the ends {self.backed} meet"
        if pool.limits is None:
            assert sum(self.backed) == ceiling, "no limits, but not all of the tier is backed"
            return
        for group, (limit, backed, extent) in enumerate(
            zip(pool.limits, self.backed, pool.extents, strict=True)
        ):
            assert extent <= backed, f"group {group}: units reach {extent} bytes, but {backed} are backed"
            assert limit <= backed, f"group {group}: pages are handed out up to {limit}, backed are {backed}"

    def _make_promised_room(self, now: float) -> None:
        """Before limits are set: free room in which the second end may grow to all pages that it has promised."""
        pages = self._tiers.claimed[1] - self._tiers.pinned[1]
        if pages:
            self._evictor.reserve((0, pages), now, NO_TENANT)
            self._on_evicted()

    def _adopt_units(self) -> None:
        """Without limits, units change groups. Count backed memory to the ends as the units lie now, and as much as
        they leave to the promises of the second end."""
        if self._pool.limits is None:
            ceiling, (low, high) = self._pool.ceiling_bytes, self._pool.extents
            claimed = self._pool.ends_for(*self._tiers.claimed)[1]
            low = min(max(min(self.backed[0], ceiling - claimed), low), ceiling - high)
            self.backed = low, ceiling - low

    def _set_limits(self) -> None:
        ceiling = self._pool.ceiling_bytes
        if sum(self.backed) == sum(self._aim) == ceiling:
            self._pool.limit(None)
        else:
            self._pool.limit((min(self._aim[0], self.backed[0]), min(self._aim[1], self.backed[1])))

    def _make_fit(self, now: float, most: int) -> None:
        """Evict what the limits have no room for, and move what lies beyond them inwards."""
        pool = self._pool
        if pool.limits is None:
            return
        if pool.excess(0) or pool.excess(1):
            self._evictor.shrink(now, most)
            self._on_evicted()
        for group in range(len(pool.groups)):
            for source, target in pool.pack(group, most):
                self._tiers.move(group, source, target)

    def _ends_for(self, target: int, demand: Pages) -> Ends:
        """Return the aims of both ends for a tier of ``target`` bytes, or more if running requests hold more."""
        tiers, pool = self._tiers, self._pool
        claimed = tiers.claimed
        least = pool.ends_for(*claimed)
        total = max(target, sum(least))
        sizes = [group.unit_bytes for group in pool.groups]
        if len(sizes) == 1 or not sizes[1]:
            return total, 0
        if not sizes[0]:
            return 0, total
        needed = pool.ends_for(claimed[0] + demand[0], claimed[1] + demand[1])
        # One unit more, so that running requests find room while they grow.
        wished = needed[0] + sizes[0], needed[1] + sizes[1]
        extents = pool.extents
        unmoved = max(wished[0], extents[0]), max(wished[1], extents[1])
        ends = next(one for one in (unmoved, wished, needed, least) if sum(one) <= total)
        enough = min(ends[0], wished[0]), min(ends[1], wished[1])
        old = self._aim
        if sum(old) == total and old[0] >= enough[0] and old[1] >= enough[1] and not self._is_lopsided():
            return old
        used = [pool.used(group) * kind.page_bytes + 1 for group, kind in enumerate(pool.groups)]
        high = ends[1] + (total - sum(ends)) * used[1] // sum(used) // sizes[1] * sizes[1]
        return total - high, high

    def _is_lopsided(self) -> bool:
        """Whether one end has much room and the other none."""
        pool = self._pool
        if pool.limits is None:
            return False
        unused = [limit - extent for limit, extent in zip(pool.limits, pool.extents, strict=True)]
        return max(unused) > sum(self._aim) // LOPSIDED_SHARE and not min(pool.free(0), pool.free(1))
