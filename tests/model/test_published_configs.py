"""Odd values in config.json and generation_config.json: the tokens of transformers, or a refusal naming the field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pensieve.config import EngineOptions
from pensieve.core import Sampling
from pensieve.engine.build import scheduler_config
from pensieve.engine.worker.sizing import worker_info
from pensieve.model.arch import ModelError
from pensieve.model.folder import load_arch, load_generation
from support.engine.checkpoints import FAMILIES, Family, tiny_checkpoint
from support.engine.greedy import greedy_tokens, transformers_tokens

ABSENT = object()
ROPE = {"factor": 2.0, "rope_theta": 5000.0}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def changed(base: Path, tmp_path: Path, family: Family, config: dict[str, Any], **overrides: Any) -> Path:
    """A checkpoint made with ``overrides``, whose config.json has other values then; ``ABSENT`` takes one away."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(family, base, **overrides), folder)
    values = json.loads((folder / "config.json").read_text()) | config
    values = {name: value for name, value in values.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


HEADS_32: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 2,
}


@pytest.mark.parametrize(
    ("family", "config", "overrides"),
    [
        ("llama", {"num_key_value_heads": None}, {}),
        ("llama", {"num_key_value_heads": ABSENT}, {}),
        ("llama", {"head_dim": None}, {}),
        ("llama", {"head_dim": ABSENT}, {}),
        ("mistral", {"head_dim": None}, {}),
        ("qwen2", {"num_key_value_heads": None}, {"num_key_value_heads": 6}),
        ("qwen3", {"num_key_value_heads": None}, {"num_key_value_heads": 6}),
        ("qwen2", {"num_key_value_heads": ABSENT}, {k: v for k, v in HEADS_32.items() if k != "head_dim"}),
        ("qwen2", {"rope_parameters": ABSENT, "rope_theta": ABSENT}, {}),
        ("qwen2", {"rope_parameters": None, "rope_scaling": None, "rope_theta": 500.0}, {}),
        ("qwen2", {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", **ROPE}}, {}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", **ROPE}, "rope_theta": 777.0}, {}),
        ("qwen2", {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 777.0}, {}),
        ("qwen2", {"rope_scaling": {}, "rope_theta": 777.0}, {}),
        ("llama", {"rope_parameters": ABSENT, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {}),
        ("llama", {"rope_scaling": {"type": "llama3", **LLAMA3}, "original_max_position_embeddings": 64}, {}),
        ("llama", {"rope_scaling": {"type": "llama3", "original_max_position_embeddings": 32, **LLAMA3}}, {}),
        ("mistral", {"attention_bias": True}, {}),
        ("llama", {"sliding_window": 40, "use_sliding_window": True}, {}),
        ("llama", {"sliding_window": None}, {}),
        ("qwen2", {"attention_bias": False}, {}),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": False}, {}),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 3}, {}),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True}, {}),
        ("qwen3", {"layer_types": None}, {}),
        ("qwen3", {"hidden_act": "swish"}, {}),
        ("qwen3", {"hidden_act": ABSENT}, {}),
        ("qwen3", {"rms_norm_eps": ABSENT}, {}),
        ("qwen3", {"tie_word_embeddings": ABSENT}, {}),
        ("seed_oss", {"attention_bias": ABSENT, "attention_out_bias": ABSENT, "mlp_bias": ABSENT}, {}),
        ("seed_oss", {}, {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
        ("seed_oss", {"head_dim": None}, {"head_dim": 8}),
        ("seed_oss", {"head_dim": ABSENT}, {"head_dim": 128}),
        ("seed_oss", {"num_key_value_heads": None}, {"num_key_value_heads": 6}),
        ("llama3", {"tie_word_embeddings": True}, {}),
        ("opt", {"tie_word_embeddings": ABSENT}, {}),
        ("opt", {"word_embed_proj_dim": None}, {}),
        ("opt", {"activation_function": "gelu"}, {}),
        ("opt", {"enable_bias": ABSENT}, {}),
        ("qwen2", {"eos_token_id": [1, 2], "bos_token_id": None, "pad_token_id": -1}, {}),
    ],
)  # fmt: skip
def test_configs_are_read_as_transformers_does(
    base: Path, tmp_path: Path, family: Family, config: dict[str, Any], overrides: dict[str, Any]
) -> None:
    rope = {} if family == "opt" else {"rope_parameters": ABSENT} if "rope_scaling" in config else {}
    folder = changed(base, tmp_path, family, rope | config, **overrides)
    assert greedy_tokens(folder) == transformers_tokens(folder)


def test_the_new_spelling_beside_the_old_one(base: Path, tmp_path: Path) -> None:
    old, new = {"type": "linear", "factor": 4.0}, {"rope_type": "default", "rope_theta": 300.0}
    folder = changed(base, tmp_path, "qwen2", {"rope_scaling": old, "rope_parameters": new})
    assert greedy_tokens(folder) == transformers_tokens(folder)


def test_the_engine_ends_turns_where_the_tokenizer_does(base: Path) -> None:
    options = EngineOptions(
        model=str(tiny_checkpoint("llama", base)), device_cache="64tokens", host_cache="0"
    )
    arch = load_arch(Path(options.model))
    info = worker_info(options, arch, weight_bytes=0)
    assert scheduler_config(options, arch, info).eos_token_ids == (2,)
    named = msgspec.structs.replace(options, eos_token_ids=(2, 7))
    assert scheduler_config(named, arch, info).eos_token_ids == (2, 7)


def test_a_window_of_a_llama_limits_the_context(base: Path, tmp_path: Path) -> None:
    assert load_arch(changed(base, tmp_path, "llama", {"sliding_window": 40})).context_limit == 40


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_no_layer_has_limits_nothing(base: Path, tmp_path: Path, family: Family) -> None:
    config = {"sliding_window": 40, "use_sliding_window": True, "layer_types": ABSENT}
    behind = changed(base, tmp_path / "a", family, config | {"max_window_layers": 3})
    within = changed(base, tmp_path / "b", family, config | {"max_window_layers": 2})
    windows = [[layer.window for layer in load_arch(folder).layers] for folder in (behind, within)]
    assert windows == [[None, None, None], [None, None, 40]]


_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


@pytest.mark.parametrize("value", [None, 0, -1, "8", 8.0, True, [8]], ids=repr)
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_that_are_none(base: Path, tmp_path: Path, family: Family, value: object) -> None:
    sizes = (*_SIZES, "ffn_dim" if family == "opt" else "intermediate_size")
    folder = changed(base, tmp_path, family, {})
    config = json.loads((folder / "config.json").read_text())
    for name in sizes:
        (folder / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(ModelError, match=rf"config\.json: {name} is ") as refused:
            load_arch(folder)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("family", "config", "field"),
    [
        ("mistral", {"num_key_value_heads": None}, "num_key_value_heads is null"),
        ("qwen2", {"num_key_value_heads": ABSENT}, "num_key_value_heads 32"),
        ("qwen3", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ("llama", {"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        ("llama", {"num_key_value_heads": "2"}, 'num_key_value_heads is "2"'),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ("qwen3", {"head_dim": None}, "head_dim is null"),
        ("llama", {"head_dim": 0}, "head_dim is 0"),
        ("llama", {"head_dim": 7}, "head_dim"),
        ("llama", {"rope_parameters": ABSENT, "rope_theta": None}, "rope_theta"),
        ("llama", {"rope_parameters": ABSENT, "rope_theta": "1"}, "rope_theta"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": None}}, "factor .* is null"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": "linear"}, "rope_parameters"),
        ("qwen2", {"tie_word_embeddings": None}, "tie_word_embeddings is null"),
        ("qwen2", {"tie_word_embeddings": "true"}, 'tie_word_embeddings is "true"'),
        ("opt", {"tie_word_embeddings": None}, "tie_word_embeddings is null"),
        ("llama", {"attention_bias": None}, "attention_bias is null"),
        ("seed_oss", {"attention_out_bias": None}, "attention_out_bias is null"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is null"),
        ("llama", {"hidden_act": None}, "hidden_act is null"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral", {"sliding_window": "8"}, 'sliding_window is "8"'),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types|num_hidden_layers"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types has chunked_attention"),
        ("opt", {"activation_function": None}, "activation_function is null"),
        ("opt", {"hidden_size": 47}, "hidden_size 47"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("llama", {"eos_token_id": "2"}, "eos_token_id"),
        ("llama", {"eos_token_id": [1, None]}, "eos_token_id"),
        ("llama", {"bos_token_id": "1"}, 'bos_token_id is "1"'),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(
    base: Path, tmp_path: Path, family: Family, config: dict[str, Any], field: str
) -> None:
    folder = changed(base, tmp_path, family, config)
    with pytest.raises(ModelError, match=field) as refused:
        load_arch(folder)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"do_sample": True, "temperature": None, "top_k": None, "top_p": None}, Sampling(temperature=1.0)),
        ({"do_sample": True, "top_k": 0, "top_p": 0}, Sampling(temperature=1.0, top_p=0.0)),
        ({"do_sample": True}, Sampling(temperature=1.0, top_k=50)),
        ({"do_sample": None, "temperature": 0.5}, Sampling()),
        ({"repetition_penalty": 0}, Sampling()),
        ({}, Sampling()),
    ],
)
def test_recommended_sampling(tmp_path: Path, values: dict[str, Any], expected: Sampling) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert load_generation(tmp_path) == expected


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"do_sample": "false"}, "do_sample"),
        ({"do_sample": 1}, "do_sample"),
        ({"do_sample": True, "temperature": "0.7"}, 'temperature is "0.7"'),
        ({"do_sample": True, "temperature": float("nan")}, "temperature is NaN"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": True, "top_p": True}, "top_p is true"),
        ({"do_sample": True, "min_p": -1}, "min_p is -1"),
        ({"do_sample": True, "top_k": [5]}, "top_k"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1"),
    ],
)
def test_recommended_sampling_that_is_refused(tmp_path: Path, values: dict[str, Any], field: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=rf"/generation_config\.json: {field}"):
        load_generation(tmp_path)
