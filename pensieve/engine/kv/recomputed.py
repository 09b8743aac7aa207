"""Checksums of computed chunks: a chunk that is computed again must have the bytes that it had before.

Only ``--invariant`` promises this, so only there the engine asks for it (``Plan.checks``). Each rank remembers the
checksums of its own part of a chunk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import torch

from pensieve.engine.kv.pools import GroupPages
from pensieve.engine.plan import PageCheck

MOST: Final = 1 << 18
"""Chunks whose checksums are remembered, about 30 MiB; the ones that were checked last."""


class RestoreMismatch(RuntimeError):
    """A chunk came back from the host, or from its recomputation, changed. The KV of its session is wrong."""


class ComputedChunks:
    """Checksums of the first group's pages by the address of their chunk."""

    def __init__(self, pages: GroupPages) -> None:
        self._pages = pages
        self._known: OrderedDict[int, int] = OrderedDict()
        self.compared = 0
        """Chunks that were computed again."""

    def sums(self, checks: Sequence[PageCheck]) -> torch.Tensor:
        """Queue the checksums of the pages of ``checks`` on the current stream, and their copy to the host. Returns
        int64 [n], which is complete when the stream has got there."""
        device = self._pages.device
        if device.is_cuda:
            return self._sums_on_gpu([check.page for check in checks])
        at = torch.tensor([check.page for check in checks])
        total = torch.zeros(len(checks), dtype=torch.int64)
        for layer in device:
            words = layer.view(len(layer), -1).view(torch.int32).index_select(0, at)
            if used := self._pages.used_bytes:  # padding may hold anything
                words.view(torch.uint8)[:, used:] = 0
            # Odd weights: each changed bit changes the sum, and so do words that change places.
            total = 3 * total + (words * torch.arange(1, 2 * words.shape[1], 2)).sum(1)
        return total

    def _sums_on_gpu(self, pages: Sequence[int]) -> torch.Tensor:
        from pensieve.kernels.chunk_checksum import ChunkChecksum  # needs Triton
        from pensieve.kernels.chunk_copy import runs_of

        runs = runs_of(self._pages.device)
        if (
            used := self._pages.used_bytes
        ):  # padding may hold anything; a last part of a word is left out with it
            runs = runs[..., : used // runs.element_size()]
        pairs = torch.tensor(
            list(zip(pages, range(len(pages)), strict=True)), dtype=torch.int32, pin_memory=True
        )
        unused = torch.zeros(1, dtype=torch.int32, device=runs.device)
        checksum = ChunkChecksum(runs, len(pages), unused)
        checksum.keep(pairs.to(runs.device, non_blocking=True), 0, len(pages) * len(runs))
        weights = torch.arange(1, 2 * len(runs), 2, device=runs.device)
        found = torch.empty(len(pages), dtype=torch.int64, pin_memory=True)
        return found.copy_((checksum.sums * weights).sum(1), non_blocking=True)

    def compare(self, checks: Sequence[PageCheck], sums: torch.Tensor) -> None:
        """Remember the checksums of new chunks. Raises RestoreMismatch if another one differs from what it was."""
        changed = []
        for check, found in zip(checks, sums.tolist(), strict=True):
            known = self._known.pop(check.address, None)
            self.compared += known is not None
            if known not in (None, found):
                changed.append(check.page)
            self._known[check.address] = found
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        if changed:
            raise RestoreMismatch(
                f"device chunks {changed} were computed again and differ; report this as a bug"
            )
