"""Families whose layers differ from Llama's: the logits of transformers, whole and in pieces."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pensieve.kernels import reference
from pensieve.model.arch import ModelError
from pensieve.model.folder import load_arch
from pensieve.model.ops import TORCH_OPS
from pensieve.model.shard import Shard
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights
from support.engine.checkpoints import LAYERED, WITH_EXPERTS, Family, tiny_checkpoint
from support.engine.layered_attention import LayeredAttention
from support.ranks.rank_threads import Exchange, ThreadCollective

TOKENS = 50
"""Five windows of most families."""
PIECES = (1, 8, 9, 30, 33)
"""Where one computation ends and the next begins: a window reaches over several of them."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
CASES: tuple[tuple[Family, dict[str, Any]], ...] = (
    *((family, {}) for family in (*LAYERED, *WITH_EXPERTS)),
    ("mistral", {"sliding_window": 9}),
    ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {"sliding_window": 9, "use_sliding_window": True, "layer_types": MIXED}),
    ("qwen3", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": YARN | {"truncate": False}}),
    ("llama", {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 1.3, "beta_fast": 4, "beta_slow": 2}}),
    ("cohere2", {"layer_types": None, "sliding_window_pattern": 2, "attention_bias": True}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("gemma2", {"layer_types": None, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"attention_bias": True, "tie_word_embeddings": False, "sliding_window": 1}),
    ("gemma3_text", {"rope_parameters": None, "layer_types": None, "sliding_window_pattern": 2}),
    ("glm4", {"partial_rotary_factor": 1.0, "attention_bias": False}),
    ("ministral", {"layer_types": None}),
    ("ministral3", {"sliding_window": 9}),
    ("olmo3", {"rope_parameters": {"sliding_attention": DEFAULT, "full_attention": YARN | {"truncate": False}}}),
    ("olmo3", {"layer_types": None, "attention_bias": True, "num_key_value_heads": None}),
    ("phi3", {"sliding_window": None, "partial_rotary_factor": 1.0}),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2, "use_sliding_window": False}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
    ("gpt_oss", {"attention_bias": False, "layer_types": MIXED, "rope_parameters": DEFAULT, "num_experts_per_tok": 6}),
    ("mixtral", {"sliding_window": 9, "num_experts_per_tok": 1}),
    ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False, "use_sliding_window": True, "sliding_window": 9}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": None, "norm_topk_prob": False}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9, "attention_bias": True}),
    ("starcoder2", {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}),
)  # fmt: skip


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@cache
def tokens() -> torch.Tensor:
    return torch.randint(3, 160, (TOKENS,), generator=torch.Generator().manual_seed(5))


def whole_model(folder: Path) -> Transformer:
    arch = load_arch(folder)
    return Transformer(arch, load_weights(folder, arch, dtype=torch.float32))


@torch.inference_mode()
def logits(model: Transformer, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    """The logits after every token of a context that is computed in spans, which end at ``cuts``."""
    attend, found = LayeredAttention(model.arch, TOKENS), []
    for start, end in itertools.pairwise((0, *cuts, TOKENS)):
        attend.positions = torch.arange(start, end)
        found.append(model.forward(tokens()[start:end], attend.positions, attend, torch.arange(end - start)))
    return torch.cat(found)


@torch.inference_mode()
def transformers_logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found: torch.Tensor = model.eval()(tokens()[None]).logits[0]
    return found


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert float((got - want).abs().max() / want.std()) < 5e-5


@pytest.mark.parametrize(("family", "config"), CASES, ids=str)
def test_logits_are_those_of_transformers(family: Family, config: dict[str, Any], base: Path) -> None:
    folder = tiny_checkpoint(family, base, **config)
    want, model = transformers_logits(folder), whole_model(folder)
    close(logits(model), want)
    close(logits(model, PIECES), want)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "granite"])
def test_embeddings_in_bfloat16_are_those_of_transformers(family: Family, base: Path) -> None:
    """Their scale is rounded before it multiplies."""
    folder = tiny_checkpoint(family, base)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        want = theirs.get_input_embeddings()(tokens()) * getattr(theirs.config, "embedding_multiplier", 1.0)
    seen: list[torch.Tensor] = []

    def norm(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(x)
        return reference.norm(x, *rest)

    arch, ops = load_arch(folder), replace(TORCH_OPS, norm=norm)
    model = Transformer(arch, load_weights(folder, arch, dtype=torch.bfloat16), ops)
    attend = LayeredAttention(arch, TOKENS, torch.bfloat16)
    attend.positions = torch.arange(TOKENS)
    with torch.inference_mode():
        model.forward(tokens(), attend.positions, attend, attend.positions)
    assert torch.equal(seen[0], want)


def test_norms_around_one_keep_their_bits_in_bfloat16(base: Path) -> None:
    """``1 + w`` of a small ``w`` would round to 1 in bfloat16."""
    folder = tiny_checkpoint("gemma2", base)
    arch = load_arch(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).model.norm
    ours = load_weights(folder, arch, dtype=torch.bfloat16).final_norm
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.inference_mode():
        theirs.weight.fill_(2**-10)
        ours.weight.fill_(1 + 2**-10)
        want, got = theirs(x * 9), reference.norm(x * 9, ours.weight, ours.bias, arch.norm_eps)
    assert got.dtype == torch.bfloat16 and ours.weight.dtype == torch.float32
    assert float((got == want).float().mean()) > 0.98
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    "family", [family for family in (*LAYERED, *WITH_EXPERTS) if not family.startswith("olmo")]
)
def test_two_ranks_give_the_logits_of_one(family: Family, base: Path) -> None:
    folder = tiny_checkpoint(family, base, num_attention_heads=6, num_key_value_heads=2, intermediate_size=64)
    arch, exchange = load_arch(folder), Exchange(2)
    found: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        shard = Shard(rank, 2)
        weights = load_weights(folder, arch, dtype=torch.float32, shard=shard)
        model = Transformer(shard.arch(arch), weights, collective=ThreadCollective(exchange, rank))
        found[rank] = logits(model, PIECES)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close(found[0], logits(whole_model(folder)))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("family", ["olmo2", "olmo3", "olmoe"])
def test_norms_of_all_heads_are_not_divided(family: Family, base: Path) -> None:
    arch = load_arch(tiny_checkpoint(family, base))
    with pytest.raises(ModelError, match=f"{family} normalises all queries and keys"):
        Shard(0, 2).arch(arch)
