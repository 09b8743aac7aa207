"""Sums over ranks by kernels and copies that reach the other GPUs' memory in place.

NCCL moves a sum through buffers of its own; here every rank has the same memory mapped. One kernel makes the sum, the
residual sum and the norm behind it, reading every rank's part where it lies (``pensieve.kernels.sum_norm``). Of large
tensors, between two ranks, copy engines hand over what is made of a product while the rest of it is still made: NCCL
beside a product takes the multiprocessors that the product wants, and gains nothing. Among more than two ranks, where
each would read as much as all others have, ranks add up a share each and hand that to all (torch's
``two_shot_all_reduce_``), or NCCL is left to it.

Which way is taken is a question of a tensor's size alone, padding included, so that no token's value depends on what
else is in its step. The limits for two ranks are set by ``bench/results/rank_sums.md``; those for more are guesses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch

from pensieve.model.collective import AddNorm, BufferIndex, ReduceBuffer

log = logging.getLogger(__name__)

FUSED_BYTES: Final = 24 << 20
"""Up to so much, two ranks are fastest reading each other's part."""
FUSED_BYTES_OF_MORE: Final = 5 << 19
"""Likewise of more ranks, of all others together."""
TWO_SHOT_BYTES: Final = 32 << 20
"""Of more than two ranks: beyond, NCCL is as fast."""
EXCHANGE_BYTES: Final = 128 << 20
"""Of two ranks: for parts up to that there is memory to hand them over."""
PIECE_BYTES: Final = 20 << 20
"""What is handed over at a time, about: small enough that little is left to hand over at the end."""
MOST_ROWS: Final = 1 << 15
ALIGNMENT: Final = 16
SLOTS: Final = 2


class SymmetricSums:
    """The common memory of all ranks, and what the ranks have said of it.

    It holds the parts of two-shot sums, those of the other sums for each slot, or what the other rank hands over of
    them, and the counters by which ranks tell each other that a row is there.
    """

    def __init__(self, group: str, rank: int, ranks: int, device: torch.device) -> None:
        """All ranks of ``group`` do this together, and wait for each other once before they use it. Raises RuntimeError
        where GPUs cannot see each other's memory."""
        import torch.distributed._symmetric_memory as symmetric  # not there in builds without CUDA

        self.rank, self.ranks, self.group = rank, ranks, group
        self._slots, self._slot_bytes = (
            (0, EXCHANGE_BYTES) if ranks == 2 else (TWO_SHOT_BYTES, FUSED_BYTES_OF_MORE)
        )
        counters = self._slots + SLOTS * self._slot_bytes
        allocator: Any = symmetric
        self._buffer: torch.Tensor = allocator.empty(
            counters + 4 * MOST_ROWS * ranks, dtype=torch.uint8, device=device
        )
        self._buffer[counters:].zero_()
        self._handle = allocator.rendezvous(self._buffer, group)
        self.arrived = self._everywhere(counters, (MOST_ROWS, ranks), torch.int32)
        self.calls = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
        self.copies = torch.cuda.Stream(device)
        """On which parts are handed over."""

    def reduce_buffer(
        self, shape: tuple[int, int], dtype: torch.dtype, slot: BufferIndex
    ) -> ReduceBuffer | None:
        """See ``Collective.reduce_buffer``."""
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
        """The memory of a slot on each rank."""
        return self._everywhere(self._slots + slot * self._slot_bytes, shape, dtype)

    def _everywhere(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The same place in each rank's memory, by rank."""
        at = start // dtype.itemsize
        return tuple(self._handle.get_buffer(rank, shape, dtype, at) for rank in range(self.ranks))

    def add_norm(
        self, parts: Sequence[torch.Tensor], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        eps: float, out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The end of a block by one kernel, when every rank has come to it."""
        from pensieve.kernels.sum_norm import sum_add_norm  # needs Triton

        return x, sum_add_norm(x, parts, self.arrived, self.calls, self.rank, weight, bias, eps, out=out)


class FusedBuffer(ReduceBuffer):
    """Parts that every rank reads where they lie."""

    pieces = 1

    def __init__(self, sums: SymmetricSums, parts: tuple[torch.Tensor, ...]) -> None:
        self._sums, self._parts = sums, parts
        self.memory = parts[sums.rank]

    def add_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sums.add_norm(self._parts, x, weight, bias, eps)


class TwoShotBuffer(ReduceBuffer):
    """Parts of which each rank adds up one share."""

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
    """Parts of two ranks that are handed to the other one, piece by piece as they are made."""

    def __init__(self, sums: SymmetricSums, inboxes: tuple[torch.Tensor, ...]) -> None:
        """``inboxes``: where each rank finds the other's part."""
        self._sums = sums
        self.memory = torch.empty_like(inboxes[sums.rank])
        self.pieces = max(2, round(self.memory.nbytes / PIECE_BYTES))
        self._outbox, self._inbox = inboxes[1 - sums.rank], inboxes[sums.rank]
        self._passed: list[tuple[int, int, torch.cuda.Event]] = []

    def rows_ready(self, start: int, end: int) -> None:
        copies, passed = self._sums.copies, torch.cuda.Event()
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            self._outbox[start:end].copy_(self.memory[start:end], non_blocking=True)
            passed.record()
        self._passed.append((start, end, passed))

    def add_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (self.memory, self._inbox) if self._sums.rank == 0 else (self._inbox, self.memory)
        normed = torch.empty_like(x)
        # The others first, while the last piece is on its way.
        *_, (_, most, before), (_, rows, last) = self._passed
        for start, end, passed in ((0, most, before), (most, rows, last)):
            # This rank says that its part is there from within the kernel, so the copies must be over when that begins.
            torch.cuda.current_stream().wait_event(passed)
            pieces = [part[start:end] for part in parts]
            self._sums.add_norm(pieces, x[start:end], weight, bias, eps, normed[start:end])
        return x, normed
