"""The order of copies and steps with two KV groups, whose pages take turns in the same bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.core import Ints, RequestKey
from pensieve.engine.kv import queue as swap_queue
from pensieve.engine.kv.grid import TierLayout, UnitOwners
from pensieve.engine.kv.queue import SwapQueue
from pensieve.engine.kv.timeline import Lane
from pensieve.engine.plan import Copy, Plan, Span
from support.engine.hybrid_lanes import HybridLanes
from support.engine.hybrid_plans import VALUE_BYTES, WORD, Memory, Planner, Shape, Values, tiers, work_of
from support.lengths import at_length

IN, OUT, COMPUTE = Lane.IN, Lane.OUT, Lane.COMPUTE


@pytest.fixture(autouse=True)
def small_quanta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a slice, and few of them: the list of copies out is used."""
    monkeypatch.setattr(swap_queue, "QUANTUM_BYTES", 4 * WORD)
    monkeypatch.setattr(swap_queue, "AHEAD_QUANTA", 3)


class Rig:
    """A queue on fake lanes beside an oracle."""

    def __init__(
        self,
        seed: int,
        *,
        pipelined: bool = True,
        ignored: tuple[Lane, Lane] | None = None,
        layers_wait: bool = True,
        kind: str | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.shape = Shape.draw(self.rng, kind)
        self.planner = Planner(self.rng, self.shape)
        self.oracle = Memory.random(self.shape, seed)
        faults = frozenset() if ignored is None else frozenset([ignored])
        self.lanes = HybridLanes(self.oracle.copy(), self.rng, faults, layers_wait)
        self.queue = SwapQueue(self.lanes, self.shape.sizes, pipelined=pipelined)
        self.got: list[list[Values]] = []
        self.want: list[list[Values]] = []

    def launch(self, plan: Plan) -> None:
        outputs: list[Values] = []
        self.queue.before_step(plan)
        if plan.spans:
            self.lanes.compute(work_of(plan, self.shape), outputs)
        self.queue.after_step(plan)
        self.got.append(outputs)
        self.want.append(self.oracle.run(plan) if plan.spans else self._copies_only(plan))

    def _copies_only(self, plan: Plan) -> list[Values]:
        self.oracle.run(plan)
        return []

    def right(self) -> bool:
        memory = self.lanes.memory
        same = np.array_equal(memory.device, self.oracle.device)
        same &= np.array_equal(memory.host, self.oracle.host)
        for got, want in zip(self.got, self.want, strict=True):
            same &= len(got) == len(want) and all(map(np.array_equal, got, want))
        return same

    def run(self, plans: int = 40) -> bool:
        """Random plans, with any amount of time between them."""
        for step in range(plans):
            self.launch(self.planner.make(step))
            if self.rng.random() < 0.3:
                self.queue.settle()
                self.queue.feed()
            self.lanes.pass_time(self.rng.choice([0, 0, 3, 30, 300]))
        self.finish()
        return self.right()

    def finish(self) -> None:
        self.queue.flush()
        self.lanes.pass_time()
        self.queue.settle()


@settings(max_examples=at_length(60, 400))
@given(seed=st.integers(0, 10**9), pipelined=st.booleans())
def test_plans_take_effect_one_after_the_other(seed: int, pipelined: bool) -> None:
    rig = Rig(seed, pipelined=pipelined)
    assert rig.run()
    lines = rig.queue.lines
    assert rig.queue.backlog == 0 and not any(line.busy or line.queued_bytes for line in lines.values())


def run_and_give_back(seed: int, ignored: Lane | None = None) -> bool:
    """Some plans, then a part of the device tier goes as soon as its marks are reached: what no plan used any more."""
    rig = Rig(seed)
    for step in range(10):
        rig.launch(rig.planner.make(step))
        rig.lanes.pass_time(rig.rng.choice([0, 3, 30]))
    if seed % 2:
        # Copies alone: the compute stream does not wait for them.
        plan = rig.planner.make(10)
        rig.lanes.pass_time()
        rig.launch(Plan(10, swap_out=plan.swap_out, swap_in=plan.swap_in))
    start, stop = sorted(rig.rng.randrange(rig.shape.device.num_bytes // 16 + 1) * 16 for _ in range(2))
    marks = rig.queue.marks_of(start, stop)
    if ignored is not None:
        known = [work.end for work in rig.queue.lines[ignored]._works]
        marks = [mark for mark in marks if all(mark is not end for end in known)]
    for _ in range(100_000):
        if all(mark.query() for mark in marks):
            break
        rig.lanes.pass_time(1)
    else:
        raise AssertionError("the marks are never reached")
    for memory in (rig.lanes.memory, rig.oracle):
        memory.device[start // VALUE_BYTES : stop // VALUE_BYTES] = -1
    rig.finish()
    return rig.right()


@settings(max_examples=at_length(60, 1000))
@given(seed=st.integers(0, 10**9))
def test_memory_goes_after_its_last_use(seed: int) -> None:
    assert run_and_give_back(seed)


@pytest.mark.parametrize("lane", Lane, ids=lambda lane: lane.value)
def test_memory_waits_for_each_lane(lane: Lane) -> None:
    assert any(not run_and_give_back(seed, lane) for seed in range(60))


EDGES = [(IN, COMPUTE), (IN, OUT), (OUT, COMPUTE), (OUT, IN), (COMPUTE, OUT), (COMPUTE, IN)]


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge[0].value}-after-{edge[1].value}")
def test_each_wait_is_needed(edge: tuple[Lane, Lane]) -> None:
    assert any(not Rig(seed, ignored=edge).run() for seed in range(60))


def test_waits_of_layers_are_needed() -> None:
    assert any(not Rig(seed, layers_wait=False).run() for seed in range(20))


@pytest.mark.parametrize("tier", ["_device_owners", "_host_owners"])
def test_clocks_must_change_hands_with_their_unit(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, copies and steps of the other group in the same bytes are overtaken."""

    def run(seed: int) -> bool:
        rig = Rig(seed)
        owners = getattr(rig.queue, tier)
        monkeypatch.setattr(owners, "claim", lambda indices, clocks: None)
        return rig.run()

    assert any(not run(seed) for seed in range(100))


class LateOwners(UnitOwners):
    """Takes a unit only once: a unit that was taken back is not noticed."""

    def _take(self, group: int, unit: int, clocks: Sequence[Ints]) -> None:
        super()._take(group, unit, clocks)
        for owned in self._owned:
            owned[:] = True


def test_a_unit_changes_hands_each_time() -> None:
    def run(seed: int) -> bool:
        rig = Rig(seed)
        rig.queue._device_owners = LateOwners(rig.shape.device.grids)
        return rig.run()

    assert any(not run(seed) for seed in range(60))


def test_units_change_hands_often() -> None:
    """The random plans are of use only if they do."""
    taken = 0

    class Counting(UnitOwners):
        def _take(self, group: int, unit: int, clocks: Sequence[Ints]) -> None:
            nonlocal taken
            taken += 1
            super()._take(group, unit, clocks)

    for seed in range(5):
        rig = Rig(seed)
        rig.queue._device_owners = Counting(rig.shape.device.grids)
        rig.queue._host_owners = Counting(rig.shape.host.grids)
        assert rig.run()
    assert taken > 100


def test_pages_that_do_not_exist_are_refused() -> None:
    rig = Rig(0)
    first, second = rig.shape.device.grids
    wrong = [
        Copy(first.end, 0),
        Copy(first.size.unit_pages, 0),  # between two units
        Copy(second.first - 1, second.first, 1),
        Copy(second.first + second.size.unit_pages, second.first, 1),
        Copy(0, 1, 2),
    ]
    for copy in wrong:
        with pytest.raises(ValueError, match="step 4: copies names a page that does not exist"):
            rig.queue.before_step(Plan(4, copies=(copy,)))
    assert not any(rig.lanes.queues.values())


@pytest.mark.parametrize("seed", range(3))
def test_a_step_waits_for_copies_of_the_other_group_in_its_bytes(seed: int) -> None:
    rig = Rig(seed, kind="window")
    first, second = rig.shape.device.grids
    start = second.address(second.first)
    overlapping = first.units_in(start, start + second.size.unit_bytes)
    below, above = (first.pages_of(overlapping[:1]), first.pages_of(overlapping[-1:]))
    apart = next(
        page
        for page in range(first.end)
        if first.is_page(np.array([page])) and not below.start <= page < above.stop
    )
    out = [*range(below.start, below.stop), *range(above.start, above.stop)][:3]
    rig.launch(Plan(0, swap_out=tuple(Copy(page, 2 * slot) for slot, page in enumerate(out))))
    tables = (np.array([apart], np.int32),), (np.array([second.first], np.int32),)
    span = Span(RequestKey(0), 0, np.zeros(2, np.int32), 0, None, 2)
    rig.launch(Plan(1, (span,), tables[0], window_tables=tables[1]))
    assert rig.lanes.followed == [(COMPUTE, OUT)]
    rig.finish()
    assert rig.right()


@given(tiers(), st.data())
def test_clocks_tell_of_all_uses_of_a_pages_bytes(tier: TierLayout, data: st.DataObject) -> None:
    """Under whatever number of whatever group, and of no others while the unit stays with its group."""
    grids = tier.grids
    owners = UnitOwners(grids)
    clock = np.zeros(owners.length, np.int64)
    by_byte = np.zeros(tier.num_bytes, np.int64)
    pages = [
        (group, page)
        for group, grid in enumerate(grids)
        for unit in range(grid.units)
        for page in range(
            grid.pages_of(range(unit, unit + 1)).start, grid.pages_of(range(unit, unit + 1)).stop
        )
    ]
    alone = dict.fromkeys(pages, 0)
    for ticket, (group, page) in enumerate(data.draw(st.lists(st.sampled_from(pages), max_size=40)), 1):
        grid = grids[group]
        index = np.array([page + (owners.second if group else 0)])
        starts = [grid.address(page, layer) for layer in range(grid.size.layers)]
        parts = [by_byte[start : start + grid.size.layer_page_bytes] for start in starts]
        owners.claim(index, [clock])
        assert clock[index[0]] >= max(part.max() for part in parts)
        others = [seen for (other, _), seen in alone.items() if other != group]
        assert clock[index[0]] in (alone[group, page], *others), "of this page, or of the other group"
        clock[index] = alone[group, page] = ticket
        for part in parts:
            part[:] = ticket
