"""One decoder for all families: the ``Arch`` says what a layer computes, the caller where KV lies.

The model never sees a page or a session. It computes queries, keys and values of T concatenated tokens and hands them
to ``attend``, which stores the keys and values and returns the attention output.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F

from pensieve.model.arch import Arch, Rope
from pensieve.model.weights import LayerWeights, Linear, Norm, Weights


class Attend(Protocol):
    """Attention of one step, layer after layer."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store ``k`` and ``v`` [T, Hkv, D] of ``layer``, then attend ``q`` [T, Hq, D] to all it may see.

        Returns [T, Hq, D]. Called once per layer, in order.
        """
        ...


class Transformer:
    """A decoder with its weights; stateless, so one object serves any batch."""

    def __init__(self, arch: Arch, weights: Weights) -> None:
        self.arch = arch
        self.weights = weights
        device = weights.embedding.device
        self._inverse_frequency = inverse_frequency(arch.rope, arch.head_dim, device) if arch.rope else None

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        """Logits after the tokens at ``sample_rows``, float32 [S, vocab].

        ``tokens`` and ``positions`` int64 [T]: concatenated spans in any order. ``sample_rows`` int64 [S], S ≥ 0.
        """
        weights = self.weights
        x = F.embedding(tokens, weights.embedding)
        if weights.positions is not None:
            x = x + F.embedding(positions + self.arch.position_offset, weights.positions)
        rotation = self._rotation(positions, x.dtype)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            attention = self._attention(index, layer, self._norm(x, layer.attention_norm), rotation, attend)
            if index == last:
                # After the last attention a token matters only if it is sampled.
                x, attention = x[sample_rows], attention[sample_rows]
            x = x + _linear(attention, layer.output)
            x = x + self._mlp(self._norm(x, layer.mlp_norm), layer)
        return _linear(self._norm(x, weights.final_norm), weights.head).float()

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        attend: Attend,
    ) -> torch.Tensor:
        """Attention output before its projection, [T, Hq * D]."""
        arch = self.arch
        heads, kv_heads = arch.num_heads, arch.num_kv_heads
        qkv = _linear(x, layer.qkv).view(len(x), heads + 2 * kv_heads, arch.head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q = F.rms_norm(q, (arch.head_dim,), layer.query_norm, arch.norm_eps)
            k = F.rms_norm(k, (arch.head_dim,), layer.key_norm, arch.norm_eps)
        if rotation is not None:
            q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        return attend(index, q, k, v).reshape(len(x), heads * arch.head_dim)

    def _mlp(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        up = _linear(x, layer.up)
        if self.arch.gated_mlp:
            gate, up = up.chunk(2, dim=-1)
            return _linear(self._activate(gate) * up, layer.down)
        return _linear(self._activate(up), layer.down)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        if self.arch.activation == "silu":
            return F.silu(x)
        return F.relu(x) if self.arch.activation == "relu" else F.gelu(x)

    def _norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        shape, eps = (self.arch.hidden_size,), self.arch.norm_eps
        if self.arch.norm == "rms":
            return F.rms_norm(x, shape, norm.weight, eps)
        return F.layer_norm(x, shape, norm.weight, norm.bias, eps)

    def _rotation(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosine and sine of every token's angles, each [T, 1, D/2]; shared by all layers."""
        if self._inverse_frequency is None:
            return None
        # float32 whatever the model's dtype: bfloat16 cannot tell large positions apart.
        angles = positions[:, None].float() * self._inverse_frequency
        return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def inverse_frequency(rope: Rope, head_dim: int, device: torch.device) -> torch.Tensor:
    """Radians per position of each pair of a head's values, float32 [D/2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequency = 1.0 / rope.theta**exponent
    if rope.scaling == "linear":
        return frequency / rope.factor
    if rope.scaling == "default":
        return frequency
    wavelength = 2 * math.pi / frequency
    # 0 where the wavelength is long against the original context (scaled), 1 where it is short (left alone).
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    kept = blend.clamp(0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / rope.factor)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [T, H, D] turned by the angles of their positions."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    return F.linear(x, linear.weight, linear.bias)
