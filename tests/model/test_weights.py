"""Checkpoints: sharded or not, with base or causal names, and what is wrong with a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from pensieve.model.arch import ModelError
from pensieve.model.folder import load_arch
from pensieve.model.weights import Weights, load_weights, weight_bytes
from support.engine.checkpoints import Family, tiny_checkpoint


def load(folder: Path) -> Weights:
    return load_weights(folder, load_arch(folder), dtype=torch.float32)


def copy(folder: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen2", tmp_path_factory.getbasetemp())


def test_projections_are_fused_in_order(qwen: Path) -> None:
    tensors, weights = load_file(qwen / "model.safetensors"), load(qwen)
    at = "model.layers.1."
    layer = weights.layers[1]
    parts = [tensors[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.attention.qkv.weight, torch.cat(parts))
    assert layer.attention.qkv.bias is not None
    assert torch.equal(
        layer.attention.qkv.bias, torch.cat([tensors[f"{at}self_attn.{name}_proj.bias"] for name in "qkv"])
    )
    assert torch.equal(layer.mlp.up.weight[:64], tensors[f"{at}mlp.gate_proj.weight"])


def test_tied_head_is_the_embedding(tmp_path_factory: pytest.TempPathFactory) -> None:
    weights = load(tiny_checkpoint("llama3", tmp_path_factory.getbasetemp()))
    assert weights.head.weight is weights.embedding


def test_shards(qwen: Path, tmp_path: Path) -> None:
    tensors = load_file(qwen / "model.safetensors")
    names = sorted(tensors)
    folder = copy(qwen, tmp_path, tensors)
    (folder / "model.safetensors").unlink()
    index = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in names if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(load(folder).layers[2].attention.qkv.weight, load(qwen).layers[2].attention.qkv.weight)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"part-1\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("family", "prefix"), [("opt", "model."), ("opt", "model.decoder."), ("llama3", "model.")]
)
def test_names_of_the_base_model(
    family: Family, prefix: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tiny_checkpoint(family, tmp_path_factory.getbasetemp())
    tensors = {
        name.removeprefix(prefix): value for name, value in load_file(folder / "model.safetensors").items()
    }
    got = load(copy(folder, tmp_path, tensors))
    assert torch.equal(got.layers[0].mlp.up.weight, load(folder).layers[0].mlp.up.weight)


def test_bfloat16(qwen: Path) -> None:
    weights = load_weights(qwen, load_arch(qwen), dtype=torch.bfloat16)
    assert weights.layers[0].mlp.down.weight.dtype == weights.final_norm.weight.dtype == torch.bfloat16


def test_broken_checkpoints(qwen: Path, tmp_path: Path) -> None:
    tensors = load_file(qwen / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(ModelError, match=name):
        load(copy(qwen, tmp_path, {key: value for key, value in tensors.items() if key != name}))
    with pytest.raises(ModelError, match=r"\[84, 48\].*\[80, 48\]"):
        load(copy(qwen, tmp_path, tensors | {name: torch.zeros(20, 48)}))
    with pytest.raises(ModelError, match=r"no use for: model\.layers\.0\.adapter"):
        load(copy(qwen, tmp_path, tensors | {"model.layers.0.adapter": torch.zeros(1)}))
    with pytest.raises(ModelError, match="not a checkpoint of qwen2"):
        load(copy(qwen, tmp_path, {"transformer.wte.weight": torch.zeros(1)}))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load(tmp_path)


def test_old_buffers_are_ignored(qwen: Path, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    load(copy(qwen, tmp_path, load_file(qwen / "model.safetensors") | extra))


def test_parts_that_do_not_go_together(qwen: Path, tmp_path: Path) -> None:
    tensors = load_file(qwen / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    for odd, said in ((torch.zeros(16, 47), r"\[48, 48\], \[16, 47\]"), (torch.tensor(1.0), r"\[\]")):
        with pytest.raises(ModelError, match=said):
            load(copy(qwen, tmp_path, tensors | {name: odd}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_joined_that_is_large(qwen: Path, dtype: torch.dtype) -> None:
    """What is allocated is the weights themselves and nothing else: no copy of a file, no joined duplicate."""
    with Allocations() as seen:
        weights = load_weights(qwen, load_arch(qwen), dtype=dtype)
    assert seen.bytes == weight_bytes(weights)


def test_weight_bytes_count_a_tied_head_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_checkpoint("llama3", tmp_path_factory.getbasetemp())
    tensors = load_file(folder / "model.safetensors")
    assert weight_bytes(load(folder)) == sum(tensor.nbytes for tensor in tensors.values())


class Allocations(TorchDispatchMode):
    """Bytes of the memory that new tensors take; a view of known memory takes none, nor does a mapped file."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.bytes += result.untyped_storage().nbytes()
        return result
