"""One decoder for all families: ``Arch`` defines a layer, the caller stores the KV.

The model knows no pages or sessions. It projects T concatenated tokens to queries, keys and values and passes
them to ``attend``, with the preparation they need. ``attend`` stores keys and values and returns the
attention output. ``recur`` does the same for the states of recurrent mixers (``recurrent``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from pensieve.kernels.arguments import HeadPrep
from pensieve.model.arch import Arch, Rope
from pensieve.model.collective import SINGLE_RANK, BufferIndex, Collective
from pensieve.model.experts import mixture
from pensieve.model.ops import TORCH_OPS, DecoderOps
from pensieve.model.recurrent import Mixer, Recur
from pensieve.model.shard import Shard
from pensieve.model.weights import (
    AttentionWeights,
    ExpertWeights,
    Linear,
    MlpWeights,
    NormWeights,
    Weights,
)

_Turn = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Cosine and sine of every token's angles, each [T, D/2], and the factor of its queries, [T, 1]; None: not applied."""
_Part = tuple[torch.Tensor, Linear | None]
"""A part of a block [T, ·], with the projection that follows; None: the values are complete."""


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
        device, dtype = weights.embedding.device, weights.embedding.dtype
        ropes = arch.ropes
        self._rotations = [_Rotation.make(rope, arch.head_dim, device) for rope in ropes]
        self._rope_of = [None if layer.rope is None else ropes.index(layer.rope) for layer in arch.layers]
        scale = arch.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale).to(dtype).item()
        norms = [layer.mixer_norm for layer in weights.layers]
        self._next_norms = (*norms[1:], weights.final_norm)
        """The norm that follows each layer: the next layer's, or the final one."""
        self._mixers = [
            None
            if arch.recurrent is None or layer.recurrent is None or described.state is None
            else Mixer.make(index, arch.recurrent, described.state, layer.recurrent, arch.norm_eps)
            for index, (layer, described) in enumerate(zip(weights.layers, arch.layers, strict=True))
        ]

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        sample_rows: torch.Tensor,
        recur: Recur | None = None,
    ) -> torch.Tensor:
        """Return the logits after the tokens at ``sample_rows``, float32 [S, vocab]. ``tokens`` and
        ``positions`` [T]: concatenated spans in any order. ``sample_rows`` [S], S ≥ 0. All int32 or int64.
        ``recur``: needed if a layer has a recurrent mixer. Never waits for the device, and does the same work
        whatever the values: can be captured in a graph."""
        weights, arch = self.weights, self.arch
        x = F.embedding(tokens, weights.embedding)
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        if weights.positions is not None:
            x = x + F.embedding(positions + arch.position_offset, weights.positions)
        x = x.float() if arch.float32_residual else x
        angles = [
            rotation.angles(positions, weights.embedding.dtype, self.ops) for rotation in self._rotations
        ]
        growth = self._query_growth(positions, weights.embedding.dtype)
        # Each residual sum is fused with the following norm: the next layer's, or the final one.
        normed = self._norm(x, weights.layers[0].mixer_norm)
        for index, (layer, next_norm) in enumerate(zip(weights.layers, self._next_norms, strict=True)):
            rope = self._rope_of[index]
            turn = (*((None, None) if rope is None else angles[rope]), growth)
            blocks = self._mix(index, normed, turn, attend, recur)
            if index == arch.num_layers - 1:
                # After the last mixer only sampled tokens matter.
                x = x.index_select(0, sample_rows)
                blocks = [(mixed.index_select(0, sample_rows), linear) for mixed, linear in blocks]
                normed = normed.index_select(0, sample_rows) if arch.parallel_blocks else normed
            if arch.parallel_blocks:
                assert layer.mlp is not None
                block = self._sum([*blocks, self._mlp(layer.mlp, normed)])
                x, normed = self._add(x, self.collective.all_reduce(block), None, next_norm)
                continue
            after_mixer = next_norm if layer.mlp is None else layer.mlp_norm
            # Consecutive sums over the ranks use different memory, also without an MLP between them.
            slot: BufferIndex = 1 if layer.mlp is None and index % 2 else 0
            x, normed = self._end_block(slot, x, blocks, (layer.post_mixer_norm, after_mixer))
            if layer.mlp is not None:
                norms = (layer.post_mlp_norm, next_norm)
                x, normed = self._end_block(1, x, [self._mlp(layer.mlp, normed)], norms)
        return self._logits(normed)

    def _mix(
        self, index: int, x: torch.Tensor, turn: _Turn, attend: Attend, recur: Recur | None
    ) -> list[_Part]:
        """Return the outputs [T, ·] of the layer's mixers."""
        layer, blocks = self.weights.layers[index], list[_Part]()
        mixer = self._mixers[index]
        if mixer is not None:
            if recur is None:
                raise ValueError(f"layer {index} has a recurrent mixer, and the caller gave no recur")
            blocks.append((mixer(x, recur), mixer.weights.output))
        if layer.attention is not None:
            out = self._attention(index, layer.attention, x, turn, attend)
            blocks.append((out, layer.attention.output))
        return blocks

    def _attention(
        self, index: int, attention: AttentionWeights, x: torch.Tensor, turn: _Turn, attend: Attend
    ) -> torch.Tensor:
        """Return the attention output before its projection, [T, Hq * D]."""
        arch, (cos, sin, growth) = self.arch, turn
        heads = arch.num_heads + 2 * arch.num_kv_heads
        qkv = self._linear(x, attention.qkv)
        query_norm, key_norm = attention.query_norm, attention.key_norm
        if arch.qk_norm == "projection":
            assert query_norm is not None and key_norm is not None
            queries, keys = len(query_norm), len(key_norm)
            self._norm_in_place(qkv[:, :queries], query_norm)
            self._norm_in_place(qkv[:, queries : queries + keys], key_norm)
            query_norm = key_norm = None
        if growth is not None:
            qkv[:, : arch.num_heads * arch.head_dim].mul_(growth)
        prep = HeadPrep(cos, sin, query_norm, key_norm, arch.norm_eps, attention.sinks)
        width, inner = heads * arch.head_dim, arch.num_heads * arch.head_dim
        out = attend(index, qkv[:, :width].unflatten(1, (heads, arch.head_dim)), prep).reshape(len(x), inner)
        return out * self.ops.pointwise(torch.sigmoid, qkv[:, width:]) if arch.attention_gate else out

    def _query_growth(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the factor of every token's queries, [T, 1]; None: 1."""
        if self.arch.query_growth is None:
            return None
        slope, original = self.arch.query_growth
        growth = 1 + slope * self.ops.pointwise(torch.log, 1 + torch.floor(positions[:, None] / original))
        return growth.to(dtype)

    def _norm_in_place(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        x.copy_(self.ops.norm(x, weight, None, self.arch.norm_eps))

    def _mlp(self, mlp: MlpWeights | ExpertWeights, x: torch.Tensor) -> _Part:
        """Return the MLP's output [T, ·], before it is reduced over the ranks."""
        if isinstance(mlp, MlpWeights):
            up = self._linear(x, mlp.up)
            return self.ops.activate(up, self.arch.gated_mlp, self.arch.activation), mlp.down
        assert self.arch.experts is not None
        return mixture(x, mlp, self.arch.experts, self.arch.activation, self.ops), None

    def _end_block(
        self,
        slot: BufferIndex,
        x: torch.Tensor,
        blocks: list[_Part],
        norms: tuple[NormWeights | None, NormWeights | None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the products of a block's parts, reduced over the ranks, to ``x`` [T, W]; return the sum and its norm.
        ``norms``: of the products, and of the sum."""
        eps, (rows, width) = self.arch.norm_eps, x.shape
        post, norm = norms
        plain = post is None and norm is not None and self.arch.residual_scale is None
        plain = plain and len(blocks) == 1 and not self.arch.float32_residual
        room = self.collective.reduce_buffer((rows, width), x.dtype, slot) if plain else None
        if room is None or norm is None:
            return self._add(x, self.collective.all_reduce(self._sum(blocks)), post, norm)
        (block, linear), *_ = blocks
        step = -(-rows // room.pieces)
        for start in range(0, rows, step):
            end = min(start + step, rows)
            _product(block[start:end], linear, room.memory[start:end])
            room.rows_ready(start, end)
        return room.add_norm(x, norm.weight, norm.bias, eps, self.ops.add_norm)

    def _add(
        self, x: torch.Tensor, delta: torch.Tensor, post: NormWeights | None, norm: NormWeights | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a block's output to ``x`` [T, W]; return the sum and its norm, or the sum twice without one."""
        if post is not None:
            delta = self.ops.norm(delta, post.weight, post.bias, self.arch.norm_eps)
        if self.arch.residual_scale is not None:
            delta = delta * self.arch.residual_scale
        if self.arch.float32_residual:
            x = x + delta
            return x, self._norm(x, norm)
        if norm is None:
            x = x + delta
            return x, x
        return self.ops.add_norm(x, delta, norm.weight, norm.bias, self.arch.norm_eps)

    def _norm(self, x: torch.Tensor, norm: NormWeights | None) -> torch.Tensor:
        x = x.to(self.weights.embedding.dtype)
        return x if norm is None else self.ops.norm(x, norm.weight, norm.bias, self.arch.norm_eps)

    def _sum(self, blocks: list[_Part]) -> torch.Tensor:
        """Return the sum of the products of a block's parts."""
        first, *others = (
            block if linear is None else self._linear(block, linear) for block, linear in blocks
        )
        for other in others:
            first = first + other
        return first

    def _linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        if linear.scales is not None:
            return self.ops.scaled_linear(x, linear.weight, linear.scales, linear.bias)
        return self.ops.linear(x, linear.weight, linear.bias)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [S, vocab], the same on every rank."""
        ranks, size = self.collective.ranks, self.arch.vocab_size
        own = Shard(self.collective.rank, ranks).vocabulary(size)
        part = self._linear(x, self.weights.head)[
            :, : own.stop - own.start
        ]  # the head may have rows of padding
        if ranks > 1:
            missing = Shard(self.collective.rank, ranks).vocabulary_width(size) - part.shape[1]
            parts = self.collective.all_gather(F.pad(part, (0, missing)) if missing else part.contiguous())
            part = parts.transpose(0, 1).flatten(1)[:, :size]
        logits, cap = part.float(), self.arch.logit_softcap
        if self.arch.logit_scale is not None:
            logits = logits * self.arch.logit_scale
        return logits if cap is None else self.ops.pointwise(torch.tanh, logits / cap) * cap


@dataclass(frozen=True, slots=True, eq=False)
class _Rotation:
    """One kind of rotary positions, on the device."""

    frequency: torch.Tensor
    """Radians per position of each pair, float32 [D/2]."""
    magnitude: torch.Tensor | None
    """Factor of each pair's cosine and sine, float32 [D/2]; None: 1."""

    @classmethod
    def make(cls, rope: Rope, head_dim: int, device: torch.device) -> _Rotation:
        frequency = inverse_frequency(rope, head_dim, device)
        if rope.magnitude == 1.0:
            return cls(frequency, None)
        magnitude = torch.ones_like(frequency)
        magnitude[: (head_dim if rope.rotated is None else rope.rotated) // 2] = rope.magnitude
        return cls(frequency, magnitude)

    def angles(
        self, positions: torch.Tensor, dtype: torch.dtype, ops: DecoderOps
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine of every token's angles, each [T, D/2]."""
        # float32 whatever the model's dtype: bfloat16 cannot distinguish large positions.
        angles = positions[:, None].float() * self.frequency
        cos, sin = ops.pointwise(torch.cos, angles), ops.pointwise(torch.sin, angles)
        if self.magnitude is None:
            return cos.to(dtype), sin.to(dtype)
        return (cos * self.magnitude).to(dtype), (sin * self.magnitude).to(dtype)


def inverse_frequency(rope: Rope, head_dim: int, device: torch.device) -> torch.Tensor:
    """Return radians per position of each pair of a head's values, float32 [D/2]; 0 for pairs that are not rotated."""
    rotated = head_dim if rope.rotated is None else rope.rotated
    exponent = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
    frequency = 1.0 / rope.theta**exponent
    if rope.divisors:
        frequency = frequency / torch.tensor(rope.divisors, dtype=torch.float32, device=device)
    if rope.scaling == "linear":
        frequency = frequency / rope.factor
    elif rope.scaling == "llama3":
        frequency = _llama3(rope, frequency)
    elif rope.scaling == "yarn":
        frequency = _yarn(rope, frequency, 1.0 / (rope.factor * rope.theta**exponent))
    return F.pad(frequency, (0, (head_dim - rotated) // 2)) if rotated < head_dim else frequency


def _llama3(rope: Rope, frequency: torch.Tensor) -> torch.Tensor:
    wavelength = 2 * math.pi / frequency
    # 0 where the wavelength is long relative to the original context (scaled), 1 where it is short
    # (unchanged).
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    kept = blend.clamp(0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / rope.factor)


def _yarn(rope: Rope, frequency: torch.Tensor, divided: torch.Tensor) -> torch.Tensor:
    """Blend the frequencies with those divided by the factor. The order of operations is that of transformers: one
    bit of a frequency is an angle of some size at a large position."""
    rotated = 2 * len(frequency)

    def pair(turns: float) -> float:
        """Return the index, a fraction, of the pair that turns this often within the original context."""
        return (rotated * math.log(rope.original_context / (turns * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    index = torch.arange(len(frequency), dtype=torch.float32, device=frequency.device)
    kept = 1 - ((index - low) / (high - low or 0.001)).clamp(0.0, 1.0)  # the blend must have a width
    return divided * (1 - kept) + frequency * kept


def _product(x: torch.Tensor, linear: Linear | None, out: torch.Tensor) -> None:
    if linear is None:
        out.copy_(x)
    elif linear.bias is None:
        torch.mm(x, linear.weight.t(), out=out)
    else:
        torch.addmm(linear.bias, x, linear.weight.t(), out=out)
