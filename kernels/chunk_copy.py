"""Copies pages between KV pools, many in one launch: gather and scatter, pinned host memory included.

A page of one layer is a *run*: contiguous in both pools, and the unit of a copy. A GPU accesses pinned host
memory in place, at link speed as long as about 100 KB are in flight. So a handful of programs is enough at
any run size and leaves the multiprocessors to the model. More programs would only queue at the link, and
other memory traffic behind them: stores of 12 programs to the host slow a step down by 80 %. Matches
``pensieve.kernels.reference.chunk_copy``, for several layers at once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

WORD = torch.int64
"""Runs are copied as words of this type, whatever the pool's dtype."""
TILE_BYTES = 16384
"""Most bytes in flight per program."""
WARPS = 4
IN_PROGRAMS, OUT_PROGRAMS = 8, 4
"""Programs that fill a PCIe 5 link from 16 KiB a run on, reading from the host and writing to it."""


@triton.jit(do_not_specialize=["first", "count", "layers", "first_layer"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    dst, src, pairs, first, count, layers, first_layer, dst_layer, dst_page, src_layer, src_page,
    WORDS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Copy runs: run ``first + i`` is page pair ``run // layers`` in layer ``first_layer + run % layers``."""
    offsets = tl.arange(0, TILE)
    total = count * TILES
    work = tl.program_id(0)
    pair = pairs + (first + work // TILES) // layers * 2
    source = tl.load(pair, mask=work < total, other=0)
    target = tl.load(pair + 1, mask=work < total, other=0)
    for work in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1):
        layer = (first_layer + (first + work // TILES) % layers).to(tl.int64)
        src_at = src + layer * src_layer + source.to(tl.int64) * src_page
        dst_at = dst + layer * dst_layer + target.to(tl.int64) * dst_page
        # The page numbers of the next tile are behind the link too: fetch them beside this one's words.
        coming = work + tl.num_programs(0)
        pair = pairs + (first + coming // TILES) // layers * 2
        source = tl.load(pair, mask=coming < total, other=0)
        target = tl.load(pair + 1, mask=coming < total, other=0)
        at = work % TILES * TILE + offsets
        if WORDS % TILE == 0:
            tl.store(dst_at + at, tl.load(src_at + at))
        else:
            tl.store(dst_at + at, tl.load(src_at + at, mask=at < WORDS), mask=at < WORDS)


def runs_of(pool: torch.Tensor, *, chunk_first: bool = False) -> torch.Tensor:
    """View a pool [L, P, ...] (``chunk_first``: [P, L, ...]) as ``WORD`` runs [L, P, words], without a copy.
    Raises ValueError unless a run is a multiple of 16 bytes: copies use 16-byte accesses."""
    values = math.prod(pool.shape[2:])  # not -1: a tier may be empty
    run_bytes = values * pool.element_size()
    if run_bytes % 16:
        raise ValueError(f"a page of one layer is {run_bytes} bytes: copies need a multiple of 16")
    flat = pool.view(*pool.shape[:2], values).view(WORD)
    return flat.transpose(0, 1) if chunk_first else flat


def check_runs(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Raises ValueError unless ``src`` and ``dst`` are runs of one size that a kernel can copy."""
    for name, runs in (("dst", dst), ("src", src)):
        if runs.dim() != 3 or runs.dtype != WORD or (runs.stride(2) != 1 and runs.shape[2] > 1):
            raise ValueError(f"{name} is {runs.dtype} {tuple(runs.shape)}, not {WORD} runs [L, P, words]")
        if any(stride % 2 for stride in runs.stride()[:2]) or runs.data_ptr() % 16:
            raise ValueError(f"{name}: runs must begin at multiples of 16 bytes")
    if dst.shape[0] != src.shape[0] or dst.shape[2] != src.shape[2]:
        raise ValueError(f"runs of {tuple(dst.shape)} and {tuple(src.shape)} do not fit each other")


class ChunkCopy:
    """Copies from one pool to another. Arguments are checked once, when it is made."""

    def __init__(
        self,
        dst: torch.Tensor,
        src: torch.Tensor,
        *,
        programs: int = IN_PROGRAMS,
        tile_bytes: int = TILE_BYTES,
    ) -> None:
        """``dst`` [L, Q, words] and ``src`` [L, P, words] as returned by ``runs_of``, each on the device or pinned."""
        check_runs(dst, src)
        words = dst.shape[2]
        # The largest power of two that divides a run, unless it is so small that masks are cheaper.
        tile = min(words & -words, tile_bytes // 8)
        if tile < min(words, tile_bytes // 8) // 2:
            tile = min(triton.next_power_of_2(words), tile_bytes // 8)
        self.layers = dst.shape[0]
        self._dst, self._src, self._grid = dst, src, (programs,)
        self._strides = (dst.stride(0), dst.stride(1), src.stride(0), src.stride(1))
        self._shape = {"WORDS": words, "TILE": tile, "TILES": -(-words // tile)}

    def __call__(
        self, pairs: torch.Tensor, *, first: int = 0, count: int | None = None, layers: range | None = None
    ) -> None:
        """Copy page ``pairs[i, 0]`` of ``src`` to page ``pairs[i, 1]`` of ``dst`` in ``layers`` (default:
        all).

        ``pairs``: int32 [n, 2], contiguous, on the device or pinned; it must not change until the copy is
        done. With k layers there are ``n * k`` runs; run ``r`` belongs to pair ``r // k``. Only ``count``
        runs from ``first`` on are copied. No target may repeat, and no target may be a source. Queued on the
        current stream.
        """
        layers = range(self.layers) if layers is None else layers
        runs = len(pairs) * len(layers)
        count = runs - first if count is None else count
        if pairs.dtype != torch.int32 or pairs.shape[1] != 2 or not pairs.is_contiguous():
            raise ValueError(f"pairs are {pairs.dtype} {tuple(pairs.shape)}, not contiguous int32 [n, 2]")
        if layers.step != 1 or layers.start < 0 or layers.stop > self.layers:
            raise ValueError(f"{layers} are not layers of {self.layers}")
        if first < 0 or count < 0 or first + count > runs:
            raise ValueError(f"runs {first} to {first + count} are not among {runs}")
        if count:
            self._launch(pairs, first, count, layers)

    def warm_up(self, pairs: torch.Tensor) -> None:
        """Compile the kernel without copying anything. ``pairs``: any valid argument of a call."""
        self._launch(pairs, 0, 0, range(self.layers))

    def _launch(self, pairs: torch.Tensor, first: int, count: int, layers: range) -> None:
        _copy[self._grid](
            self._dst, self._src, pairs, first, count, len(layers), layers.start, *self._strides,
            **self._shape, num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def chunk_copy(
    dst: torch.Tensor, src: torch.Tensor, pairs: torch.Tensor, *, layers: range | None = None
) -> None:
    """Copy page ``pairs[i, 0]`` of ``src`` to page ``pairs[i, 1]`` of ``dst``, in place; see ``ChunkCopy``."""
    ChunkCopy(dst, src)(pairs, layers=layers)
