"""Plain torch versions of every kernel: exact, the oracle of the fast ones, and fast enough to serve from a CPU.

Shapes: T query tokens, Hq query heads, Hkv KV heads (Hq a multiple of it), D head size, P pages of N tokens,
R page-table rows. A layer's KV pool is ``[P, 2, Hkv, N, D]``: keys and values of one page lie side by side.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F

from pensieve.kernels.reference_plan import AttentionPlan, Group, make_plan
from pensieve.kernels.span_table import SpanTable


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
    Returns ``out`` [T, Hq, D] and, if asked for, the natural log of the softmax denominator, float32 [T, Hq].
    Slots that no query sees may hold anything, NaN included. Page-table entries past a row's last visible page may name
    any page of the pool. Rows of ``q`` outside every span come out as 0 (lse: -inf).
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
) -> AttentionPlan:
    """The plan of this step: made by its first layer, shared by the others."""
    key = f"reference/{q.shape[1]}/{tuple(pool.shape[2:4])}/{q.dtype}/{page_tables.data_ptr()}"
    return spans.plan(key, lambda: make_plan(q, pool, spans, page_tables))


def _gather(
    pages: torch.Tensor, group: Group, scratch: torch.Tensor, pool_shape: torch.Size
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


def kv_write(kv_pool_of_layer: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Store keys and values [T, Hkv, D] at ``slots`` int64 [T] of a layer's pool, in place.

    Slot ``s`` is place ``s % N`` of page ``s // N``; a negative slot is padding and is skipped. No slot may repeat.
    """
    page_tokens = kv_pool_of_layer.shape[3]
    both = torch.stack((k, v), dim=1)  # [T, 2, Hkv, D]
    if bool((slots < 0).any()):
        keep = slots >= 0
        both, slots = both[keep], slots[keep]
    page = torch.div(slots, page_tokens, rounding_mode="floor")
    kv_pool_of_layer[page, :, :, slots - page * page_tokens] = both


def chunk_copy(
    dst: torch.Tensor, src: torch.Tensor, dst_pages: torch.Tensor, src_pages: torch.Tensor
) -> None:
    """Copy page ``src_pages[i]`` of ``src`` [P, ...] to page ``dst_pages[i]`` of ``dst`` [Q, ...], in place.

    Page numbers are int64 [n]; the pages of both sides have one shape and may be strided views (one layer of a pool
    that is stored chunk by chunk). All pages are read before the first is written; no target may repeat.
    """
    picked = src.index_select(0, src_pages.to(src.device))
    dst.index_copy_(0, dst_pages.to(dst.device), picked.to(dst.device, dst.dtype))
