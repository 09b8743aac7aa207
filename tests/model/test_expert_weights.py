"""Weights of mixtures of experts: every spelling of a checkpoint, divided over ranks, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pensieve.engine.worker.sizing import Placement, workspace_bytes
from pensieve.model import checkpoint
from pensieve.model.arch import ModelError
from pensieve.model.checkpoint import TensorFill, pieces
from pensieve.model.families.common import _gpt_oss
from pensieve.model.folder import load_arch
from pensieve.model.shard import Shard
from pensieve.model.weights import ExpertWeights, LoadFormat, Weights, load_weights, tensors_of
from support.engine.checkpoints import WITH_EXPERTS, Family, tiny_checkpoint

EACH = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
JOINED = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
PUBLISHED = {
    "gpt_oss": "model.layers.0.mlp.experts.gate_up_proj_bias",
    "granitemoe": "model.layers.0.block_sparse_moe.input_linear.weight",
    "mixtral": "model.layers.0.block_sparse_moe.experts.5.w3.weight",
    "olmoe": "model.layers.0.mlp.experts.5.up_proj.weight",
    "qwen2_moe": "model.layers.0.mlp.experts.5.up_proj.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.5.up_proj.weight",
}
"""A tensor of each family's published checkpoints."""

GPT_OSS_20B = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "vocab_size": 201088,
    "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "sliding_window": 128, "initial_context_length": 4096, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 150000, "num_experts_per_tok": 4, "experts_per_token": 4,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "attention_bias": True, "swiglu_limit": 7.0, "hidden_act": "silu", "eos_token_id": 200002,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936, "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
    "attention_bias": False, "decoder_sparse_step": 1, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL_8X7B = {
    "model_type": "mixtral", "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
    "sliding_window": None, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def load(folder: Path, rank: int = 0, ranks: int = 1, load_format: LoadFormat = "auto") -> Weights:
    arch = load_arch(folder)
    return load_weights(folder, arch, dtype=torch.float32, load_format=load_format, shard=Shard(rank, ranks))


def same(one: Weights, other: Weights) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def in_memory_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names and tensors of transformers' own modules, made from published ones."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (len(item[0]), item[0])):
        each = EACH.fullmatch(name)
        if each is None:
            renamed = name.replace("block_sparse_moe.gate.", "mlp.gate.")
            renamed = renamed.replace(
                "block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"
            )
            renamed = renamed.replace(
                "block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"
            )
            found[renamed.replace(".router.layer.", ".router.")] = tensor
            continue
        at = each[1].replace("block_sparse_moe", "mlp")
        experts.setdefault(at, {}).setdefault(JOINED[each[3]], []).append(tensor)
    for at, parts in experts.items():
        gates, ups = torch.stack(parts["gate"]), torch.stack(parts["up"])
        found[f"{at}.gate_up_proj"] = torch.cat([gates, ups], dim=1)
        found[f"{at}.down_proj"] = torch.stack(parts["down"])
    return {name: tensor.contiguous() for name, tensor in found.items()}


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_every_spelling_gives_the_same_weights(family: Family, base: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, base)
    tensors = load_file(folder / "model.safetensors")
    assert PUBLISHED[family] in tensors, "transformers saves another spelling now"
    other = in_memory_names(tensors)
    assert family == "gpt_oss" or set(other) != set(tensors)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(other, tmp_path / "model.safetensors")
    assert same(load(folder), load(tmp_path))


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize("family", [family for family in WITH_EXPERTS if family != "olmoe"])
def test_the_ranks_together_have_all_experts(family: Family, load_format: LoadFormat, base: Path) -> None:
    folder = tiny_checkpoint(family, base, num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    whole, parts = load(folder, 0, 1, load_format), [load(folder, rank, 4, load_format) for rank in range(4)]
    paired = family == "gpt_oss"
    for index, layer in enumerate(whole.layers):
        mine = [part.layers[index].mlp for part in parts]
        if not isinstance(layer.mlp, ExpertWeights):
            assert family == "qwen3_moe" and index == 1
            continue
        experts = [one for one in mine if isinstance(one, ExpertWeights)]
        assert len(experts) == 4
        assert all(torch.equal(one.router.weight, layer.mlp.router.weight) for one in experts)
        assert torch.equal(torch.cat([one.down.weight for one in experts], 1), layer.mlp.down.weight)
        ups = [one.up.weight for one in experts]
        halves = torch.cat([up.chunk(2, 2)[0] for up in ups] + [up.chunk(2, 2)[1] for up in ups], 2)
        assert torch.equal(torch.cat(ups, 2) if paired else halves, layer.mlp.up.weight)
        if paired:
            biases = [one.up.bias for one in experts if one.up.bias is not None]
            assert layer.mlp.up.bias is not None and layer.mlp.down.bias is not None
            assert torch.equal(torch.cat(biases, 1), layer.mlp.up.bias)
            assert [one.down.bias is None for one in experts] == [False, True, True, True]
            assert experts[0].down.bias is not None
            assert torch.equal(experts[0].down.bias, layer.mlp.down.bias)


def test_parameters_are_counted_all_or_those_of_a_token(base: Path) -> None:
    for family in WITH_EXPERTS:
        folder = tiny_checkpoint(family, base)
        arch, weights = load_arch(folder), load(folder)
        matrices = [one.numel() for one in tensors_of(weights.layers) if one.ndim > 1]
        # A bias of all experts is a matrix in memory.
        biases = 3 * 6 * (48 + 48) if family == "gpt_oss" else 0
        assert arch.num_parameters == sum(matrices) - biases + weights.head.weight.numel()
        each = 3 * 48 * 24 * sum(layer.has_experts for layer in arch.layers)
        assert arch.num_parameters - arch.active_parameters == (6 - 2) * each


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [(GPT_OSS_20B, 20.3, 3.6), (QWEN3_30B_A3B, 30.2, 3.0), (MIXTRAL_8X7B, 46.6, 12.7)],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else str(value),
)
def test_published_models_have_the_parameters_that_their_authors_name(
    config: dict[str, Any], billions: float, active: float, tmp_path: Path
) -> None:
    """Without the embedding, which takes no products."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = load_arch(tmp_path)
    assert round(arch.num_parameters / 1e9, 1) == billions
    assert round(arch.active_parameters / 1e9, 1) == active


def test_gpt_oss_is_read_as_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    arch = load_arch(tmp_path)
    assert [layer.window for layer in arch.layers[:3]] == [128, None, 128]
    assert arch.sinks and arch.qkv_bias and arch.output_bias and arch.context_limit == 131072
    (rope,) = arch.ropes
    assert (rope.scaling, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)
    assert arch.experts is not None and arch.experts.clamped == (1.702, 7.0)


def test_gpt_oss_is_read_by_older_transformers() -> None:
    """Their config has no names for the two numbers of the activation."""
    parsed = SimpleNamespace(num_local_experts=32, num_experts_per_tok=4, intermediate_size=2880)
    assert _gpt_oss(parsed).clamped == (1.702, 7.0)


def test_a_step_needs_memory_for_every_pick(base: Path) -> None:
    arch = load_arch(tiny_checkpoint("mixtral", base))
    assert arch.experts is not None
    more = replace(arch, experts=replace(arch.experts, per_token=4))
    place = Placement("cuda", "bfloat16", 512, 100, 4)
    one, other = (workspace_bytes(which, place, cuda_graphs=False) for which in (arch, more))
    assert other - one == 100 * 2 * (3 * 24 + 48) * 2


def test_large_slices_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 4 * 20)
    source = torch.arange(3 * 7 * 9.0).view(3, 7, 9)[:, 2:6, :]
    target = torch.zeros(3, 4, 9)
    found = list(pieces([TensorFill(source, target)]))
    assert max(part.numel() for part, _ in found) <= 20
    for part, its_target in found:
        its_target.copy_(part)
    assert torch.equal(source, target)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, not within 1 to 6 experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0; it must be a whole number above 0"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is false"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, which is not supported"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit is 0.0, not a number above 0"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
    ],
)  # fmt: skip
def test_what_is_refused(
    family: Family, change: dict[str, Any], said: str, base: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_checkpoint(family, base) / "config.json").read_text()) | change
    config = {name: value for name, value in config.items() if name not in change or value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said) as error:
        load_arch(tmp_path)
    assert "\n" not in str(error.value)


def test_experts_that_cannot_be_divided_are_refused(base: Path) -> None:
    arch = load_arch(tiny_checkpoint("qwen2_moe", base, num_key_value_heads=6))
    with pytest.raises(
        ModelError, match="an MLP of 20 does not divide over 3 ranks; this model can have 1, 2"
    ):
        Shard(0, 3).arch(arch)
    assert arch.experts is not None
    half = Shard(0, 2).arch(arch).experts
    assert half == replace(arch.experts, width=12, shared_width=10)


def test_a_missing_expert_is_named(base: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint("mixtral", base)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    del tensors[name]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape(f"no tensor {name}")):
        load(tmp_path)
