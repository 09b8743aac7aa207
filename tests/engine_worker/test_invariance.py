"""``--invariant`` is refused, in one line, where it cannot be kept: by family, and by what this machine computes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.config import EngineOptions
from pensieve.engine.worker import invariance
from pensieve.engine.worker.invariance import NotInvariant, check, require
from pensieve.engine.worker.torch_worker import build_worker
from pensieve.kernels import reference
from pensieve.model.folder import load_arch
from pensieve.model.ops import INVARIANT_OPS
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights
from pensieve.spawn import ServerProcess, SpawnError
from support.engine.bits import norm_by_size
from support.engine.checkpoints import WITH_EXPERTS, Family, tiny_checkpoint
from support.model import recurrent_models
from support.tokenizers_ import byte_level, write_folder


@pytest.mark.parametrize("family", recurrent_models.FAMILIES)
def test_recurrent_families_are_refused_by_name(family: recurrent_models.Family, tmp_path: Path) -> None:
    recurrent_models.make_model(family, tmp_path)
    arch = load_arch(tmp_path)
    for device in ("cpu", "cuda"):
        with pytest.raises(NotInvariant, match=f"^invariant: {arch.family} has recurrent layers") as caught:
            require(arch, device)
        assert "\n" not in str(caught.value) and str(caught.value).endswith("start without --invariant")
    options = {"model": str(tmp_path), "device_cache": "256tokens", "host_cache": "0"}
    with pytest.raises(NotInvariant, match="recurrent layers"):
        build_worker(EngineOptions(**options, device="cpu", invariant=True))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_are_refused_on_a_gpu_only(family: Family, checkpoints: Path) -> None:
    arch = load_arch(tiny_checkpoint(family, checkpoints))
    require(arch, "cpu")
    with pytest.raises(NotInvariant, match=f"^invariant: {arch.family} has a mixture of experts"):
        require(arch, "cuda")


def model_of(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    arch = load_arch(folder)
    return Transformer(arch, load_weights(folder, arch, dtype=dtype), INVARIANT_OPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_passes_on_this_machine(folder: Path, dtype: torch.dtype) -> None:
    check(model_of(folder, dtype), most_rows=64)


def test_a_product_that_depends_on_its_rows_is_named(llama: Path) -> None:
    model = model_of(llama)
    inner = model.weights.head.weight.shape[1]

    def by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        right = INVARIANT_OPS.linear(x, weight, bias)
        return right + 0.25 if len(x) == 5 and weight.shape == model.weights.head.weight.shape else right

    broken = Transformer(model.arch, model.weights, replace(INVARIANT_OPS, linear=by_rows))
    with pytest.raises(NotInvariant) as caught:
        check(broken, most_rows=64)
    message = str(caught.value)
    assert message.startswith(
        f"invariant: the head, {inner} to {len(model.weights.head.weight)}: 5 rows alone differ"
    )
    assert re.search(r" by up to 0\.25 on this machine; start without --invariant$", message), message


def test_a_norm_that_depends_on_its_place_is_named(llama: Path) -> None:
    model = model_of(llama)

    def by_place(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        result = INVARIANT_OPS.norm(x, weight, bias, eps)
        result[0] *= 2
        return result

    broken = Transformer(model.arch, model.weights, replace(INVARIANT_OPS, norm=by_place))
    with pytest.raises(NotInvariant, match=r"^invariant: the norm of .*: the last 1 rows alone differ"):
        check(broken, most_rows=64)


def test_a_head_norm_that_depends_on_its_rows_is_named(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tiny_checkpoint("qwen3", checkpoints))
    check(model, most_rows=64)
    monkeypatch.setattr(reference, "norm", norm_by_size(reference.norm))
    with pytest.raises(
        NotInvariant, match=r"^invariant: the norm of \d+ heads of 16 values: .* alone differ"
    ):
        check(model, most_rows=64)


def test_a_worker_is_checked_before_it_serves(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Transformer, most_rows: int, **_: Any) -> None:
        raise NotInvariant("invariant: some shape")

    monkeypatch.setattr(invariance, "check", refuse)
    options = {"model": str(llama), "device_cache": "64tokens", "host_cache": "0"}
    for invariant in (None, False):
        build_worker(EngineOptions(**options, device="cpu", invariant=invariant)).close()
    with pytest.raises(NotInvariant, match="some shape"):
        build_worker(EngineOptions(**options, device="cpu", invariant=True))


@pytest.mark.timeout(120)
def test_serve_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    recurrent_models.make_model("mamba2", tmp_path, vocab_size=368)
    config = json.loads((tmp_path / "config.json").read_text())
    write_folder(tmp_path, byte_level(), **config)
    with pytest.raises(SpawnError) as caught:
        ServerProcess("--model", str(tmp_path), "--store", "memory:", "--invariant", "--threads", "1")
    assert caught.value.status == 2
    assert caught.value.line.endswith(
        "invariant: mamba2 has recurrent layers, which round differently token by token and by blocks; "
        "start without --invariant"
    )
