"""Attention with windows, soft caps and sinks over paged keys and values: one span at a time, in plain torch."""

from __future__ import annotations

import torch

from pensieve.kernels import reference
from pensieve.kernels.arguments import HeadPrep
from pensieve.model.arch import Arch

PAGE = 8


class LayeredAttention:
    """``pensieve.model.transformer.Attend`` for one context of at most ``limit`` tokens, computed span by span in any
    order. What no query may see is NaN."""

    def __init__(self, arch: Arch, limit: int, dtype: torch.dtype = torch.float32) -> None:
        pages = -(-limit // PAGE)
        self.arch = arch
        self.table = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        shape = (arch.num_layers, pages, 2, arch.num_kv_heads, PAGE, arch.head_dim)
        self.pools = torch.full(shape, torch.nan, dtype=dtype)
        self.positions = torch.empty(0, dtype=torch.int64)
        """Positions of the span that is computed now."""

    def __call__(self, layer: int, qkv: torch.Tensor, prep: HeadPrep) -> torch.Tensor:
        arch, at = self.arch, self.positions
        slots = self.table[at // PAGE] * PAGE + at % PAGE
        q = reference.kv_write(self.pools[layer], qkv, slots, prep)
        end = int(at.max()) + 1
        stored = (
            self.pools[layer][self.table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :end]
        )  # [2, Hkv, K, D]
        keys, values = stored.repeat_interleave(arch.num_heads // arch.num_kv_heads, dim=1)
        seen = torch.arange(end)[None, :] <= at[:, None]
        window = arch.layers[layer].window
        if window is not None:
            seen &= torch.arange(end)[None, :] > at[:, None] - window
        scores = torch.einsum("thd,hkd->htk", q, keys.nan_to_num(0.0)) * arch.attention_scale
        if arch.softcap is not None:
            scores = torch.tanh(scores / arch.softcap) * arch.softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if prep.sinks is not None:
            sinks = prep.sinks[:, None, None].expand(-1, len(at), 1)
            scores = torch.cat((scores, sinks), -1)
        weights = torch.softmax(scores, -1)[..., :end]
        assert not bool(keys.isnan().any(-1)[:, None].expand_as(weights)[weights > 0].any()), (
            "a key is missing"
        )
        return torch.einsum("htk,hkd->thd", weights, values.nan_to_num(0.0))
