"""Random plans over tiny tiers of two KV groups, in which units change their group at once, and what must come of
them.

A tier is one array of whole numbers. Pages are taken from the cache's own ``PagePool``. A step's "model" turns each
page that it writes into ``3 * old + number`` and each chain's state into two other numbers, then adds up all that it
reads. So whatever is read or written too early, too late or elsewhere changes all later values.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from pensieve.core import RequestKey
from pensieve.engine.cache.pages import PagePool, PageSize
from pensieve.engine.kv.grid import Grid, TierLayout
from pensieve.engine.kv.queue import SecondGroup, Sizes
from pensieve.engine.plan import NO_PAGE, Chain, Copy, Plan, Span

Values = npt.NDArray[np.int32]
WORD, VALUE_BYTES = 16, 4
"""Bytes that a copy moves at a time, and of one number."""
PAGE_TOKENS, WINDOW, NUM_LAYERS = 4, 6, 5
LAYER_PAGE_BYTES = (2 * WORD, 3 * WORD)
UNIT_PAGES = (3, 2)
LAYERS = {"window": ((1, 4), (0, 2, 3)), "state": ((1, 4), (0, 1, 3))}
"""Layers of both groups by the second one's kind. One layer has attention and a state."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The groups and tiers of a random run."""

    kind: str
    device: TierLayout
    host: TierLayout

    @staticmethod
    def draw(rng: random.Random, kind: str | None = None) -> Shape:
        kind = kind or rng.choice(["window", "state"])

        def sizes(units: Sequence[int]) -> tuple[PageSize, ...]:
            return tuple(
                PageSize(len(layers), size, unit)
                for layers, size, unit in zip(LAYERS[kind], LAYER_PAGE_BYTES, units, strict=True)
            )

        device = TierLayout(WORD * rng.randrange(60, 110), sizes(UNIT_PAGES))
        return Shape(kind, device, TierLayout(WORD * rng.randrange(40, 70), sizes((1, 1))))

    @property
    def sizes(self) -> Sizes:
        (first, second), (host, other) = self.device.grids, self.host.grids
        group = SecondGroup(
            second.size.layers,
            second.size.page_bytes,
            WINDOW if self.kind == "window" else None,
            (first, second),
            (host, other),
        )
        return Sizes(first.end, host.end, PAGE_TOKENS, first.size.layers, first.size.page_bytes, group)


@st.composite
def tiers(draw: st.DrawFn) -> TierLayout:
    """A tier of two groups with room for some units of each."""
    sizes = tuple(
        PageSize(draw(st.integers(least, 4)), 16 * draw(st.integers(1, 5)), draw(st.integers(1, 4)))
        for least in (0, 1)
    )
    return TierLayout(16 * draw(st.integers(0, 60)) + sum(4 * size.unit_bytes for size in sizes), sizes)


@dataclass(frozen=True, slots=True)
class Work:
    """What a plan's step does in every layer of the model: pages by group."""

    step: int
    written: tuple[list[int], list[int]]
    read: tuple[list[int], list[int]]
    chains: tuple[Chain, ...]

    def number(self, layer: int, page: int) -> int:
        return 1000 * self.step + 50 * layer + page + 1


@dataclass(frozen=True, slots=True)
class Memory:
    """The contents of both tiers."""

    shape: Shape
    device: Values
    host: Values

    @staticmethod
    def random(shape: Shape, seed: int) -> Memory:
        numbers = np.random.default_rng(seed)
        tiers = (shape.device.num_bytes, shape.host.num_bytes)
        device, host = (
            numbers.integers(-(2**31), 2**31, size // VALUE_BYTES, dtype=np.int64).astype(np.int32)
            for size in tiers
        )
        return Memory(shape, device, host)

    def copy(self) -> Memory:
        return Memory(self.shape, self.device.copy(), self.host.copy())

    def on_device(self, group: int, number: int, page: int) -> Values:
        """The values of a page in layer ``number`` of a group."""
        return _part(self.device, self.shape.device.grids[group], number, page)

    def on_host(self, group: int, number: int, page: int) -> Values:
        return _part(self.host, self.shape.host.grids[group], number, page)

    def compute(self, work: Work, layer: int) -> list[Values]:
        """Do a step's work in one layer of the model, and return what it read: first all writes, then all reads."""
        outputs = []
        for group, layers in enumerate(LAYERS[self.shape.kind]):
            if layer not in layers:
                continue
            number = layers.index(layer)
            for page in work.written[group]:
                values = self.on_device(group, number, page)
                values[:] = values * np.int32(3) + np.int32(work.number(layer, page))
            total = np.zeros(LAYER_PAGE_BYTES[group] // VALUE_BYTES, np.int32)
            for page in work.read[group]:
                total += self.on_device(group, number, page)
            if group == 1:
                self._pass_states(work, number)
            outputs.append(total)
        return outputs

    def _pass_states(self, work: Work, number: int) -> None:
        def state(page: int) -> Values:
            return self.on_device(1, number, page)

        before = [0 if chain.read == NO_PAGE else state(chain.read).copy() for chain in work.chains]
        for chain, values in zip(work.chains, before, strict=True):
            for page, factor in ((chain.boundary, 5), (chain.live, 7)):
                if page != NO_PAGE:
                    state(page)[:] = np.int32(factor) * np.asarray(values, np.int32) + np.int32(work.step)

    def run(self, plan: Plan) -> list[Values]:
        """Carry out a plan in the order of ``pensieve.engine.plan``; return what its step read."""
        for copy in plan.swap_out:
            for number in self._layers(copy.group):
                self.on_host(copy.group, number, copy.dst)[:] = self.on_device(copy.group, number, copy.src)
        self.copy_on_device(plan.copies)
        for copy in plan.swap_in:
            for number in self._layers(copy.group):
                self.on_device(copy.group, number, copy.dst)[:] = self.on_host(copy.group, number, copy.src)
        work = work_of(plan, self.shape)
        return [values for layer in range(NUM_LAYERS) for values in self.compute(work, layer)]

    def copy_on_device(self, copies: Sequence[Copy]) -> None:
        places = [(copy, number) for copy in copies for number in self._layers(copy.group)]
        before = [self.on_device(copy.group, number, copy.src).copy() for copy, number in places]
        for (copy, number), values in zip(places, before, strict=True):
            self.on_device(copy.group, number, copy.dst)[:] = values

    def _layers(self, group: int) -> range:
        return range(self.shape.device.sizes[group].layers)


def _part(buffer: Values, grid: Grid, number: int, page: int) -> Values:
    start = grid.address(page, number) // VALUE_BYTES
    return buffer[start : start + grid.size.layer_page_bytes // VALUE_BYTES]


def work_of(plan: Plan, shape: Shape) -> Work:
    written: tuple[list[int], list[int]] = ([], [])
    read: tuple[list[int], list[int]] = ([], [])
    for span in plan.spans:
        groups = (plan.page_tables, plan.window_tables) if shape.kind == "window" else (plan.page_tables,)
        for group, tables in enumerate(groups):
            table = tables[span.page_table].tolist()
            first = max(0, span.start - WINDOW + 1) // PAGE_TOKENS if group else 0
            read[group].extend(table[first : -(-span.end // PAGE_TOKENS)])
            if span.stores >> group & 1:
                written[group].extend(table[span.start // PAGE_TOKENS : -(-span.end // PAGE_TOKENS)])
    return Work(plan.step, written, read, plan.chains)


@dataclass
class Planner:
    """Makes plans as the cache would: pages are taken, freed and moved, and bytes change groups within a plan."""

    rng: random.Random
    shape: Shape

    def __post_init__(self) -> None:
        self.device = PagePool(self.shape.device.num_bytes, self.shape.device.sizes)
        self.host = PagePool(self.shape.host.num_bytes, self.shape.host.sizes)
        self.pages: tuple[list[int], list[int]] = ([], [])
        self.saved: tuple[list[int], list[int]] = ([], [])

    def make(self, step: int) -> Plan:
        """Return the next plan."""
        rng = self.rng
        # Plans favour one group for a while, so that units change hands.
        favoured = step // 6 % 2
        flips = step % 6 == 0
        for pages, pool in ((self.saved, self.host), (self.pages, self.device)):
            self._free(pages, pool, 1 - favoured, rng.choice([0, 0, 1, 3]))
            self._free(pages, pool, favoured, rng.choice([0, 0, 0, 1]))
        old = tuple(list(pages) for pages in self.pages)
        out = tuple(self._swap_out(1 - favoured if flips else None))
        gone = {(copy.group, copy.src) for copy in out if flips or rng.random() < 0.6}
        if flips:  # without being saved
            gone |= {(1 - favoured, page) for page in self.pages[1 - favoured] if rng.random() < 0.5}
        for group, page in sorted(gone):
            self.pages[group].remove(page)
            self.device.put_back(page, group)
        copies = tuple(self._copies(favoured, old, gone))
        come_in = tuple(self._swap_in(favoured, {(copy.group, copy.dst) for copy in out}))
        for _ in range(rng.randrange(4) + 8 * flips):  # pages that the step fills
            self._take(rng.choice([favoured, favoured, 1 - favoured]))
        spans, tables, windows, chains = self._spans()
        return Plan(
            step,
            tuple(spans),
            tuple(tables),
            out,
            copies,
            come_in,
            window_tables=tuple(windows) if self.shape.kind == "window" else (),
            chains=tuple(chains),
        )

    def _free(self, pages: tuple[list[int], list[int]], pool: PagePool, group: int, count: int) -> None:
        for _ in range(min(count, len(pages[group]))):
            page = pages[group].pop(self.rng.randrange(len(pages[group])))
            pool.put_back(page, group)

    def _take(self, group: int) -> int | None:
        if not self.device.free(group):
            return None
        page = self.device.take(group)
        self.pages[group].append(page)
        return page

    def _swap_out(self, most_of: int | None) -> Iterator[Copy]:
        for group, pages in enumerate(self.pages):
            count = len(pages) if group == most_of else min(len(pages), self.rng.randrange(3))
            for page in self.rng.sample(pages, count):
                if self.host.free(group):
                    target = self.host.take(group)
                    self.saved[group].append(target)
                    yield Copy(page, target, group)

    def _copies(
        self, favoured: int, old: tuple[list[int], ...], gone: set[tuple[int, int]]
    ) -> Iterator[Copy]:
        """Moves that make room for the favoured group, and copies of pages into pages that are free by now."""
        other = 1 - favoured
        wanted = [0, 0]
        wanted[favoured] = self.device.free(favoured) + 1
        moves = self.device.shrink(other, *wanted, lambda page: page in old[other])
        for source, target in moves:
            self.pages[other].remove(source)
            self.pages[other].append(target)
            yield Copy(source, target, other)
        moved = {source for source, _ in moves}
        for group in (0, 1):
            for _ in range(self.rng.choice([0, 0, 1, 2])):
                sources = [page for page in old[group] if (group, page) not in gone]
                if group == other:
                    sources = [page for page in sources if page not in moved]
                target = self._take(group) if sources else None
                if target is not None:
                    yield Copy(self.rng.choice(sources), target, group)

    def _swap_in(self, favoured: int, written: set[tuple[int, int]]) -> Iterator[Copy]:
        for group in (favoured, favoured, 1 - favoured):
            sources = [page for page in self.saved[group] if (group, page) not in written]
            for source in self.rng.sample(sources, min(len(sources), self.rng.randrange(3))):
                target = self._take(group)
                if target is not None:
                    yield Copy(source, target, group)

    def _spans(
        self,
    ) -> tuple[list[Span], list[npt.NDArray[np.int32]], list[npt.NDArray[np.int32]], list[Chain]]:
        rng = self.rng
        found: _Rows = _Rows()
        for _ in range(rng.randrange(4) if rng.random() < 0.8 else 0):
            row = len(found.spans)
            chunks = rng.randrange(1, 5)
            start = rng.randrange(chunks * PAGE_TOKENS)
            length = rng.randrange(1, min(chunks * PAGE_TOKENS - start, 6) + 1)
            if chunks > len(self.pages[0]):
                continue
            table = self._some(0, chunks)
            stores = rng.choice([3, 3, 1, 2])
            window = [rng.randrange(-1, 9) for _ in range(chunks)]
            written = slice(start // PAGE_TOKENS, -(-(start + length) // PAGE_TOKENS))
            seen = range(max(0, start - WINDOW + 1) // PAGE_TOKENS, written.stop)
            chain = None
            if self.shape.kind == "window":
                if len(seen) > len(self.pages[1]):
                    continue
                window[seen.start : seen.stop] = self._some(1, len(seen))
            else:
                chain = self._chain(row, start, start + length, found)
                if chain is None:
                    continue
            targets = {(0, page) for page in table[written]} if stores & 1 else set()
            if self.shape.kind == "window" and stores & 2:
                targets |= {(1, page) for page in window[written]}
            if targets & found.written:
                continue
            found.written |= targets
            found.spans.append(Span(RequestKey(row), start, np.zeros(length, np.int32), row, None, stores))
            found.tables.append(np.array(table, np.int32))
            found.windows.append(np.array(window, np.int32))
            if chain is not None:
                found.chains.append(chain)
                found.read.add(chain.read)
                found.states |= {chain.boundary, chain.live} - {NO_PAGE}
        return found.spans, found.tables, found.windows, found.chains

    def _some(self, group: int, count: int) -> list[int]:
        """Distinct pages of a group, often the ones that were taken last."""
        pages = self.pages[group]
        return self.rng.sample(self.rng.choice([pages, pages[-count - 1 :]]), count)

    def _chain(self, row: int, start: int, end: int, found: _Rows) -> Chain | None:
        free = [page for page in self.pages[1] if page not in found.states | found.read]
        free = self.rng.choice([free, free[-3:]])
        if len(free) < 2:
            return None
        live, boundary = self.rng.sample(free, 2)
        readable = [page for page in self.pages[1] if page not in found.states]
        read = NO_PAGE if start == 0 else self.rng.choice([*readable, live, live])
        at = end // PAGE_TOKENS * PAGE_TOKENS
        if read == boundary or at <= start:
            boundary = NO_PAGE
        elif at == end and self.rng.random() < 0.5:
            live = NO_PAGE
        return Chain(row, row, read, boundary, at, live)


@dataclass
class _Rows:
    spans: list[Span] = field(default_factory=list)
    tables: list[npt.NDArray[np.int32]] = field(default_factory=list)
    windows: list[npt.NDArray[np.int32]] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    written: set[tuple[int, int]] = field(default_factory=set)
    states: set[int] = field(default_factory=set)
    """State pages that a chain writes."""
    read: set[int] = field(default_factory=set)
