"""Sizes of both tiers out of free memory: a pure function of numbers, and what it says when something does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pensieve.config import EngineOptions, KvDtypeName
from pensieve.engine.build import numerics
from pensieve.engine.scheduling.drafts import MOST_PREDICTED
from pensieve.engine.worker import sizing
from pensieve.engine.worker.sizing import (
    GIB,
    FreeMemory,
    Placement,
    TierSizes,
    WorkerInfo,
    report,
    resolve_device,
    tier_sizes,
    workspace_bytes,
)
from pensieve.engine.worker.torch_worker import build_worker
from pensieve.model.arch import Arch, Layer, RecurrentMixer, Rope
from pensieve.model.groups import kv_groups
from pensieve.model.shard import Shard

ARCH = Arch(
    family="llama",
    vocab_size=32000,
    hidden_size=5120,
    intermediate_size=13824,
    layers=(Layer(rope=Rope(theta=10000.0)),) * 40,
    num_heads=40,
    num_kv_heads=10,
    head_dim=128,
    context_limit=4096,
    norm="rms",
    norm_eps=1e-5,
    activation="silu",
    gated_mlp=True,
    dtype="float16",
)
"""Llama 2 13B with 10 KV heads: 200 KiB per token in 16 bits, 6.25 MiB per chunk."""
CHUNK = 32 * 200 * 1024
GPU = Placement("cuda", "bfloat16", 4096, 2048, 256)
CPU = Placement("cpu", "bfloat16", 4096, 512, 64)


def sizes(place: Placement, device_gib: float, host_gib: float, **values: Any) -> TierSizes:
    options = EngineOptions(model="/m", **values)
    return tier_sizes(options, ARCH, place, FreeMemory(int(device_gib * GIB), int(host_gib * GIB)))


def test_workspace() -> None:
    kept = workspace_bytes(ARCH, GPU, cuda_graphs=True)
    assert 2 * GIB < kept < 3 * GIB
    assert kept - workspace_bytes(ARCH, GPU, cuda_graphs=False) == 3 * GIB // 2
    twice = dataclasses.replace(GPU, max_batch_tokens=4096)
    assert workspace_bytes(ARCH, twice, cuda_graphs=True) - kept == 2048 * (4 * 5120 + 3 * 13824) * 2


def test_auto_on_a_gpu() -> None:
    kept = workspace_bytes(ARCH, GPU, cuda_graphs=True)
    tiers = sizes(GPU, 100, 1000)
    assert tiers.device_chunks == int((100 * GIB - kept) * 0.92) // CHUNK
    assert tiers.host_chunks == 4 * tiers.device_chunks
    assert tiers.device_source.startswith("auto: 92% of the rest of 100.0 GiB free, ")
    assert tiers.host_source == "auto: 4x the device tier"


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_keys_and_values_in_8_bits_take_half(kv_dtype: KvDtypeName) -> None:
    layer_page = 82_560  # 2 * 10 heads * 32 tokens * (128 codes + an exponent), a multiple of 128
    tiers = sizes(GPU, 100, 1000, device_cache="40GiB", host_cache="8192tokens", kv_dtype=kv_dtype)
    assert tiers.device_chunks == 40 * GIB // (40 * layer_page)
    assert tiers.host_tier.num_bytes == 8192 // 32 * 40 * layer_page
    shard = Shard(1, 2).arch(ARCH)
    assert kv_groups(shard, 1, "bfloat16", kv_dtype)[0].layer_page_bytes == 1408  # 1,290 and padding
    info = WorkerInfo(
        "cpu", "float32", 9, 9, 32, 4096, groups=kv_groups(ARCH, 32, "float32", kv_dtype), kv_dtype=kv_dtype
    )
    assert numerics(info) == f"float32 kv-{kv_dtype} cpu"
    assert f"float32 with KV in {kv_dtype} on cpu" in report(ARCH, info)
    assert f"device tier: {9 * 40 * layer_page / GIB:.1f} GiB, 288 tokens" in report(ARCH, info)


@pytest.mark.parametrize(("running", "drafts"), [(1, MOST_PREDICTED), (200, 200)])
def test_a_lone_request_may_have_all_its_drafts(running: int, drafts: int) -> None:
    options = EngineOptions(model="/m", device="cpu", max_running=running)
    assert resolve_device(options, ARCH).max_drafts == drafts


def test_who_cannot_have_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = EngineOptions(model="/m", device="cuda", kv_dtype="fp8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match=r"compute capability 8\.0\) has no FP8: give --kv-dtype int8"):
        resolve_device(fp8, ARCH)
    resolve_device(EngineOptions(model="/m", device="cuda", kv_dtype="int8"), ARCH)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 9))
    resolve_device(fp8, ARCH)
    none = dataclasses.replace(ARCH, layers=(dataclasses.replace(ARCH.layers[0], attends=False),))
    with pytest.raises(ValueError, match="llama has no keys and values; start without --kv-dtype"):
        resolve_device(EngineOptions(model="/m", device="cpu", kv_dtype="int8"), none)


def test_auto_host_tier_leaves_half_of_the_memory() -> None:
    tiers = sizes(GPU, 100, 64)
    assert tiers.host_chunks == 32 * GIB // CHUNK
    assert tiers.host_source == "auto: 50% of 64.0 GiB available"
    assert sizes(GPU, 100, 0).host_chunks == 0


def test_auto_on_a_cpu_is_modest() -> None:
    assert sizes(CPU, 16, 16) == TierSizes(GIB // CHUNK, GIB // CHUNK, *["auto: 1 GiB on a CPU"] * 2, None)
    small = sizes(CPU, 0.5, 0.5)
    assert small.device_chunks == GIB // 2 // CHUNK
    assert (small.device_chunks + small.host_chunks) * CHUNK <= GIB // 2


def test_explicit_sizes() -> None:
    tiers = sizes(GPU, 100, 128, device_cache="40GiB", host_cache="64GiB")
    assert (tiers.device_chunks, tiers.host_chunks) == (40 * GIB // CHUNK, 64 * GIB // CHUNK)
    assert (tiers.device_source, tiers.host_source) == ("--device-cache 40GiB", "--host-cache 64GiB")
    tiers = sizes(CPU, 16, 16, device_cache="100tokens", host_cache="0")
    assert (tiers.device_chunks, tiers.host_chunks) == (3, 0)


@pytest.mark.fault(30)
@pytest.mark.parametrize(
    ("place", "free", "values", "said"),
    [
        (
            GPU,
            (50, 500),
            {"device_cache": "49GiB"},
            r"device cache 49GiB: 49\.0 GiB do not fit \(50\.0 GiB free, ",
        ),
        (GPU, (50, 500), {"device_cache": "49GiB"}, "at most 4[0-9]{4}MiB, or lower --max-batch-tokens"),
        (
            GPU,
            (50, 8),
            {"host_cache": "9GiB"},
            r"host cache 9GiB: 9\.0 GiB do not fit into 8\.0 GiB .*8192MiB, or 0",
        ),
        (GPU, (2, 8), {}, "device cache auto: no room for one chunk of 6553600 bytes"),
        (
            CPU,
            (4, 4),
            {"device_cache": "5GiB"},
            r"5GiB: 5\.0 GiB do not fit \(4\.0 GiB available\): give at most 4096MiB$",
        ),
        (
            CPU,
            (4, 4),
            {"device_cache": "3GiB", "host_cache": "2GiB"},
            r"host cache 2GiB: 2\.0 GiB .* into 1\.0 GiB",
        ),
        (CPU, (4, 4), {"device_cache": "31tokens"}, "less than one chunk"),
        (CPU, (4, 4), {"host_cache": "plenty"}, "host cache size 'plenty'"),
    ],
)
def test_what_does_not_fit(
    place: Placement, free: tuple[float, float], values: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        sizes(place, *free, **values)


def test_the_size_that_is_suggested_is_taken() -> None:
    with pytest.raises(ValueError, match="at most") as caught:
        sizes(GPU, 50, 500, device_cache="49GiB")
    suggested = str(caught.value).split("at most ")[1].split(",")[0]
    sizes(GPU, 50, 500, device_cache=suggested)


def test_dtype_and_limits_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: True)
    options = EngineOptions(model="/m")
    assert resolve_device(options, ARCH) == Placement("cuda", "float16", 4096, 2048, 256, 0)
    single = dataclasses.replace(ARCH, dtype="float32")
    assert resolve_device(options, single).dtype == "bfloat16"
    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: False)
    assert resolve_device(options, ARCH) == Placement("cpu", "float32", 4096, 512, 64, 64)
    given = EngineOptions(model="/m", max_batch_tokens=7, max_running=3, context_limit=9)
    assert resolve_device(given, ARCH) == Placement("cpu", "float32", 9, 7, 3, 64)
    with pytest.raises(ValueError, match="no CUDA device"):
        resolve_device(EngineOptions(model="/m", device="cuda"), ARCH)


def test_recurrent_layers_on_a_gpu_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sizing, "find_spec", lambda name: None)
    model = dataclasses.replace(
        ARCH, recurrent=RecurrentMixer(kind="ssd", key_heads=1, gate="no norm"), dtype="bfloat16"
    )
    with pytest.raises(ValueError, match="fla-core: pip install"):
        resolve_device(EngineOptions(model="/m"), model)
    # In float32 it is never used.
    assert resolve_device(EngineOptions(model="/m", dtype="float32"), model).device == "cuda"
    assert resolve_device(EngineOptions(model="/m", device="cpu"), model).device == "cpu"


def test_a_wrong_size_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, '
        '"num_attention_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu"}'
    )  # and no weights
    with pytest.raises(ValueError, match="cache size 'lots'"):
        build_worker(EngineOptions(model=str(tmp_path), device="cpu", device_cache="lots"))


@pytest.mark.parametrize("given", ["auto", "40GiB", "100000tokens"])
def test_sizes_are_totals_over_ranks(given: str) -> None:
    """Half of each chunk lies on each of two GPUs: they hold as many as one GPU of twice the memory for them."""
    half, options = Shard(0, 2).arch(ARCH), EngineOptions(model="/m", device_cache=given, host_cache="20GiB")
    kept = workspace_bytes(half, GPU, cuda_graphs=True)
    two = tier_sizes(options, half, GPU, FreeMemory(100 * GIB, 64 * GIB), 2)
    assert two.host_chunks == 20 * GIB // CHUNK
    assert (
        two.device_chunks
        == {
            "auto": int(2 * (100 * GIB - kept) * 0.92) // CHUNK,
            "40GiB": 40 * GIB // CHUNK,
            "100000tokens": 100000 // 32,
        }[given]
    )


def test_totals_that_do_not_fit() -> None:
    half, options = Shard(0, 2).arch(ARCH), EngineOptions(model="/m", device_cache="190GiB", host_cache="0")
    tier_sizes(options, half, GPU, FreeMemory(100 * GIB, 64 * GIB), 2)
    with pytest.raises(ValueError, match=r"190GiB: 190.0 GiB do not fit \(188.0 GiB free"):
        tier_sizes(options, half, GPU, FreeMemory(94 * GIB, 64 * GIB), 2)
    with pytest.raises(ValueError, match=r"host cache 65GiB: 65.0 GiB do not fit into 64.0 GiB"):
        options = EngineOptions(model="/m", host_cache="65GiB")
        tier_sizes(options, half, GPU, FreeMemory(100 * GIB, 64 * GIB), 2)


def test_a_report_of_several_ranks() -> None:
    info = WorkerInfo("cpu", "bfloat16", 1000, 500, 32, 4096, weight_bytes=3 * GIB, ranks=2)
    lines = report(Shard(0, 2).arch(ARCH), info).splitlines()
    assert lines[0].startswith("llama, 40 layers, in bfloat16 on 2 x cpu: weights 3.0 GiB each, ")
    assert lines[1].startswith("  device tier: 6.1 GiB, 32000 tokens, ")


def test_report() -> None:
    info = WorkerInfo(
        "cpu", "bfloat16", 1000, 500, 32, 4096, 512, 64, "auto: because", "--host-cache 3GiB", 3 * GIB
    )
    assert report(ARCH, info).splitlines() == [
        "llama, 40 layers, in bfloat16 on cpu: weights 3.0 GiB, contexts up to 4096 tokens, steps of up to 512 tokens "
        "and 64 generations",
        "  device tier: 6.1 GiB, 32000 tokens, 15 sessions of 2048 (auto: because)",
        "  host tier: 3.1 GiB, 16000 tokens, 7 sessions of 2048 (--host-cache 3GiB)",
    ]
