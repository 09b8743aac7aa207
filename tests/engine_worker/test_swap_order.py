"""The order of copies and steps without a GPU: every plan has its effect as if it had run alone, whatever is slow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.core import RequestKey
from pensieve.engine.kv import queue as swap_queue
from pensieve.engine.kv.mechanisms import CALL_BYTES, calls_for, layer_groups
from pensieve.engine.kv.queue import Sizes, SwapQueue
from pensieve.engine.kv.timeline import Lane
from pensieve.engine.plan import Copy, Plan, Span
from support.engine.fake_lanes import FakeLanes
from support.engine.swap_plans import DEVICE_PAGES, HOST_PAGES, PAGE_TOKENS, Pools, make_plan, work_of
from support.lengths import at_length

LAYERS, WORDS = 5, 2
IN, OUT, COMPUTE = Lane.IN, Lane.OUT, Lane.COMPUTE
CHUNK_BYTES = LAYERS * WORDS * 4


@pytest.fixture(autouse=True)
def small_quanta(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantum is less than a chunk, and two of them are most that is under way: the list is used."""
    monkeypatch.setattr(swap_queue, "QUANTUM_BYTES", 3 * WORDS * 4)
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
    ) -> None:
        self.rng = random.Random(seed)
        self.oracle = Pools.random(LAYERS, WORDS, seed)
        self.lanes = FakeLanes(
            self.oracle.copy(),
            self.rng,
            frozenset() if ignored is None else frozenset([ignored]),
            layers_wait,
        )
        sizes = Sizes(DEVICE_PAGES, HOST_PAGES, PAGE_TOKENS, LAYERS, CHUNK_BYTES)
        self.queue = SwapQueue(self.lanes, sizes, pipelined=pipelined)
        self.got: list[np.ndarray] = []
        self.want: list[np.ndarray] = []

    def launch(self, plan: Plan) -> None:
        self.queue.before_step(plan)
        outputs = np.zeros((LAYERS, WORDS), np.int32)
        if plan.spans:
            self.lanes.step(work_of(plan), outputs)
        self.queue.after_step(plan)
        self.got.append(outputs)
        self.want.append(self.oracle.run(plan))

    def finish(self) -> None:
        self.queue.flush()
        self.lanes.pass_time()
        self.queue.settle()

    def right(self) -> bool:
        pools = self.lanes.pools
        same = np.array_equal(pools.device, self.oracle.device) and np.array_equal(
            pools.host, self.oracle.host
        )
        return same and all(np.array_equal(a, b) for a, b in zip(self.got, self.want, strict=True))

    def run(self, plans: int = 30) -> bool:
        """Random plans, with any amount of time between them."""
        for step in range(plans):
            self.launch(make_plan(self.rng, step))
            if self.rng.random() < 0.3:
                self.queue.settle()
                self.queue.feed()
            self.lanes.pass_time(self.rng.choice([0, 0, 3, 30, 300]))
        self.finish()
        return self.right()


@settings(max_examples=at_length(150, 400))
@given(seed=st.integers(0, 10**9), pipelined=st.booleans())
def test_plans_take_effect_one_after_the_other(seed: int, pipelined: bool) -> None:
    rig = Rig(seed, pipelined=pipelined)
    assert rig.run()
    lines = rig.queue.lines
    assert rig.queue.backlog == 0 and not any(line.busy or line.queued_bytes for line in lines.values())


EDGES = [(IN, COMPUTE), (IN, OUT), (OUT, COMPUTE), (OUT, IN), (COMPUTE, OUT), (COMPUTE, IN)]


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge[0].value}-after-{edge[1].value}")
def test_each_wait_is_needed(edge: tuple[Lane, Lane]) -> None:
    assert any(not Rig(seed, ignored=edge).run() for seed in range(60))


def test_waits_of_layers_are_needed() -> None:
    assert any(not Rig(seed, layers_wait=False).run() for seed in range(20))


class Forgetful(np.ndarray):
    """Never remembers a ticket."""

    def __setitem__(self, index: object, value: object) -> None:
        return


@pytest.mark.parametrize("clock", ["_touched", "_read_out", "_brought_in", "_saved", "_loaded"])
def test_each_memory_of_a_page_is_needed(clock: str) -> None:
    def run(seed: int) -> bool:
        rig = Rig(seed)
        setattr(rig.queue, clock, getattr(rig.queue, clock).view(Forgetful))
        return rig.run()

    assert any(not run(seed) for seed in range(200))


# -- which waits are queued: what is free must stay free -------------------------------------------------------------


def span(row: int, start: int, length: int = 1) -> Span:
    return Span(RequestKey(row), start, np.zeros(length, np.int32), row)


def table(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def plan(step: int, *pages: int, start: int = 0, **copies: Sequence[tuple[int, int]]) -> Plan:
    """One row of pages, one token at ``start``; no spans without pages."""
    lists = {name: tuple(Copy(*pair) for pair in pairs) for name, pairs in copies.items()}
    return Plan(step, (span(0, start),) if pages else (), (table(*pages),) if pages else (), **lists)


def waits(rig: Rig, next_plan: Plan) -> list[tuple[Lane, Lane]]:
    before = len(rig.lanes.followed)
    rig.launch(next_plan)
    return rig.lanes.followed[before:]


def test_swap_in_runs_beside_a_step_that_does_not_use_its_pages() -> None:
    rig = Rig(0)
    assert waits(rig, plan(0, 1, 2)) == []
    assert waits(rig, plan(1, 1, 2, swap_in=[(0, 5), (1, 6)])) == []
    assert waits(rig, plan(2, 5, swap_in=[(0, 2)])) == [(IN, COMPUTE)]
    rig.finish()
    assert waits(rig, plan(3, 1, swap_in=[(0, 5)])) == [], "what is done is not waited for"
    rig.finish()
    assert rig.right()


def test_swap_out_does_not_hold_a_step_up_unless_it_writes_the_page() -> None:
    rig = Rig(0)
    assert waits(rig, plan(0, 1, 2, swap_out=[(3, 0), (4, 1)])) == []
    assert waits(rig, plan(1, 3, 4, 1, start=2 * PAGE_TOKENS)) == [], "reading 3 and 4 is no harm"
    assert waits(rig, plan(2, 3, 4, start=PAGE_TOKENS)) == [(COMPUTE, OUT)]
    assert waits(rig, plan(3, swap_in=[(6, 4)])) == [(IN, COMPUTE), (IN, OUT)]
    rig.finish()
    assert rig.right()


def test_a_copy_out_waits_for_the_step_that_used_the_page() -> None:
    rig = Rig(0)
    rig.launch(plan(0, 1, 2))
    assert waits(rig, plan(1, 3, swap_out=[(5, 0), (6, 1)])) == []
    assert waits(rig, plan(2, 3, swap_out=[(2, 2)])) == []  # those before it fill the quanta
    rig.lanes.pass_time()
    rig.launch(plan(3, 3))
    rig.finish()
    assert (OUT, COMPUTE) not in rig.lanes.followed, "the step had ended by then"
    rig.launch(plan(4, 3))
    assert waits(rig, plan(5, swap_out=[(3, 3)])) == [(OUT, COMPUTE)]
    rig.finish()
    assert rig.right()


def test_a_chunk_saved_and_brought_back_waits_for_its_copy() -> None:
    rig = Rig(0)
    rig.launch(plan(0, swap_out=[(1, 0), (2, 1), (3, 2)]))
    assert waits(rig, plan(1, swap_in=[(1, 5)])) == [(IN, OUT)]
    queued = sum(count for _, count in rig.lanes.out_calls)
    assert 2 * LAYERS <= queued < 3 * LAYERS, "what is needed, and little of what is not"
    assert waits(rig, plan(2, swap_in=[(0, 6)])) == [], (
        "an earlier one on the same stream needs no wait of its own"
    )
    rig.finish()
    assert rig.right()


def test_a_step_waits_for_what_a_plan_without_a_step_brought_in() -> None:
    rig = Rig(0)
    rig.launch(plan(0, swap_in=[(0, 5)]))
    assert waits(rig, plan(1, 1, 2)) == []
    assert waits(rig, plan(2, 1, 5)) == [(COMPUTE, IN)]
    rig.finish()
    assert rig.right()


def test_not_pipelined_waits_at_the_start() -> None:
    rig = Rig(0, pipelined=False)
    assert waits(rig, plan(0, 5, swap_in=[(0, 5)])) == [(COMPUTE, IN)]


def test_copies_out_yield_to_copies_in() -> None:
    runs_of_quantum = 3
    rig = Rig(0)
    rig.launch(plan(0, swap_in=[(6, 8)]))
    rig.launch(plan(1, swap_out=[(page, page) for page in range(4)]))
    assert rig.lanes.out_calls == [(0, runs_of_quantum)] and rig.queue.backlog == 4
    rig.queue.feed()
    assert len(rig.lanes.out_calls) == 1, "one quantum is under way"
    rig.lanes.pass_time()
    rig.queue.feed()
    assert rig.lanes.out_calls[1:] == [(runs_of_quantum, 3 * runs_of_quantum)]
    assert rig.queue.backlog == 4 - runs_of_quantum // LAYERS
    while rig.queue.backlog:
        rig.lanes.pass_time()
        rig.queue.feed()
        rig.queue.settle()
    line = rig.queue.lines[OUT]
    assert line.finished_bytes == 4 * CHUNK_BYTES
    assert line.finished_seconds == pytest.approx(0.002 * len(rig.lanes.out_calls))
    assert rig.right()


def test_pages_that_do_not_exist_are_refused() -> None:
    beyond = [("swap_out", (0, HOST_PAGES)), ("swap_in", (HOST_PAGES, 0)), ("copies", (DEVICE_PAGES, 0))]
    for name, pair in [*beyond, ("swap_in", (-1, 0))]:
        rig = Rig(0)
        with pytest.raises(ValueError, match=f"step 4: {name} names a page"):
            rig.launch(Plan(4, **{name: (Copy(*pair),)}))  # type: ignore[arg-type]
        assert not any(rig.lanes.queues.values())


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 12, 24, 32, 40, 41, 80])
def test_layer_groups(num_layers: int) -> None:
    groups = layer_groups(num_layers)
    sizes = [len(group) for group in groups]
    assert [layer for group in groups for layer in group] == list(range(num_layers))
    assert sizes[0] == sizes[-1] == 1 and max(sizes) <= 8
    assert all(max(a, b) <= 2 * min(a, b) or a + b > 8 for a, b in itertools.pairwise(sizes))
    if num_layers == 40:
        assert sizes == [1, 1, 2, 4, 8, 8, 8, 4, 2, 1, 1]


@pytest.mark.parametrize(("layer_bytes", "expected"), [(1, 1), (CALL_BYTES // 9, 3), (CALL_BYTES, 11)])
def test_small_copies_are_made_by_few_calls(layer_bytes: int, expected: int) -> None:
    groups = layer_groups(40)
    calls = list(calls_for(groups, layer_bytes))
    assert [group for _, together in calls for group in together] == list(groups)
    assert all(layers == range(together[0].start, together[-1].stop) for layers, together in calls)
    assert all(len(layers) * layer_bytes >= CALL_BYTES for layers, _ in calls[:-1])
    assert len(calls) == expected
