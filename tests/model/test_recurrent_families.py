"""Families with recurrent layers against transformers in float32: whole, and in pieces through pages."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.model.arch import Arch, ModelError
from pensieve.model.folder import load_arch
from pensieve.model.groups import kv_groups
from pensieve.model.shard import Shard, divisors
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights
from support.model.recurrent_models import FAMILIES, Family, Pages, make_model, run_in_pieces
from support.ranks.rank_threads import Exchange, ThreadCollective

CLOSE = 5e-5
"""Largest difference of logits, as a share of their spread; rounding alone gives up to 2e-5."""


def _load(folder: Path) -> Transformer:
    arch = load_arch(folder)
    return Transformer(arch, load_weights(folder, arch, dtype=torch.float32))


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert float((got - want).abs().max() / want.std()) < CLOSE


def _texts(*lengths: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(5)
    return [torch.randint(3, 120, (length,), generator=drawn) for length in lengths]


VARIANTS: list[tuple[Family, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("mamba2", {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "conv_kernel": 3}),
    ("mamba2", {"tie_word_embeddings": True, "residual_in_fp32": False, "time_step_limit": (0.0, float("inf"))}),
    ("bamba", {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True, "time_step_limit": (0.1, 0.5)}),
    ("bamba", {"attn_layer_indices": [0, 2], "mamba_conv_bias": False}),
    ("falcon_h1", {"mamba_rms_norm": False, "projectors_bias": True, "mamba_proj_bias": True, "attention_bias": True}),
    ("falcon_h1", {"mamba_norm_before_gate": False, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen3_next", {"attention_bias": True, "num_experts": 0, "mlp_only_layers": []}),
    ("qwen3_next_experts", {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_logits_equal_transformers(family: Family, overrides: dict[str, Any], tmp_path: Path) -> None:
    theirs = make_model(family, tmp_path, **overrides)
    ours, texts = _load(tmp_path), _texts(60, 37)
    with torch.inference_mode():
        wanted = [theirs(text[None]).logits[0] for text in texts]
    rows = [[0, 60, -1, -1, 0, 0], [60, 37, -1, -1, 0, 1]]
    pages = [(text, 0, list(range(8 * index, 8 * index + 8))) for index, text in enumerate(texts)]
    whole = Pages(ours.arch, 16, 2).run(ours, pages, rows)
    for got, want in zip(whole.split((60, 37)), wanted, strict=True):
        _assert_close(got, want)
    for got, want in zip(run_in_pieces(ours, texts, random.Random(7)), wanted, strict=True):
        _assert_close(got, want)


def test_a_folder_of_qwen3_5_with_images(tmp_path: Path) -> None:
    """Its text model is below ``language_model``; the vision tower and the draft layer are not read."""
    from safetensors.torch import load_file, save_file

    theirs = make_model("qwen3_5_text", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "text_config": config, "vision_config": {}, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {re.sub(r"^model\.", "model.language_model.", name): each for name, each in tensors.items()}
    extra = {"model.visual.merger.norm.weight": torch.ones(3), "mtp.norm.weight": torch.ones(3)}
    save_file(renamed | extra, tmp_path / "model.safetensors")
    ours, (text,) = _load(tmp_path), _texts(20)
    with torch.inference_mode():
        wanted = theirs(text[None]).logits[0]
    got = Pages(ours.arch, 3, 1).run(ours, [(text, 0, [0, 1, 2])], [[0, 20, -1, -1, 0, 0]])
    _assert_close(got, wanted)


def _changed(family: Family, folder: Path, **values: Any) -> Arch:
    make_model(family, folder)
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    return load_arch(folder)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("qwen3_next", {"mlp_only_layers": [0]}, "num_experts_per_tok is 10, not within 1 to 4 experts"),
        ("qwen3_next_experts", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_next_experts", {"mlp_only_layers": ["2"]}, "mlp_only_layers"),
        ("qwen3_next_experts", {"num_experts": -1}, "num_experts is -1"),
        ("qwen3_next_experts", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        (
            "qwen3_next_experts",
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size is 0",
        ),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads 3 do not divide"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("bamba", {"attn_layer_indices": [7]}, "attn_layer_indices has 7"),
        ("bamba", {"mamba_n_groups": 3}, "do not divide over 3 groups"),
        ("bamba", {"time_step_limit": [0.1]}, "time_step_limit"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
        ("falcon_h1", {"key_multiplier": 0.0}, "key_multiplier"),
        ("mamba2", {"hidden_act": "relu"}, "hidden_act relu"),
        ("mamba2", {"max_position_embeddings": "many"}, "max_position_embeddings"),
        ("mamba2", {"state_size": 0}, "state_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    family: Family, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        _changed(family, tmp_path, **values)


def test_only_attention_layers_have_keys_and_values(tmp_path: Path) -> None:
    bytes_of = {
        family: kv_groups(_changed(family, tmp_path / family), 1, "bfloat16")[0].page_bytes
        for family in FAMILIES
    }
    per_layer = 2 * 2 * 8 * 2
    assert bytes_of["mamba2"] == 0
    assert bytes_of["bamba"] == per_layer
    assert bytes_of["falcon_h1"] == 2 * per_layer
    assert bytes_of["qwen3_next"] == bytes_of["qwen3_5_text"] == 2 * 2 * per_layer


def test_context_limits(tmp_path: Path) -> None:
    assert _changed("mamba2", tmp_path / "a").context_limit == 131_072
    assert _changed("mamba2", tmp_path / "b", max_position_embeddings=4096).context_limit == 4096
    assert _changed("bamba", tmp_path / "c").context_limit == 512


def test_parameters_are_counted(tmp_path: Path) -> None:
    """All weights of projections, and those that compute a token: without the experts that are not picked."""
    for family in FAMILIES:
        model = make_model(family, tmp_path / family)
        wanted = sum(
            parameter.numel()
            for name, parameter in model.named_parameters()
            if parameter.dim() >= 2 and "embed" not in name and "conv1d" not in name
        )
        arch = load_arch(tmp_path / family)
        assert arch.num_parameters == wanted
        mixtures = sum(layer.has_experts for layer in arch.layers)
        assert mixtures == (3 if family == "qwen3_next_experts" else 0)
        assert arch.active_parameters == wanted - mixtures * (6 - 2) * 3 * 24 * arch.hidden_size


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_together_compute_the_model(family: Family, tmp_path: Path) -> None:
    """Two ranks: half the key heads, value heads and states each."""
    make_model(family, tmp_path)
    whole, (text,) = _load(tmp_path), _texts(30)
    arch, exchange = whole.arch, Exchange(2)
    assert divisors(arch) == [1, 2]

    def run(model: Transformer) -> torch.Tensor:
        return Pages(model.arch, 4, 1).run(model, [(text, 0, [0, 1, 2, 3])], [[0, 30, -1, -1, 0, 0]])

    def of_rank(rank: int) -> torch.Tensor:
        shard = Shard(rank, 2)
        weights = load_weights(tmp_path, arch, dtype=torch.float32, shard=shard)
        return run(Transformer(shard.arch(arch), weights, collective=ThreadCollective(exchange, rank)))

    want = run(whole)
    with ThreadPoolExecutor(2) as threads:
        for got in threads.map(of_rank, range(2)):
            _assert_close(got, want)


def test_dummy_weights_are_divided_alike(tmp_path: Path) -> None:
    arch = _changed("qwen3_next", tmp_path)
    parts = [
        load_weights(tmp_path, arch, dtype=torch.float32, load_format="dummy", shard=Shard(rank, 2))
        for rank in (0, 1)
    ]
    whole = load_weights(tmp_path, arch, dtype=torch.float32, load_format="dummy")
    layers = [weights.layers[0].recurrent for weights in (whole, *parts)]
    assert layers[0] is not None and layers[1] is not None and layers[2] is not None
    assert torch.equal(
        torch.cat([layer.output.weight for layer in layers[1:] if layer], 1), layers[0].output.weight
    )
    assert layers[1].project.weight.shape[0] * 2 == layers[0].project.weight.shape[0]


def test_ranks_divide_heads_and_every_width(tmp_path: Path) -> None:
    """12 of everything that is divided; 8 of one of them do not divide over 3 or 6 ranks."""
    arch = _changed("qwen3_next_experts", tmp_path)
    assert arch.experts is not None and arch.recurrent is not None
    even = replace(
        arch,
        num_heads=12,
        num_kv_heads=12,
        intermediate_size=12,
        recurrent=replace(arch.recurrent, key_heads=12),
        experts=replace(arch.experts, width=12, shared_width=12),
    )
    others = (
        replace(even, num_heads=8, num_kv_heads=1),
        replace(even, intermediate_size=8),
        replace(even, recurrent=replace(arch.recurrent, key_heads=8)),
        replace(even, experts=replace(arch.experts, width=8, shared_width=12)),
        replace(even, experts=replace(arch.experts, width=12, shared_width=8)),
    )
    assert divisors(even) == [1, 2, 3, 4, 6]
    for other in others:
        assert divisors(other) == [1, 2, 4]
        with pytest.raises(
            ModelError, match=r"do(es)? not divide over 3 ranks; this model can have 1, 2, 4$"
        ):
            Shard(0, 3).arch(other)


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    arch = _changed("mamba2", tmp_path)
    with pytest.raises(ModelError, match="2 key heads of recurrent layers do not divide over 4 ranks"):
        Shard(0, 4).arch(arch)
