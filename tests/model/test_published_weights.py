"""Heads, indexes and shards as people publish them: the tokens of transformers, or a refusal in one line."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pensieve.model.arch import ModelError
from pensieve.model.folder import INDEX, SINGLE, load_arch, model_fingerprint
from pensieve.model.shard import Shard
from pensieve.model.weights import load_weights
from support.engine.checkpoints import Family, tiny_checkpoint
from support.engine.greedy import greedy_tokens, transformers_tokens

HEAD = "lm_head.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def made(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a copy of a tiny checkpoint: ``change`` gets its tensors, ``config`` replaces values."""

    def make(family: Family, change: Callable[[Tensors], None] = lambda _: None, **config: object) -> Path:
        source = tiny_checkpoint(family, tmp_path_factory.getbasetemp())
        folder = tmp_path / "model"
        shutil.copytree(source, folder)
        values = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(values))
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)
        return folder

    return make


def embedding(tensors: Tensors) -> str:
    return next(name for name in tensors if name.endswith("embed_tokens.weight"))


def own_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[embedding(tensors)].flip(0).clone()


def equal_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[embedding(tensors)].clone()


def only_a_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors.pop(embedding(tensors))


def extra_tensor(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)


@pytest.mark.parametrize("change", [own_head, equal_head, only_a_head, extra_tensor])
@pytest.mark.parametrize("family", ["llama3", "opt", "qwen3"])
def test_a_head_beside_the_tie_flag(
    made: Callable[..., Path], family: Family, change: Callable[[Tensors], None]
) -> None:
    def tied(tensors: Tensors) -> None:
        tensors.pop(HEAD, None)
        change(tensors)

    folder = made(family, tied, tie_word_embeddings=True)
    assert greedy_tokens(folder) == transformers_tokens(folder)


def test_a_head_of_its_own_is_told_and_an_equal_one_costs_nothing(
    made: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = made("llama3", own_head)
    load_weights(folder, load_arch(folder), dtype=torch.float32)
    assert f"{HEAD} differs from model.embed_tokens.weight" in caplog.text
    shutil.rmtree(folder)
    caplog.clear()
    folder = made("llama3", equal_head)
    weights = load_weights(folder, load_arch(folder), dtype=torch.float32)
    assert weights.head.weight is weights.embedding and not caplog.text


def test_each_rank_has_its_part_of_a_head_of_its_own(made: Callable[..., Path]) -> None:
    folder = made("llama3", own_head)
    arch = load_arch(folder)
    whole = load_weights(folder, arch, dtype=torch.float32)
    parts = [load_weights(folder, arch, dtype=torch.float32, shard=Shard(rank, 2)) for rank in (0, 1)]
    assert torch.equal(torch.cat([part.head.weight for part in parts]), whole.head.weight)
    assert not torch.equal(whole.head.weight, whole.embedding)


def _drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def _short_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[embedding(tensors)][:-1].clone()


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama3", _short_head, rf"{HEAD} has shape \[159, 48\], config.json says \[160, 48\]"),
        ("qwen2", _drop(HEAD), f"no tensor {HEAD}, and config.json: tie_word_embeddings is false"),
        ("qwen2", _drop("model.embed_tokens.weight"), "no tensor model.embed_tokens.weight"),
        ("llama3", _drop("model.embed_tokens.weight"), "no tensor model.embed_tokens.weight"),
    ],
)
def test_heads_that_are_refused(
    made: Callable[..., Path], family: Family, change: Callable[[Tensors], None], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        greedy_tokens(made(family, change))
    assert "\n" not in str(refused.value)


def shard(folder: Path, parts: int = 2, *, keep: bool = False) -> dict[str, str]:
    """Divide the only file into ``parts``, with an index, and say which tensor lies where."""
    tensors = load_file(folder / SINGLE)
    where = {
        name: f"model-{number % parts + 1:05}-of-{parts:05}.safetensors"
        for number, name in enumerate(sorted(tensors))
    }
    for file in set(where.values()):
        save_file({name: tensors[name] for name in where if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    if not keep:
        (folder / SINGLE).unlink()
    return where


def _stale_index(folder: Path) -> None:
    for file in set(shard(folder, keep=True).values()):
        (folder / file).unlink()


def _stale_shards(folder: Path) -> None:
    shard(folder, keep=True)
    tensors = load_file(folder / SINGLE)
    save_file({name: tensor + 0.1 for name, tensor in tensors.items()}, folder / SINGLE)


def _broken_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def _not_in_the_index(folder: Path) -> None:
    where = shard(folder)
    del where["model.layers.1.mlp.up_proj.weight"]
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _tensor_in_two_shards(folder: Path) -> None:
    where = shard(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    other = folder / min(set(where.values()) - {where[name]})
    save_file(load_file(other) | {name: load_file(folder / where[name])[name].flip(0)}, other)


def _stray_shard(folder: Path) -> None:
    shard(folder)
    save_file(
        {"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 48)},
        folder / "model-00003-of-00003.safetensors",
    )


def _named_in_the_config(folder: Path) -> None:
    shard(folder, keep=True)
    (folder / SINGLE).rename(folder / "other.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"transformers_weights": "other.safetensors"}
    (folder / "config.json").write_text(json.dumps(config))


def _pickled_beside(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    (folder / "pytorch_model.bin.index.json").write_text("{}")


@pytest.mark.parametrize(
    "arrange",
    [
        _stale_index,
        _stale_shards,
        _broken_index,
        shard,
        _not_in_the_index,
        _tensor_in_two_shards,
        _stray_shard,
        _named_in_the_config,
        _pickled_beside,
    ],
)
def test_files_are_chosen_as_transformers_does(
    made: Callable[..., Path], arrange: Callable[[Path], object]
) -> None:
    folder = made("qwen2")
    arrange(folder)
    assert greedy_tokens(folder) == transformers_tokens(folder)


def test_an_index_that_is_not_read_is_told(
    made: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = made("qwen2")
    _stale_shards(folder)
    with caplog.at_level(logging.WARNING):
        load_weights(folder, load_arch(folder), dtype=torch.float32)
    assert f"{INDEX} is not read: the folder has {SINGLE}" in caplog.text


def test_the_fingerprint_is_that_of_the_files_that_are_loaded(made: Callable[..., Path]) -> None:
    folder = made("qwen2")
    alone = model_fingerprint(folder)
    _stale_shards(folder)
    changed = model_fingerprint(folder)
    assert changed != alone, "the only file is other than before"
    first = folder / "model-00001-of-00002.safetensors"
    first.write_bytes(first.read_bytes()[:-4] + b"1234")
    assert model_fingerprint(folder) == changed, "a shard that is not loaded does not count"
    (folder / SINGLE).unlink()
    sharded = model_fingerprint(folder)
    first.write_bytes(first.read_bytes()[:-4] + b"5678")
    assert sharded not in (alone, changed, model_fingerprint(folder))


def _index(weight_map: object) -> Callable[[Path], None]:
    def arrange(folder: Path) -> None:
        (folder / SINGLE).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return arrange


def _incomplete(folder: Path) -> None:
    (folder / min(set(shard(folder).values()))).unlink()


def _index_of_absent_tensors(folder: Path) -> None:
    where = shard(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    file = folder / where[name]
    save_file({key: value for key, value in load_file(file).items() if key != name}, file)


def _renamed(name: str) -> Callable[[Path], None]:
    def arrange(folder: Path) -> None:
        (folder / SINGLE).rename(folder / name)

    return arrange


def _named(value: object) -> Callable[[Path], None]:
    def arrange(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | {"transformers_weights": value}
        (folder / "config.json").write_text(json.dumps(config))

    return arrange


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (_incomplete, f"{INDEX}: weight_map names model-00001-of-00002.safetensors, which is missing"),
        (_index_of_absent_tensors, "no tensor model.layers.1.mlp.up_proj.weight"),
        (_index({}), f"{INDEX}: weight_map"),
        (_index(["a"]), f"{INDEX}: weight_map"),
        (_index({"a": None}), f"{INDEX}: weight_map gives a the file None"),
        (_index({"a": "../a.safetensors"}), f"{INDEX}: weight_map gives a the file '../a.safetensors'"),
        (_index({"a": "a.bin"}), f"{INDEX}: weight_map gives a the file 'a.bin'"),
        (_renamed("pytorch_model.bin"), r"no model\.safetensors; pytorch_model\.bin is pickled"),
        (_renamed("pytorch_model.bin.index.json"), "pytorch_model.bin.index.json is pickled"),
        (_renamed("adapter_model.safetensors"), "adapter_model.safetensors is an adapter"),
        (
            _renamed("weights.safetensors"),
            f"no model.safetensors and no {INDEX} that names weights.safetensors",
        ),
        (_renamed("weights.pt"), r"no model\.safetensors \(weights must be safetensors files\)"),
        (_named("gone.safetensors"), "transformers_weights names gone.safetensors, which is missing"),
        (_named("../model.safetensors"), "transformers_weights is '../model.safetensors'"),
        (_named(7), "transformers_weights is 7"),
    ],
)
def test_folders_without_their_weights_are_refused(
    made: Callable[..., Path], arrange: Callable[[Path], None], message: str
) -> None:
    folder = made("qwen2")
    arrange(folder)
    with pytest.raises(ModelError, match=message) as refused:
        load_weights(folder, load_arch(folder), dtype=torch.float32)
    assert "\n" not in str(refused.value)
