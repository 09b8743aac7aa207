"""Tiny random Hugging Face checkpoints: the models that tests compare with transformers.

One per family, and ``llama3``: a Llama with scaled rotary positions and a tied head. The families of ``LAYERED`` differ
from Llama in their layers: windows, layers without positions, norms in other places; those of ``WITH_EXPERTS`` have
mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.models.arcee import ArceeConfig
from transformers.models.cohere import CohereConfig
from transformers.models.cohere2 import Cohere2Config
from transformers.models.cwm import CwmConfig
from transformers.models.exaone4 import Exaone4Config
from transformers.models.gemma import GemmaConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3Config, Gemma3TextConfig
from transformers.models.glm import GlmConfig
from transformers.models.glm4 import Glm4Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.granite import GraniteConfig
from transformers.models.granitemoe import GraniteMoeConfig
from transformers.models.helium import HeliumConfig
from transformers.models.llama import LlamaConfig
from transformers.models.ministral import MinistralConfig
from transformers.models.ministral3 import Ministral3Config
from transformers.models.mistral import MistralConfig
from transformers.models.mistral3 import Mistral3Config
from transformers.models.mixtral import MixtralConfig
from transformers.models.olmo2 import Olmo2Config
from transformers.models.olmo3 import Olmo3Config
from transformers.models.olmoe import OlmoeConfig
from transformers.models.opt import OPTConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.seed_oss import SeedOssConfig
from transformers.models.smollm3 import SmolLM3Config
from transformers.models.stablelm import StableLmConfig
from transformers.models.starcoder2 import Starcoder2Config

Family = Literal[
    "opt", "llama", "llama3", "mistral", "qwen2", "qwen3", "seed_oss",
    "arcee", "cohere", "cohere2", "cwm", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4",
    "granite", "helium", "ministral", "ministral3", "mistral3", "olmo2", "olmo3", "phi3", "smollm3", "stablelm",
    "starcoder2",
    "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
]  # fmt: skip
FAMILIES: tuple[Family, ...] = ("opt", "llama", "llama3", "mistral", "qwen2", "qwen3", "seed_oss")
"""Append: the position decides which random schedules a family gets in ``tests/exactness``."""
LAYERED: tuple[Family, ...] = (
    "arcee", "cohere", "cohere2", "cwm", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4",
    "granite", "helium", "ministral", "ministral3", "olmo2", "olmo3", "phi3", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
WITH_EXPERTS: tuple[Family, ...] = ("gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")

_COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED = _COMMON | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.2,
}
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_PLAIN = {name: value for name, value in _GATED.items() if name != "head_dim"}
"""Heads of hidden size / heads: some families have no others."""
_GEMMA = _GATED | {
    "head_dim": 16, "num_key_value_heads": 3, "query_pre_attn_scalar": 5, "sliding_window": 9,
    "final_logit_softcapping": 9.0, "layer_types": _MIXED,
}  # fmt: skip
_GEMMA3 = _GEMMA | {
    "rope_parameters": {
        "sliding_attention": _DEFAULT,
        "full_attention": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 8.0},
    },
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.7,
}


def _gemma3_with_images(**values: Any) -> Gemma3Config:
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8,
    }  # fmt: skip
    return Gemma3Config(text_config=values, vision_config=vision, mm_tokens_per_image=4)


def _mistral3(**values: Any) -> Mistral3Config:
    vision = {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    text = {"model_type": "mistral"} | values
    return Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)


_CONFIGS: dict[Family, tuple[Callable[..., Any], dict[str, Any]]] = {
    "opt": (OPTConfig, _COMMON | {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    "llama": (LlamaConfig, _GATED | {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
    "llama3": (LlamaConfig, _GATED | {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, _GATED | {"sliding_window": None}),
    "qwen2": (Qwen2Config, {k: v for k, v in _GATED.items() if k != "head_dim"}),
    "qwen3": (Qwen3Config, _GATED | {"head_dim": 16}),
    "seed_oss": (SeedOssConfig, _GATED | {"head_dim": 16}),
    "arcee": (ArceeConfig, _GATED | {"attention_bias": True, "mlp_bias": True}),
    "cohere": (CohereConfig, _PLAIN | {"attention_bias": True, "logit_scale": 0.3}),
    "cohere2": (Cohere2Config, _PLAIN | {"logit_scale": 0.3, "sliding_window": 9, "layer_types": _MIXED}),
    "cwm": (CwmConfig, _GATED | {"sliding_window": 9, "rope_parameters": _LLAMA3_ROPE}),
    "exaone4": (Exaone4Config, _PLAIN | {"sliding_window": 9, "sliding_window_pattern": 2}),
    "gemma": (GemmaConfig, _GATED | {"head_dim": 16}),
    "gemma2": (Gemma2Config, _GEMMA | {"attn_logit_softcapping": 4.0}),
    "gemma3": (_gemma3_with_images, _GEMMA3 | {"final_logit_softcapping": None}),
    "gemma3_text": (Gemma3TextConfig, _GEMMA3),
    "glm": (GlmConfig, _GATED | {"head_dim": 12, "attention_bias": True}),
    "glm4": (Glm4Config, _GATED | {"head_dim": 16, "attention_bias": True}),
    "granite": (GraniteConfig, _PLAIN | _MULTIPLIERS),
    "helium": (HeliumConfig, _GATED),
    "ministral": (MinistralConfig, _GATED | {"sliding_window": 9, "layer_types": _MIXED}),
    "ministral3": (
        Ministral3Config,
        _GATED
        | {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}},
    ),
    "mistral3": (_mistral3, _GATED | {"sliding_window": 9, "tie_word_embeddings": False}),
    "olmo2": (Olmo2Config, _PLAIN | {"attention_bias": True}),
    "olmo3": (Olmo3Config, _PLAIN | {"sliding_window": 9, "layer_types": _MIXED}),
    "phi3": (Phi3Config, _PLAIN | {"sliding_window": 9, "partial_rotary_factor": 0.5}),
    "smollm3": (
        SmolLM3Config,
        _PLAIN
        | {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 1], "mlp_bias": True},
    ),
    "stablelm": (StableLmConfig, _PLAIN | {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "starcoder2": (Starcoder2Config, _PLAIN | {"sliding_window": 9}),
    "gpt_oss": (
        GptOssConfig,
        _GATED
        | _LOCAL_EXPERTS
        | {"sliding_window": 9, "swiglu_limit": 1.5, "rope_parameters": _YARN | {"truncate": False}},
    ),
    "granitemoe": (GraniteMoeConfig, _PLAIN | _LOCAL_EXPERTS | _MULTIPLIERS | {"attention_bias": True}),
    "mixtral": (MixtralConfig, _GATED | _LOCAL_EXPERTS),
    "olmoe": (OlmoeConfig, _PLAIN | _EXPERTS | {"intermediate_size": 24}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        _PLAIN | _EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        _GATED | _EXPERTS | {"moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
}
_made: dict[tuple[str, str, int, str], Path] = {}


def tiny_checkpoint(family: Family, tmp_path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Folder of a random model of ``family``, made below ``tmp_path`` unless this process made the same one before.

    ``overrides`` replace values of the config. Weights are large enough that logits are well apart: greedy decoding
    neither meets near ties nor runs into one repeated token. Pass a session-scoped folder to share it across tests.
    """
    key = (str(tmp_path), family, seed, repr(sorted(overrides.items())))
    if key not in _made:
        folder = tmp_path / f"{family}-{len(_made)}"
        config_class, values = _CONFIGS[family]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = auto_class(family).from_config(config_class(**(values | overrides)), dtype=torch.float32)
            _spread(model)
        model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
        model.save_pretrained(folder)
        _made[key] = folder
    return _made[key]


def auto_class(family: Family) -> Any:
    """The class of transformers that makes and loads models of a family."""
    return AutoModelForImageTextToText if family == "mistral3" else AutoModelForCausalLM


@torch.no_grad()
def _spread(model: torch.nn.Module) -> None:
    """Random weights whose output depends strongly on the whole context; norms and biases not at their defaults."""
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.copy_(1.0 + 0.2 * torch.randn_like(parameter))
        elif name.endswith("bias"):
            parameter.copy_(0.2 * torch.randn_like(parameter))
        elif "embed" in name or "lm_head" in name:
            parameter.copy_(0.5 * torch.randn_like(parameter))
        elif name.endswith(("fc2.weight", "out_proj.weight")):
            # OPT: blocks must outweigh the embedding, or the tied head repeats the token that came in.
            parameter.copy_(torch.randn_like(parameter) * 1.5)
        else:
            fan_in = parameter.shape[-1]
            parameter.copy_(torch.randn_like(parameter) * (2.0 / fan_in**0.5))
