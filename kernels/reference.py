"""The oracle: what the kernels compute, in plain torch. It is exact, so that they can be tested against it, and fast
enough to serve from a CPU, where nothing else runs. No kernel imports it.

Shapes: T query tokens, Hq query heads, Hkv KV heads (Hq a multiple of it), D head size, P pages of N tokens,
R page-table rows. A layer's KV pool is ``[P, 2, Hkv, N, D]``: keys and values of one page lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
import torch.nn.functional as F

from pensieve.kernels.arguments import Activation, HeadPrep
from pensieve.kernels.reference_plan import ReferencePlan, SpanGroup, make_plan
from pensieve.kernels.span_table import SpanTable

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
}


@overload
def ragged_paged_attention(
    q: torch.Tensor,
    kv_pool_of_layer: torch.Tensor,
    spans: SpanTable,
    page_tables: torch.Tensor,
    *,
    scale: float,
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def ragged_paged_attention(
    q: torch.Tensor,
    kv_pool_of_layer: torch.Tensor,
    spans: SpanTable,
    page_tables: torch.Tensor,
    *,
    scale: float,
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def ragged_paged_attention(
    q: torch.Tensor,
    kv_pool_of_layer: torch.Tensor,
    spans: SpanTable,
    page_tables: torch.Tensor,
    *,
    scale: float,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of ragged query spans over paged keys and values.

    ``q`` [T, Hq, D]; ``kv_pool_of_layer`` [P, 2, Hkv, N, D], already holding the keys and values of the queries
    themselves; ``page_tables`` int32 [R, pages]. The query at position ``p`` sees positions ``0..p`` of its row.
    Returns ``out`` [T, Hq, D] and, if asked for, the natural log of the softmax denominator, float32 [T, Hq]. Slots
    (places of tokens in pages) that no query sees may hold anything, NaN included. Page-table entries past a row's last
    visible page may name any page of the pool. Rows of ``q`` outside every span come out as 0 (lse: -inf).
    """
    groups, num_heads, head_dim = q.shape[1] // kv_pool_of_layer.shape[2], q.shape[1], q.shape[2]
    if groups * kv_pool_of_layer.shape[2] != num_heads:
        raise ValueError(f"{num_heads} query heads do not divide over {kv_pool_of_layer.shape[2]} KV heads")
    out = torch.empty_like(q) if out is None else out
    lse = q.new_full((len(q), num_heads), -torch.inf, dtype=torch.float32) if return_lse else None
    if spans.num_tokens != len(q):
        out.zero_()
    plan = _plan_for(q, kv_pool_of_layer, spans, page_tables)
    pages = kv_pool_of_layer.reshape(-1, kv_pool_of_layer.shape[3] * head_dim)
    scratch = q.new_empty((plan.scratch_rows, pages.shape[1]))
    for group in plan.groups:
        keys, values = _gather(pages, group, scratch, kv_pool_of_layer.shape)
        for block in group.blocks:
            rows, seen = block.rows, block.seen
            # Query heads of one KV head become query rows of it, so that keys are never repeated: [B, Hkv, G*q, D].
            queries = q[rows].view(group.batch, -1, kv_pool_of_layer.shape[2], groups, head_dim)
            length = queries.shape[1]
            folded = queries.permute(0, 2, 3, 1, 4).reshape(group.batch, -1, groups * length, head_dim)
            part = F.scaled_dot_product_attention(
                folded, keys[:, :, :seen], values[:, :, :seen], attn_mask=block.mask, scale=scale
            )
            out[rows] = _unfold(part, groups, length)
            if lse is not None:
                scores = (folded.float() @ keys[:, :, :seen].float().transpose(-1, -2)) * scale
                if block.mask is not None:
                    scores += block.mask.float()
                lse[rows] = _unfold(torch.logsumexp(scores, -1, keepdim=True), groups, length).squeeze(-1)
    return out if lse is None else (out, lse)


def _plan_for(
    q: torch.Tensor, pool: torch.Tensor, spans: SpanTable, page_tables: torch.Tensor
) -> ReferencePlan:
    """The plan of this step: made by its first layer, shared by the others."""
    key = f"reference/{q.shape[1]}/{tuple(pool.shape[2:4])}/{q.dtype}/{page_tables.data_ptr()}"
    return spans.plan(key, lambda: make_plan(q, pool, spans, page_tables))


def _gather(
    pages: torch.Tensor, group: SpanGroup, scratch: torch.Tensor, pool_shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a group, each [B, Hkv, K, D] with K a multiple of the page; unseen slots are 0.

    One scratch buffer serves all groups of a call: fresh large buffers would cost a page fault per 4 KiB.
    """
    _, _, kv_heads, _, head_dim = pool_shape
    gathered = scratch[: len(group.page_rows)]
    torch.index_select(pages, 0, group.page_rows, out=gathered)
    both = gathered.view(2, group.batch, kv_heads, -1, head_dim)
    if group.unseen is not None:
        which, position = group.unseen
        both[:, which, :, position] = 0.0  # masked weights are 0, but 0 * NaN is NaN
    return both[0], both[1]


def _unfold(part: torch.Tensor, groups: int, length: int) -> torch.Tensor:
    """[B, Hkv, G*q, X] back to query rows, [B*q, Hq, X]."""
    batch, kv_heads, _, width = part.shape
    split = part.view(batch, kv_heads, groups, length, width)
    return split.permute(0, 3, 1, 2, 4).reshape(batch * length, kv_heads * groups, width)


def kv_write(
    kv_pool_of_layer: torch.Tensor, qkv: torch.Tensor, slots: torch.Tensor, prep: HeadPrep
) -> torch.Tensor:
    """Make query and key heads ready, store keys and values in a layer's pool, return the queries [T, Hq, D].

    ``qkv`` [T, Hq + 2 * Hkv, D] holds the heads of queries, keys, values in this order and may be overwritten; the
    result may be a view of it. ``slots`` int32 or int64 [T]: slot ``s`` is place ``s % N`` of page ``s // N``; a
    negative one is padding, whose keys and values go nowhere. No slot may repeat. Every operation rounds to the dtype
    of ``qkv``.
    """
    kv_heads, page_tokens = kv_pool_of_layer.shape[2:4]
    q: torch.Tensor
    k: torch.Tensor
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if prep.query_norm is not None and prep.key_norm is not None:
        q = F.rms_norm(q, q.shape[-1:], prep.query_norm, prep.eps)
        k = F.rms_norm(k, k.shape[-1:], prep.key_norm, prep.eps)
    if prep.cos is not None and prep.sin is not None:
        q, k = _rotate(q, prep.cos, prep.sin), _rotate(k, prep.cos, prep.sin)
    both, slots = torch.stack((k, v), dim=1), slots.long()  # [T, 2, Hkv, D]
    if bool((slots < 0).any()):
        keep = slots >= 0
        both, slots = both[keep], slots[keep]
    page = torch.div(slots, page_tokens, rounding_mode="floor")
    kv_pool_of_layer[page, :, :, slots - page * page_tokens] = both
    return q


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads [T, H, D] turned by the angles of their positions, [T, D/2]."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm of the rows of ``x`` [T, W], or LayerNorm when there is a bias; ``weight`` and ``bias`` [W]."""
    if bias is None:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + delta`` [T, W], rounded to their dtype, and its ``norm``. ``x`` may be overwritten with the sum."""
    total = x + delta
    return total, norm(total, weight, bias, eps)


def activate(up: torch.Tensor, gated: bool, activation: Activation) -> torch.Tensor:
    """``act(up)`` [T, I]; gated, with ``up`` [T, 2 * I]: ``act`` of its first half times its second half."""
    if gated:
        gate, up = up.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gate) * up
    return _ACTIVATIONS[activation](up)


def chunk_copy(
    dst: torch.Tensor, src: torch.Tensor, dst_pages: torch.Tensor, src_pages: torch.Tensor
) -> None:
    """Copy page ``src_pages[i]`` of ``src`` [P, ...] to page ``dst_pages[i]`` of ``dst`` [Q, ...], in place.

    Page numbers are int64 [n]; the pages of both sides have one shape and may be strided views (one layer of a pool
    that is stored chunk by chunk). All pages are read before the first is written; no target may repeat.
    """
    picked = src.index_select(0, src_pages.to(src.device))
    dst.index_copy_(0, dst_pages.to(dst.device), picked.to(dst.device, dst.dtype))
