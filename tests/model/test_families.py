"""Families whose layers differ from Llama's: the logits of transformers, whole and in pieces."""

from __future__ import annotations

import itertools
import json
import re
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pensieve.kernels import reference
from pensieve.model.arch import Layer, ModelError, Rope
from pensieve.model.folder import load_arch
from pensieve.model.ops import TORCH_OPS
from pensieve.model.shard import Shard
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights
from support.engine.checkpoints import LAYERED, WITH_EXPERTS, Family, auto_class, tiny_checkpoint
from support.engine.layered_attention import LayeredAttention
from support.model.newest_models import as_newest
from support.ranks.rank_threads import Exchange, ThreadCollective

TOKENS = 50
"""Five windows of most families."""
PIECES = (1, 8, 9, 30, 33)
"""Where one computation ends and the next begins: a window reaches over several of them."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
CASES: tuple[tuple[Family, dict[str, Any]], ...] = (
    *((family, {}) for family in (*LAYERED, *WITH_EXPERTS)),
    ("mistral3", {}),
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
    ("mistral3", {"model_type": "ministral3", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
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
def transformers_logits(family: Family, folder: Path) -> torch.Tensor:
    made = auto_class(family)
    model = made.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found: torch.Tensor = as_newest(model.eval())(tokens()[None]).logits[0]
    return found


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert float((got - want).abs().max() / want.std()) < 5e-5


@pytest.mark.parametrize(("family", "config"), CASES, ids=str)
def test_logits_are_those_of_transformers(family: Family, config: dict[str, Any], base: Path) -> None:
    folder = tiny_checkpoint(family, base, **config)
    want, model = transformers_logits(family, folder), whole_model(folder)
    close(logits(model), want)
    close(logits(model, PIECES), want)


@torch.inference_mode()
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
    model.forward(tokens(), attend.positions, attend, attend.positions)
    assert torch.equal(seen[0], want)


@torch.inference_mode()
def test_norms_around_one_keep_their_bits_in_bfloat16(base: Path) -> None:
    """``1 + w`` of a small ``w`` would round to 1 in bfloat16."""
    folder = tiny_checkpoint("gemma2", base)
    arch = load_arch(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).model.norm
    ours = load_weights(folder, arch, dtype=torch.bfloat16).final_norm
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
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


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
@pytest.mark.parametrize("old", [False, True])
def test_old_and_new_names_of_a_text_part(family: Family, old: bool, base: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, base)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    text = "language_model.model." if old else "model.language_model."

    def renamed(name: str) -> str:
        inner = re.sub(r"^(model\.language_model\.|language_model\.model\.)", text, name)
        if old:
            return re.sub(
                "^lm_head", "language_model.lm_head", inner.replace("model.vision_tower", "vision_tower")
            )
        return inner.replace("language_model.lm_head", "lm_head")

    tensors = {renamed(name): value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logits(whole_model(tmp_path)), logits(whole_model(folder)))


def test_gemma3_published_with_few_fields(tmp_path: Path) -> None:
    """As gemma-3-4b-it has them: sizes that are defaults are absent, and positions are in the old spelling."""
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    outer = {"model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    arch = load_arch(tmp_path)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.vocab_size) == (8, 4, 256, 262208)
    assert (arch.context_limit, arch.dtype, arch.eos_token_ids) == (131072, "bfloat16", (1, 106))
    local, whole = Rope(10000.0), Rope(1e6, "linear", 8.0)
    assert arch.layers[:6] == (*[Layer(window=1024, rope=local)] * 5, Layer(rope=whole))
    assert arch.layers[33] == Layer(window=1024, rope=local)
    assert arch.tied_embeddings and arch.attention_scale == 256**-0.5


@pytest.mark.parametrize(
    ("family", "config", "field"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation gelu"),
        ("gemma2", {"sliding_window": None}, "layer_types has sliding_attention, but"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ("gemma3", {"text_config": None}, "text_config is null"),
        ("mistral3", {"text_config": {"model_type": "llama"}}, 'model_type of text_config is "llama"'),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping is 5.0"),
        ("gemma3", {"text_config": {"final_logit_softcapping": 5.0}}, "final_logit_softcapping is 5.0"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm true"),
        ("cohere2", {"logit_scale": 0.0}, "logit_scale is 0.0"),
        ("cohere2", {"layer_types": ["chunked_attention"] * 3}, "layer_types has chunked_attention"),
        ("glm4", {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.2}}, "partial_rotary_factor 0.2 rotates 3"),
        ("granite", {"residual_multiplier": None}, "residual_multiplier"),
        ("ministral3", {"rope_parameters": YARN}, "llama_4_scaling_beta .* is null"),
        ("olmo3", {"hidden_act": "relu2"}, "hidden_act relu2"),
        ("phi3", {"rope_parameters": LONGROPE}, "longrope"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers is \[1\]"),
        ("smollm3", {"use_sliding_window": False}, "use_sliding_window is false"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm true"),
        ("qwen3", {"rope_parameters": YARN | {"attention_factor": "1"}}, "attention_factor"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(
    family: Family, config: dict[str, Any], field: str, base: Path, tmp_path: Path
) -> None:
    values = json.loads((tiny_checkpoint(family, base) / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=rf"config\.json: .*{field}") as refused:
        load_arch(tmp_path)
    assert "\n" not in str(refused.value)
