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
