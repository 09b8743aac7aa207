"""The architecture of a decoder, as a frozen description. No torch.

One ``Arch`` covers all families. It describes the computation (which norm, which positions, gated or not),
not the tensor names of a checkpoint; those are in ``tensor_names``. ``folder`` reads it from a Hugging Face
model folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from pensieve.core import Sampling

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Mlp = Literal["dense", "experts", "none"]


class ModelError(Exception):
    """A model cannot be served; the message says what is missing or not supported."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions; the first half of a head is rotated against its second half.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` does so for wavelengths above
    ``original_context / low_freq_factor``, leaves those below ``original_context / high_freq_factor``
    unchanged and blends between. ``yarn`` (https://arxiv.org/abs/2309.00071) divides the frequencies of pairs
    that turn less than ``beta_slow`` times within ``original_context``, leaves those that turn more than
    ``beta_fast`` times unchanged and blends between. ``divisors`` come on top: one per pair of a head's
    values, () for none.
    """

    theta: float
    scaling: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    divisors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: the blend begins and ends at whole pairs."""
    magnitude: float = 1.0
    """Factor of cosine and sine, and so of rotated queries and keys."""
    rotated: int | None = None
    """Leading values of a head that are rotated, the first half of them against the second. None: all."""
    interleaved: bool = False
    """In the checkpoint, the values of a pair are neighbours. ``head_order`` brings them apart."""

    def head_order(self, head_dim: int) -> tuple[int, ...] | None:
        """Return the order in which a query or key head's values are computed: position i holds the checkpoint's
        value ``order[i]``. Pair i is then the values i and i + head_dim / 2, as kernels expect, and the pairs
        that are not rotated come last. Scores do not depend on the order. None: as in the checkpoint."""
        rotated = head_dim if self.rotated is None else self.rotated
        if rotated == head_dim and not self.interleaved:
            return None
        pairs, rest = rotated // 2, (head_dim - rotated) // 2
        first = range(0, rotated, 2) if self.interleaved else range(pairs)
        second = range(1, rotated, 2) if self.interleaved else range(pairs, rotated)
        return (*first, *range(rotated, rotated + rest), *second, *range(rotated + rest, head_dim))


@dataclass(frozen=True, slots=True)
class StateShape:
    """Geometry of a recurrent mixer. Of a context it keeps the last ``conv_width - 1`` inputs of its convolution,
    [conv_channels, conv_width - 1] in the model's dtype, and a state, float32 [heads, key_dim, value_dim]."""

    conv_channels: int
    conv_width: int
    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class RecurrentMixer:
    """The recurrent mixers of a model, which differ from layer to layer in their ``StateShape`` at most."""

    kind: Literal["ssd", "gated_delta"]
    """Mamba-2's recurrence, or the gated delta rule. Both follow a convolution with SiLU."""
    key_heads: int
    """Heads of queries and keys; each serves as many value heads (``StateShape.heads``)."""
    gate: Literal["before norm", "after norm", "no norm"]
    """Whether the output is gated before or after its RMS norm."""
    norm_per_head: bool = False
    """The norm is over each value head, with one weight for all, rather than over the value heads of a key head."""
    conv_bias: bool = False
    input_bias: bool = False
    output_bias: bool = False
    step_limit: tuple[float, float] = (0.0, math.inf)
    """``ssd``: bounds of the step size."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors of projections (https://arxiv.org/abs/2507.22448). Loading multiplies them into the weights."""

    attention_input: float = 1.0
    key: float = 1.0
    attention_output: float = 1.0
    recurrent_input: float = 1.0
    recurrent_parts: tuple[float, float, float, float, float] = (1.0,) * 5
    """For the projection's rows of gate, values, keys, queries, step size."""
    recurrent_output: float = 1.0
    mlp_gate: float = 1.0
    mlp_output: float = 1.0


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: its mixers (attention, a recurrent one, or both) and its MLP."""

    attends: bool = True
    window: int | None = None
    """A token at position x sees positions x - window + 1 to x. None: it sees 0 to x."""
    rope: Rope | None = None
    """None: attention does not know positions, unless the embedding does (``Arch.learned_positions``)."""
    state: StateShape | None = None
    """None: no recurrent mixer."""
    mlp: Mlp = "dense"

    @property
    def has_experts(self) -> bool:
        return self.mlp == "experts"


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
    """A decoder-only transformer. Its layers may differ, but all that attend share one geometry of heads."""

    family: str
    """``model_type`` of config.json. Selects the layout of the weights; the other fields describe the computation."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner width of a dense MLP."""
    layers: tuple[Layer, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_limit: int
    """Longest context that is computed exactly."""
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["silu", "relu", "relu2", "gelu", "gelu_tanh"]
    gated_mlp: bool
    """``down(act(gate(x)) * up(x))`` rather than ``down(act(up(x)))``."""
    experts: Experts | None = None
    """The mixture of the layers that have one."""
    learned_positions: bool = False
    position_offset: int = 0
    """Learned positions: row of position 0."""
    norm_bias: bool = True
    """LayerNorm: the checkpoint has biases."""
    unit_offset: bool = False
    """The checkpoint has the weights of RMS norms less 1. They are kept in float32, where adding 1 is exact enough."""
    norms: Literal["before", "after", "both"] = "before"
    """Each block (mixer or MLP) normalises its input, its output, or both; a residual sum follows."""
    parallel_blocks: bool = False
    """Mixer and MLP read one norm, and their outputs are added together."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    """RMS norm before the rotation, over each query and key head, or over all queries and all keys of a token."""
    sinks: bool = False
    """Each query head has a learned score that takes part in its softmax and has no value."""
    attention_gate: bool = False
    """The query projection also gives a gate of the attention's output, behind each head's query."""
    recurrent: RecurrentMixer | None = None
    """None: no layer has a state."""
    multipliers: Multipliers | None = None
    float32_residual: bool = False
    """The residual sum is float32 whatever the model's dtype."""
    score_scale: float | None = None
    """Factor of attention scores; None: 1 / sqrt(head_dim)."""
    query_growth: tuple[float, float] | None = None
    """(b, n): queries at position x are multiplied by 1 + b * log(1 + floor(x / n))."""
    softcap: float | None = None
    """Attention scores s become softcap * tanh(s / softcap), before the mask."""
    embedding_scale: float | None = None
    """Factor of the embedding, rounded to the weights' dtype."""
    residual_scale: float | None = None
    """Factor of each block's output before it is added."""
    logit_scale: float | None = None
    logit_softcap: float | None = None
    """Logits x become logit_softcap * tanh(x / logit_softcap), after ``logit_scale``."""
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
        if self.experts is None and any(layer.has_experts for layer in self.layers):
            raise ModelError("a layer has experts, and nothing describes them")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        return 1.0 / math.sqrt(self.head_dim) if self.score_scale is None else self.score_scale

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotary positions of all layers, in order of appearance."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indexes of the layers that attend."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.attends)

    @property
    def num_parameters(self) -> int:
        """All weights, without biases and norms."""
        return self._parameters(active=False)

    @property
    def active_parameters(self) -> int:
        """Weights that take part in computing a token, without biases and norms: of a mixture, its picked experts."""
        return self._parameters(active=True)

    def _parameters(self, *, active: bool) -> int:
        query_heads = self.num_heads * (3 if self.attention_gate else 2)
        attention = self.hidden_size * self.head_dim * (query_heads + 2 * self.num_kv_heads)
        recurrent = sum(self._recurrent_parameters(layer.state) for layer in self.layers if layer.state)
        mlp = self.hidden_size * self.intermediate_size * (3 if self.gated_mlp else 2)
        kinds = [layer.mlp for layer in self.layers]
        blocks = len(self.attention_layers) * attention + recurrent + kinds.count("dense") * mlp
        if self.experts is not None:
            mixture = self.experts.num_parameters(self.hidden_size, active=active)
            blocks += kinds.count("experts") * mixture
        return blocks + self.vocab_size * self.hidden_size

    def _recurrent_parameters(self, state: StateShape) -> int:
        """Return the weights of one recurrent mixer's projections."""
        gates = 1 if self.recurrent is not None and self.recurrent.kind == "ssd" else 2
        inner = state.heads * state.value_dim
        return self.hidden_size * (state.conv_channels + 2 * inner + gates * state.heads)


def with_divisors(layers: tuple[Layer, ...], divisors: tuple[float, ...]) -> tuple[Layer, ...]:
    """Return the layers with these divisors in their rotary positions."""
    return tuple(
        layer if layer.rope is None else replace(layer, rope=replace(layer.rope, divisors=divisors))
        for layer in layers
    )
