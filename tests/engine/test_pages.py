"""The pages of a tier against a model of its bytes, which scans everything and shares no code with it."""

from __future__ import annotations

import copy
import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from pensieve.engine.cache.pages import PagePool, PageSize, unit_pages_for

Page = tuple[int, int]
"""(unit, slot)"""

TIERS: dict[str, tuple[int, PageSize, PageSize]] = {
    "windows": (601, PageSize(2, 7, 3), PageSize(3, 5, 4)),
    "states": (580, PageSize(2, 3, 8), PageSize(2, 60, 1)),
    "a host's": (155, PageSize(3, 4, 1), PageSize(1, 11, 1)),
    "few units": (160, PageSize(1, 10, 5), PageSize(5, 2, 5)),
    "large units of the second": (1_450, PageSize(1, 20, 4), PageSize(4, 13, 9)),
}


class Model:
    """The taken pages of both groups and the bytes that they occupy. All else follows by scanning."""

    def __init__(self, size: int, groups: tuple[PageSize, ...]) -> None:
        self.size = size
        self.groups = groups
        self.bytes = bytearray(size)
        self.taken: tuple[set[Page], set[Page]] = (set(), set())
        self.held: Counter[int] = Counter()

    def in_use(self, group: int, unit: int) -> int:
        return sum(page[0] == unit for page in self.taken[group])

    def units(self, group: int) -> int:
        return 1 + max((unit for unit, _ in self.taken[group]), default=-1)

    def holes(self, group: int) -> int:
        slots = range(self.groups[group].unit_pages)
        everywhere = {(unit, slot) for unit in range(self.units(group)) for slot in slots}
        return len(everywhere - self.taken[group])

    def middle(self) -> int:
        return self.size - sum(self.units(g) * group.unit_bytes for g, group in enumerate(self.groups))

    def free(self, group: int) -> int:
        size = self.groups[group]
        return self.holes(group) + self.middle() // size.unit_bytes * size.unit_pages

    def next_page(self, group: int) -> Page | None:
        """The page that should be taken next."""
        size, units = self.groups[group], self.units(group)
        open_units = [unit for unit in range(units) if self.in_use(group, unit) < size.unit_pages]
        open_units.sort(key=lambda unit: (unit == units - 1, -self.in_use(group, unit), unit))
        if not open_units and self.middle() < size.unit_bytes:
            return None
        unit = (open_units or [units])[0]
        return unit, min(slot for slot in range(size.unit_pages) if (unit, slot) not in self.taken[group])

    def number(self, group: int, page: Page) -> int:
        """A page's number, from the first byte of its first layer page."""
        start, _ = self.ranges(group, page)[0]
        size = self.groups[group].layer_page_bytes
        number, rest = divmod(start - (self.size % size if group else 0), size)
        assert rest == 0
        return number

    def numbers(self, group: int) -> dict[int, Page]:
        return {self.number(group, page): page for page in self.taken[group]}

    def ranges(self, group: int, page: Page) -> list[tuple[int, int]]:
        """The bytes of a page, layer by layer."""
        size = self.groups[group]
        unit, slot = page
        start = self.size - (unit + 1) * size.unit_bytes if group else unit * size.unit_bytes
        found = []
        for layer in range(size.layers):
            first = start + (layer * size.unit_pages + slot) * size.layer_page_bytes
            found.append((first, first + size.layer_page_bytes))
        return found

    def take(self, group: int, page: Page) -> None:
        for first, end in self.ranges(group, page):
            assert 0 <= first < end <= self.size and not any(self.bytes[first:end])
            self.bytes[first:end] = bytes([group + 1]) * (end - first)
        self.taken[group].add(page)

    def put_back(self, group: int, page: Page) -> None:
        for first, end in self.ranges(group, page):
            self.bytes[first:end] = bytes(end - first)
        self.taken[group].remove(page)

    def check(self, pool: PagePool) -> None:
        """Compare all counts."""
        assert pool.middle_bytes == self.middle() >= 0
        assert pool.used_bytes == sum(byte > 0 for byte in self.bytes)
        assert pool.free_bytes == self.size - pool.used_bytes
        holes = sum(pool.holes(g) * size.page_bytes for g, size in enumerate(self.groups))
        assert pool.used_bytes + holes + pool.middle_bytes == pool.size_bytes == self.size
        assert +Counter(pool.held) == +self.held
        assert sum(pool.held.values()) == pool.used_bytes
        for group, size in enumerate(self.groups):
            assert pool.used(group) == len(self.taken[group])
            assert pool.holes(group) == self.holes(group)
            assert pool.free(group) == self.free(group)
            assert pool.capacity(group) == self.size // size.unit_bytes * size.unit_pages


class Walk:
    """Random calls of a pool and of the model, which must agree."""

    def __init__(self, name: str, seed: int) -> None:
        size, *groups = TIERS[name]
        self.rng = random.Random(seed)
        self.pool = PagePool(size, groups)
        self.model = Model(size, tuple(groups))
        self.tenants: tuple[dict[Page, int], dict[Page, int]] = ({}, {})
        self.filling = 0.7

    def step(self) -> None:
        if self.rng.random() < 0.03:
            self.filling = self.rng.choice((0.2, 0.5, 0.8))
        group = self.rng.randrange(2)
        if self.rng.random() < self.filling:
            self.take(group)
        elif self.model.taken[group]:
            self.put_back(group)

    def take(self, group: int) -> bool:
        tenant = self.rng.randrange(3)
        expected = self.model.next_page(group)
        if expected is None:
            with pytest.raises(IndexError):
                self.pool.take(group, tenant)
            return False
        number = self.model.number(group, expected)
        assert self.pool.is_free(number, group)
        assert self.pool.take(group, tenant) == number
        assert not self.pool.is_free(number, group)
        self.model.take(group, expected)
        self.model.held[tenant] += self.model.groups[group].page_bytes
        self.tenants[group][expected] = tenant
        return True

    def put_back(self, group: int) -> None:
        page = self.rng.choice(sorted(self.model.taken[group]))
        number = self.model.number(group, page)
        tenant = self.tenants[group].pop(page)
        self.pool.put_back(number, group, tenant)
        with pytest.raises(ValueError, match="is not taken"):
            self.pool.put_back(number, group, tenant)
        self.model.put_back(group, page)
        self.model.held[tenant] -= self.model.groups[group].page_bytes

    def need(self) -> tuple[int, int]:
        """Pages of each group, often more than are free."""
        return self.rng.randrange(self.pool.free(0) + 3), self.rng.randrange(self.pool.free(1) + 3)

    def scatter(self) -> int:
        """Fill the tier, then put back some pages of one group, which is returned."""
        group = self.rng.randrange(2)
        for _ in range(self.rng.randrange(self.pool.free(1 - group) + 1)):
            self.take(1 - group)
        while self.take(group):
            pass
        for _ in range(self.rng.randrange(self.pool.used(group) + 1)):
            self.put_back(group)
        return group

    def shrink(self, group: int, movable: Callable[[int], bool], most: int | None = None) -> bool:
        """Shrink one end, mostly for the other, and compare; whether there was any move."""
        own = self.rng.choice((0, 0, 1))
        extra = self.rng.randrange(self.pool.groups[1 - group].unit_pages + 1)
        other = self.pool.free(1 - group) + extra
        need = (other, own) if group else (own, other)
        expected = expected_moves(self.model, group, need, movable)
        moves = self.pool.shrink(group, *need, movable, most)
        assert moves == expected[:most]
        assert not {source for source, _ in moves} & {target for _, target in moves}
        for source, target in moves:
            page = self.model.numbers(group)[source]
            to = next(p for p in all_pages(self.model, group) if self.model.number(group, p) == target)
            self.model.take(group, to)
            self.model.put_back(group, page)
            self.tenants[group][to] = self.tenants[group].pop(page)
        if len(moves) == len(expected) > 0:
            assert self.pool.fits(*need)
        return bool(moves)


def all_pages(model: Model, group: int) -> list[Page]:
    size = model.groups[group]
    return [(unit, slot) for unit in range(model.size // size.unit_bytes) for slot in range(size.unit_pages)]


def room(model: Model, need: tuple[int, int], kept: dict[int, int]) -> bool:
    """Whether both needs find room when the ends have the ``kept`` units, by counting unit after unit."""
    left = model.size
    for group, size in enumerate(model.groups):
        units = kept.get(group, model.units(group))
        while units * size.unit_pages < len(model.taken[group]) + need[group]:
            units += 1
        left -= units * size.unit_bytes
    return left >= 0


def expected_moves(
    model: Model, group: int, need: tuple[int, int], movable: Callable[[int], bool]
) -> list[tuple[int, int]]:
    """The fewest outermost units that make room are emptied into the fullest of the others."""
    kept = next((k for k in range(model.units(group), -1, -1) if room(model, need, {group: k})), None)
    if kept is None:
        return []
    sources = sorted((p for p in model.taken[group] if p[0] >= kept), key=lambda p: (-p[0], p[1]))
    if not all(movable(model.number(group, page)) for page in sources):
        return []
    holes = [p for p in all_pages(model, group) if p[0] < kept and p not in model.taken[group]]
    holes.sort(key=lambda p: (-model.in_use(group, p[0]), p))
    if len(holes) < len(sources):
        return []
    return [(model.number(group, a), model.number(group, b)) for a, b in zip(sources, holes, strict=False)]


@pytest.mark.parametrize("name", TIERS)
def test_pages_are_taken_in_order_and_no_byte_belongs_to_two(name: str) -> None:
    for seed in range(4):
        walk = Walk(name, seed)
        for _ in range(150):
            walk.step()
            walk.model.check(walk.pool)


@pytest.mark.parametrize("name", TIERS)
def test_fits_says_what_can_be_taken(name: str) -> None:
    answers = Counter[bool]()
    walk = Walk(name, 5)
    for _ in range(60):
        walk.step()
        need = walk.need()
        trial = copy.deepcopy(walk.pool)
        order = [0] * need[0] + [1] * need[1]
        walk.rng.shuffle(order)
        try:
            for group in order:
                trial.take(group)
            taken = True
        except IndexError:
            taken = False
        assert walk.pool.fits(*need) == taken == room(walk.model, need, {})
        answers[taken] += 1
    assert min(answers[True], answers[False]) > 0


@pytest.mark.parametrize("name", TIERS)
def test_moves_make_room(name: str) -> None:
    moved = 0
    for seed in range(8):
        walk = Walk(name, seed)
        for _ in range(25):
            group = walk.scatter()
            pinned = frozenset(walk.rng.sample(range(120), 8))
            moved += walk.shrink(
                group, lambda page, pinned=pinned: page not in pinned, walk.rng.choice((None, None, 1, 3))
            )
            walk.model.check(walk.pool)
    assert moved > 5


def test_a_page_that_may_not_move_stays() -> None:
    pool = PagePool(100, (PageSize(1, 10, 2), PageSize(1, 10, 4)))
    pages = [pool.take() for _ in range(7)]
    for page in (0, 1, 3):
        pool.put_back(page)
    assert pages == [0, 1, 2, 3, 4, 5, 6] and not pool.fits(0, 1)
    assert pool.shrink(0, 0, 1, lambda page: page != 6) == []
    assert pool.shrink(0, 0, 1, lambda page: page != 5) == [(6, 3)]
    assert pool.fits(0, 1) and pool.take(1) == 6
    assert pool.shrink(0, 3, 0, bool) == []


def test_an_empty_unit_returns_to_the_middle_when_it_is_outermost() -> None:
    pool = PagePool(1_000, (PageSize(2, 10, 3), PageSize(1, 30, 2)))
    for _ in range(9):
        pool.take()
    assert [pool.take(1) for _ in range(3)] == [31, 32, 29]
    assert pool.middle_bytes == 1_000 - 3 * 60 - 2 * 60
    for page in (6, 7, 8):
        pool.put_back(page)
    assert (pool.middle_bytes, pool.holes()) == (1_000 - 5 * 60, 3)
    assert pool.take() == 6
    pool.put_back(6)
    for page in (12, 13, 14):
        pool.put_back(page)
    assert (pool.middle_bytes, pool.holes()) == (1_000 - 3 * 60, 0)


class OldPool:
    """The pool of a tier before there were groups."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._heap = list(range(capacity))
        self._free = set(self._heap)
        self.held: defaultdict[int, int] = defaultdict(int)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, tenant: int = 0) -> int:
        page = heapq.heappop(self._heap)
        self._free.remove(page)
        self.held[tenant] += 1
        return page

    def put_back(self, page: int, tenant: int = 0) -> None:
        if page in self._free or not 0 <= page < self.capacity:
            raise ValueError(f"page {page} of {self.capacity} is not taken")
        self._free.add(page)
        self.held[tenant] -= 1
        heapq.heappush(self._heap, page)


def outcome(call: Callable[[], int | None]) -> int | str | None:
    try:
        return call()
    except IndexError:
        return "IndexError"
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("capacity", [0, 1, 30])
def test_one_group_is_the_pool_of_before(capacity: int) -> None:
    rng = random.Random(capacity)
    size = PageSize(3, 5, unit_pages=4)
    pool, old = PagePool(15 * capacity + 7, (size,)), OldPool(capacity)
    for _ in range(2_000):
        tenant, page = rng.randrange(3), rng.randrange(-2, capacity + 2)
        if rng.random() < 0.4:
            new, before = outcome(lambda: pool.take(0, tenant)), outcome(lambda: old.take(tenant))  # noqa: B023
        else:
            new = outcome(lambda: pool.put_back(page, 0, tenant))  # noqa: B023
            before = outcome(lambda: old.put_back(page, tenant))  # noqa: B023
        assert new == before
        assert (pool.free(), pool.used(), pool.capacity()) == (old.free, capacity - old.free, capacity)
        assert +Counter(pool.held) == +Counter({who: 15 * pages for who, pages in old.held.items()})
        assert pool.is_free(page) == (page in old._free)
        assert pool.fits(page) == pool.fits(page, 0) == (page <= old.free)


def test_a_group_without_layers_costs_nothing() -> None:
    pool = PagePool(1_000, (PageSize(0, 0, 1), PageSize(1, 30, 2)))
    assert pool.fits(1_000, 32) and not pool.fits(0, 33)
    assert [pool.take() for _ in range(5)] == [0] * 5
    pages = [pool.take(1) for _ in range(32)]
    assert pages[:3] == [31, 32, 29] and sorted(pages) == list(range(1, 33))
    assert (pool.used(), pool.used(1), pool.used_bytes, pool.held[0]) == (0, 32, 960, 960)
    assert pool.fits(1_000, 0) and not pool.fits(0, 1)
    pool.put_back(0)
    assert pool.free() == pool.capacity() > 1 << 30 and pool.is_free(0)
    assert pool.shrink(0, 0, 1, bool) == pool.shrink(1, 0, 1, bool) == []


def test_sizes_that_cannot_work_are_refused() -> None:
    groups = (PageSize(2, 10, 3), PageSize(1, 30, 2))
    with pytest.raises(
        ValueError, match="119 bytes is too small: a unit of each group needs 60 \\+ 60 = 120"
    ):
        PagePool(119, groups)
    assert PagePool(120, groups).fits(3, 2)
    empty = PagePool(0, groups)
    assert (empty.free(0), empty.free(1), empty.fits(0, 0), empty.fits(0, 1)) == (0, 0, True, False)
    with pytest.raises(ValueError, match="one or two KV groups, not 3"):
        PagePool(1_000, (*groups, groups[0]))
    with pytest.raises(ValueError, match="one or two KV groups, not 0"):
        PagePool(1_000, ())
    with pytest.raises(ValueError, match="needs a KV group with layers"):
        PagePool(1_000, (PageSize(0, 0, 1),))
    for wrong in ((-1, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="must be positive"):
            PageSize(*wrong)


def test_a_unit_has_2_mib_of_each_layer() -> None:
    page = 163_840  # 32 tokens of 10 heads of 128, keys and values, 2 bytes
    assert unit_pages_for(40, page, 40 << 30, on_gpu=True) == 13
    assert unit_pages_for(40, 3 << 20, 40 << 30, on_gpu=True) == 1
    assert unit_pages_for(40, page, 40 * page * 80, on_gpu=True) == 10, "1/8 of the tier"
    assert unit_pages_for(40, page, 40 * page * 640, on_gpu=False) == 10, "1/64 of the tier"
    assert unit_pages_for(40, page, 40 << 30, on_gpu=False) == 13
    assert unit_pages_for(40, page, 40 * page, on_gpu=False) == 1
    assert unit_pages_for(0, 0, 40 << 30, on_gpu=True) == 1
