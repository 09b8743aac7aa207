"""The KV groups of a model, and the layout of both tiers when there are two: no byte belongs to two pages."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pensieve.engine.cache.pages import PagePool, PageSize
from pensieve.engine.kv.grid import Grid, TierLayout
from pensieve.engine.kv.pools import HybridPools, KvFormat, KvPools
from pensieve.engine.plan import Copy
from pensieve.model.arch import Arch, Layer, ModelError, StateShape
from pensieve.model.groups import (
    KvGroup,
    context_bytes,
    context_pages,
    conv_bytes,
    kv_groups,
    state_bytes,
)
from support.engine.hybrid_plans import tiers
from support.model.tiny_arch import make_arch

CHUNK = 4
STATE = StateShape(conv_channels=5, conv_width=4, heads=2, key_dim=3, value_dim=5)
FULL, WINDOW, RECURRENT = Layer(), Layer(window=6), Layer(attends=False, state=STATE)
BOTH = Layer(state=STATE)


SLOTS = 2 * 2 * CHUNK * 8 * 4
"""Bytes of a chunk in one attention layer, in float32."""


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ((FULL, FULL), [KvGroup("full", (0, 1), SLOTS)]),
        ((WINDOW, FULL, WINDOW), [KvGroup("full", (1,), SLOTS), KvGroup("window", (0, 2), SLOTS, 6)]),
        ((WINDOW, Layer(window=9)), [KvGroup("full", (), 0), KvGroup("window", (0, 1), SLOTS, 9)]),
        (
            (RECURRENT, BOTH, FULL),
            [KvGroup("full", (1, 2), SLOTS), KvGroup("state", (0, 1), state_bytes(STATE, "float32"))],
        ),
        ((RECURRENT,), [KvGroup("full", (), 0), KvGroup("state", (0,), state_bytes(STATE, "float32"))]),
    ],
)
def test_groups_of_a_model(layers: tuple[Layer, ...], groups: list[KvGroup]) -> None:
    assert list(kv_groups(make_arch(*layers), CHUNK, "float32")) == groups


def test_a_state_has_two_aligned_parts() -> None:
    assert (conv_bytes(STATE, "float32"), conv_bytes(STATE, "bfloat16")) == (64, 32)
    assert state_bytes(STATE, "bfloat16") == 32 + 128


def test_models_with_three_kinds_of_layers_are_refused() -> None:
    with pytest.raises(ModelError, match=r"layer_types: .* windows and recurrent layers"):
        kv_groups(make_arch(FULL, WINDOW, RECURRENT), CHUNK, "float32")
    other = replace(RECURRENT, state=replace(STATE, heads=3))
    with pytest.raises(ModelError, match=r"layer_types: .* several shapes"):
        kv_groups(make_arch(FULL, RECURRENT, other), CHUNK, "float32")


def test_pages_of_a_context() -> None:
    windows = kv_groups(make_arch(WINDOW, FULL), CHUNK, "float32")
    states = kv_groups(make_arch(RECURRENT, FULL), CHUNK, "float32")
    assert context_pages(windows, CHUNK, 9) == (3, 3)
    assert context_pages(windows, CHUNK, 4000) == (1000, 67)  # 5 + 256 tokens, and a chunk that begins before
    assert context_pages(states, CHUNK, 4000) == (1000, 4)
    assert context_bytes(windows, CHUNK, 9) == 6 * SLOTS


# -- where pages lie -------------------------------------------------------------------------------------------------


@given(tiers(), st.integers(0, 10**6))
def test_no_byte_belongs_to_two_pages(tier: TierLayout, seed: int) -> None:
    """Whatever pages the cache has taken, their bytes lie inside the tier and apart."""
    rng, pool = random.Random(seed), PagePool(tier.num_bytes, tier.sizes)
    taken: list[tuple[int, int]] = []
    groups = [group for group in (0, 1) if tier.sizes[group].layers]
    for _ in range(60):
        group = rng.choice(groups)
        if pool.free(group) and rng.random() < 0.8:
            taken.append((group, pool.take(group)))
        elif taken:
            group, page = taken.pop(rng.randrange(len(taken)))
            pool.put_back(page, group)
    used = np.zeros(tier.num_bytes, np.int32)
    for group, page in taken:
        grid = tier.grids[group]
        assert grid.is_page(np.array([page])) and page < grid.end
        for layer in range(grid.size.layers):
            start = grid.address(page, layer)
            assert 0 <= start <= start + grid.size.layer_page_bytes <= tier.num_bytes
            used[start : start + grid.size.layer_page_bytes] += 1
    assert used.max(initial=0) <= 1


@given(tiers())
def test_units_are_whole_and_found_by_their_bytes(tier: TierLayout) -> None:
    """A unit's pages are all its bytes, and ``units_in`` finds the units that overlap a range."""
    owners = []
    for grid in tier.grids:
        owner = np.full(tier.num_bytes, -1)
        for unit in range(grid.units):
            numbers = grid.pages_of(range(unit, unit + 1))
            pages = np.arange(numbers.start, numbers.stop)
            assert grid.is_page(pages) and (grid.units_of(pages) == unit).all()
            for page, layer in itertools.product(pages.tolist(), range(grid.size.layers)):
                start = grid.address(page, layer)
                assert (owner[start : start + grid.size.layer_page_bytes] == -1).all()
                owner[start : start + grid.size.layer_page_bytes] = unit
        assert (owner >= 0).sum() == grid.units * grid.size.unit_bytes
        owners.append(owner)
    for start in range(0, tier.num_bytes, 48):
        for grid, owner in zip(tier.grids, owners, strict=True):
            stop = min(start + 64, tier.num_bytes)
            assert list(grid.units_in(start, stop)) == sorted({*owner[start:stop].tolist()} - {-1})


def test_pages_between_units_do_not_exist() -> None:
    grid = Grid.in_tier(1000, PageSize(2, 16, 3), from_top=True)
    # 62 layer pages begin at byte 8: 10 units of 6, after 2 that no unit has.
    assert (grid.offset, grid.first, grid.units, grid.end) == (8, 2, 10, 59)
    exist = [page for page in range(-3, 70) if grid.is_page(np.array([page]))]
    assert exist == [2 + 6 * unit + slot for unit in range(10) for slot in range(3)]


def test_a_tier_that_words_do_not_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="1000 bytes is not a multiple of 16"):
        TierLayout(1000, (PageSize(1, 16, 1), PageSize(1, 16, 1)))


# -- pools -----------------------------------------------------------------------------------------------------------

ARCHES = [
    make_arch(WINDOW, FULL, WINDOW),
    make_arch(RECURRENT, FULL, BOTH),
    make_arch(WINDOW, WINDOW),
    make_arch(RECURRENT, RECURRENT),
]


def make_pools(arch: Arch, dtype: torch.dtype = torch.float32) -> HybridPools:
    groups = kv_groups(arch, CHUNK, str(dtype).removeprefix("torch."))
    device, host = (
        TierLayout(
            num_bytes,
            tuple(
                PageSize(len(group.layers), group.layer_page_bytes, unit)
                for group, unit in zip(groups, units, strict=True)
            ),
        )
        for num_bytes, units in ((40_000, (3, 2)), (20_000, (1, 1)))
    )
    return HybridPools(arch, groups, (device, host), form=KvFormat(CHUNK, dtype), device=torch.device("cpu"))


def pages_of(pools: HybridPools, tier: int, group: int, count: int) -> list[int]:
    """Pages that the cache could take, in the order in which it would."""
    layout = pools.tiers[tier]
    pool = PagePool(layout.num_bytes, layout.sizes)
    return [pool.take(group) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ARCHES, ids=["window", "state", "windows only", "states only"])
def test_views_lie_where_the_grid_says(arch: Arch, dtype: torch.dtype) -> None:
    pools = make_pools(arch, dtype)
    grids = pools.tiers[0].grids
    for group in (0, 1):
        pages = pools.groups[group]
        for index, layer in enumerate(pages.layers):
            for page in pages_of(pools, 0, group, 3):
                pools.device.zero_()
                if pools.kv_groups[group].kind == "state":
                    conv, recurrent = pools.state(layer)
                    assert conv.shape[1:] == (5, 3) and conv.dtype == dtype
                    assert recurrent.shape[1:] == (2, 3, 5) and recurrent.dtype == torch.float32
                    conv[page], recurrent[page] = 1.0, 1.0
                    wanted = 15 * dtype.itemsize + 30 * 4
                else:
                    view = pools.attention(layer)
                    assert view.shape[1:] == (2, 2, CHUNK, 8) and view.dtype == dtype
                    assert view[0].is_contiguous()
                    view[page] = 1.0
                    wanted = 2 * 2 * CHUNK * 8 * dtype.itemsize
                start = grids[group].address(page, index)
                stop = start + pages.page_bytes // len(pages.layers)
                inside = pools.device[start:stop]
                written = inside.view(torch.uint8).count_nonzero()
                assert written == pools.device.count_nonzero() > 0 and stop - start >= wanted
                assert torch.equal(pages.device[index, page].view(torch.uint8), inside)


@pytest.mark.parametrize("arch", ARCHES, ids=["window", "state", "windows only", "states only"])
def test_a_slice_comes_back_as_it_was(arch: Arch) -> None:
    """Out to the host, overwritten, and back to another page, layer by layer."""
    pools = make_pools(arch)
    groups = [group for group in (0, 1) if pools.groups[group].layers]
    pools.device.copy_(torch.randint(0, 256, pools.device.shape, dtype=torch.uint8))
    pages = {group: pages_of(pools, 0, group, 5) for group in groups}
    hosts = {group: pages_of(pools, 1, group, 2) for group in groups}
    before = {group: pools.groups[group].device[:, pages[group]].clone() for group in groups}
    out = [Copy(pages[group][n], hosts[group][n], group) for group in groups for n in (0, 1)]
    pools.swap_out(out)
    for group in groups:
        # A slice is one contiguous piece of the host tier.
        start = pools.tiers[1].grids[group].address(hosts[group][0])
        piece = pools.host[start : start + pools.groups[group].page_bytes]
        assert torch.equal(piece, before[group][:, 0].reshape(-1).view(torch.uint8))
    pools.device.zero_()
    back = [Copy(hosts[group][n], pages[group][4 - n], group) for group in groups for n in (0, 1)]
    assert pools.bytes_of(back) == 2 * pools.chunk_bytes
    transfers = pools.swap_in(back)
    for layer in range(pools.num_layers):
        transfers.wait(layer)
        for group in groups:
            view = pools.groups[group].device[:, [pages[group][4], pages[group][3]]]
            for index, of_layer in enumerate(pools.groups[group].layers):
                arrived = torch.equal(view[index], before[group][index, :2])
                assert arrived == (of_layer <= layer), f"layer {of_layer} at {layer}"
    transfers.finish()


@pytest.mark.parametrize("arch", ARCHES[:2], ids=["window", "state"])
def test_all_sources_are_read_before_any_target_is_written(arch: Arch) -> None:
    """A page moves out of a unit, in which a page of the other group is written by the same list."""
    pools = make_pools(arch)
    first, second = pools.tiers[0].grids
    pools.device.copy_(torch.randint(0, 256, pools.device.shape, dtype=torch.uint8))
    low = second.first
    start = second.address(low)
    overlapped = next(
        page
        for page in range(first.end)
        if first.is_page(np.array([page])) and first.address(page) <= start < first.address(page + 1)
    )
    source = first.end - 1
    copies = [Copy(source, overlapped, 0), Copy(low, low + second.stride, 1)]
    before = [pools.groups[0].device[:, source].clone(), pools.groups[1].device[:, low].clone()]
    pools.copy_on_device(copies)
    assert torch.equal(pools.groups[0].device[:, overlapped], before[0])
    assert torch.equal(pools.groups[1].device[:, low + second.stride], before[1])
    assert not torch.equal(pools.groups[1].device[:, low], before[1])


def test_one_group_has_the_layout_of_chunks() -> None:
    pools = KvPools(
        make_arch(FULL, FULL),
        device_chunks=5,
        host_chunks=3,
        form=KvFormat(CHUNK, torch.float32),
        device=torch.device("cpu"),
    )
    assert pools.device.shape == (2, 6, 2, 2, CHUNK, 8) and pools.device.is_contiguous()
    assert pools.host.shape == (3, 2, 2, 2, CHUNK, 8) and pools.host.is_contiguous()
    assert torch.equal(pools.attention(1), pools.device[1]) and pools.padding_page == 5
    assert pools.attention(1).data_ptr() == pools.device[1].data_ptr()
