"""What a server does on a GPU before it is ready: weights, tiers out of what is free, a cost profile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pensieve.config import EngineOptions
from pensieve.core import RequestKey, Sampling
from pensieve.engine.cost_profiles import load_or_measure_cost, profile_directory
from pensieve.engine.plan import Plan, SampleSpec, Span
from pensieve.engine.worker.sizing import report
from pensieve.engine.worker.torch_worker import Worker, build_worker
from pensieve.model.checkpoint import MOST_THREADS, PIECE_BYTES, TensorFill, fill_all
from pensieve.model.folder import load_arch
from pensieve.model.weights import Weights, load_weights, tensors_of, weight_bytes
from support.engine.checkpoints import FAMILIES, Family, tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.whole_device]
CUDA = torch.device("cuda")
CONFIG = {
    "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "hidden_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Two layers of an 8B model: the widest steps and the largest logits without the weights."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_weights_as_on_a_cpu(family: Family, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    arch = load_arch(folder)
    here, there = (load_weights(folder, arch, dtype=dtype, device=device) for device in ("cpu", CUDA))
    assert weight_bytes(here) == weight_bytes(there)
    for expected, got in zip(tensors_of(here), tensors_of(there), strict=True):
        assert got.device.type == "cuda"
        assert torch.equal(got.cpu(), expected)


def test_large_tensors_through_little_memory() -> None:
    generator = torch.Generator().manual_seed(3)
    sources = [torch.rand(count, generator=generator) for count in (30_000_001, 17, 9_000_000)]
    fills = [
        TensorFill(source, torch.empty(len(source), dtype=torch.bfloat16, device=CUDA)) for source in sources
    ]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fill_all(fills, CUDA, lambda count: None)
    assert torch.cuda.max_memory_allocated() - before <= MOST_THREADS * 2 * PIECE_BYTES
    for fill in fills:
        assert torch.equal(fill.target.cpu(), fill.source.bfloat16())


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker whose device tier takes all it may."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    made = build_worker(
        EngineOptions(model=str(folder), device="cuda", load_format="dummy", host_cache="256MiB")
    )
    yield made
    made.close()
    torch.cuda.empty_cache()


def test_auto_takes_most_and_leaves_room_for_the_largest_step(worker: Worker) -> None:
    info, total = worker.info, torch.cuda.mem_get_info()[1]
    tier = info.device_chunks * info.groups[0].page_bytes
    assert tier + info.weight_bytes > total / 2, "the machine is in use, or auto is far too careful"
    assert "auto: 92% of the rest" in report(worker.arch, info)
    specs = [
        SampleSpec(Sampling(temperature=0.8 * (index % 2), top_p=0.99, seed=index), 0)
        for index in range(info.max_running)
    ]
    count = info.max_running
    length = info.max_batch_tokens // count
    spans = tuple(
        Span(RequestKey(index), 0, np.arange(length, dtype=np.int32), index, specs[index])
        for index in range(count)
    )
    per_request = -(-length // info.chunk_tokens)
    tables = tuple(
        np.arange(index * per_request, (index + 1) * per_request, dtype=np.int32) for index in range(count)
    )
    for step in range(3):
        result = worker.launch(Plan(step=step, spans=spans, page_tables=tables)).result()
        assert len(result.sampled) == count
        assert len({item.token_id for item in result.sampled if item.request % 2}) > 1


def test_a_quick_profile_is_made_once(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = EngineOptions(model="/models/any", device="cuda")
    cost = load_or_measure_cost(options, worker)
    (path,) = profile_directory().iterdir()
    written = path.stat().st_mtime_ns
    assert cost.cost([32, 8192]).tolist() == sorted(cost.cost([32, 8192]).tolist())
    assert cost.other > 0
    assert load_or_measure_cost(options, worker) == cost
    assert path.stat().st_mtime_ns == written


def test_dummy_weights_are_finite_and_always_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    arch = load_arch(tmp_path)

    def make() -> Weights:
        return load_weights(tmp_path, arch, dtype=torch.bfloat16, device=CUDA, load_format="dummy")

    for first, second in zip(tensors_of(make()), tensors_of(make()), strict=True):
        assert torch.isfinite(first).all()
        assert torch.equal(first, second)
