"""One decoder for all families: ``Arch`` defines a layer, the caller stores the KV.

The model knows no pages or sessions. It projects T concatenated tokens to queries, keys and values and passes
them to ``attend``, with the preparation they need. ``attend`` stores keys and values and returns the
attention output.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F

from pensieve.kernels.arguments import HeadPrep
from pensieve.model.arch import Arch, Rope
from pensieve.model.collective import SINGLE_RANK, BufferIndex, Collective
from pensieve.model.ops import TORCH_OPS, DecoderOps
from pensieve.model.shard import Shard
from pensieve.model.weights import LayerWeights, Linear, NormWeights, Weights


class Attend(Protocol):
    """The attention of one step, layer after layer."""

    def __call__(self, layer: int, qkv: torch.Tensor, prep: HeadPrep) -> torch.Tensor:
        """Prepare the heads as ``prep`` says, store keys and values of ``layer``, attend the queries to all
        they see. ``qkv`` [T, Hq + 2 * Hkv, D]: queries, then keys, then values; it may be overwritten.
        Returns [T, Hq, D]. Called once per layer, in order."""
        ...


class Transformer:
    """A decoder with its weights. It has no state, so one object serves any batch."""

    def __init__(
        self, arch: Arch, weights: Weights, ops: DecoderOps = TORCH_OPS, collective: Collective = SINGLE_RANK
    ) -> None:
        """``arch`` and ``weights``: of the whole model, or of one rank's shard, combined by ``collective``."""
        self.arch = arch
        self.weights = weights
        self.ops = ops
        self.collective = collective
        device = weights.embedding.device
        self._inverse_frequency = inverse_frequency(arch.rope, arch.head_dim, device) if arch.rope else None

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits after the tokens at ``sample_rows``, float32 [S, vocab]. ``tokens`` and
        ``positions`` [T]: concatenated spans in any order. ``sample_rows`` [S], S ≥ 0. All int32 or int64.
        Never waits for the device, and does the same work whatever the values: can be captured in a graph."""
        weights, ops, eps = self.weights, self.ops, self.arch.norm_eps
        x = F.embedding(tokens, weights.embedding)
        if weights.positions is not None:
            x = x + F.embedding(positions + self.arch.position_offset, weights.positions)
        cos, sin = self._angles(positions, x.dtype)
        # Each residual sum is fused with the following norm: the next layer's, or the final one.
        first = weights.layers[0].attention_norm
        next_norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.final_norm]
        normed = ops.norm(x, first.weight, first.bias, eps)
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            prep = HeadPrep(cos, sin, layer.query_norm, layer.key_norm, eps)
            attention = self._attention(index, layer, normed, prep, attend)
            if index == len(next_norms) - 1:
                # After the last attention only sampled tokens matter.
                x, attention = x.index_select(0, sample_rows), attention.index_select(0, sample_rows)
            norm = layer.mlp_norm
            x, normed = self._end_block(0, x, attention, layer.output, norm)
            up = ops.activate(_linear(normed, layer.up), self.arch.gated_mlp, self.arch.activation)
            x, normed = self._end_block(1, x, up, layer.down, next_norm)
        return self._logits(normed)

    def _attention(
        self, index: int, layer: LayerWeights, x: torch.Tensor, prep: HeadPrep, attend: Attend
    ) -> torch.Tensor:
        """Return the attention output before its projection, [T, Hq * D]."""
        arch = self.arch
        heads = arch.num_heads + 2 * arch.num_kv_heads
        qkv = _linear(x, layer.qkv).view(len(x), heads, arch.head_dim)
        return attend(index, qkv, prep).reshape(len(x), arch.num_heads * arch.head_dim)

    def _end_block(
        self, slot: BufferIndex, x: torch.Tensor, block: torch.Tensor, linear: Linear, norm: NormWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the block's last product, reduced over the ranks, to ``x`` [T, W]; return the sum and its norm."""
        eps, (rows, width) = self.arch.norm_eps, x.shape
        room = self.collective.reduce_buffer((rows, width), x.dtype, slot)
        if room is None:
            delta = self.collective.all_reduce(_linear(block, linear))
            return self.ops.add_norm(x, delta, norm.weight, norm.bias, eps)
        step = -(-rows // room.pieces)
        for start in range(0, rows, step):
            end = min(start + step, rows)
            _product(block[start:end], linear, room.memory[start:end])
            room.rows_ready(start, end)
        return room.add_norm(x, norm.weight, norm.bias, eps, self.ops.add_norm)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [S, vocab], the same on every rank."""
        part, ranks, size = _linear(x, self.weights.head), self.collective.ranks, self.arch.vocab_size
        if ranks == 1:
            return part.float()
        missing = Shard(self.collective.rank, ranks).vocabulary_width(size) - part.shape[1]
        parts = self.collective.all_gather(F.pad(part, (0, missing)) if missing else part)
        return parts.transpose(0, 1).flatten(1)[:, :size].float()

    def _angles(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return cosine and sine of every token's angles, each [T, D/2]; all layers share them."""
        if self._inverse_frequency is None:
            return None, None
        # float32 whatever the model's dtype: bfloat16 cannot distinguish large positions.
        angles = positions[:, None].float() * self._inverse_frequency
        return angles.cos().to(dtype), angles.sin().to(dtype)


def inverse_frequency(rope: Rope, head_dim: int, device: torch.device) -> torch.Tensor:
    """Return radians per position of each pair of a head's values, float32 [D/2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequency = 1.0 / rope.theta**exponent
    if rope.divisors:
        frequency = frequency / torch.tensor(rope.divisors, dtype=torch.float32, device=device)
    if rope.scaling == "linear":
        return frequency / rope.factor
    if rope.scaling == "default":
        return frequency
    wavelength = 2 * math.pi / frequency
    # 0 where the wavelength is long relative to the original context (scaled), 1 where it is short
    # (unchanged).
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    kept = blend.clamp(0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / rope.factor)


def _product(x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
    if linear.bias is None:
        torch.mm(x, linear.weight.t(), out=out)
    else:
        torch.addmm(linear.bias, x, linear.weight.t(), out=out)


def _linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    return F.linear(x, linear.weight, linear.bias)
