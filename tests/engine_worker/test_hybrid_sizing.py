"""Sizes of tiers that two KV groups share: in bytes, and in tokens of contexts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.config import EngineOptions
from pensieve.engine.cache.pages import PagePool
from pensieve.engine.kv.grid import TierLayout
from pensieve.engine.worker.hybrid_sizing import ContextSizes
from pensieve.engine.worker.sizing import (
    GIB,
    FreeMemory,
    Placement,
    TierSizes,
    WorkerInfo,
    allocate_pools,
    report,
    tier_sizes,
)
from pensieve.model.arch import Arch, Layer, StateShape
from pensieve.model.groups import KvGroup, context_bytes, context_pages, kv_groups

STATE = StateShape(conv_channels=8192, conv_width=4, heads=32, key_dim=128, value_dim=128)
GEMMA = tuple(Layer(window=None if index % 6 == 5 else 1024) for index in range(62))
QWEN_NEXT = tuple(Layer() if index % 4 == 3 else Layer(attends=False, state=STATE) for index in range(48))
GPU = Placement("cuda", "bfloat16", 32768, 2048, 256)
CPU = Placement("cpu", "float32", 512, 512, 64)


def make_arch(layers: tuple[Layer, ...]) -> Arch:
    return Arch(
        family="llama",
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=512,
        num_heads=8,
        num_kv_heads=2,
        head_dim=256,
        context_limit=32768,
        norm="rms",
        norm_eps=1e-5,
        activation="silu",
        gated_mlp=True,
        layers=layers,
    )


def sizes(layers: tuple[Layer, ...], place: Placement, ranks: int = 1, **values: str) -> TierSizes:
    options = EngineOptions(model="/m", **values)  # type: ignore[arg-type]
    return tier_sizes(options, make_arch(layers), place, FreeMemory(80 * GIB, 300 * GIB), ranks)


def holds(tier: TierLayout, pages: tuple[int, ...]) -> bool:
    """Whether the cache has room for so many pages of each group."""
    return PagePool(tier.num_bytes, tier.sizes).fits(*pages)


MODELS = pytest.mark.parametrize("layers", [GEMMA, QWEN_NEXT], ids=["windows", "states"])


@MODELS
@pytest.mark.parametrize("place", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("tokens", [32, 500, 20000])
def test_tokens_are_those_of_one_context(layers: tuple[Layer, ...], place: Placement, tokens: int) -> None:
    tiers = sizes(layers, place, device_cache=f"{tokens}tokens", host_cache=f"{tokens}tokens")
    groups = kv_groups(make_arch(layers), 32, place.dtype)
    pages = context_pages(groups, 32, tokens)
    assert holds(tiers.device_tier, pages) and holds(tiers.host_tier, pages)
    chunks = -(-tokens // 32)
    longest = -(-place.context_limit // 32)
    assert min(chunks, longest) <= tiers.device_chunks
    # Whole units, and no more than one of each group to spare.
    spare = sum(size.unit_bytes for size in tiers.device_tier.sizes)
    assert tiers.device_tier.num_bytes <= context_bytes(groups, 32, tokens) + spare
    assert tiers.host_tier.num_bytes < context_bytes(groups, 32, tokens) + groups[1].layer_page_bytes


@MODELS
def test_bytes_are_shared(layers: tuple[Layer, ...]) -> None:
    tiers = sizes(layers, GPU, device_cache="40GiB", host_cache="100GiB")
    for tier, size in ((tiers.device_tier, 40 * GIB), (tiers.host_tier, 100 * GIB)):
        second = tier.sizes[1]
        assert size - second.layer_page_bytes < tier.num_bytes <= size
        assert tier.grids[1].offset == 0, "host memory is registered in pieces that cut no layer page"
    assert [size.unit_pages for size in tiers.host_tier.sizes] == [1, 1]
    assert all(size.unit_pages * size.layer_page_bytes >= 2 << 20 for size in tiers.device_tier.sizes)
    groups = kv_groups(make_arch(layers), 32, "bfloat16")
    full = tiers.device_tier.num_bytes // context_bytes(groups, 32, GPU.context_limit)
    assert tiers.device_chunks == pytest.approx(1024 * full, rel=0.1) and tiers.device_chunks % 1024 == 0


@MODELS
def test_auto(layers: tuple[Layer, ...]) -> None:
    on_gpu, on_cpu = sizes(layers, GPU), sizes(layers, CPU)
    assert 60 * GIB < on_gpu.device_tier.num_bytes < 80 * 0.92 * GIB
    assert on_gpu.host_tier.num_bytes == pytest.approx(150 * GIB, rel=0.01)
    assert on_cpu.device_tier.num_bytes == pytest.approx(GIB, rel=0.01)
    assert on_cpu.device_source == on_cpu.host_source == "auto: 1 GiB on a CPU"


def test_totals_are_divided_by_the_ranks() -> None:
    one, two = (sizes(GEMMA, GPU, ranks, device_cache="40GiB", host_cache="0") for ranks in (1, 2))
    assert two.device_tier.num_bytes == one.device_tier.num_bytes // 2
    assert two.host_tier.num_bytes == two.host_chunks == 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"device_cache": "0"}, "device cache 0: less than one chunk, which is 32 tokens or [0-9]+ bytes"),
        ({"device_cache": "1KiB"}, "less than one chunk"),
        ({"device_cache": "79GiB"}, r"79GiB: 79\.0 GiB do not fit .* give at most"),
        ({"device_cache": "9000000tokens"}, "do not fit"),
        ({"host_cache": "301GiB"}, r"host cache 301GiB: 301\.0 GiB do not fit into 300\.0 GiB"),
        ({"host_cache": "many"}, "host cache size 'many'"),
    ],
)
def test_what_does_not_fit(values: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sizes(GEMMA, GPU, **values)


def test_pages_that_cannot_be_copied_are_refused() -> None:
    odd = (KvGroup("full", (0,), 32), KvGroup("window", (1,), 24, 8))
    with pytest.raises(ValueError, match="chunk tokens 1: a page of a window layer is 24 bytes"):
        ContextSizes(odd, 1, 512, 1, on_gpu=False)


@given(st.integers(0, 3_000_000), st.integers(1, 4), st.booleans())
def test_chunks_of_a_tier(num_bytes: int, ranks: int, on_gpu: bool) -> None:
    """The longest context that has room, or whole contexts of the longest length."""
    groups = (KvGroup("full", (0, 1), 512), KvGroup("window", (2,), 512, 100))
    made = ContextSizes(groups, 4, 2000, ranks, on_gpu)
    for tier in (made.device_layout(made.whole(num_bytes)), made.host_layout(made.whole(num_bytes))):
        chunks = made.chunks(tier)
        if chunks < 500:
            assert holds(tier, context_pages(groups, 4, 4 * chunks)) or chunks == 0
            assert not holds(tier, context_pages(groups, 4, 4 * (chunks + 1)))
        else:
            pages = context_pages(groups, 4, 2000)
            assert chunks % 500 == 0
            assert holds(tier, (pages[0] * chunks // 500, pages[1] * chunks // 500))


def test_a_worker_has_what_its_sizes_say() -> None:
    layers = (Layer(window=20), Layer(), Layer(window=20))
    arch = replace(make_arch(layers), num_kv_heads=2, head_dim=8)
    options = EngineOptions(model="/m", device_cache="200tokens", host_cache="100tokens", chunk_tokens=8)
    tiers = tier_sizes(options, arch, CPU, FreeMemory(GIB, GIB))
    info = WorkerInfo(
        "cpu",
        "float32",
        tiers.device_chunks,
        tiers.host_chunks,
        8,
        512,
        groups=kv_groups(arch, 8, "float32"),
        device_tier=tiers.device_tier,
        host_tier=tiers.host_tier,
    )
    pools = allocate_pools(arch, info)
    assert [group.layers for group in pools.groups] == [(1,), (0, 2)]
    assert pools.attention(0).shape[1:] == pools.attention(1).shape[1:] == (2, 2, 8, 8)
    assert len(pools.device) == tiers.device_tier.num_bytes
    lines = report(arch, info).splitlines()
    assert lines[1].startswith("  device tier: 0.0 GiB, ") and " sessions of 2048 " in lines[1]
