"""How the reference attention walks through a step; the first layer of a step computes it, all layers share it.

Single-token spans are attended in padded batches of similar context length; a longer span stands alone and is cut
into blocks of queries, so that a block reads only the keys that its last query sees and its mask stays small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pensieve.kernels.span_table import HostSpans, Ints, SpanTable

QUERY_BLOCK = 256
"""Most queries of one span attended at a time."""
GROUP_ELEMENTS = 1024 * 1024
"""Largest batch of single-token spans, in gathered key and value elements: bounds memory, keeps caches warm."""
GROUP_FILL = 0.75
"""A span joins a batch only if its context fills at least this share of the longest one."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries that one call attends: ``rows`` of q in order of (span, token), and the keys that they see."""

    rows: torch.Tensor | slice
    seen: int
    """Leading keys that some query sees."""
    mask: torch.Tensor | None
    """What is added to the scores: 0 or -inf, broadcastable to [B, Hkv, G*q, seen]; None: every query sees all keys."""


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
    """The walk through one step."""

    groups: tuple[SpanGroup, ...]
    scratch_rows: int
    """Longest ``page_rows`` of a group."""
    page_tables: torch.Tensor
    """Kept alive, because the plan is found by the address of this tensor."""


def make_plan(
    q: torch.Tensor, pool: torch.Tensor, spans: SpanTable, page_tables: torch.Tensor
) -> ReferencePlan:
    """Plan for queries of q's shape and dtype over a pool of ``pool``'s shape; reads the page tables once."""
    builder = _Builder(q, pool, page_tables)
    host = spans.host[spans.host[:, 1] > 0]
    single = host[:, 1] == 1
    groups = [builder.batched(batch) for batch in _batches(host[single], pool)]
    groups += [builder.alone(span) for span in host[~single]]
    rows = max((len(group.page_rows) for group in groups), default=0)
    return ReferencePlan(tuple(groups), rows, page_tables)


def _batches(host: HostSpans, pool: torch.Tensor) -> list[HostSpans]:
    """Single-token spans [n, 4] in batches of similar context length, longest first."""
    order = host[np.argsort(-host[:, 2], kind="stable")]
    per_token = 2 * pool.shape[2] * pool.shape[4]
    batches, first = [], 0
    for index in range(1, len(order) + 1):
        longest = int(order[first, 2]) + 1
        full = (index + 1 - first) * longest * per_token > GROUP_ELEMENTS
        if index == len(order) or full or order[index, 2] + 1 < GROUP_FILL * longest - pool.shape[3]:
            batches.append(order[first:index])
            first = index
    return batches


class _Builder:
    """Makes groups for one set of tensors."""

    def __init__(self, q: torch.Tensor, pool: torch.Tensor, page_tables: torch.Tensor) -> None:
        self.q, self.kv_heads, self.page_tokens = q, pool.shape[2], pool.shape[3]
        self.tables = page_tables.cpu().numpy()

    def batched(self, host: HostSpans) -> SpanGroup:
        """One group of single-token spans [n, 4]."""
        seen = host[:, 2] + 1
        longest = int(seen.max())
        page_rows, padded = self._page_rows(host[:, 3], seen)
        position = np.arange(padded)
        which, where = np.nonzero(position[None, :] >= seen[:, None])
        mask = None
        if int(seen.min()) < longest:
            mask = self._bias(position[None, :longest] < seen[:, None])[:, None, None, :]
        unseen = (self._index(which), self._index(where)) if mask is not None else None
        return SpanGroup(len(host), page_rows, unseen, (QueryBlock(self._index(host[:, 0]), longest, mask),))

    def alone(self, span: Ints) -> SpanGroup:
        """One span of several tokens: [4]."""
        start, length, position, row = (int(value) for value in span)
        page_rows, _ = self._page_rows(np.array([row]), np.array([position + length]))
        blocks = []
        for first in range(0, length, QUERY_BLOCK):
            count = min(QUERY_BLOCK, length - first)
            seen = position + first + count
            visible = np.arange(seen)[None, :] <= (position + first + np.arange(count))[:, None]
            heads = self.q.shape[1] // self.kv_heads
            mask = self._bias(np.tile(visible, (heads, 1)))
            blocks.append(QueryBlock(slice(start + first, start + first + count), seen, mask))
        return SpanGroup(1, page_rows, None, tuple(blocks))

    def _page_rows(self, rows: Ints, seen: Ints) -> tuple[torch.Tensor, int]:
        """Pool rows of keys then values of all pages the spans see, and the padded length in tokens."""
        needed = -(-seen // self.page_tokens)
        count = int(needed.max())
        pages = self.tables[rows, :count].astype(np.int64)
        # Entries past a row's last visible page may be anything: read its first page in their place.
        pages = np.where(np.arange(count)[None, :] < needed[:, None], pages, pages[:, :1])
        heads = np.arange(self.kv_heads)
        keys = (pages[:, None, :] * 2) * self.kv_heads + heads[None, :, None]  # [B, Hkv, pages]
        both = np.stack([keys, keys + self.kv_heads])
        return self._index(both.reshape(-1)), count * self.page_tokens

    def _bias(self, visible: npt.NDArray[np.bool_]) -> torch.Tensor:
        bias = torch.zeros(visible.shape, dtype=self.q.dtype)
        return bias.masked_fill_(torch.from_numpy(~visible), -torch.inf).to(self.q.device)

    def _index(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.q.device)
