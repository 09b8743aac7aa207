"""Memory of a GPU that an elastic tier takes and gives back: the driver's calls, copies under way, captured graphs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pensieve.engine.cache.pages import PagePool
from pensieve.engine.kv.grid import TierLayout
from pensieve.engine.kv.virtual.driver import DriverBackend, refusal
from pensieve.engine.kv.virtual.region import RegionSizes, reserve
from pensieve.engine.plan import Copy, Plan
from support.engine.checkpoints import tiny_checkpoint
from support.engine.elastic_driver import backing_of, ends, held, make_elastic, run
from support.engine.hybrid_plans import Shape
from support.engine.slow_hybrid import make_pools
from support.engine.slow_lanes import make_engine
from support.engine.worker_driver import EVERYTHING, logprobs, random_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.whole_device]
MIB = 1 << 20


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def soon(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def test_memory_comes_and_goes_behind_addresses_that_stay() -> None:
    device = torch.device("cuda")
    assert refusal(device) == ""
    backend = DriverBackend(device)
    assert backend.granule % (64 << 10) == 0
    before = free_bytes()
    region = reserve(2048 * MIB, backend, RegionSizes(permanent=300 * MIB, handle=32 * MIB))
    assert before - free_bytes() >= region.held == 300 * MIB
    tensor = region.tensor
    tensor[: 300 * MIB] = 1
    region.step(1000 * MIB, 500 * MIB)
    assert region.held >= 1500 * MIB and before - free_bytes() >= 1500 * MIB
    tensor[300 * MIB : 1000 * MIB] = 2
    tensor[1548 * MIB :] = 3
    torch.cuda.synchronize()
    region.step(0, 32 * MIB)
    assert before - free_bytes() < 450 * MIB
    assert bool(tensor[: 300 * MIB].eq(1).all()) and bool(tensor[2016 * MIB :].eq(3).all())
    with pytest.raises(MemoryError):
        reserve(1 << 44, DriverBackend(device), RegionSizes(permanent=1 << 40, handle=32 * MIB))
    torch.cuda.synchronize()
    region.free()
    assert abs(before - free_bytes()) < 100 * MIB


@pytest.mark.parametrize("mechanism", ["kernel", "batch"])
def test_pages_are_saved_before_their_memory_goes(mechanism: str) -> None:
    """Copies out that begin late read memory that the same plan gives up."""
    for seed in range(8):
        save_and_give_back(random.Random(seed), mechanism)


def save_and_give_back(rng: random.Random, mechanism: str) -> None:
    shape = Shape.draw(rng)
    sizes = tuple(replace(size, layer_page_bytes=size.layer_page_bytes << 12) for size in shape.device.sizes)
    host_sizes = tuple(replace(size, unit_pages=1) for size in sizes)
    units = sum(size.unit_bytes for size in sizes)
    shape = replace(shape, device=TierLayout(24 * units, sizes), host=TierLayout(24 * units, host_sizes))
    pools = make_pools(shape, floor=units)
    backing = pools.backing
    assert backing is not None
    compute = torch.cuda.Stream()
    swap = make_engine(pools, compute, rng, mechanism=mechanism)
    half = pools.device.nbytes // 2
    assert pools.grow(Plan(0, memory=(half, half))) == (half, half)
    pools.shrink(swap.marks_of(half, half))
    device, host = (PagePool(tier.num_bytes, tier.sizes) for tier in (shape.device, shape.host))
    copies = []
    with torch.cuda.stream(compute):
        for group, size in enumerate(sizes):
            for number in range(3 * size.unit_pages if size.layers else 0):
                source, target = device.take(group), host.take(group)
                pools.groups[group].device[:, source] = 100 * group + number
                copies.append((number, Copy(source, target, group)))
        plan = Plan(1, swap_out=tuple(copy for _, copy in copies), memory=(0, 0))
        assert pools.grow(plan) == (0, 0)
        swap.before_step(plan)
        swap.after_step(plan)
        pools.shrink(swap.marks_of(0, pools.device.nbytes))
    soon(lambda: backing.region.held < pools.device.nbytes / 4)
    swap.drain()
    for number, copy in copies:
        assert pools.groups[copy.group].host[:, copy.dst].eq(100 * copy.group + number).all()
    swap.close()
    pools.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tiny_checkpoint("llama3", tmp_path)


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "plain"])
def test_graphs_stay_valid(folder: Path, cuda_graphs: bool) -> None:
    """Captured at the floor; replayed at the ceiling, at the floor and at the ceiling again, bit by bit alike."""
    worker = make_elastic(folder, "64MiB..512MiB", device="cuda", dtype="bfloat16", cuda_graphs=cuda_graphs)
    tokens, tier = random_tokens(32), worker.info.device_tier
    most = tier.num_bytes // tier.sizes[0].page_bytes
    least = held(worker) // tier.sizes[0].page_bytes
    found = []
    for memory, pages in (
        (most, [most - 1, 0, most // 2, most - 2]),
        (least, [3, least - 1, 0, 1]),
        (most, [most // 3, 1, most - 2, most - 1]),
    ):
        assert run(worker, tokens, (0, 0), [], memory=memory).memory == ends(worker, memory)
        run(worker, tokens, (0, 31), pages)
        found.append(logprobs(run(worker, tokens, (31, 32), pages, sampling=EVERYTHING)))
        if memory == least:
            soon(lambda: held(worker) <= ends(worker, least)[0] + 64 * MIB)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    worker.close()


def test_pages_move_out_of_memory_that_goes(folder: Path) -> None:
    worker = make_elastic(folder, "64MiB..512MiB", device="cuda", dtype="bfloat16")
    tokens, tier = random_tokens(32), worker.info.device_tier
    most = tier.num_bytes // tier.sizes[0].page_bytes
    run(worker, tokens, (0, 0), [], memory=most)
    high = [most - 1, most - 2, most - 3, most - 4]
    run(worker, tokens, (0, 31), high)
    want = logprobs(run(worker, tokens, (31, 32), high, sampling=EVERYTHING))
    for number in range(20):
        low = [number, number + 1, number + 2, number + 3]
        pairs = list(zip(high, low, strict=True))
        run(worker, tokens, (0, 0), [], copies=pairs, memory=10 + number)
        got = logprobs(run(worker, tokens, (31, 32), low, sampling=EVERYTHING))
        assert torch.equal(got, want)
        run(worker, tokens, (0, 0), [], memory=most)
        run(worker, tokens, (0, 0), [], copies=[(target, source) for source, target in pairs])
    worker.close()


def test_memory_that_a_neighbour_has(folder: Path) -> None:
    """The tier keeps its size, serves, and grows when the neighbour has gone."""
    total = torch.cuda.mem_get_info()[1]
    worker = make_elastic(folder, f"64MiB..{total // 2 // MIB}MiB", device="cuda", dtype="bfloat16")
    tokens, tier = random_tokens(16), worker.info.device_tier
    most = tier.num_bytes // tier.sizes[0].page_bytes
    neighbour = torch.empty(free_bytes() - 1024 * MIB, dtype=torch.uint8, device="cuda")
    result = run(worker, tokens, (0, 16), [0, 1], sampling=EVERYTHING, memory=most)
    assert result.memory is not None and result.memory[0] < ends(worker, most)[0]
    want = logprobs(result)
    del neighbour
    torch.cuda.empty_cache()
    assert run(worker, tokens, (0, 0), [], memory=most).memory == ends(worker, most)
    assert backing_of(worker).region.low == ends(worker, most)[0]
    pages = [most - 1, most - 2]
    assert torch.equal(logprobs(run(worker, tokens, (0, 16), pages, sampling=EVERYTHING)), want)
    worker.close()
