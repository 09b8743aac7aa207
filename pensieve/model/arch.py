"""The architecture of a decoder, as a frozen description. No torch.

One ``Arch`` covers all families. It describes the computation (which norm, which positions, gated or not),
not the tensor names of a checkpoint; those are in ``weights``. ``folder`` reads it from a Hugging Face model
folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from pensieve.core import Sampling

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelError(Exception):
    """A model cannot be served; the message says what is missing or not supported."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions; the first half of a head is rotated against its second half.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` does so for wavelengths above
    ``original_context / low_freq_factor``, leaves those below ``original_context / high_freq_factor``
    unchanged and blends between. ``divisors`` come on top: one per pair of a head's values, () for none.
    """

    theta: float
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """An MLP that is a mixture: for each token a router picks ``per_token`` of ``count`` gated MLPs, the experts, and
    the result is the sum of theirs with the router's weights."""

    count: int
    per_token: int
    width: int
    """Inner width of one expert."""
    softmax: Literal["all", "picked"]
    """The weights are a softmax over all experts, in float32, before the pick; or over the picked ones."""
    renormalised: bool = False
    """Softmax over all: the picked weights are divided by their sum."""
    weights_rounded: bool = True
    """Softmax over all: the weights are rounded to the model's dtype."""
    bias: bool = False
    """The router and all experts have biases."""
    clamped: tuple[float, float] | None = None
    """gpt-oss's gate with (alpha, limit), its gate and projection in alternating columns; see ``clamped_glu``. None:
    the model's activation, the gate before the projection."""
    shared_width: int = 0
    """Inner width of an expert that takes part in every token, weighted by a sigmoid of its own; 0: there is none."""

    def __post_init__(self) -> None:
        if not 0 < self.per_token <= self.count:
            raise ModelError(f"num_experts_per_tok is {self.per_token}, not within 1 to {self.count} experts")

    def num_parameters(self, hidden_size: int, *, active: bool) -> int:
        """Return the weights of one layer's mixture without biases: all, or those that compute one token."""
        experts = (self.per_token if active else self.count) * self.width + self.shared_width
        return hidden_size * (3 * experts + self.count + (self.shared_width > 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """A decoder-only transformer whose layers all have one KV geometry."""

    family: Literal["opt", "llama", "mistral", "qwen2", "qwen3", "seed_oss"]
    """``model_type`` of config.json. Selects the layout of the weights; the other fields describe the computation."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_limit: int
    """Longest context that is computed exactly (a sliding window shortens it)."""
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["silu", "relu", "gelu"]
    gated_mlp: bool
    """``down(act(gate(x)) * up(x))`` rather than ``down(act(up(x)))``."""
    rope: Rope | None
    """None: learned positions."""
    position_offset: int = 0
    """Learned positions: row of position 0."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each query and key head, before the rotation."""
    tied_embeddings: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation: Sampling = field(default_factory=Sampling)
    """Sampling that the model's authors recommend; greedy without ``do_sample``."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads {self.num_heads} do not divide over num_key_value_heads {self.num_kv_heads}"
            )

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the bytes of one KV-token: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    @property
    def num_parameters(self) -> int:
        """Weights that take part in computing a token, without biases and norms."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = self.hidden_size * self.intermediate_size * (3 if self.gated_mlp else 2)
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size
