"""An elastic device tier as the worker in plain torch follows it: memory is there before a plan, and goes after it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pensieve.engine.cache.pages import PageSize
from pensieve.engine.kv.grid import TierLayout
from pensieve.engine.kv.pools import HybridPools, KvFormat, back_tier
from pensieve.engine.kv.swap import sizes_of
from pensieve.engine.kv.virtual.plain import PlainBackend
from pensieve.engine.plan import Plan
from pensieve.model.arch import Arch, Layer, StateShape
from pensieve.model.groups import kv_groups
from support.engine.elastic_driver import CEILING, FLOOR, backing_of, ends, held, make_elastic, run
from support.engine.worker_driver import (
    CHUNK,
    EVERYTHING,
    logprobs,
    make_worker,
    random_tokens,
    reference_logprobs,
)
from support.lengths import at_length
from support.model.tiny_arch import make_arch

STATE = StateShape(conv_channels=5, conv_width=4, heads=2, key_dim=3, value_dim=5)
FULL, WINDOW, RECURRENT = Layer(), Layer(window=8), Layer(attends=False, state=STATE)


def test_a_context_moves_down_while_the_tier_shrinks(folder: Path) -> None:
    """Pages beyond the new end are read by the plan that gives them up: by a copy to the host, by a move, and by
    neither any more after it. Addresses stay."""
    worker, tokens = make_elastic(folder), random_tokens(32)
    assert worker.info.device_floor == ends(worker, FLOOR)[0] == held(worker)
    pools = backing_of(worker).region
    address = pools.tensor.data_ptr()
    assert run(worker, tokens, (0, 0), [], memory=CEILING).memory == ends(worker, CEILING)
    assert held(worker) == worker.info.device_tier.num_bytes == pools.ceiling
    high = [CEILING - 1, 40, CEILING - 3, 41]
    assert run(worker, tokens, (0, 31), high).memory is None
    moved = [2, 40, 5, 41]
    result = run(
        worker,
        tokens,
        (31, 32),
        moved,
        sampling=EVERYTHING,
        memory=42,
        copies=[(CEILING - 1, 2), (CEILING - 3, 5)],
        swap_out=[(CEILING - 1, 7), (40, 3)],
    )
    assert result.memory == ends(worker, 42)
    want = reference_logprobs(folder, tokens)
    torch.testing.assert_close(logprobs(result), want[-1], atol=1e-4, rtol=1e-4)
    assert ends(worker, 42)[0] <= held(worker) < ends(worker, 43)[0] + 4096  # whole handles
    # The two pages that are still beyond the floor go by way of the host.
    run(worker, tokens, (0, 0), [], swap_out=[(41, 4)], memory=FLOOR)
    assert held(worker) == ends(worker, FLOOR)[0]
    assert run(worker, tokens, (0, 0), [], memory=20).memory == ends(worker, 20)
    run(worker, tokens, (0, 0), [], swap_in=[(7, 19), (3, 0), (4, 18)])
    result = run(worker, tokens, (30, 32), [19, 0, 5, 18], sampling=EVERYTHING)
    torch.testing.assert_close(logprobs(result), want[-1], atol=1e-4, rtol=1e-4)
    assert pools.tensor.data_ptr() == address
    worker.close()


def test_memory_is_there_before_the_plan_runs(llama: Path) -> None:
    """The scheduler waits for the result, but the worker need not."""
    worker, tokens = make_elastic(llama), random_tokens(16)
    result = run(worker, tokens, (0, 16), [50, 51], sampling=EVERYTHING, memory=52)
    torch.testing.assert_close(logprobs(result), reference_logprobs(llama, tokens)[-1], atol=1e-4, rtol=1e-4)


def test_memory_that_cannot_be_made(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, tokens = make_elastic(llama), random_tokens(16)
    run(worker, tokens, (0, 0), [], memory=20)
    before = held(worker)
    create = PlainBackend.create
    left = 3

    def fails(self: PlainBackend, num_bytes: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError("another program was faster")
        return create(self, num_bytes)

    monkeypatch.setattr(PlainBackend, "create", fails)
    result = run(worker, tokens, (0, 16), [18, 3], sampling=EVERYTHING, memory=40)
    assert result.memory == ends(worker, 20) and held(worker) == before
    torch.testing.assert_close(logprobs(result), reference_logprobs(llama, tokens)[-1], atol=1e-4, rtol=1e-4)
    assert run(worker, tokens, (0, 0), [], memory=10).memory == ends(worker, 10)
    monkeypatch.undo()
    assert run(worker, tokens, (0, 0), [], memory=40).memory == ends(worker, 40)


def test_a_tier_of_one_size_refuses_plans_about_memory(llama: Path) -> None:
    worker = make_worker(llama)
    assert worker.pools.backing is None and worker.info.device_floor is None
    with pytest.raises(ValueError, match="step 9: the device tier has one size"):
        worker.run(Plan(9, memory=(0, 0)))


def test_no_memory_at_the_start_is_said_in_one_line(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: PlainBackend, num_bytes: int) -> int:
        raise MemoryError("nothing left")

    monkeypatch.setattr(PlainBackend, "create", fails)
    with pytest.raises(
        ValueError, match=r"^no memory for 64 device and 24 host chunks of 8 tokens: give smaller"
    ):
        make_elastic(llama)


# -- pools -----------------------------------------------------------------------------------------------------------

ARCHES = {
    "one group": make_arch(FULL, FULL, FULL),
    "window": make_arch(WINDOW, FULL, WINDOW),
    "state": make_arch(RECURRENT, FULL, RECURRENT),
    "windows only": make_arch(WINDOW, WINDOW),
    "states only": make_arch(RECURRENT, RECURRENT),
}


def make_pools(arch: Arch, units: tuple[int, int], pages: int = 60) -> HybridPools:
    groups = kv_groups(arch, CHUNK, "float32")
    sizes = tuple(
        PageSize(len(group.layers), group.layer_page_bytes, unit)
        for group, unit in zip(groups, units, strict=False)
    )
    one = sum(size.unit_bytes for size in sizes)
    device = TierLayout(pages * one + (48 if len(sizes) > 1 else 0), sizes)
    host = TierLayout(
        10 * one, tuple(replace(size, unit_pages=1 if len(sizes) > 1 else 10) for size in sizes)
    )
    return HybridPools(
        arch, groups, (device, host), form=KvFormat(CHUNK, torch.float32), device=torch.device("cpu"), floor=one
    )  # fmt: skip


@pytest.mark.parametrize("name", ARCHES)
def test_page_0_of_each_group_is_always_backed(name: str) -> None:
    """Unused entries of page tables name it, at whatever byte its layers lie."""
    pools = make_pools(ARCHES[name], (3, 2))
    backing = pools.backing
    assert backing is not None and pools.padding_page == 0
    backing.grow(pools.device.nbytes, 0)
    backing.shrink()
    backing.grow(0, 0)
    backing.shrink()
    for group in pools.groups:
        if group.layers:
            assert group.device[:, 0].sum() == 0
    assert backing.region.held < pools.device.nbytes / 2
    pools.close()


@pytest.mark.parametrize("name", ARCHES)
def test_units_of_both_ends_are_backed(name: str) -> None:
    """Every page of a unit within the ends can be written, and the pages of others do not change."""
    rng = random.Random(7)
    for _ in range(at_length(6, 60)):
        pools = make_pools(ARCHES[name], (rng.randint(1, 3), rng.randint(1, 3)))
        layout, backing = pools.tiers[0], pools.backing
        assert backing is not None
        units = [rng.randint(0, 20) for _ in layout.sizes]
        wanted = [count * size.unit_bytes for count, size in zip(units, layout.sizes, strict=True)]
        backing.grow(wanted[0], wanted[1] if len(wanted) > 1 else 0)
        backing.shrink()
        written = 0
        for number, grid in enumerate(layout.grids[: len(units)]):
            below = range(units[number]) if number == 0 else range(grid.units - units[number], grid.units)
            for unit in below if grid.units else ():
                pages = grid.pages_of(range(unit, unit + 1))
                pools.groups[number].device[:, pages].fill_(-1)
                written += grid.size.unit_bytes
        high = wanted[1] if len(wanted) > 1 else 0
        everything = pools.device[: wanted[0]], pools.device[pools.device.nbytes - high :]
        assert sum(int(part.eq(255).sum()) for part in everything) == written == sum(wanted)
        pools.close()


def test_sizes_for_copies_in_a_tier_of_one_group() -> None:
    pools = make_pools(ARCHES["one group"], (3, 1))
    sizes = sizes_of(pools)
    assert sizes.second is None and sizes.device_grid == pools.tiers[0].grids[0]
    assert sizes.device_pages == sizes.device_grid.end and sizes.host_pages == 30
    pools.host.zero_()
    pools.groups[0].host[1, 4].fill_(-1)
    layer_page = pools.kv_groups[0].layer_page_bytes
    assert pools.host.nonzero().flatten().tolist() == list(range(13 * layer_page, 14 * layer_page))


def test_a_tier_with_two_groups_has_no_permanent_floor() -> None:
    """Either end may need it."""
    groups = (PageSize(2, 4096, 8), PageSize(1, 8192, 8))
    layout = TierLayout(64 * 65536, groups)
    backing = back_tier(layout, 16 * 65536, torch.device("cpu"))
    assert backing.region.held == 65536
    backing.grow(4 * 65536, 12 * 65536)
    backing.shrink()
    assert backing.region.held == 16 * 65536
    backing.close()
