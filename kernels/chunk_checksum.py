"""Checksums of pages on the device, taken when a page is swapped out and compared when its chunk returns.

There is no reference implementation: the checksum only has to be the same twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MIX = tl.constexpr(0x5DEECE66D)
"""Keeps the checksum of a zeroed page from being 0, which stands for "none taken"."""
TILE_WORDS = 2048


@triton.jit(do_not_specialize=["first", "layers", "first_layer"])  # type: ignore[untyped-decorator]
def _checksum(  # type: ignore[no-untyped-def]
    pool, pairs, sums, failed, first, layers, first_layer, pool_layer, pool_page, sums_row,
    COMPARE: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, PAGE_STEP: tl.constexpr,
):  # fmt: skip
    """Sum one run. ``pairs`` are (device, host) pages; with COMPARE they are (host, device)."""
    run = first + tl.program_id(0)
    layer = first_layer + run % layers
    pair = pairs + run // layers * 2
    if COMPARE:
        host, page = tl.load(pair), tl.load(pair + 1)
    else:
        page, host = tl.load(pair), tl.load(pair + 1)
    base = pool + layer.to(tl.int64) * pool_layer + page.to(tl.int64) * pool_page
    total = tl.zeros([TILE], tl.int64)
    for start in tl.range(0, WORDS, TILE):
        at = start + tl.arange(0, TILE)
        word = tl.load(base + at, mask=at < WORDS, other=MIX)
        total += (word ^ MIX) * (2 * at + 1).to(tl.int64)  # odd weights detect swapped words
    value = tl.sum(total, 0) | 1
    host = host // PAGE_STEP
    kept = sums + host.to(tl.int64) * sums_row + layer
    if COMPARE:
        before = tl.load(kept)
        if (before != 0) & (before != value):
            tl.store(failed + host, 1)
    else:
        tl.store(kept, value)


class ChunkChecksum:
    """Checksums of one device pool's pages, kept per host page and layer."""

    def __init__(
        self, runs: torch.Tensor, host_pages: int, failed: torch.Tensor, *, page_step: int = 1
    ) -> None:
        """``runs`` [L, P, words] of the device pool; ``failed`` int32 [host pages], on the device or pinned, zeros.
        Host page n is number ``n // page_step`` of them."""
        self.sums = torch.zeros((host_pages, len(runs)), dtype=torch.int64, device=runs.device)
        self.failed = failed
        self._page_step = page_step
        self._runs = runs

    def keep(self, pairs: torch.Tensor, first: int, count: int) -> None:
        """Store the checksums of runs ``[first, first + count)`` of (device page, host page) pairs, int32 [n, 2]."""
        self._launch(pairs, first, count, range(len(self._runs)), compare=False)

    def compare(self, pairs: torch.Tensor, layers: range) -> None:
        """Set ``failed`` for the host page of every (host page, device page) pair that differs from its checksum, if
        there is one."""
        self._launch(pairs, 0, len(pairs) * len(layers), layers, compare=True)

    def _launch(self, pairs: torch.Tensor, first: int, count: int, layers: range, *, compare: bool) -> None:
        words = self._runs.shape[2]
        _checksum[(count,)](
            self._runs, pairs, self.sums, self.failed, first, len(layers), layers.start,
            self._runs.stride(0), self._runs.stride(1), self.sums.stride(0),
            COMPARE=compare, WORDS=words, TILE=min(TILE_WORDS, triton.next_power_of_2(words)),
            PAGE_STEP=self._page_step, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
