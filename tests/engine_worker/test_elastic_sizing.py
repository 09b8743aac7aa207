"""Floor and ceiling of an elastic device tier, out of options and free memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pensieve.config import EngineOptions
from pensieve.engine.cache.pages import PagePool
from pensieve.engine.worker import sizing
from pensieve.engine.worker.sizing import (
    GIB,
    FreeMemory,
    Placement,
    TierSizes,
    resolve_device,
    tier_sizes,
    worker_info,
)
from pensieve.model.arch import Arch, Layer, StateShape
from pensieve.model.groups import context_pages, kv_groups

STATE = StateShape(conv_channels=8192, conv_width=4, heads=32, key_dim=128, value_dim=128)
MODELS = {
    "full": (Layer(),) * 40,
    "windows": tuple(Layer(window=None if index % 6 == 5 else 1024) for index in range(40)),
    "states": tuple(Layer() if index % 4 == 3 else Layer(attends=False, state=STATE) for index in range(40)),
}
GPU = Placement("cuda", "bfloat16", 32768, 2048, 256)
CPU = Placement("cpu", "float32", 32768, 512, 64)


def arch_of(name: str) -> Arch:
    return Arch(
        family="llama", vocab_size=32000, hidden_size=512, intermediate_size=512, num_heads=8, num_kv_heads=2,
        head_dim=256, context_limit=32768, norm="rms", norm_eps=1e-5, activation="silu", gated_mlp=True,
        layers=MODELS[name],
    )  # fmt: skip


def sizes(
    name: str,
    size: str,
    place: Placement = GPU,
    ranks: int = 1,
    free: FreeMemory | None = None,
    **values: Any,
) -> TierSizes:
    options = EngineOptions(model="/m", device_cache=size, **values)
    return tier_sizes(options, arch_of(name), place, free or FreeMemory(80 * GIB, 300 * GIB), ranks)


@pytest.mark.parametrize("place", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", MODELS)
def test_a_range_in_bytes(name: str, place: Placement) -> None:
    tiers = sizes(name, "2GiB..20GiB", place)
    assert tiers.device_floor is not None
    units = sum(size.unit_bytes for size in tiers.device_tier.sizes)
    assert 2 * GIB - units < tiers.device_floor <= 2 * GIB
    assert 20 * GIB - units < tiers.device_tier.num_bytes <= 20 * GIB
    assert units * 4 <= tiers.device_floor
    assert tiers.device_source == "--device-cache 2GiB..20GiB, 2.0 GiB at least"
    if name == "full":
        (size,) = tiers.device_tier.sizes
        assert tiers.device_tier.num_bytes % size.unit_bytes == tiers.device_floor % size.unit_bytes == 0
        assert tiers.device_chunks * size.page_bytes == tiers.device_tier.num_bytes


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_context(name: str) -> None:
    tiers = sizes(name, "3000tokens..9000tokens")
    groups = kv_groups(arch_of(name), 32, "bfloat16")
    for tokens, num_bytes in ((3000, tiers.device_floor), (9000, tiers.device_tier.num_bytes)):
        assert num_bytes is not None
        needed = context_pages(groups, 32, tokens)
        if len(groups) > 1:
            assert PagePool(num_bytes, tiers.device_tier.sizes).fits(*needed)
        else:
            assert num_bytes >= needed[0] * groups[0].page_bytes


def test_sides_of_one_size_are_one_size() -> None:
    assert sizes("full", "8GiB..8GiB") == sizes("full", "8GiB")
    assert sizes("full", "8GiB..8GiB").device_floor is None


def test_ranks_share_both_sides() -> None:
    one, two = sizes("windows", "4GiB..8GiB"), sizes("windows", "8GiB..16GiB", ranks=2)
    assert (two.device_floor, two.device_tier) == (one.device_floor, one.device_tier)


def test_the_ceiling_may_be_memory_that_a_neighbour_has_now() -> None:
    free = FreeMemory(20 * GIB, 300 * GIB, 70 * GIB)
    tiers = sizes("full", "8GiB..60GiB", free=free)
    assert tiers.device_tier.num_bytes > 59 * GIB
    with pytest.raises(ValueError, match=r"a floor of 24\.0 GiB does not fit into 1[78]\."):
        sizes("full", "24GiB..60GiB", free=free)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("9GiB..8GiB", "^device cache 9GiB..8GiB: the floor 9GiB is above the ceiling 8GiB$"),
        ("1GiB..100tokens", "the floor 1GiB is above the ceiling 100tokens"),
        ("8GiB..90GiB", r"^device cache 8GiB..90GiB: a ceiling of 90\.0 GiB does not fit into 7\d\.\d GiB: give "),
        ("0..8GiB", "the floor is less than one chunk, which is 32 tokens or"),
        ("1MiB..8GiB", "the floor is less than one chunk"),
        ("8..60GiB", "'8': write it as"),
        ("8GiB..", "'': write it as"),
        ("..8GiB", "'': write it as"),
        ("1GiB..2GiB..3GiB", "write it as"),
        ("8GiB..auto", "'auto': write it as"),
    ],
)  # fmt: skip
@pytest.mark.fault(30)
def test_ranges_that_are_refused(size: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        sizes("full", size)
    assert "\n" not in str(error.value)
    if "write it as" in said:
        with pytest.raises(ValueError, match=said):
            resolve_device(EngineOptions(model="/m", device="cpu", device_cache=size), arch_of("full"))


@pytest.mark.fault(30)
def test_a_device_that_cannot_follow_has_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "refusal", lambda device: f"this {device} cannot")
    monkeypatch.setattr(sizing, "free_memory", lambda device: FreeMemory(60 * GIB, 60 * GIB))
    options = EngineOptions(model="/m", device="cpu", device_cache="1GiB..2GiB", host_cache="0")
    info = worker_info(options, arch_of("full"))
    assert info.device_floor is None and info.elastic_refusal == "this cpu cannot"
    assert info.device_source == "--device-cache 2GiB"
    assert info.device_tier.num_bytes == pytest.approx(2 * GIB, rel=0.01)
    monkeypatch.setattr(sizing, "refusal", lambda device: "")
    info = worker_info(options, arch_of("full"))
    assert info.device_floor is not None and info.elastic_refusal == ""
    monkeypatch.setattr(sizing, "refusal", lambda device: "no")
    one = EngineOptions(model="/m", device="cpu", device_cache="2GiB", host_cache="0")
    assert worker_info(one, arch_of("full")).elastic_refusal == ""


def test_what_the_cache_is_told(llama: Path) -> None:
    from pensieve.engine.build import cache_config
    from pensieve.engine.worker.torch_worker import build_worker

    options = EngineOptions(
        model=str(llama), device="cpu", device_cache="256tokens..512tokens", host_cache="0", chunk_tokens=8
    )
    worker = build_worker(options)
    config = cache_config(options, worker.info)
    (group,) = config.groups
    tier = worker.info.device_tier
    assert (group.layers, group.layer_page_bytes, group.device_unit) == (
        len(worker.arch.layers),
        tier.sizes[0].layer_page_bytes,
        tier.sizes[0].unit_pages,
    )
    assert config.device_bytes == tier.num_bytes and config.host_bytes == 0
    assert config.device_floor_bytes == worker.info.device_floor == tier.num_bytes // 2
    worker.close()
