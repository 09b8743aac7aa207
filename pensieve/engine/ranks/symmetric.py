"""All-reduce by kernels and copies that access the other GPUs' memory directly.

NCCL moves data through buffers of its own; here every rank maps the same memory. One kernel makes the
all-reduce, the residual sum and the following norm, and reads every rank's part in place
(``pensieve.kernels.sum_norm``). Large tensors of two ranks are exchanged by copy engines, piece by piece
while the rest of a product is computed: NCCL beside a product takes the multiprocessors that the product
needs, and gains nothing. With more than two ranks, where each would read as much as all others have, each
rank reduces one share and distributes it (torch's ``two_shot_all_reduce_``), or NCCL does the work.

The choice depends only on a tensor's size, padding included, so that no token's value depends on the rest of
its step. The limits for two ranks come from ``bench/results/rank_sums.md``; those for more ranks are guesses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch

from pensieve.model.collective import AddNorm, BufferIndex, ReduceBuffer

log = logging.getLogger(__name__)

FUSED_BYTES: Final = 24 << 20
"""Up to this size, two ranks are fastest reading each other's part."""
FUSED_BYTES_OF_MORE: Final = 5 << 19
"""The same for more ranks: size of all other ranks' parts together."""
TWO_SHOT_BYTES: Final = 32 << 20
"""More than two ranks: for larger parts NCCL is as fast."""
EXCHANGE_BYTES: Final = 128 << 20
"""Two ranks: largest part with memory for the exchange."""
PIECE_BYTES: Final = 20 << 20
"""Approximate size of an exchanged piece: small enough that little remains to be copied at the end."""
MOST_ROWS: Final = 1 << 15
ALIGNMENT: Final = 16
BUFFERS: Final = 2


class SymmetricSums:
    """The shared memory of all ranks. It holds the parts of two-shot sums, the parts (or received parts) of
    the other sums for each buffer index, and the counters by which ranks signal that a row is ready."""

    def __init__(self, group: str, rank: int, ranks: int, device: torch.device) -> None:
        """Allocate on all ranks of ``group``, which wait for each other once. Raises RuntimeError where GPUs
        cannot access each other's memory."""
        import torch.distributed._symmetric_memory as symmetric  # absent in builds without CUDA

        self.rank, self.ranks, self.group = rank, ranks, group
        self._buffer_start, self._buffer_bytes = (
            (0, EXCHANGE_BYTES) if ranks == 2 else (TWO_SHOT_BYTES, FUSED_BYTES_OF_MORE)
        )
        counters = self._buffer_start + BUFFERS * self._buffer_bytes
        allocator: Any = symmetric
        self._buffer: torch.Tensor = allocator.empty(
            counters + 4 * MOST_ROWS * ranks, dtype=torch.uint8, device=device
        )
        self._buffer[counters:].zero_()
        self._handle = allocator.rendezvous(self._buffer, group)
        self.arrived = self._on_each_rank(counters, (MOST_ROWS, ranks), torch.int32)
        self.calls = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
        self.copies = torch.cuda.Stream(device)

    def reduce_buffer(
        self, shape: tuple[int, int], dtype: torch.dtype, slot: BufferIndex
    ) -> ReduceBuffer | None:
        size = shape[0] * shape[1] * dtype.itemsize
        if size == 0 or shape[0] > MOST_ROWS:
            return None
        if size <= (FUSED_BYTES if self.ranks == 2 else FUSED_BYTES_OF_MORE // (self.ranks - 1)):
            return FusedBuffer(self, self.slot(shape, dtype, slot))
        if self.ranks == 2:
            return ExchangeBuffer(self, self.slot(shape, dtype, slot)) if size <= EXCHANGE_BYTES else None
        if size > TWO_SHOT_BYTES or size % (ALIGNMENT * self.ranks):
            return None
        return TwoShotBuffer(self, self._buffer[:size].view(dtype).view(shape))

    def slot(self, shape: tuple[int, int], dtype: torch.dtype, slot: BufferIndex) -> tuple[torch.Tensor, ...]:
        return self._on_each_rank(self._buffer_start + slot * self._buffer_bytes, shape, dtype)

    def _on_each_rank(
        self, start: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Return the same range of each rank's memory, by rank."""
        at = start // dtype.itemsize
        return tuple(self._handle.get_buffer(rank, shape, dtype, at) for rank in range(self.ranks))

    def add_norm(
        self, parts: Sequence[torch.Tensor], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        eps: float, out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Run the fused kernel, which waits until every rank has reached it."""
        from pensieve.kernels.sum_norm import sum_add_norm  # needs Triton

        return x, sum_add_norm(x, parts, self.arrived, self.calls, self.rank, weight, bias, eps, out=out)


class FusedBuffer(ReduceBuffer):
    """Parts that every rank reads in place."""

    pieces = 1

    def __init__(self, sums: SymmetricSums, parts: tuple[torch.Tensor, ...]) -> None:
        self._sums, self._parts = sums, parts
        self.memory = parts[sums.rank]

    def add_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sums.add_norm(self._parts, x, weight, bias, eps)


class TwoShotBuffer(ReduceBuffer):
    """Parts of which each rank reduces one share."""

    pieces = 1

    def __init__(self, sums: SymmetricSums, memory: torch.Tensor) -> None:
        self._sums, self.memory = sums, memory

    def add_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        operations: Any = torch.ops.symm_mem
        operations.two_shot_all_reduce_(self.memory.view(-1), "sum", self._sums.group)
        return add_norm(x, self.memory, weight, bias, eps)


class ExchangeBuffer(ReduceBuffer):
    """Parts of two ranks, copied to the other one piece by piece as they are computed."""

    def __init__(self, sums: SymmetricSums, inboxes: tuple[torch.Tensor, ...]) -> None:
        """``inboxes``: memory of each rank that receives the other's part."""
        self._sums = sums
        self.memory = torch.empty_like(inboxes[sums.rank])
        self.pieces = max(2, round(self.memory.nbytes / PIECE_BYTES))
        self._outbox, self._inbox = inboxes[1 - sums.rank], inboxes[sums.rank]
        self._copied: list[tuple[int, int, torch.cuda.Event]] = []

    def rows_ready(self, start: int, end: int) -> None:
        copies, copied = self._sums.copies, torch.cuda.Event()
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            self._outbox[start:end].copy_(self.memory[start:end], non_blocking=True)
            copied.record()
        self._copied.append((start, end, copied))

    def add_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (self.memory, self._inbox) if self._sums.rank == 0 else (self._inbox, self.memory)
        normed = torch.empty_like(x)
        # The other pieces first, while the last one is being copied.
        *_, (_, most, before), (_, rows, last) = self._copied
        for start, end, copied in ((0, most, before), (most, rows, last)):
            # The kernel itself signals that this rank's part is ready, so the copies must be done when it
            # begins.
            torch.cuda.current_stream().wait_event(copied)
            pieces = [part[start:end] for part in parts]
            self._sums.add_norm(pieces, x[start:end], weight, bias, eps, normed[start:end])
        return x, normed
