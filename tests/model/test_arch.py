"""Reading architectures, old and new config files, and refusing what is not supported."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from pensieve.core import Sampling
from pensieve.model.arch import Arch, ModelError, Rope
from pensieve.model.families import CONFIG_CLASSES, READERS
from pensieve.model.families.parsing import default_eos_ids
from pensieve.model.folder import load_arch
from pensieve.model.groups import kv_groups

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MIXED = ["full_attention", "sliding_attention"] * 16
OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
}


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Arch:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_arch(folder)


def test_llama(tmp_path: Path) -> None:
    arch = read(tmp_path, LLAMA)
    assert (arch.num_kv_heads, arch.head_dim, arch.context_limit) == (8, 128, 4096)
    assert arch.ropes == (Rope(10000.0),) and {layer.window for layer in arch.layers} == {None}
    assert arch.dtype == "bfloat16"
    assert arch.eos_token_ids == (2,)
    assert not (arch.qkv_bias or arch.mlp_bias or arch.qk_norm or arch.tied_embeddings)
    assert kv_groups(arch, 3, "bfloat16")[0].page_bytes == 3 * 2 * 32 * 8 * 128 * 2
    assert arch.num_parameters == 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 11008) + 32000 * 4096


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3},
    ],
)
def test_llama3_scaling_in_old_and_new_files(tmp_path: Path, config: dict[str, Any]) -> None:
    assert read(tmp_path, LLAMA | config).ropes == (Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192),)


def test_linear_scaling(tmp_path: Path) -> None:
    (rope,) = read(tmp_path, LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}).ropes
    assert rope == Rope(10000.0, "linear", 2.0)


def test_opt(tmp_path: Path) -> None:
    arch = read(tmp_path, OPT)
    assert arch.learned_positions and not arch.ropes and arch.position_offset == 2
    assert arch.qkv_bias and arch.output_bias and arch.mlp_bias and arch.tied_embeddings
    assert arch.num_kv_heads == 12 and arch.norm == "layer" and arch.eos_token_ids == (2,)


def test_qwen_biases_and_norms(tmp_path: Path) -> None:
    two = read(tmp_path, LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64})
    assert two.qkv_bias and not two.output_bias and not two.qk_norm and two.context_limit == 4096
    three = read(tmp_path, LLAMA | {"model_type": "qwen3", "tie_word_embeddings": True})
    assert three.qk_norm and not three.qkv_bias and three.tied_embeddings and three.head_dim == 128


def test_seed_oss_biases_and_eos(tmp_path: Path) -> None:
    config = {name: value for name, value in LLAMA.items() if name != "eos_token_id"}
    arch = read(tmp_path, config | {"model_type": "seed_oss", "num_attention_heads": 80})
    assert arch.qkv_bias and not (arch.output_bias or arch.mlp_bias or arch.qk_norm)
    assert arch.head_dim == 128 and arch.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": None}, [None] * 32),
        ({"model_type": "mistral", "sliding_window": 100}, [100] * 32),
        ({"model_type": "mistral", "sliding_window": 8192}, [None] * 32),
        ({"model_type": "mistral", "max_position_embeddings": 32768}, [4096] * 32),
        ({"model_type": "ministral", "sliding_window": 9, "layer_types": MIXED}, [None, 9] * 16),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512}, [None] * 28 + [512] * 4),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 512}, [None] * 32),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 9, "layer_types": MIXED},
            [None, 9] * 16,
        ),
        ({"model_type": "qwen3", "sliding_window": 512, "layer_types": ["full_attention"] * 32}, [None] * 32),
        ({"model_type": "llama", "layer_types": ["full_attention"] * 32}, [None] * 32),
    ],
)
def test_sliding_windows(tmp_path: Path, config: dict[str, Any], windows: list[int | None]) -> None:
    arch = read(tmp_path, LLAMA | config)
    assert [layer.window for layer in arch.layers] == windows
    assert arch.context_limit == config.get("max_position_embeddings", 4096)


def test_a_window_that_only_the_cache_of_transformers_knows_limits_the_context(tmp_path: Path) -> None:
    arch = read(tmp_path, LLAMA | {"sliding_window": 512})
    assert arch.context_limit == 512 and {layer.window for layer in arch.layers} == {None}


def test_generation_config(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA).generation == Sampling()
    greedy = read(tmp_path, LLAMA, {"temperature": 0.6, "eos_token_id": [7, 9]})
    assert greedy.generation == Sampling() and greedy.eos_token_ids == (7, 9, 2)
    given = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    assert read(tmp_path, LLAMA, given).generation == Sampling(
        temperature=0.6, top_p=0.9, top_k=50, repetition_penalty=1.1
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({}, "none named"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA | {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope|short_factor"),
        (LLAMA | {"model_type": "mistral", "sliding_window": 9, "layer_types": MIXED}, "layer_types"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quant_method None is not supported"),
        (LLAMA | {"hidden_act": "gelu"}, "gelu"),
        (LLAMA | {"torch_dtype": "int8"}, "int8"),
        (LLAMA | {"num_attention_heads": 30}, "hidden_size 4096 .* num_attention_heads 30"),
        (LLAMA | {"num_key_value_heads": 5}, "num_attention_heads 32 .* num_key_value_heads 5"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "vocab_size"),
        (OPT | {"do_layer_norm_before": False}, "opt-350m"),
        (OPT | {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
    ],
)
def test_what_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, config)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_arch(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            load_arch(tmp_path)


@pytest.mark.parametrize("family", READERS)
def test_default_eos_ids_are_those_of_transformers(family: str) -> None:
    folder, name = CONFIG_CLASSES[family]
    module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    default = getattr(module, name)().eos_token_id
    expected = () if default is None else tuple(default) if isinstance(default, list) else (default,)
    assert default_eos_ids({"model_type": family}, {}) == expected
