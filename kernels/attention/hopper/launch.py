"""The wide launch of the attention kernel on Hopper devices; its device code is in ``kernel``.

Nothing of the compiler for that device is imported before the first launch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from pensieve.kernels.attention.call import AttentionCall, Scratch
from pensieve.kernels.attention.kinds import Geometry

GROUP_ROWS, KEYS, SLAB = 64, 128, 64
"""Query rows of a warp group, keys of a tile, columns of a bulk copy: what the device code is written for."""
FIRST_VERSION = (3, 6)
"""The first Triton with the language that the device code is written in."""


def supports(geometry: Geometry, dtype: torch.dtype, page_tokens: int, device: torch.device) -> bool:
    """Whether there is a kernel for such heads, such pages and this device."""
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
    """Whether bulk copies reach all of ``q`` [T, Hq, D] and ``pool`` [P, 2, Hkv, N, D]: 16-byte steps, and pages that
    begin a whole number of rows apart."""
    dim = q.shape[2]
    aligned = all(
        part.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in part.stride()[:-1])
        for part in (q, pool)
    )
    return aligned and pool.stride(3) == dim and all(stride % dim == 0 for stride in pool.stride()[:3])


def attend_wide(
    call: AttentionCall, words: torch.Tensor, scratch: Scratch, *, programs: int, beside: bool = False
) -> None:
    """Attend the wide items of a plan's ``words`` (``attention.work_lists``) for every KV head.

    Blocks have 128 rows and pieces begin at multiples of 128 keys; the longest item should come first, or some programs
    work longer than others. ``programs``: one for each multiprocessor is best, since one fills it. ``beside``: the next
    launch may begin at once, on multiprocessors that the plan does not set aside for wide items. Only for calls that
    ``supports`` and ``addressable`` admit.
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
        pool.stride(2) // dim, call.factor, KV_HEADS=kv_heads, GROUPS=groups, DIM=dim, PAGE=page, BESIDE=beside,
        LSE=call.return_lse, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _descriptors(q: torch.Tensor, pool: torch.Tensor, groups: int) -> tuple[Any, Any]:
    """What bulk copies need to know of memory: queries are rows of the tokens' heads, the pool is one long list of
    rows."""
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
