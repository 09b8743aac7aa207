"""Small random decoders without a checkpoint, and an attention of which only the head preparation is real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pensieve.kernels.arguments import HeadPrep
from pensieve.model.arch import Arch, Layer, Rope
from pensieve.model.weights import AttentionWeights, LayerWeights, Linear, MlpWeights, NormWeights, Weights

Shape = Literal["opt", "llama", "qwen3", "gemma", "olmo", "cohere"]
SHAPES: tuple[Shape, ...] = ("opt", "llama", "qwen3", "gemma", "olmo", "cohere")
_COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 80, "intermediate_size": 112, "num_heads": 6, "head_dim": 16, "context_limit": 64,
    "norm_eps": 1e-5,
}  # fmt: skip
_LLAMA = _COMMON | {
    "layers": (Layer(rope=Rope(10000.0)),) * 3, "num_kv_heads": 2, "norm": "rms", "activation": "silu",
    "gated_mlp": True,
}  # fmt: skip
_SHAPES: dict[Shape, dict[str, Any]] = {
    "opt": _COMMON | {
        "layers": (Layer(),) * 3, "learned_positions": True, "position_offset": 2, "num_kv_heads": 6, "norm": "layer",
        "activation": "relu", "gated_mlp": False, "qkv_bias": True, "output_bias": True, "mlp_bias": True,
    },
    "llama": _LLAMA,
    "qwen3": _LLAMA | {"qk_norm": "head"},
    "gemma": _LLAMA | {
        "layers": (Layer(rope=Rope(10000.0)), Layer(rope=Rope(5e5, "linear", 8.0)), Layer(rope=Rope(10000.0))),
        "norms": "both", "unit_offset": True, "qk_norm": "head", "activation": "gelu_tanh", "embedding_scale": 9.0,
        "logit_softcap": 3.0,
    },
    "olmo": _LLAMA | {
        "layers": (Layer(rope=Rope(5e5, "yarn", 4.0, original_context=16, magnitude=1.2)),) * 3, "norms": "after",
        "qk_norm": "projection", "query_growth": (0.3, 4.0), "residual_scale": 0.5,
    },
    "cohere": _LLAMA | {
        "layers": (Layer(rope=Rope(10000.0, rotated=8)), Layer(), Layer()), "norm": "layer", "norm_bias": False,
        "parallel_blocks": True, "logit_scale": 0.5,
    },
}  # fmt: skip
"""LayerNorm, biases and learned positions; RMS norm; norms of heads; and what other families do in other places."""


def small_arch(shape: Shape) -> Arch:
    """The architecture of a small model that resembles a family."""
    return Arch(family=shape, **_SHAPES[shape])


def random_weights(arch: Arch, device: str = "cpu") -> Weights:
    """Float32 weights, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    hidden, inner, queries = arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim
    keys = arch.num_kv_heads * arch.head_dim
    before, after = arch.norms != "after", arch.norms != "before"

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device)

    def linear(out: int, width: int, bias: bool) -> Linear:
        return Linear(normal(out, width, scale=width**-0.5), normal(out, scale=0.2) if bias else None)

    def norm() -> NormWeights:
        weight = 1 + normal(hidden, scale=0.2)
        if arch.norm == "rms":
            return NormWeights(weight, None)
        return NormWeights(weight, normal(hidden, scale=0.2) if arch.norm_bias else torch.zeros_like(weight))

    def head_norm(width: int) -> torch.Tensor | None:
        width = arch.head_dim if arch.qk_norm == "head" else width
        return 1 + normal(width, scale=0.2) if arch.qk_norm else None

    layers = tuple(
        LayerWeights(
            norm() if before else None,
            AttentionWeights(
                linear(queries + 2 * keys, hidden, arch.qkv_bias), linear(hidden, queries, arch.output_bias),
                head_norm(queries), head_norm(keys),
            ),
            norm() if before and not arch.parallel_blocks else None,
            MlpWeights(
                linear(inner * (1 + arch.gated_mlp), hidden, arch.mlp_bias), linear(hidden, inner, arch.mlp_bias)
            ),
            norm() if after else None, norm() if after else None,
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
