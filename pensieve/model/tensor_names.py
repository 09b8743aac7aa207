"""The names of a checkpoint's tensors, by family. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Tensor names of a family's checkpoints, without the prefix in which base and causal models differ. A norm
    that a family's layers do not have is named "" or not asked for (``Arch.norms``)."""

    prefixes: tuple[str, ...]
    layers: str
    final_norm: str
    mixer_norm: str
    mlp_norm: str
    output: str
    up: tuple[str, ...]
    down: str
    post_mixer_norm: str = ""
    """Norm of the mixer's output."""
    post_mlp_norm: str = ""
    positions: str = ""
    embedding: str = "embed_tokens"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Concatenated: queries, keys, values."""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    """Whole name: no ``.weight`` follows."""
    ignored: tuple[str, ...] = ()
    """Beginnings of the names of tensors that text does not need."""


_LLAMA = TensorNames(
    prefixes=("model.", ""),
    layers="layers",
    final_norm="norm",
    mixer_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    output="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)
_OPT = TensorNames(
    prefixes=("model.decoder.", "decoder.", ""),
    layers="layers",
    final_norm="final_layer_norm",
    mixer_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    output="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
    positions="embed_positions",
)
_GEMMA2 = replace(
    _LLAMA,
    post_mixer_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
_OLMO2 = replace(
    _LLAMA,
    mixer_norm="",
    post_mixer_norm="post_attention_layernorm",
    mlp_norm="",
    post_mlp_norm="post_feedforward_layernorm",
)
_GLM = replace(_LLAMA, up=("mlp.gate_up_proj",))
_TABLES = {
    "arcee": replace(_LLAMA, up=("mlp.up_proj",)),
    "exaone4": _OLMO2,
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        prefixes=("model.language_model.", "language_model.model."),
        ignored=(
            "model.vision_tower.",
            "model.multi_modal_projector.",
            "vision_tower.",
            "multi_modal_projector.",
        ),
    ),
    "gemma3_text": _GEMMA2,
    "glm": _GLM,
    "glm4": replace(_GLM, post_mixer_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "opt": _OPT,
    "phi3": replace(_LLAMA, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    "starcoder2": replace(_LLAMA, up=("mlp.c_fc",), down="mlp.c_proj"),
}
"""Families whose names are not those of Llama."""


def tensor_names(family: str) -> TensorNames:
    """Return the tensor names of an ``Arch.family``."""
    return _TABLES.get(family, _LLAMA)
