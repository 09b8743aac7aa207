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
    recurrent: str = ""
    """Beginning of the names of a recurrent mixer's tensors."""
    projections: tuple[str, ...] = ("in_proj",)
    """Concatenated, below ``recurrent``. Mamba: gate, convolution, step size; else: convolution, gate, write strength,
    step size."""
    interleaved: bool = False
    """The rows of ``projections`` come key head by key head: queries, keys, values, gates of each in the first tensor,
    write strengths and step sizes in the second."""
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
_MAMBA2 = replace(
    _LLAMA,
    prefixes=("backbone.", ""),
    embedding="embeddings",
    final_norm="norm_f",
    mixer_norm="norm",
    recurrent="mixer.",
)
_BAMBA = replace(
    _LLAMA,
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    recurrent="mamba.",
)
_QWEN3_NEXT = replace(
    _LLAMA,
    recurrent="linear_attn.",
    projections=("in_proj_qkvz", "in_proj_ba"),
    interleaved=True,
    ignored=("mtp.",),
)
_QWEN3_5 = replace(
    _LLAMA,
    prefixes=("model.language_model.", "model.", ""),
    recurrent="linear_attn.",
    projections=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ignored=("mtp.", "model.visual."),
)
_GLM = replace(_LLAMA, up=("mlp.gate_up_proj",))
_TABLES = {
    "arcee": replace(_LLAMA, up=("mlp.up_proj",)),
    "bamba": _BAMBA,
    "exaone4": _OLMO2,
    "falcon_h1": _BAMBA,
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
    "mamba2": _MAMBA2,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "opt": _OPT,
    "phi3": replace(_LLAMA, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": _QWEN3_NEXT,
    "starcoder2": replace(_LLAMA, up=("mlp.c_fc",), down="mlp.c_proj"),
}
"""Families whose names are not those of Llama."""


def tensor_names(family: str) -> TensorNames:
    """Return the tensor names of an ``Arch.family``."""
    return _TABLES.get(family, _LLAMA)
