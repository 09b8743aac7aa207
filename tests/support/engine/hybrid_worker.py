"""A worker like ``HashWorker`` for models with two KV groups, over memory in which pages of both groups can collide.

Each tier is one array of cells. A page lies in it as ``pensieve.engine.cache.pages`` says: one layer page for
each of the group's layers. The KV of a position mixes its token with the KV of all earlier positions (full layers), of
those in its window (windows), and with the state before it (states). So a slice that is stale, missing, overwritten by
the other group or one position off changes all tokens that follow.

The device tier may be elastic, with one group or two. Then memory backs only what plans have asked for: any other cell
cannot be read or written, and loses what it held.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from pensieve.config import CacheConfig, CacheGroup
from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import PENDING, Copy, Plan, Sampled, Span, StepResult, SynchronousWorker
from support.engine.hash_worker import MASK, POISON, mix, next_token, oracle_beams, read_kv, sample_after


def hybrid_kv(token: int, position: int, full: int, window: int, state: int) -> int:
    """KV of one position; ``full``, ``window``: sums of ``read_kv`` over the positions that each kind of layer sees."""
    return mix(mix(token + 1) ^ mix(position + (1 << 32)) ^ full ^ mix(window + 7) ^ mix(state + 13))


def next_state(state: int, kv: int) -> int:
    """The state after a position, given the state before it."""
    return mix(state ^ mix(kv + 99))


NONE = CacheGroup("full", 0, 0, 0, 1)
"""Stands for the second group of a model with one."""
Ends = tuple[int, int]


class HybridOracle:
    """Stateless runs of a model with these groups."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        groups = (*groups, NONE)[:2]
        self.full = groups[0].layers > 0
        self.window = groups[1].window if groups[1].kind == "window" else 0
        self.state = groups[1].kind == "state"

    def tokens(self, context: Sequence[int], count: int, seed: int = 0) -> list[int]:
        """What a stateless run over ``context`` generates."""
        return self._run(context, count, seed)[0]

    def last_kv(self, context: Sequence[int]) -> int:
        """KV of the last position of a context."""
        return self._run(context, 0, 0)[1]

    def _run(self, context: Sequence[int], count: int, seed: int) -> tuple[list[int], int]:
        tokens, reads, output = list(context), list[int](), list[int]()
        full = window = state = kv = 0
        for position in range(len(context) + count):
            if position >= len(context):
                output.append(next_token(kv, seed, len(output)))
                tokens.append(output[-1])
            if self.window and position >= self.window:
                window = (window - reads[position - self.window]) & MASK
            kv = hybrid_kv(tokens[position], position, full, window, state)
            reads.append(read_kv(kv, position))
            if self.full:
                full = (full + reads[-1]) & MASK
            if self.window:
                window = (window + reads[-1]) & MASK
            if self.state:
                state = next_state(state, kv)
        return output, kv

    def verify_beams(self, context: Sequence[int], output: Sequence[int], sampling: Sampling) -> None:
        """Raise AssertionError unless ``output`` is what a stateless beam search gives."""
        assert list(output) == oracle_beams(
            context, sampling, len(context) + len(output) + 1000, self.last_kv
        )

    def verify(self, context: Sequence[int], output: Sequence[int], seed: int = 0) -> None:
        """Raise AssertionError unless ``output`` is what a stateless run over ``context`` gives."""
        assert list(output) == self.tokens(context, len(output), seed)


class _Memory:
    """One tier's cells."""

    def __init__(self, size: int, groups: Sequence[CacheGroup], units: Sequence[int]) -> None:
        self.backed: Ends | None = None
        """Cells from the bottom and from the top that memory backs; None: all."""
        self.cells = np.full(max(size, 1), POISON, dtype=np.uint64)
        self.groups, self.units = groups, units
        second = groups[1].layer_page_bytes
        self.grids = (0, size % second if second else 0)

    def at(self, group: int, page: int, layer: int, offset: int = 0) -> int:
        kind = self.groups[group]
        assert page >= 0, f"a page of group {group} is read or written that nothing has"
        place = self.grids[group] + (page + layer * self.units[group]) * kind.layer_page_bytes + offset
        assert 0 <= place < len(self.cells), f"page {page} of group {group} lies outside the tier"
        if self.backed is not None:
            low, high = self.backed
            assert place < low or place >= len(self.cells) - high, (
                f"page {page} of group {group} is not backed"
            )
        return place

    def back(self, ends: Ends) -> None:
        """Back these cells and no others, which lose what they held."""
        self.backed = ends
        self.cells[ends[0] : len(self.cells) - ends[1]] = POISON

    def page(self, group: int, page: int) -> list[slice]:
        """The cells of each of the page's layer pages."""
        kind = self.groups[group]
        starts = [self.at(group, page, layer) for layer in range(kind.layers)]
        for start in starts:
            self.at(group, page, 0, start + kind.layer_page_bytes - 1 - self.at(group, page, 0))
        return [slice(start, start + kind.layer_page_bytes) for start in starts]


def held_back(rng: random.Random) -> Callable[[Ends, Ends], Ends]:
    """At times some memory, or all that was asked for in addition, cannot be allocated."""

    def allocate(before: Ends, asked: Ends) -> Ends:
        share = rng.choice((1.0, 1.0, 0.5, 0.0))
        grown = [max(after - had, 0) for had, after in zip(before, asked, strict=True)]
        low, high = (after - int(more * (1 - share)) for after, more in zip(asked, grown, strict=True))
        return low, high

    return allocate


class HybridWorker(SynchronousWorker):
    """Executes plans of a model with two groups, or with one and an elastic device tier."""

    def __init__(self, config: CacheConfig) -> None:
        self.size, self.groups = config.chunk_tokens, (*config.groups, NONE)[:2]
        self.window = self.groups[1].window if self.groups[1].kind == "window" else 0
        self.states = self.groups[1].kind == "state"
        units = [group.device_unit for group in self.groups]
        chunk = sum(group.page_bytes for group in self.groups)
        self.device = _Memory(config.device_bytes or config.device_chunks * chunk, self.groups, units)
        # A host tier with one group is one unit, whatever the device tier is.
        host_units = (1, 1) if len(config.groups) > 1 else (max(config.host_chunks, 1), 1)
        self.host = _Memory(config.host_bytes or config.host_chunks * chunk, self.groups, host_units)
        if config.device_floor_bytes is not None:
            self.device.back((0, 0))
        self.allocate: Callable[[Ends, Ends], Ends] = lambda before, asked: asked
        """(backed before, asked for): what is backed from now on."""
        self.plans: list[Plan] = []
        self.chosen: dict[RequestKey, list[int]] = {}
        """Tokens of each request in the latest step."""
        self.checked: dict[int, list[int]] = {}
        """The KV of each address that a plan has checked."""

    def run(self, plan: Plan) -> StepResult:
        self.check_plan(plan)
        self.plans.append(plan)
        plan = plan.decided(self.chosen)
        self._copy(plan.swap_out, self.device, self.host)
        self._copy(plan.copies, self.device, self.device)
        self._copy(plan.swap_in, self.host, self.device)
        before = [self._read_state(chain.read) for chain in plan.chains]
        sampled: list[Sampled] = []
        stored: list[tuple[int, int]] = []
        chain_of = {
            span: at for at, chain in enumerate(plan.chains) for span in range(chain.first, chain.last + 1)
        }
        assert not self.states or len(chain_of) == len(plan.spans), "a span without a chain"
        states = list(before)
        for number, span in enumerate(plan.spans):
            at = chain_of.get(number)
            state = 0 if at is None else states[at]
            kvs: list[int] = []
            for position in range(span.start, span.end):
                kvs.append(self._compute(plan, span, position, state))
                state = next_state(state, kvs[-1])
                if (
                    at is not None
                    and plan.chains[at].boundary >= 0
                    and plan.chains[at].boundary_at == position + 1
                ):
                    stored.append((plan.chains[at].boundary, state))
            if at is not None:
                states[at] = state
                if number == plan.chains[at].last and plan.chains[at].live >= 0:
                    stored.append((plan.chains[at].live, state))
            for kv, spec in zip(kvs[len(kvs) - span.num_chosen :], span.specs, strict=True):
                sampled.append(sample_after(kv, span.request, spec))
        for page, state in stored:
            for layer in range(self.groups[1].layers):
                self.device.cells[self.device.at(1, page, layer)] = state ^ layer
        for check in plan.checks:
            found = [
                kv for cells in self.device.page(0, check.page) for kv in self.device.cells[cells].tolist()
            ]
            assert self.checked.setdefault(check.address, found) == found, (
                "a chunk was computed otherwise before"
            )
        self.chosen = {}
        for one in sampled:
            self.chosen.setdefault(one.request, []).append(one.token_id)
        if plan.memory is None:
            return StepResult(tuple(sampled))
        # Only now, although a real worker backs what is missing first: no page of this plan may need it.
        before, cells = self.device.backed, len(self.device.cells)
        assert before is not None and sum(plan.memory) <= cells, plan.memory
        # Where all is backed, no allocation can fail: the ends only meet elsewhere.
        self.device.back(self.allocate(before, plan.memory) if sum(before) < cells else plan.memory)
        return StepResult(tuple(sampled), memory=self.device.backed)

    def check_plan(self, plan: Plan) -> None:
        """Each page has at most one writer in each phase, and no host page is written and read."""
        for span in plan.spans:
            last = len(span.tokens) - 1 - span.drafts
            assert PENDING not in np.delete(span.tokens, last), (
                "only the last token that is no draft may be pending"
            )
        saved = {(copy.group, copy.dst) for copy in plan.swap_out}
        assert len(saved) == len(plan.swap_out), "two slices saved to one host page"
        assert not saved & {(copy.group, copy.src) for copy in plan.swap_in}, (
            "a host page is written and read"
        )
        targets = [(copy.group, copy.dst) for copy in plan.swap_in + plan.copies]
        assert len(set(targets)) == len(targets), "two slices restored to one device page"
        live = [page for chain in plan.chains for page in (chain.live, chain.boundary) if page >= 0]
        assert len(set(live)) == len(live), "two states stored in one page"
        others = {chain.live for chain in plan.chains} | {chain.boundary for chain in plan.chains}
        for chain in plan.chains:
            foreign = others - {chain.live, chain.boundary}
            assert chain.read < 0 or chain.read not in foreign, "a chain reads what another writes"
            assert chain.read >= 0 or plan.spans[chain.first].start == 0, "a zero state in the middle"

    def _copy(self, copies: Sequence[Copy], source: _Memory, target: _Memory) -> None:
        """All reads come before any write."""
        read = [
            [source.cells[cells].copy() for cells in source.page(copy.group, copy.src)] for copy in copies
        ]
        for copy, values in zip(copies, read, strict=True):
            for cells, value in zip(target.page(copy.group, copy.dst), values, strict=True):
                target.cells[cells] = value

    def _read_state(self, page: int) -> int:
        if page < 0:
            return 0
        values = {
            int(self.device.cells[self.device.at(1, page, layer)]) ^ layer
            for layer in range(self.groups[1].layers)
        }
        assert len(values) == 1, "the layers of a state belong to different states"
        return values.pop()

    def _compute(self, plan: Plan, span: Span, position: int, state: int) -> int:
        token = int(span.tokens[position - span.start])
        full, window = 0, 0
        if self.groups[0].layers:
            full = self._sum(plan.page_tables[span.page_table], 0, range(position))
        if self.window:
            first = max(position - self.window + 1, 0)
            window = self._sum(plan.window_tables[span.page_table], 1, range(first, position))
        kv = hybrid_kv(token, position, full, window, state if self.states else 0)
        for group in (0, 1) if self.window else (0,):
            tables = plan.page_tables if group == 0 else plan.window_tables
            if span.stores >> group & 1:
                for layer in range(self.groups[group].layers):
                    page = int(tables[span.page_table][position // self.size])
                    self.device.cells[self.device.at(group, page, layer, position % self.size)] = kv
        return kv

    def _sum(self, table: np.ndarray[tuple[int], np.dtype[np.int32]], group: int, positions: range) -> int:
        total = 0
        layers = self.groups[group].layers
        for position in positions:
            page = int(table[position // self.size])
            kv = int(self.device.cells[self.device.at(group, page, position % layers, position % self.size)])
            total += read_kv(kv, position)
        return total & MASK

    def close(self) -> None:
        """Nothing to release."""
