"""Tiny random Hugging Face checkpoints: the models that tests compare with transformers.

One per family, and ``llama3``: a Llama with scaled rotary positions and a tied head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.opt import OPTConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.seed_oss import SeedOssConfig

Family = Literal["opt", "llama", "llama3", "mistral", "qwen2", "qwen3", "seed_oss"]
FAMILIES: tuple[Family, ...] = ("opt", "llama", "llama3", "mistral", "qwen2", "qwen3", "seed_oss")
"""Append: the position decides which random schedules a family gets in ``tests/exactness``."""

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
_CONFIGS: dict[Family, tuple[type, dict[str, Any]]] = {
    "opt": (OPTConfig, _COMMON | {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    "llama": (LlamaConfig, _GATED | {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
    "llama3": (LlamaConfig, _GATED | {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, _GATED | {"sliding_window": None}),
    "qwen2": (Qwen2Config, {k: v for k, v in _GATED.items() if k != "head_dim"}),
    "qwen3": (Qwen3Config, _GATED | {"head_dim": 16}),
    "seed_oss": (SeedOssConfig, _GATED | {"head_dim": 16}),
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
            model = AutoModelForCausalLM.from_config(
                config_class(**(values | overrides)), dtype=torch.float32
            )
            _spread(model)
        model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
        model.save_pretrained(folder)
        _made[key] = folder
    return _made[key]


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
