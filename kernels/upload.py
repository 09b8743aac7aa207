"""Small copies from pinned host memory by a kernel, so that they do not queue behind large ones.

The copy engine of a direction processes copies in the order of submission, on whatever streams. A step's
metadata queued behind a swap-in of 400 MB would arrive 8 ms late, and delay the step as much. Measured on an
H200, that undid the whole overlap of swap-in and model (a turn of 256 tokens on 2048 swapped in: 19.5 ms, not
12).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Words per program: few, so that enough programs run side by side to hide the link's latency."""


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _upload(dst, src, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at, mask=at < count), mask=at < count)


def upload(dst: torch.Tensor, src: torch.Tensor, count: int) -> None:
    """Queue the copy of the first ``count`` words of ``src`` int32, pinned, to ``dst`` int32 on a GPU.
    ``src`` must not change until the copy is done. Raises ValueError when the tensors do not fit."""
    if dst.dtype != torch.int32 or src.dtype != torch.int32 or dst.dim() != 1 or src.dim() != 1:
        raise ValueError(f"{dst.dtype} {tuple(dst.shape)} and {src.dtype} {tuple(src.shape)}: int32 [n] both")
    if not 0 <= count <= min(len(dst), len(src)):
        raise ValueError(f"{count} words between tensors of {len(dst)} and {len(src)}")
    if not (dst.is_contiguous() and src.is_contiguous()):
        raise ValueError("both tensors must be contiguous")
    if count:
        _upload[(triton.cdiv(count, BLOCK),)](dst, src, count, BLOCK=BLOCK)
