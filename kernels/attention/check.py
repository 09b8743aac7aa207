"""Checks the arguments of ragged paged attention before anything is launched."""

from __future__ import annotations

import torch

from pensieve.kernels.attention.tiles import width_of
from pensieve.kernels.checks import FLOAT_DTYPES, check_device, check_layout


def check_attention(
    q: torch.Tensor, pool: torch.Tensor, page_tables: torch.Tensor, out: torch.Tensor | None, scale: float
) -> None:
    """Raises ValueError unless the tensors of ``ragged_paged_attention`` fit each other."""
    if q.dim() != 3 or pool.dim() != 5 or page_tables.dim() != 2:
        raise ValueError("q must be [T, Hq, D], the pool [P, 2, Hkv, N, D], the page tables [R, pages]")
    heads, kv_heads = q.shape[1], pool.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide over {kv_heads} KV heads")
    width_of(q.shape[2])
    if pool.shape[1] != 2 or pool.shape[4] != q.shape[2]:
        raise ValueError(f"a pool of {tuple(pool.shape)} does not fit heads of {q.shape[2]} values")
    if q.dtype != pool.dtype or q.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"q is {q.dtype} and the pool {pool.dtype}: both must be float16, bfloat16 or float32"
        )
    if page_tables.dtype != torch.int32:
        raise ValueError(f"page tables are {page_tables.dtype}, not int32")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, q is {q.dtype} {tuple(q.shape)}")
    tensors = [q, pool, page_tables] if out is None else [q, pool, page_tables, out]
    check_layout(tensors)
    check_device(tensors)
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")
