"""The ways in which ``prefix_attention`` computes a layer's attention over a shared prefix, and their tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from common.gpu_timing import Contender
from kernel_ops import attention as ops_attention
from kernel_ops.attention import DIM, PAGE
from sharing.shared_plan import Cut, SharedStep, prefix_alone

from pensieve.kernels.attention.capacity import capacity_for
from pensieve.kernels.attention.plan import PARTY_KIND, AttentionPlan, geometry_for, plan_key
from pensieve.kernels.attention.prefixes import Parties, PartyRule
from pensieve.kernels.ragged_paged_attention import ragged_paged_attention
from pensieve.kernels.span_table import SpanTable

HEADS, KV_HEADS = 40, 10
"""Llama-2-13B with 10 KV heads, as in ``bench/dummy_model.py``."""
MOST_BYTES = 45e9
"""Of private pools; those on shared pages are held beside them."""
Parts = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""A pool's number → results [B, Hq, D] and the log of their denominators [B, Hq]."""


@dataclass(frozen=True, slots=True)
class Step:
    """Tensors of a shape; pools take turns."""

    shape: SharedStep
    q: torch.Tensor
    pools: list[torch.Tensor]
    tables: torch.Tensor
    """int32 [B, pages of a context]; every row begins with the pages of the prefix."""
    spans: SpanTable

    @property
    def prefix_pages(self) -> torch.Tensor:
        return self.tables[0, : self.shape.prefix // PAGE].long()


def make_step(shape: SharedStep, device: str = "cuda", heads: int = HEADS, kv_heads: int = KV_HEADS,
              dtype: torch.dtype = torch.bfloat16, dim: int = DIM) -> Step:  # fmt: skip
    """Random keys, values and queries, pages in random order."""
    prefix, own = shape.prefix // PAGE, -(-shape.suffix // PAGE)
    pages = prefix + shape.sessions * own
    per_set = pages * 2 * kv_heads * PAGE * dim * dtype.itemsize
    sets = max(1, min(4, int(30e9 // per_set)))
    order = torch.randperm(pages, device=device).int()
    tables = torch.cat(
        [order[:prefix].expand(shape.sessions, -1), order[prefix:].view(shape.sessions, own)], 1
    )
    size = (pages, 2, kv_heads, PAGE, dim)
    pools = [torch.randn(size, device=device, dtype=dtype) for _ in range(sets)]
    q = torch.randn(shape.sessions, heads, dim, device=device, dtype=dtype)
    ones, rows = [1] * shape.sessions, range(shape.sessions)
    spans = SpanTable.build(ones, [shape.context - 1] * shape.sessions, rows, device)
    return Step(shape, q, pools, tables.contiguous(), spans)


def today(step: Step, out: torch.Tensor) -> Contender:
    """The kernel and its plan as they are now."""
    data = ops_attention.Data(step.q, step.pools, step.tables, step.spans, 0.0, 0.0)
    return ops_attention.ours(data, out)


def parties_of(step: Step, **rule: float) -> Parties | None:
    """What a server finds in the page tables of a step."""
    geometry = geometry_for(step.q.shape[1], step.pools[0])
    host = step.spans.host.copy()
    host[:, 3] *= step.tables.shape[1]
    return PartyRule(geometry, PAGE, **rule).find(host, step.tables.reshape(-1).cpu().numpy())


def product(step: Step, out: torch.Tensor) -> tuple[Contender, dict[str, int]]:
    """The kernel and the plan that a server has for a graph of this size if it reads the prefix once for all, whether
    its rule thinks that this pays or not; and how it cut the work. Raises ValueError when it finds no prefix."""
    found = parties_of(step, least_saved_us=0.0)
    if found is None or found.table[:, 1:].tolist() != [[step.shape.sessions, step.shape.prefix]]:
        raise ValueError(f"found {None if found is None else found.table.tolist()}")
    geometry = geometry_for(step.q.shape[1], step.pools[0])
    count = len(step.q)
    capacity = capacity_for(PARTY_KIND, count, count, step.shape.context, geometry)
    plan = AttentionPlan(count, geometry, step.q.device, kind=PARTY_KIND, capacity=capacity)
    plan.refill(step.spans.host, found.table)
    spans = replace(step.spans, plans={plan_key(step.q, step.pools[0]): plan})

    def call(index: int) -> object:
        return ragged_paged_attention(
            step.q, step.pools[index], spans, step.tables, scale=step.q.shape[2] ** -0.5, out=out
        )

    narrow, wide, _, _, _, _, programs, _ = plan.words[:8].tolist()
    return call, {"narrow_items": narrow, "wide_items": wide, "beside": programs}


def private(step: Step) -> Step:
    """The same contexts with all pages of their own, or ValueError when there is no room for them."""
    pages = step.tables.numel()
    per_set = pages * step.pools[0][0].nbytes
    sets = min(len(step.pools), int(MOST_BYTES // per_set))
    if sets < 1:
        raise ValueError(f"{per_set / 1e9:.0f} GB of private pages are more than {MOST_BYTES / 1e9:.0f} GB")
    order = torch.randperm(pages, device=step.q.device)
    pools = []
    for pool in step.pools[:sets]:
        copy = torch.empty((pages, *pool.shape[1:]), device=pool.device, dtype=pool.dtype)
        for row, own in zip(step.tables.long(), order.view(step.tables.shape), strict=True):
            copy[own] = pool[row]
        pools.append(copy)
    return Step(step.shape, step.q, pools, order.int().view(step.tables.shape), step.spans)


def two_parts(prefix: Parts, suffix: Parts, out: torch.Tensor) -> Contender:
    """Both parts, merged by torch."""

    def call(index: int) -> object:
        (first, first_lse), (second, second_lse) = prefix(index), suffix(index)
        weight = torch.sigmoid(first_lse - second_lse)[..., None]
        out.copy_(torch.lerp(second.float(), first.float(), weight))
        return out

    return call


def suffix_part(step: Step) -> Parts:
    """Our kernel over the suffixes alone, with a plan as for a graph."""
    shape = step.shape
    tables = step.tables[:, shape.prefix // PAGE :].contiguous()
    spans = SpanTable.build(
        [1] * shape.sessions, [shape.suffix - 1] * shape.sessions, range(shape.sessions), step.q.device
    )
    return _kernel(step, spans, tables)


def prefix_by_kernel(step: Step, cut: Cut) -> Parts:
    geometry = geometry_for(step.q.shape[1], step.pools[0])
    spans = prefix_alone(step.shape, cut, step.q, step.pools[0], step.spans, geometry)
    return _kernel(step, spans, step.tables)


def _kernel(step: Step, spans: SpanTable, tables: torch.Tensor) -> Parts:
    scale = step.q.shape[2] ** -0.5

    def call(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        result = ragged_paged_attention(
            step.q, step.pools[index], spans, tables, scale=scale, return_lse=True
        )
        assert isinstance(result, tuple)
        return result

    return call


def prefix_by_torch(step: Step, which: str) -> Parts:
    """PyTorch's attention, query heads of a KV head as rows of one head, over contiguous keys and values."""
    sessions, heads, dim = step.q.shape
    kv_heads = step.pools[0].shape[2]
    contiguous = [
        pool[step.prefix_pages].permute(1, 2, 0, 3, 4).reshape(2, 1, kv_heads, -1, dim).contiguous()
        for pool in step.pools
    ]

    def call(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = step.q.view(sessions, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
        keys, values = contiguous[index]
        aten = torch.ops.aten
        if which == "flash":
            found = aten._scaled_dot_product_flash_attention(
                rows, keys, values, 0.0, False, False, scale=dim**-0.5
            )
        else:
            found = aten._scaled_dot_product_cudnn_attention(
                rows, keys, values, None, True, 0.0, False, False, scale=dim**-0.5
            )
        out = found[0].view(kv_heads, sessions, -1, dim).transpose(0, 1).reshape(sessions, heads, dim)
        lse = found[1].reshape(kv_heads, sessions, -1).transpose(0, 1).reshape(sessions, heads)
        return out, lse

    return call
