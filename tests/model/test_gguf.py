"""GGUF files: the tensors and the architecture of the folder that they were made of, and what is wrong with one."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pensieve.gguf import read_gguf
from pensieve.model import gguf_checkpoint
from pensieve.model.arch import ModelError
from pensieve.model.folder import load_arch, load_generation, model_fingerprint
from pensieve.model.resolve import display_name, resolve_model
from pensieve.model.shard import Shard
from pensieve.model.transformer import inverse_frequency
from pensieve.model.weights import Weights, load_weights, tensors_of
from support.engine.checkpoints import Family, tiny_checkpoint
from support.gguf_files import write_gguf

FAMILIES: tuple[Family, ...] = ("llama", "llama3", "qwen2", "qwen3")
BLOCKS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
"""Rows of whole blocks of 32 values."""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def same(one: Weights, other: Weights) -> bool:
    found, wanted = list(tensors_of(one)), list(tensors_of(other))
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def load(path: Path, shard: Shard | None = None) -> Weights:
    return load_weights(path, load_arch(path), dtype=torch.float32, shard=shard or Shard())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_folder_that_it_was_made_of(
    family: Family, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "PIECE_VALUES", 700)  # several pieces per tensor
    model = tiny_checkpoint(family, folder)
    path = write_gguf(tmp_path / "model.gguf", model)
    found, wanted = load_arch(path), load_arch(model)
    assert same(load(path), load(model))
    (ours,), (theirs,) = found.ropes, wanted.ropes
    torch.testing.assert_close(
        *(inverse_frequency(rope, found.head_dim, torch.device("cpu")) for rope in (ours, theirs)),
        rtol=1e-6, atol=0,
    )  # fmt: skip
    assert found.norm_eps == pytest.approx(wanted.norm_eps)
    assert replace(found, layers=wanted.layers, norm_eps=0.0) == replace(wanted, norm_eps=0.0)
    assert found.num_layers == wanted.num_layers


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_tensors_as_transformers_reads_them(quant: str, folder: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", folder, attention_bias=False, mlp_bias=False, **BLOCKS)
    path = write_gguf(tmp_path / "model.gguf", model, quant=quant, llama__rope__dimension_count=8)
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    wanted = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    weights = load(path)
    at = "model.layers.1."
    assert torch.equal(weights.embedding, wanted["model.embed_tokens.weight"])
    assert torch.equal(weights.head.weight, wanted["lm_head.weight"])
    assert torch.equal(
        weights.layers[1].attention.qkv.weight,
        torch.cat([wanted[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]),
    )
    assert torch.equal(weights.layers[1].mlp.down.weight, wanted[f"{at}mlp.down_proj.weight"])
    assert load_arch(path).dtype == ("float16" if quant == "F16" else "bfloat16")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rank_has_its_part(family: Family, folder: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint(family, folder, **BLOCKS)
    path = write_gguf(tmp_path / "model.gguf", model)
    for ranks in (2, 8):
        for rank in range(ranks):
            assert same(load(path, Shard(rank, ranks)), load(model, Shard(rank, ranks)))


def test_bfloat16(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_checkpoint("qwen2", folder, **BLOCKS), quant="Q8_0")
    arch = load_arch(path)
    exact, rounded = (load_weights(path, arch, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert all(
        torch.equal(one.bfloat16(), other)
        for one, other in zip(tensors_of(exact), tensors_of(rounded), strict=True)
    )


def test_parts_of_a_split_model(folder: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint("qwen3", folder)
    parts = split(tmp_path, model)
    assert same(load(parts[0]), load(model)) and same(load(parts[1]), load(model))
    assert model_fingerprint(parts[0]) == model_fingerprint(parts[1])
    parts[1].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelError, match=r"is one of 2 parts, and m-00002-of-00002\.gguf is not beside it"):
        load_arch(parts[0])
    parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ModelError, match="its name does not give the others"):
        load_arch(tmp_path / "first.gguf")


def test_parts_that_do_not_belong_together(folder: Path, tmp_path: Path) -> None:
    parts = split(tmp_path, tiny_checkpoint("qwen3", folder))
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(ModelError, match=r"00002-of-00002.gguf: is not part 2 of 2"):
        load_arch(parts[0])


def split(folder: Path, model: Path) -> list[Path]:
    """Two parts: the metadata is in the first alone."""

    def half(first: bool, keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        names = sorted(tensors)
        for name in names[len(names) // 2 :] if first else names[: len(names) // 2]:
            del tensors[name]
        if not first:
            for key in [key for key in keys if key != "general.architecture"]:
                del keys[key]
        keys |= {"split.no": 0 if first else 1, "split.count": 2, "split.tensors.count": len(names)}

    return [
        write_gguf(
            folder / f"m-0000{number}-of-00002.gguf",
            model,
            change=lambda k, t, first=number == 1: half(first, k, t),
        )
        for number in (1, 2)
    ]


def test_the_fingerprint_covers_the_file(folder: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama3", folder)
    path = write_gguf(tmp_path / "model.gguf", model)
    first = model_fingerprint(path)
    assert len(first) == 64
    renamed = write_gguf(tmp_path / "other name.gguf", model)
    assert model_fingerprint(renamed) == first != model_fingerprint(renamed, weights=False)
    keyed = write_gguf(tmp_path / "keyed.gguf", model, llama__rope__freq_base=1e6)
    seen = {first, model_fingerprint(keyed)}
    data = path.read_bytes()
    for place in read_gguf(path).tensors.values():
        at = place.start + place.nbytes // 2
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        seen.add(model_fingerprint(path))
    assert len(seen) == 2 + len(read_gguf(path).tensors)


def test_what_the_authors_recommend(folder: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint("qwen3", folder)
    sampled = write_gguf(tmp_path / "a.gguf", model, general__sampling__temp=0.6, general__sampling__top_k=20)
    assert (load_generation(sampled).temperature, load_generation(sampled).top_k) == (pytest.approx(0.6), 20)
    assert load_generation(write_gguf(tmp_path / "b.gguf", model)).temperature == 0.0


def test_linear_scaling_and_windows(folder: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint("qwen2", folder)
    path = write_gguf(
        tmp_path / "a.gguf", model, qwen2__rope__scaling__type="linear", qwen2__rope__scaling__factor=4.0,
        qwen2__attention__sliding_window=64,
    )  # fmt: skip
    arch = load_arch(path)
    (rope,) = arch.ropes
    assert (rope.scaling, rope.factor, arch.context_limit) == ("linear", 4.0, 64)
    assert all(layer.window is None for layer in arch.layers)


def test_a_llama_with_biases_of_queries_alone(folder: Path, tmp_path: Path) -> None:
    def without(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(".bias") and ".attn_output." in name]:
            del tensors[name]

    arch = load_arch(write_gguf(tmp_path / "a.gguf", tiny_checkpoint("llama", folder), change=without))
    assert (arch.qkv_bias, arch.output_bias, arch.mlp_bias) == (True, False, True)


def test_end_tokens_are_all_that_the_file_names(folder: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama3", folder)
    path = write_gguf(
        tmp_path / "a.gguf", model, tokenizer__ggml__eot_token_id=9, tokenizer__ggml__eom_token_id=2
    )
    assert load_arch(path).eos_token_ids == (2, 9)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general__architecture": "gemma3"}, r"architecture gemma3 is not supported"),
    "adapter": ({"general__type": "adapter"}, "is of type adapter, not a model"),
    "experts": ({"qwen3__expert_count": 8}, r"mixture of experts \(qwen3.expert_count\)"),
    "missing": ({"qwen3__context_length": None}, "qwen3.context_length is missing"),
    "not a number": ({"qwen3__block_count": "three"}, "qwen3.block_count is 'three', not a whole number"),
    "yarn": ({"qwen3__rope__scaling__type": "yarn"}, "RoPE scaling 'yarn' is not supported"),
    "partial": ({"qwen3__rope__dimension_count": 4}, "qwen3.rope.dimension_count is 4, which is not supported"),
    "layers": ({"qwen3__feed_forward_length": [64, 64, 32]}, "feed_forward_length differs from layer to layer"),
    "capped": ({"qwen3__attn_logit_softcapping": 30.0}, "qwen3.attn_logit_softcapping is not supported"),
    "both ways": ({"qwen3__attention__causal": False}, "attention in both directions"),
    "shape": ({"qwen3__embedding_length": 56}, r"has shape \[160, 48\], the metadata says \[160, 56\]"),
    "alignment": ({"general__alignment": 48}, "general.alignment is 48, not a power of two"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served(case: str, folder: Path, tmp_path: Path) -> None:
    keys, message = REFUSED[case]

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        if "general.alignment" in metadata:  # which the writer would not write
            metadata["general.alignmenu"] = metadata.pop("general.alignment")

    path = write_gguf(tmp_path / "model.gguf", tiny_checkpoint("qwen3", folder), change=change, **keys)
    path.write_bytes(path.read_bytes().replace(b"general.alignmenu", b"general.alignment"))
    with pytest.raises(ModelError, match=message) as error:
        load(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_tensors_without_a_use(folder: Path, tmp_path: Path) -> None:
    def change(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.0.attn_sinks.weight"] = np.zeros(8, dtype=np.float32)

    path = write_gguf(tmp_path / "model.gguf", tiny_checkpoint("qwen3", folder), change=change)
    with pytest.raises(
        ModelError, match=r"1 tensors that this architecture has no use for: blk.0.attn_sinks.weight"
    ):
        load(path)


def test_types_of_tensors_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    def change(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.0.attn_v.weight"] = tensors["blk.0.attn_v.weight"].astype(np.int8)

    path = write_gguf(tmp_path / "model.gguf", tiny_checkpoint("qwen3", folder), change=change)
    with pytest.raises(ModelError, match=r"tensor blk.0.attn_v.weight has type I8, which cannot be read"):
        resolve_model(str(path))
    data = path.read_bytes()
    name = b"blk.0.attn_v.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (gguf.GGMLQuantizationType.I8,)
    path.write_bytes(data[:at] + struct.pack("<I", 99) + data[at + 4 :])
    with pytest.raises(ModelError, match=r"tensor blk.0.attn_v.weight has type 99, which cannot be read"):
        resolve_model(str(path))


def test_a_file_that_is_cut_short_anywhere(folder: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_checkpoint("llama3", folder))
    data, path = whole.read_bytes(), tmp_path / "cut.gguf"
    end = max(place.start + place.nbytes for place in read_gguf(whole).tensors.values())
    for length in [*range(4, 400), *range(400, end, 997), end - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match="cut short") as error:
            resolve_model(str(path))
        assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_any_damage_of_the_header_is_a_line(folder: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_checkpoint("llama3", folder))
    data, path = whole.read_bytes(), tmp_path / "damaged.gguf"
    draw = np.random.default_rng(7)
    for at in draw.integers(4, read_gguf(whole).headers[0][1], 300):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << int(draw.integers(8)))]) + data[at + 1 :])
        try:
            load(path)
        except ModelError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"GGUF" + struct.pack(">I", 3), "big-endian GGUF file; convert it with gguf-convert-endian"),
        (b"GGUF" + struct.pack("<I", 1), r"GGUF version 1 is not supported \(supported: 2, 3\)"),
        (b"GGUF" + struct.pack("<I", 4), "GGUF version 4 is not supported"),
        (b"tjgg" + struct.pack("<I", 3), "neither a model folder nor a GGUF file"),
        (b"", "neither a model folder nor a GGUF file"),
        (b"GG", "neither a model folder nor a GGUF file"),
    ],
)
def test_files_of_other_formats(start: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(start + bytes(64) if len(start) > 4 else start)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(path))


def test_what_a_file_is_called(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "Tiny-Q8_0.gguf", tiny_checkpoint("qwen3", folder))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("Tiny-Q8_0.gguf") == tmp_path / "Tiny-Q8_0.gguf"
    assert display_name(str(tmp_path / "Tiny-Q8_0.gguf")) == display_name("Tiny-Q8_0.gguf") == "Tiny-Q8_0"
    with pytest.raises(ModelError, match=r"not a model folder; give one of its files: Tiny-Q8_0\.gguf"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"other.gguf: no such file"):
        resolve_model("other.gguf")


def test_formats_that_do_not_go_together(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_checkpoint("qwen3", folder))
    with pytest.raises(ModelError, match="is a GGUF file, and --load-format says safetensors"):
        load_weights(path, load_arch(path), dtype=torch.float32, load_format="safetensors")
    assert load_weights(path, load_arch(path), dtype=torch.float32, load_format="dummy").embedding.shape == (
        160,
        48,
    )
