"""Small random decoders without a checkpoint, and an attention of which only the head preparation is real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from pensieve.kernels.arguments import HeadPrep
from pensieve.model.arch import Arch, Layer, Rope
from pensieve.model.weights import AttentionWeights, LayerWeights, Linear, MlpWeights, NormWeights, Weights

Shape = Literal["opt", "llama", "qwen3"]
SHAPES: tuple[Shape, ...] = ("opt", "llama", "qwen3")


def small_arch(shape: Shape) -> Arch:
    """OPT-like (LayerNorm, biases, learned positions), Llama-like, or Qwen3-like (norms of heads)."""
    opt = shape == "opt"
    return Arch(
        family=shape, vocab_size=97, hidden_size=80, intermediate_size=112,
        layers=(Layer(rope=None if opt else Rope(10000.0)),) * 3, learned_positions=opt, num_heads=6,
        num_kv_heads=6 if opt else 2, head_dim=16, context_limit=64, norm="layer" if opt else "rms", norm_eps=1e-5,
        activation="relu" if opt else "silu", gated_mlp=not opt,
        position_offset=2 if opt else 0, qkv_bias=opt, output_bias=opt, mlp_bias=opt,
        qk_norm="head" if shape == "qwen3" else None,
    )  # fmt: skip


def random_weights(arch: Arch, device: str = "cpu") -> Weights:
    """Float32 weights, the same on every device."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device)

    def linear(out: int, width: int, bias: bool) -> Linear:
        return Linear(normal(out, width, scale=width**-0.5), normal(out, scale=0.2) if bias else None)

    def norm() -> NormWeights:
        return NormWeights(
            1 + normal(hidden, scale=0.2), normal(hidden, scale=0.2) if arch.norm == "layer" else None
        )

    def head_norm() -> torch.Tensor | None:
        return 1 + normal(arch.head_dim, scale=0.2) if arch.qk_norm else None

    hidden, inner, queries = arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim
    all_heads = queries + 2 * arch.num_kv_heads * arch.head_dim
    layers = tuple(
        LayerWeights(
            norm(),
            AttentionWeights(
                linear(all_heads, hidden, arch.qkv_bias), linear(hidden, queries, arch.output_bias),
                head_norm(), head_norm(),
            ),
            norm(),
            MlpWeights(
                linear(inner * (1 + arch.gated_mlp), hidden, arch.mlp_bias), linear(hidden, inner, arch.mlp_bias)
            ),
        )
        for _ in range(arch.num_layers)
    )  # fmt: skip
    positions = normal(arch.position_offset + arch.context_limit, hidden) if arch.learned_positions else None
    embedding = normal(arch.vocab_size, hidden)
    return Weights(embedding, positions, layers, norm(), linear(arch.vocab_size, hidden, False))


@dataclass(frozen=True, slots=True)
class HeadsOnly:
    """Stands in for attention: a query comes out plus the key and value that were stored with it."""

    kv_write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, HeadPrep], torch.Tensor]
    pools: torch.Tensor
    """[L, P, 2, Hkv, N, D]"""
    slots: torch.Tensor

    def __call__(self, layer: int, qkv: torch.Tensor, prep: HeadPrep) -> torch.Tensor:
        pool = self.pools[layer]
        q = self.kv_write(pool, qkv, self.slots, prep)
        page_tokens, groups = pool.shape[3], q.shape[1] // pool.shape[2]
        stored = pool[self.slots // page_tokens, :, :, self.slots % page_tokens]  # [T, 2, Hkv, D]
        return q + (stored[:, 0] - stored[:, 1]).repeat_interleave(groups, dim=1)


def heads_only(
    arch: Arch,
    slots: torch.Tensor,
    kv_write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, HeadPrep], torch.Tensor],
) -> HeadsOnly:
    """A stand-in over pools of 5 pages of 8 tokens, on the device of ``slots`` [T]."""
    pools = torch.zeros(arch.num_layers, 5, 2, arch.num_kv_heads, 8, arch.head_dim, device=slots.device)
    return HeadsOnly(kv_write, pools, slots)
