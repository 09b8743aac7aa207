"""Copies beside steps on a real GPU, everything slow by chance: the result of plans run one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pensieve.core import RequestKey
from pensieve.engine.kv import pools as kv_pools
from pensieve.engine.kv import queue as swap_queue
from pensieve.engine.kv.mechanisms import make_copy
from pensieve.engine.kv.pools import KvPools, PinnedMemory
from pensieve.engine.kv.recomputed import RestoreMismatch
from pensieve.engine.kv.swap import SwapEngine
from pensieve.engine.kv.timeline import Lane
from pensieve.engine.plan import Copy, Plan, Span
from pensieve.kernels.chunk_copy import chunk_copy, runs_of
from support.engine.slow_lanes import LAYERS, WORDS, Edge, Rig, make_engine, make_pools, nap

pytestmark = pytest.mark.gpu
IN, OUT, COMPUTE = Lane.IN, Lane.OUT, Lane.COMPUTE
MECHANISMS = ("kernel", "batch")
EDGES = [(IN, COMPUTE), (IN, OUT), (OUT, COMPUTE), (OUT, IN), (COMPUTE, OUT), (COMPUTE, IN)]


def small_quanta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a chunk, and few of them: copies out are cut and wait in the list."""
    monkeypatch.setattr(swap_queue, "QUANTUM_BYTES", 3 * WORDS * 4)
    monkeypatch.setattr(swap_queue, "AHEAD_QUANTA", 3)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "whole"])
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "plain"])
def test_random_plans(mechanism: str, pipelined: bool, verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(60):
        if seed == 30:
            small_quanta(monkeypatch)
        rig = Rig(seed, mechanism=mechanism, pipelined=pipelined, verify=verify)
        assert rig.run(), f"seed {seed}"


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge[0].value}-after-{edge[1].value}")
def test_each_wait_is_needed(edge: Edge, mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above notice when one kind of wait is left out."""
    small_quanta(monkeypatch)
    assert any(not Rig(seed, ignored=[edge], mechanism=mechanism).run() for seed in range(30))


def test_waits_of_layers_are_needed() -> None:
    assert any(not Rig(seed, layers_wait=False).run() for seed in range(10))


# -- inside CUDA graphs ----------------------------------------------------------------------------------------------


def test_a_replay_waits_for_records_made_before_its_launch_only() -> None:
    """Why the events of layers can be recorded again while replays are queued: what a wait in a graph waits for is
    settled when the graph is launched. Otherwise a step would wait for the next one's copies, which wait for it."""
    side, compute = torch.cuda.Stream(), torch.cuda.Stream()
    source, seen = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    event, graph = torch.cuda.Event(external=True), torch.cuda.CUDAGraph()
    event.record(side)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=compute):
        torch.cuda._sleep(20_000_000)
        event.wait()
        seen.copy_(source)

    def change(value: int) -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            source.fill_(value)
            event.record()

    with torch.cuda.stream(compute):
        graph.replay()
        change(7)
        compute.synchronize()
        assert seen.item() == 0
        graph.replay()
        compute.synchronize()
        assert seen.item() == 7
        change(9)
        graph.replay()
        compute.synchronize()
        assert seen.item() == 9


def one_page(step: int, page: int, **copies: tuple[int, int]) -> Plan:
    """A step that writes one token into one page."""
    span = Span(RequestKey(0), 0, np.zeros(1, np.int32), 0)
    lists = {name: (Copy(*pair),) for name, pair in copies.items()}
    return Plan(step, (span,), (np.array([page], np.int32),), **lists)


class GraphRig:
    """One captured step that in each layer waits, takes its time, and adds 1 to page 3 after it was read."""

    def __init__(self, chunks: int, **options: bool | list[Edge]) -> None:
        self.rng = random.Random(1)
        self.compute = torch.cuda.Stream()
        self.pools = make_pools(4, chunks)
        self.device = self.pools.device.view(LAYERS, -1, WORDS)
        self.host = self.pools.host.view(chunks, LAYERS, WORDS)
        self.swap = make_engine(self.pools, self.compute, self.rng, **options)  # type: ignore[arg-type]
        self.seen = torch.zeros(LAYERS, WORDS, dtype=torch.int32, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.compute):
            for layer in range(LAYERS):
                torch.cuda._sleep(50_000)
                self.swap.wait(layer)
                self.seen[layer].copy_(self.device[layer, 3])
                self.device[layer, 3].add_(1)

    def run(self, plans: list[Plan]) -> torch.Tensor:
        """What each replay saw of page 3, [plans, L, words]. Nothing waits for the GPU in between."""
        results = torch.zeros(len(plans), LAYERS, WORDS, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(self.compute):
            for index, plan in enumerate(plans):
                self.swap.before_step(plan)
                self.graph.replay()
                results[index].copy_(self.seen)
                self.swap.after_step(plan)
                nap(self.rng)
        self.swap.drain()
        torch.cuda.synchronize()
        self.swap.close()
        self.pools.close()
        return results.cpu()


def swapped_in_right(chunks: int = 40, **options: bool | list[Edge]) -> bool:
    """Every replay has another chunk brought into the same page. The events of the layers are recorded again while
    replays that wait for their former records have not begun."""
    rig = GraphRig(chunks, **options)
    rig.host.copy_(torch.arange(chunks * LAYERS * WORDS, dtype=torch.int32).view(chunks, LAYERS, WORDS))
    want = rig.host.clone()
    seen = rig.run([one_page(step, 3, swap_in=(step, 3)) for step in range(chunks)])
    return torch.equal(seen, want)


def test_replays_wait_for_their_layers() -> None:
    assert swapped_in_right()
    assert swapped_in_right(pipelined=False)


def test_replays_need_their_waits() -> None:
    assert not swapped_in_right(layers_wait=False)
    assert not swapped_in_right(ignored=[(IN, COMPUTE)])


def swapped_out_right(steps: int = 40, **options: bool | list[Edge]) -> bool:
    """After every replay the page is copied out while the next ones change it."""
    rig = GraphRig(steps, **options)
    rig.device[:, 3] = torch.arange(LAYERS * WORDS, dtype=torch.int32, device="cuda").view(LAYERS, WORDS)
    first = rig.device[:, 3].cpu()
    seen = rig.run([one_page(step, 3, swap_out=(3, step)) for step in range(steps)])
    want = torch.stack([first + step for step in range(steps)])
    return torch.equal(seen, want) and torch.equal(rig.host, want)


def test_copies_out_beside_replays() -> None:
    assert swapped_out_right()


def test_copies_out_beside_replays_need_their_waits() -> None:
    assert not swapped_out_right(ignored=[(OUT, COMPUTE)])
    assert not swapped_out_right(ignored=[(COMPUTE, OUT)])


# -- what is reported ------------------------------------------------------------------------------------------------


@pytest.fixture
def pools() -> Iterator[KvPools]:
    pools = make_pools()
    pools.device.copy_(torch.randint_like(pools.device, -(2**31), 2**31 - 1))
    yield pools
    pools.close()


def test_counters_name_every_byte(pools: KvPools) -> None:
    swap = SwapEngine(pools, torch.cuda.current_stream(), pipelined=True)
    out = Plan(0, swap_out=tuple(Copy(page, page) for page in range(5)))
    swap.before_step(out)
    swap.after_step(out)
    swap.drain()
    first = swap.counters()
    assert (first.out_bytes, first.in_bytes, first.backlog) == (5 * pools.chunk_bytes, 0, 0)
    assert first.out_seconds > 0 and first.in_seconds == 0
    come_in = Plan(1, swap_in=(Copy(2, 0), Copy(1, 8)))
    swap.before_step(come_in)
    swap.after_step(come_in)
    swap.drain()
    second = swap.counters()
    assert (second.out_bytes, second.in_bytes) == (0, 2 * pools.chunk_bytes) and second.in_seconds > 0
    assert torch.equal(pools.device[:, [0, 8]].cpu(), pools.host[[2, 1]].transpose(0, 1))


def test_a_corrupted_chunk_is_noticed(pools: KvPools) -> None:
    swap = SwapEngine(pools, torch.cuda.current_stream(), pipelined=True, verify=True)
    swap.before_step(Plan(0, swap_out=(Copy(3, 5), Copy(4, 6))))
    swap.drain()
    swap.before_step(Plan(1, swap_in=(Copy(5, 1), Copy(6, 2))))
    swap.drain()
    swap.counters()
    pools.host.view(torch.uint8).flatten()[5 * pools.chunk_bytes + 77] ^= 4
    swap.before_step(Plan(2, swap_in=(Copy(5, 7), Copy(6, 8))))
    swap.drain()
    with pytest.raises(RestoreMismatch, match=r"host chunks \[5\]"):
        swap.counters()


def test_copies_that_read_what_they_write(pools: KvPools) -> None:
    swap = SwapEngine(pools, torch.cuda.current_stream(), pipelined=True)
    before = pools.device.clone()
    swap.before_step(Plan(0, copies=(Copy(1, 2), Copy(2, 3), Copy(5, 6))))
    torch.cuda.synchronize()
    before[:, [2, 3, 6]] = before[:, [1, 2, 5]]
    assert torch.equal(pools.device, before)


def test_unknown_mechanism_is_refused(pools: KvPools) -> None:
    with pytest.raises(ValueError, match="'dma': give one of auto, batch, kernel"):
        SwapEngine(pools, torch.cuda.current_stream(), pipelined=True, mechanism="dma")


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("run_bytes", [256, 10240, 16384, 163840])
def test_copies_of_real_sizes(run_bytes: int, mechanism: str) -> None:
    layers, pages = 8, 24
    device = torch.randint(-(2**62), 2**62, (layers, pages, run_bytes // 8), device="cuda")
    memory = PinnedMemory(pages * layers * run_bytes, unit=layers * run_bytes)
    host = memory.tensor.view(torch.int64).view(pages, layers, -1)
    outside = runs_of(host, chunk_first=True)
    order = torch.stack([torch.randperm(pages), torch.randperm(pages)], 1).int().pin_memory()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        make_copy(mechanism, outside, device)(order, first=0, count=pages * layers, layers=range(layers))
    torch.cuda.synchronize()
    assert torch.equal(outside[:, order[:, 1].long()], device[:, order[:, 0].long()].cpu())
    fresh = torch.zeros_like(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        make_copy(mechanism, fresh, outside)(order[:9], first=2, count=21, layers=range(3, 6))
    torch.cuda.synchronize()
    want = torch.zeros_like(fresh)
    for run in range(2, 23):
        source, target = order[run // 3].tolist()
        want[3 + run % 3, target] = outside[3 + run % 3, source].cuda()
    assert torch.equal(fresh, want)
    memory.close()


def test_pools_beyond_two_billion_words() -> None:
    runs = torch.empty((3, 400, 2**21), dtype=torch.int64, device="cuda")
    runs[2, 399] = torch.arange(2**21, device="cuda")
    chunk_copy(runs, runs, torch.tensor([[399, 7]], dtype=torch.int32, device="cuda"), layers=range(2, 3))
    assert torch.equal(runs[2, 7], runs[2, 399])


def test_pinned_memory_in_several_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pools, "SEGMENT_BYTES", 1 << 20)
    memory = PinnedMemory(5 << 20, unit=160 << 10)
    assert not memory.tensor.any() and memory.tensor.is_pinned()
    values = torch.randint(0, 255, (5 << 20,), dtype=torch.uint8, device="cuda")
    for start in range(0, 5 << 20, 160 << 10):
        piece = slice(start, start + (160 << 10))
        memory.tensor[piece].copy_(values[piece], non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory.tensor, values.cpu())
    memory.close()
    memory.close()
    assert not memory.tensor.is_pinned()
