"""Tensors of one ragged paged attention call, checked before any launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pensieve.kernels.arguments import Logits
from pensieve.kernels.attention.kinds import Geometry
from pensieve.kernels.attention.tiles import width_of
from pensieve.kernels.checks import FLOAT_DTYPES, check_device, check_layout, check_logits
from pensieve.kernels.kv_codec import check_pool


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Inputs and outputs of one attention call."""

    q: torch.Tensor
    """[T, Hq, D]"""
    pool: torch.Tensor
    """[P, 2, Hkv, N, D], plain or coded"""
    tables: torch.Tensor
    """int32 [R, pages], or [n] with page tables laid end to end."""
    out: torch.Tensor
    lse: torch.Tensor
    """float32 [T, Hq]; [1, 1] and unused without ``has_lse``."""
    has_lse: bool
    logits: Logits

    @property
    def has_sinks(self) -> bool:
        return self.logits.sinks is not None

    @property
    def sinks(self) -> torch.Tensor:
        """Any tensor where there are none: kernels do not read it then."""
        return self.lse if self.logits.sinks is None else self.logits.sinks

    @property
    def factor(self) -> float:
        """Scale for scores that are exponents of 2, as the kernels use them; with a softcap, for its tanh."""
        return (self.logits.softcap or self.logits.scale) * math.log2(math.e)

    @property
    def inner_softcap(self) -> float:
        """Scale for products before the tanh; 0: no softcap."""
        scale, softcap, _ = self.logits
        return 0.0 if softcap is None else scale / softcap

    @property
    def table_stride(self) -> int:
        """Page-table entries from one ``TABLE`` number to the next; 1 for tables laid end to end."""
        return self.tables.stride(0)

    @classmethod
    def from_tensors(
        cls,
        q: torch.Tensor,
        pool: torch.Tensor,
        tables: torch.Tensor,
        logits: Logits,
        out: torch.Tensor | None,
        *,
        with_lse: bool = False,
    ) -> AttentionCall:
        """Check the tensors and allocate the results. Raises ValueError unless the tensors fit each other."""
        check_attention(q, pool, tables, out)
        check_logits(q, logits)
        lse = q.new_empty(q.shape[:2] if with_lse else (1, 1), dtype=torch.float32)
        return cls(q, pool, tables, torch.empty_like(q) if out is None else out, lse, with_lse, logits)


class Scratch:
    """Partial results before they are merged. Each layer overwrites them, so all plans of a stream can share one."""

    def __init__(self, rows: int, geometry: Geometry, device: torch.device, copies: int = 0) -> None:
        """``rows``, ``copies``: largest ``partial_rows`` and ``copies`` of the capacities it serves. With fixed pieces,
        ``partial_lse`` has the largest scores instead, and ``partial_total`` the sums of weights."""
        self.rows, fixed = rows, geometry.piece > 0
        held = max(1, rows) * geometry.kv_heads
        self.partial = torch.empty(held, width_of(geometry.head_dim), dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(held, dtype=torch.float32, device=device)
        self.partial_total = torch.empty(held if fixed else 1, dtype=torch.float32, device=device)
        # Exponents of codes exceed float16.
        dtype = torch.float32 if geometry.element_bytes > 2 else torch.bfloat16
        page = 2, geometry.kv_heads, geometry.copied_page, geometry.head_dim
        self.copies = torch.empty(copies, *page, dtype=dtype, device=device)
        """Plain copies of coded pages (``copies``)."""
        self.numbers = torch.arange(copies, dtype=torch.int32, device=device)


def check_attention(
    q: torch.Tensor, pool: torch.Tensor, tables: torch.Tensor, out: torch.Tensor | None
) -> None:
    """Raises ValueError unless the tensors fit each other."""
    if q.dim() != 3 or pool.dim() != 5 or tables.dim() not in (1, 2):
        raise ValueError(
            "q must be [T, Hq, D], the pool [P, 2, Hkv, N, D], the page tables [R, pages] or [n]"
        )
    heads, kv_heads = q.shape[1], pool.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} KV heads")
    width_of(q.shape[2])
    if pool.shape[1] != 2 or pool.shape[4] != q.shape[2]:
        raise ValueError(f"a pool of {tuple(pool.shape)} does not fit heads of {q.shape[2]} values")
    check_pool(pool, q.dtype, FLOAT_DTYPES)
    if tables.dtype != torch.int32:
        raise ValueError(f"page tables are {tables.dtype}, not int32")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, q is {q.dtype} {tuple(q.shape)}")
    tensors = [q, pool, tables] if out is None else [q, pool, tables, out]
    check_layout(tensors)
    check_device(tensors)
