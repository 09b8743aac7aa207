"""Copies beside steps on a real GPU with two KV groups, everything slow by chance: plans run one after the other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pensieve.engine.cache.pages import PagePool
from pensieve.engine.kv import queue as swap_queue
from pensieve.engine.kv.grid import TierLayout
from pensieve.engine.kv.recomputed import RestoreMismatch
from pensieve.engine.kv.swap import SwapEngine
from pensieve.engine.kv.timeline import Lane
from pensieve.engine.plan import Copy, Plan
from support.engine.hybrid_plans import WORD, Shape
from support.engine.slow_hybrid import Rig, make_pools
from support.engine.slow_lanes import Edge

pytestmark = pytest.mark.gpu
IN, OUT, COMPUTE = Lane.IN, Lane.OUT, Lane.COMPUTE
MECHANISMS = ("kernel", "batch")
EDGES = [(IN, COMPUTE), (IN, OUT), (OUT, COMPUTE), (OUT, IN), (COMPUTE, OUT), (COMPUTE, IN)]


def small_quanta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a slice, and few of them: copies out are cut and wait in the list."""
    monkeypatch.setattr(swap_queue, "QUANTUM_BYTES", 4 * WORD)
    monkeypatch.setattr(swap_queue, "AHEAD_QUANTA", 3)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "plain"])
def test_random_plans(mechanism: str, verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(40):
        if seed == 20:
            small_quanta(monkeypatch)
        rig = Rig(seed, mechanism=mechanism, pipelined=seed % 4 > 0, verify=verify)
        assert rig.run(), f"seed {seed}"


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge[0].value}-after-{edge[1].value}")
def test_each_wait_is_needed(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above notice when one kind of wait is left out."""
    small_quanta(monkeypatch)
    assert any(not Rig(seed, ignored=[edge], mechanism="kernel").run() for seed in range(30))


def test_waits_of_layers_are_needed() -> None:
    assert any(not Rig(seed, layers_wait=False).run() for seed in range(20))


def test_clocks_must_change_hands_with_their_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    small_quanta(monkeypatch)

    def run(seed: int) -> bool:
        rig = Rig(seed)
        monkeypatch.setattr(rig.swap._queue._device_owners, "claim", lambda indices, clocks: None)
        return rig.run()

    assert any(not run(seed) for seed in range(40))


def test_a_changed_slice_of_either_group_is_noticed() -> None:
    for group in (0, 1):
        shape = Shape.draw(random.Random(5))
        pools = make_pools(shape)
        device, host = (PagePool(tier.num_bytes, tier.sizes) for tier in (shape.device, shape.host))
        source, saved, target = device.take(group), [host.take(group), host.take(group)], device.take(group)
        swap = SwapEngine(pools, torch.cuda.current_stream(), pipelined=True, verify=True)
        swap.before_step(Plan(0, swap_out=tuple(Copy(source, page, group) for page in saved)))
        swap.drain()
        assert swap.counters().out_bytes == 2 * pools.groups[group].page_bytes
        start = shape.host.grids[group].address(saved[1])
        pools.host[start + 21] ^= 4
        swap.before_step(Plan(1, swap_in=(Copy(saved[0], target, group),)))
        swap.drain()
        swap.counters()
        swap.before_step(Plan(2, swap_in=(Copy(saved[1], target, group),)))
        swap.drain()
        with pytest.raises(RestoreMismatch, match=rf"host chunks \[{saved[1]}\]"):
            swap.counters()
        pools.close()


def test_tiers_beyond_two_billion_words() -> None:
    """The view of each layer spans the whole tier: page numbers and offsets at its end are large."""
    shape = Shape.draw(random.Random(5))
    device, host = (
        TierLayout(
            num_bytes,
            tuple(replace(size, layer_page_bytes=size.layer_page_bytes << 10) for size in tier.sizes),
        )
        for num_bytes, tier in (((1 << 34) + (3 << 20), shape.device), (1 << 24, shape.host))
    )
    pools = make_pools(replace(shape, device=device, host=host))
    swap = SwapEngine(pools, torch.cuda.current_stream(), pipelined=True)
    first, second = device.grids
    low, high = second.first, second.end - 1
    middle = first.pages_of(range(first.units // 2, first.units // 2 + 1)).start
    pools.groups[0].device[:, middle] = 7
    pools.groups[1].device[:, high] = 5
    # Both groups in one list, then one alone. The lowest pages of both groups share bytes.
    swap.before_step(Plan(0, copies=(Copy(high, low + second.stride, 1), Copy(middle, 0))))
    swap.before_step(Plan(1, copies=(Copy(low + second.stride, high - second.stride, 1),)))
    torch.cuda.synchronize()
    for page in (low + second.stride, high, high - second.stride):
        assert pools.groups[1].device[:, page].eq(5).all()
    assert pools.groups[0].device[:, [0, middle]].eq(7).all()
    swap.close()
    pools.close()
