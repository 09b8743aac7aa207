"""A checkpoint's layout by family: names of tensors, and orders of rows that are stored head by head. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pensieve.core import Ints
from pensieve.model.arch import StateShape

_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """One way to name and store the tensors of a mixture of experts."""

    router: str
    joined: tuple[str, str] | None = None
    """Whole names of tensors with all experts: [E, 2 * I, H], gates before projections, and [E, H, I]. Their biases
    have ``_bias`` behind."""
    inputs_first: bool = False
    """Joined tensors are [E, H, 2 * I], gates and projections in alternating columns, and [E, I, H]."""
    each: tuple[str, str, str] = ("", "", "")
    """Names of one expert's gate, projection and output, with {} for its number, if not ``joined``."""
    shared: tuple[str, str, str] = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    )
    shared_gate: str = "mlp.shared_expert_gate"

    @property
    def sign(self) -> str:
        """A tensor that is there if the mixture is named this way."""
        return self.each[0].format(0) + ".weight" if self.joined is None else self.joined[0]


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
    heads: tuple[str, ...] = (_HEAD,)
    """Whole names of the output head, which a checkpoint has at most one of."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Concatenated: queries, keys, values."""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    """Whole name: no ``.weight`` follows."""
    experts: tuple[ExpertNames, ...] = ()
    """Ways in which checkpoints of the family name mixtures of experts."""
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


def _with_images(text: TensorNames) -> TensorNames:
    """Names of a model whose text part has these; older files begin with ``language_model``."""
    images = ("vision_tower.", "multi_modal_projector.")
    return replace(
        text,
        prefixes=("model.language_model.", "language_model.model."),
        heads=(_HEAD, f"language_model.{_HEAD}"),
        ignored=(*images, *(f"model.{name}" for name in images)),
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
_EXPERTS = (
    ExpertNames(
        "mlp.gate",
        each=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    ),
    ExpertNames("mlp.gate", joined=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
)
"""As published, and as transformers names them in memory."""
_MIXTRAL = ExpertNames(
    "block_sparse_moe.gate",
    each=(
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ),
)
_GRANITE = (
    ExpertNames(
        "block_sparse_moe.router.layer",
        joined=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    ExpertNames(
        "block_sparse_moe.router",
        joined=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
)
_GPT_OSS = ExpertNames(
    "mlp.router", joined=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), inputs_first=True
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
    experts=_EXPERTS,
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
    "gemma3": _with_images(_GEMMA2),
    "mistral3": _with_images(_LLAMA),
    "gemma3_text": _GEMMA2,
    "glm": _GLM,
    "glm4": replace(_GLM, post_mixer_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"),
    "mamba2": _MAMBA2,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "gpt_oss": replace(_LLAMA, experts=(_GPT_OSS,)),
    "granitemoe": replace(_LLAMA, experts=_GRANITE),
    "mixtral": replace(_LLAMA, experts=(_MIXTRAL, _EXPERTS[1])),
    "olmoe": replace(_LLAMA, experts=_EXPERTS),
    "opt": _OPT,
    "phi3": replace(_LLAMA, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    "qwen2_moe": replace(_LLAMA, experts=_EXPERTS),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": replace(_LLAMA, experts=_EXPERTS),
    "qwen3_next": _QWEN3_NEXT,
    "starcoder2": replace(_LLAMA, up=("mlp.c_fc",), down="mlp.c_proj"),
}
"""Families whose names are not those of Llama."""


def tensor_names(family: str) -> TensorNames:
    """Return the tensor names of an ``Arch.family``."""
    return _TABLES.get(family, _LLAMA)


def gated_query_order(heads: int, head_dim: int, rows: int) -> Ints:
    """Return the order [rows] that brings a query projection with gates to queries, keys, values, gates. In the
    checkpoint, each head's query is followed by its gate; keys and values follow the last gate."""
    each = np.arange(2 * heads * head_dim).reshape(heads, 2, head_dim)
    rest = np.arange(2 * heads * head_dim, rows)
    return np.concatenate((each[:, 0].reshape(-1), rest, each[:, 1].reshape(-1)))


def key_head_order(state: StateShape, key_heads: int) -> Ints:
    """Return the order that brings the projections of a gated delta rule to queries, keys, values, gates, write
    strengths, step sizes. In the checkpoint, they come key head by key head: first queries, keys, values, gates of
    each; then write strengths and step sizes of each."""
    shared = state.heads // key_heads
    inner = shared * state.value_dim
    wide = np.arange(key_heads * 2 * (state.key_dim + inner)).reshape(key_heads, -1)
    ends = np.cumsum((state.key_dim, state.key_dim, inner))
    narrow = wide.size + np.arange(2 * state.heads).reshape(key_heads, 2, shared)
    parts = [*np.split(wide, ends, axis=1), narrow[:, 0], narrow[:, 1]]
    return np.concatenate([part.reshape(-1) for part in parts])
