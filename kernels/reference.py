"""Reference implementations of the kernels in plain torch.

They are exact, so the kernels are tested against them, and fast enough to serve on a CPU. No kernel imports
this module.

Shapes: T query tokens, Hq query heads, Hkv KV heads (Hq a multiple of it), D head size, P pages of N tokens,
R page-table rows. A layer's KV pool is ``[P, 2, Hkv, N, D]``: keys and values of one page are adjacent. It may be
coded (``kv_codec``): keys and values are then encoded when they are written, and attention reads what they decode to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pensieve.kernels import kv_codec
from pensieve.kernels.arguments import ACTIVATIONS, Activation, HeadPrep, Logits
from pensieve.kernels.checks import check_logits, check_window
from pensieve.kernels.spans import POSITION, Q_LEN, Q_START, TABLE, Ints, Spans, num_tokens

QUERY_BLOCK = 256
"""Most queries of one span attended at a time."""
GROUP_ELEMENTS = 1024 * 1024
"""Largest batch of single-token spans, in gathered key and value elements; bounds memory and keeps caches warm."""
GROUP_FILL = 0.75
"""A span joins a batch only if its context is at least this share of the longest one."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries of one attention call: ``rows`` of q in order of (span, token), and the keys that they see."""

    rows: torch.Tensor | slice
    first: int
    """First gathered key that some query sees."""
    end: int
    """The one after the last."""
    mask: torch.Tensor | None
    """Added to the scores: 0 or -inf, broadcastable to [B, Hkv, G*q, end - first]; None: every query sees all keys."""


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """Spans whose keys and values are gathered together."""

    batch: int
    page_rows: torch.Tensor
    """int64 [2 * batch * Hkv * pages]: rows of the pool seen as [P * 2 * Hkv, N * D]."""
    unseen: tuple[torch.Tensor, torch.Tensor] | None
    """(batch index, position) of every gathered slot that must not be read."""
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Groups of one step, shared by all its layers."""

    groups: tuple[SpanGroup, ...]
    scratch_rows: int
    """Longest ``page_rows`` of a group."""
    covers_all: bool
    """Whether every row of q belongs to a span."""


def make_plan(
    q: torch.Tensor, pool: torch.Tensor, spans: Spans, page_tables: torch.Tensor, *, window: int | None = None
) -> ReferencePlan:
    """Make the plan for queries of q's shape and dtype over a pool of ``pool``'s shape; reads the page tables
    once.

    ``window``: the query at position ``p`` sees only positions ``[p - window + 1, p]``; None: it sees ``[0, p]``.
    Single-token spans are attended in padded batches of similar length. A longer span is a group of its own,
    split into blocks of queries: a block reads only the keys that its queries see, and its mask stays small.
    Pages below every window of a span are not gathered. Raises ValueError when the query heads do not divide
    over the KV heads or the window is not positive.
    """
    if q.shape[1] % pool.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads do not divide over {pool.shape[2]} KV heads")
    check_window(window)
    builder = _Builder(q, pool, page_tables, window)
    lengths = spans[:, Q_LEN]
    groups = [builder.batched(batch) for batch in _batches(spans[lengths == 1], pool, window)]
    groups += [builder.alone(span) for span in spans[lengths > 1]]
    rows = max((len(group.page_rows) for group in groups), default=0)
    return ReferencePlan(tuple(groups), rows, num_tokens(spans) == len(q))


def _batches(spans: Spans, pool: torch.Tensor, window: int | None) -> list[Spans]:
    """Single-token spans [n, 4] in batches of similar numbers of visible keys, most keys first."""
    order = spans[np.argsort(-spans[:, POSITION], kind="stable")]
    seen = order[:, POSITION] + 1
    if window is not None:
        seen = np.minimum(seen, window)
    per_token = 2 * pool.shape[2] * pool.shape[4]
    batches, first = [], 0
    for index in range(1, len(order) + 1):
        longest = int(seen[first])
        full = (index + 1 - first) * longest * per_token > GROUP_ELEMENTS
        if index == len(order) or full or seen[index] < GROUP_FILL * longest - pool.shape[3]:
            batches.append(order[first:index])
            first = index
    return batches


class _Builder:
    """Makes groups for one set of tensors."""

    def __init__(
        self, q: torch.Tensor, pool: torch.Tensor, page_tables: torch.Tensor, window: int | None
    ) -> None:
        self.q, self.kv_heads, self.page_tokens = q, pool.shape[2], pool.shape[3]
        self.tables = page_tables.cpu().numpy()
        self.window = window

    def batched(self, spans: Spans) -> SpanGroup:
        """One group of single-token spans [n, 4]."""
        first, end = self._first_seen(spans[:, POSITION]), spans[:, POSITION] + 1
        page_rows, padded, begin = self._page_rows(spans[:, TABLE], first, end)
        first, end = first - begin, end - begin
        longest = int(end.max())
        position = np.arange(padded)
        visible = (position[None, :] >= first[:, None]) & (position[None, :] < end[:, None])
        which, where = np.nonzero(~visible)
        mask = None
        if not visible[:, :longest].all():
            mask = self._bias(visible[:, :longest])[:, None, None, :]
        unseen = (self._index(which), self._index(where)) if mask is not None else None
        block = QueryBlock(self._index(spans[:, Q_START]), 0, longest, mask)
        return SpanGroup(len(spans), page_rows, unseen, (block,))

    def alone(self, span: Ints) -> SpanGroup:
        """One group for a span [4] of several tokens."""
        start, length, position, table = (int(value) for value in span)
        queries = position + np.arange(length)
        page_rows, _, begins = self._page_rows(
            np.array([table]), self._first_seen(queries[:1]), np.array([position + length])
        )
        begin = int(begins[0])
        blocks = []
        for offset in range(0, length, QUERY_BLOCK):
            count = min(QUERY_BLOCK, length - offset)
            own = queries[offset : offset + count, None]
            first, end = int(self._first_seen(own[0])[0]), int(own[-1, 0]) + 1
            keys = np.arange(first, end)[None, :]
            visible = (keys <= own) & (keys >= self._first_seen(own))
            heads = self.q.shape[1] // self.kv_heads
            mask = self._bias(np.tile(visible, (heads, 1)))
            rows = slice(start + offset, start + offset + count)
            blocks.append(QueryBlock(rows, first - begin, end - begin, mask))
        return SpanGroup(1, page_rows, None, tuple(blocks))

    def _first_seen(self, positions: Ints) -> Ints:
        """Return the first position that the query at each position sees."""
        if self.window is None:
            return np.zeros_like(positions)
        return np.maximum(positions - self.window + 1, 0)

    def _page_rows(self, rows: Ints, first: Ints, end: Ints) -> tuple[torch.Tensor, int, Ints]:
        """Return the pool rows of keys, then values, of all pages with positions ``[first, end)`` of the spans;
        the padded tokens; and the position of each span's first gathered key."""
        begin = first // self.page_tokens
        needed = -(-end // self.page_tokens) - begin
        count = int(needed.max())
        # Entries past a row's last visible page may be anything: read its first page instead.
        gathered = np.arange(count)[None, :]
        pages = self.tables[
            rows[:, None], begin[:, None] + np.where(gathered < needed[:, None], gathered, 0)
        ].astype(np.int64)
        heads = np.arange(self.kv_heads)
        keys = (pages[:, None, :] * 2) * self.kv_heads + heads[None, :, None]  # [B, Hkv, pages]
        both = np.stack([keys, keys + self.kv_heads])
        return self._index(both.reshape(-1)), count * self.page_tokens, begin * self.page_tokens

    def _bias(self, visible: npt.NDArray[np.bool_]) -> torch.Tensor:
        bias = torch.zeros(visible.shape, dtype=self.q.dtype)
        return bias.masked_fill_(torch.from_numpy(~visible), -torch.inf).to(self.q.device)

    def _index(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.q.device)


def attend(
    q: torch.Tensor,
    pool: torch.Tensor,
    plan: ReferencePlan,
    logits: Logits,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of ragged query spans over paged keys and values.

    ``q`` [T, Hq, D]; ``pool`` [P, 2, Hkv, N, D] of one layer, already holding the keys and values of the
    queries themselves; ``plan`` from ``make_plan``, shared by every layer of a step with its window. The query
    at position ``p`` sees positions ``0..p`` of its context, or the part of them in its window. Returns ``out``
    [T, Hq, D]. ``lse``, if given, gets the natural log of the softmax denominator, float32 [T, Hq]. Slots (places of
    tokens in pages) that no query sees may hold anything, NaN included. Page-table entries of pages that no query sees
    may name any page of the pool. Rows of ``q`` outside every span are 0 (lse: -inf). Raises ValueError when ``logits``
    do not fit.
    """
    check_logits(q, logits)
    scale, softcap, sinks = logits
    num_heads, head_dim, kv_heads = q.shape[1], q.shape[2], pool.shape[2]
    groups = num_heads // kv_heads
    out = torch.empty_like(q) if out is None else out
    if lse is not None:
        lse.fill_(-torch.inf)
    if not plan.covers_all:
        out.zero_()
    scratch = q.new_empty((plan.scratch_rows, pool.shape[3] * head_dim))
    for group in plan.groups:
        keys, values = _gather(pool, group, scratch)
        for block in group.blocks:
            rows, seen = block.rows, slice(block.first, block.end)
            # Query heads of one KV head become its query rows, so keys are never repeated: [B, Hkv, G*q, D].
            queries = q[rows].view(group.batch, -1, kv_heads, groups, head_dim)
            length = queries.shape[1]
            folded = queries.permute(0, 2, 3, 1, 4).reshape(group.batch, -1, groups * length, head_dim)
            logs = None
            if lse is not None or softcap is not None or sinks is not None:
                scores = _scores(folded, keys[:, :, seen], block.mask, scale, softcap)
                logs = torch.logsumexp(scores, -1, keepdim=True)
            if logs is None or (softcap is None and sinks is None):
                part = F.scaled_dot_product_attention(
                    folded, keys[:, :, seen], values[:, :, seen], attn_mask=block.mask, scale=scale
                )
            else:
                if sinks is not None:
                    of_rows = sinks.float().view(kv_heads, groups, 1).expand(-1, -1, length)
                    logs = torch.logaddexp(logs, of_rows.reshape(kv_heads, -1, 1))
                part = ((scores - logs).exp_() @ values[:, :, seen].float()).to(q.dtype)
            out[rows] = _unfold(part, groups, length)
            if lse is not None and logs is not None:
                lse[rows] = _unfold(logs, groups, length).squeeze(-1)
    return out


def ragged_paged_attention(
    q: torch.Tensor,
    kv_pool_of_layer: torch.Tensor,
    spans: Spans,
    page_tables: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``attend`` with a plan for this call only; ``page_tables`` int32 [R, pages]. ``return_lse``: return ``(out,
    lse)``."""
    plan = make_plan(q, kv_pool_of_layer, spans, page_tables, window=window)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    out = attend(q, kv_pool_of_layer, plan, Logits(scale, softcap, sinks), out=out, lse=lse)
    return out if lse is None else (out, lse)


def _scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return the logits of the softmax, float32 [B, Hkv, rows, keys]."""
    scores = (queries.float() @ keys.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores += mask.float()
    return scores


def _gather(pool: torch.Tensor, group: SpanGroup, scratch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a group, each [B, Hkv, K, D] with K a multiple of the page size; unseen slots are 0.
    One scratch buffer serves all groups of a call: fresh large buffers would cost a page fault per 4 KiB."""
    _, _, kv_heads, page_tokens, head_dim = pool.shape
    gathered = scratch[: len(group.page_rows)]
    if kv_codec.is_coded(pool):
        of_page, row = group.page_rows // (2 * kv_heads), group.page_rows % (2 * kv_heads)
        at = (of_page, row // kv_heads, row % kv_heads)
        gathered.copy_(kv_codec.read(pool, at, gathered.dtype).flatten(1))
    else:
        pages = pool.reshape(-1, page_tokens * head_dim)
        torch.index_select(pages, 0, group.page_rows, out=gathered)
    both = gathered.view(2, group.batch, kv_heads, -1, head_dim)
    if group.unseen is not None:
        which, position = group.unseen
        both[:, which, :, position] = 0.0  # masked weights are 0, but 0 * NaN is NaN
    return both[0], both[1]


def _unfold(part: torch.Tensor, groups: int, length: int) -> torch.Tensor:
    """Reshape [B, Hkv, G*q, X] to query rows [B*q, Hq, X]."""
    batch, kv_heads, _, width = part.shape
    split = part.view(batch, kv_heads, groups, length, width)
    return split.permute(0, 3, 1, 2, 4).reshape(batch * length, kv_heads * groups, width)


def kv_write(
    kv_pool_of_layer: torch.Tensor, qkv: torch.Tensor, slots: torch.Tensor, prep: HeadPrep
) -> torch.Tensor:
    """Prepare query and key heads, store keys and values in a layer's pool, return the queries [T, Hq, D].

    ``qkv`` [T, Hq + 2 * Hkv, D] holds the heads of queries, keys, values in this order and may be
    overwritten; the result may be a view of it. ``slots`` int32 or int64 [T]: slot ``s`` is place ``s % N``
    of page ``s // N``. A negative slot is padding: its keys and values are not stored. No slot may repeat.
    Every operation rounds to the dtype of ``qkv``, and a coded pool stores the codes of the result.
    """
    kv_heads, page_tokens = kv_pool_of_layer.shape[2:4]
    q: torch.Tensor
    k: torch.Tensor
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if prep.query_norm is not None and prep.key_norm is not None:
        q = norm(q, prep.query_norm, None, prep.eps)
        k = norm(k, prep.key_norm, None, prep.eps)
    if prep.cos is not None and prep.sin is not None:
        q, k = _rotate(q, prep.cos, prep.sin), _rotate(k, prep.cos, prep.sin)
    both, slots = torch.stack((k, v), dim=1), slots.long()  # [T, 2, Hkv, D]
    if bool((slots < 0).any()):
        keep = slots >= 0
        both, slots = both[keep], slots[keep]
    page = torch.div(slots, page_tokens, rounding_mode="floor")
    at = (page, slice(None), slice(None), slots - page * page_tokens)
    if kv_codec.is_coded(kv_pool_of_layer):
        kv_codec.write(kv_pool_of_layer, at, both)
    else:
        kv_pool_of_layer[at] = both
    return q


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, H, D] by the angles of their positions, [T, D/2]."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension of ``x`` [..., W], or LayerNorm when there is a bias; ``weight`` and ``bias``
    [W]. A float32 ``weight`` of a norm without bias may go with an ``x`` of another dtype: the norm is then computed
    in float32 and rounded once."""
    if bias is None and weight.dtype != x.dtype:
        return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
    if bias is None:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + delta`` [T, W], rounded to their dtype, and its ``norm``. ``x`` may be overwritten with the sum."""
    total = x + delta
    return total, norm(total, weight, bias, eps)


def activate(up: torch.Tensor, gated: bool, activation: Activation) -> torch.Tensor:
    """Return ``act(up)`` [T, I]; gated, with ``up`` [T, 2 * I]: ``act`` of the first half times the second half."""
    if gated:
        gate, up = up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up
    return ACTIVATIONS[activation](up)


def chunk_copy(
    dst: torch.Tensor, src: torch.Tensor, dst_pages: torch.Tensor, src_pages: torch.Tensor
) -> None:
    """Copy page ``src_pages[i]`` of ``src`` [P, ...] to page ``dst_pages[i]`` of ``dst`` [Q, ...], in place. Page
    numbers are int64 [n]. The pages of both sides have one shape and may be strided views (one layer of a pool that
    is stored chunk by chunk). All pages are read before the first is written; no target may repeat."""
    picked = src.index_select(0, src_pages.to(src.device))
    dst.index_copy_(0, dst_pages.to(dst.device), picked.to(dst.device, dst.dtype))
