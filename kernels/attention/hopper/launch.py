"""Launch of wide items on Hopper devices. Imports Gluon and the device code (``kernel``) at the first launch."""

from __future__ import annotations

from typing import Any

import torch
import triton

from pensieve.kernels.attention.call import AttentionCall, Scratch
from pensieve.kernels.attention.kinds import Geometry

GROUP_ROWS, KEYS, SLAB = 64, 128, 64
"""Query rows of a warp group, keys of a tile, columns of a bulk copy; fixed in the device code."""
FIRST_VERSION = (3, 6)
"""First Triton version with the language of the device code."""


def supports(geometry: Geometry, dtype: torch.dtype, page_tokens: int, device: torch.device) -> bool:
    """Return whether the kernel supports these heads, this page size and this device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    shaped = (
        dtype in (torch.float16, torch.bfloat16)
        and geometry.head_dim in (SLAB, 2 * SLAB)
        and GROUP_ROWS % geometry.groups == 0
        and page_tokens >= 16
        and page_tokens & (page_tokens - 1) == 0
    )
    return shaped and version >= FIRST_VERSION


def addressable(q: torch.Tensor, pool: torch.Tensor) -> bool:
    """Return whether bulk copies can address all of ``q`` [T, Hq, D] and ``pool`` [P, 2, Hkv, N, D]. Strides
    must be multiples of 16 bytes, and pages a whole number of rows apart."""
    dim = q.shape[2]
    aligned = all(
        part.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in part.stride()[:-1])
        for part in (q, pool)
    )
    return aligned and pool.stride(3) == dim and all(stride % dim == 0 for stride in pool.stride()[:3])


def attend_wide(
    call: AttentionCall, words: torch.Tensor, scratch: Scratch, *,
    programs: int, beside: bool = False, window: int = 0,
) -> None:  # fmt: skip
    """Attend the wide items of a plan's ``words`` (``attention.work_lists``) for every KV head.

    Blocks have 128 rows, and pieces begin at multiples of 128 keys. The longest item should come first, or
    programs end at different times. ``programs``: best one per multiprocessor, since one fills it.
    ``beside``: the next launch may begin at once, on multiprocessors that the plan does not reserve for wide
    items. ``window``: of the plan, 0 for none. Only for calls that ``supports`` and ``addressable`` accept.
    """
    pool, out, kv_heads, page, dim = (
        call.pool,
        call.out,
        call.pool.shape[2],
        call.pool.shape[3],
        call.pool.shape[4],
    )
    groups = call.q.shape[1] // kv_heads
    q_desc, pool_desc = _descriptors(call.q, pool, groups)
    from pensieve.kernels.attention.hopper.kernel import attend_hopper

    attend_hopper[(programs,)](
        q_desc, pool_desc, call.tables, out, call.lse, words, scratch.partial, scratch.partial_lse, scratch.rows,
        call.table_stride, out.stride(0), out.stride(1), pool.stride(0) // dim, pool.stride(1) // dim,
        pool.stride(2) // dim, call.factor, call.sinks, window, KV_HEADS=kv_heads, GROUPS=groups, DIM=dim, PAGE=page,
        BESIDE=beside, LSE=call.has_lse, WINDOWED=window > 0, SINKS=call.has_sinks, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip


def _descriptors(q: torch.Tensor, pool: torch.Tensor, groups: int) -> tuple[Any, Any]:
    """Describe memory for bulk copies: queries as rows of the tokens' heads, the pool as one list of rows."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dim, page = pool.shape[4], pool.shape[3]
    rows = 1 + sum(
        (n - 1) * stride // dim for n, stride in zip(pool.shape[:4], pool.stride()[:4], strict=True)
    )
    block = [GROUP_ROWS // groups, groups, SLAB]
    q_desc = TensorDescriptor(q, list(q.shape), [*q.stride()[:2], 1], block, NVMMASharedLayout(128, 16, 3))
    block = [min(page, KEYS), SLAB]
    return q_desc, TensorDescriptor(pool, [rows, dim], [dim, 1], block, NVMMASharedLayout(128, 16, 2))
