"""Weights out of thin air: for every family, always the same, and good enough to generate with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from pensieve.config import EngineOptions
from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import Plan, SampleSpec, Span
from pensieve.engine.worker.torch_worker import build_worker
from pensieve.model.folder import load_arch
from pensieve.model.tensor_source import DummySource
from pensieve.model.weights import Weights, load_weights
from support.engine.checkpoints import FAMILIES, Family, tiny_checkpoint


@pytest.fixture
def configs(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> dict[Family, Path]:
    """Folders with nothing but a config.json."""
    folders = {}
    for family in FAMILIES:
        made = tiny_checkpoint(family, tmp_path_factory.getbasetemp())
        folders[family] = tmp_path / family
        folders[family].mkdir()
        (folders[family] / "config.json").write_bytes((made / "config.json").read_bytes())
    return folders


def shapes(weights: Weights) -> str:
    return repr(_shapes(weights))


def _shapes(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple):
        return [_shapes(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {field.name: _shapes(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


@pytest.mark.parametrize("family", FAMILIES)
def test_same_shapes_as_a_checkpoint(
    configs: dict[Family, Path], family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = configs[family]
    arch = load_arch(folder)
    dummy = load_weights(folder, arch, dtype=torch.float32, load_format="dummy")
    real = tiny_checkpoint(family, tmp_path_factory.getbasetemp())
    assert shapes(dummy) == shapes(load_weights(real, arch, dtype=torch.float32))
    assert (dummy.head.weight is dummy.embedding) == arch.tied_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_finite_and_varied(configs: dict[Family, Path], family: Family) -> None:
    options = EngineOptions(
        model=str(configs[family]),
        device="cpu",
        load_format="dummy",
        device_cache="512tokens",
        host_cache="0",
    )
    worker = build_worker(options)
    spec = SampleSpec(Sampling(top_logprobs=1), output_index=0)
    pages = np.arange(16, dtype=np.int32)
    tokens, start, output = np.arange(40, dtype=np.int32) % 160, 0, []
    for step in range(32):
        span = Span(RequestKey(1), start, tokens, 0, spec)
        (sampled,) = worker.run(Plan(step=step, spans=(span,), page_tables=(pages,))).sampled
        assert sampled.logprob is not None
        assert np.isfinite(sampled.logprob.logprob)
        output.append(sampled.token_id)
        start, tokens = start + len(tokens), np.array([sampled.token_id], dtype=np.int32)
    assert len(set(output)) > 4


def test_values_depend_on_name_and_seed_alone() -> None:
    def source(seed: int = 1) -> DummySource:
        return DummySource(torch.float32, torch.device("cpu"), seed)

    first, second = source(), source()
    a, b = first.get(["a.weight"], (64, 32)), first.get(["b.weight"], (64, 32))
    assert torch.equal(second.get(["b.weight"], (64, 32)), b)
    assert torch.equal(second.get(["a.weight"], (64, 32)), a)
    assert not torch.equal(a, b)
    assert not torch.equal(source(2).get(["a.weight"], (64, 32)), a)


def test_scale() -> None:
    source = DummySource(torch.bfloat16, torch.device("cpu"))
    weight = source.get(["down_proj.weight"], (256, 400))
    assert weight.dtype == torch.bfloat16
    assert weight.float().std().item() == pytest.approx(1 / 20, rel=0.05)
    assert source.get(["q_proj.weight", "k_proj.weight"], (512, 400)).float().std().item() == pytest.approx(
        2 / 20, rel=0.05
    )
    assert torch.equal(source.get(["norm.weight"], (8,)), torch.ones(8, dtype=torch.bfloat16))
    assert torch.equal(source.get(["q_proj.bias"], (8,)), torch.zeros(8, dtype=torch.bfloat16))
