"""Sums of small tensors by kernels that read and write the other GPUs' memory in place.

NCCL moves such a sum through buffers of its own; here every rank has the same buffer mapped, products are written into
it, and one kernel has each rank add up its part and hand that to all (torch's ``two_shot_all_reduce_``). On two H200s
with NVLink, 64 rows of 5120 in bfloat16 take 8.1 µs rather than 11.3, 2048 rows 70 rather than 91.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

log = logging.getLogger(__name__)

LARGEST_BYTES: Final = 32 << 20
"""Beyond, NCCL is as fast. What is used depends on the size of a tensor alone, padding included, so that no token's
value depends on what else is in its step."""
ALIGNMENT: Final = 16


class SymmetricSums:
    """The common buffer of all ranks."""

    def __init__(self, group: str, ranks: int, device: torch.device) -> None:
        """All ranks of ``group`` do this together. Raises RuntimeError where GPUs cannot see each other's memory."""
        import torch.distributed._symmetric_memory as symmetric  # not there in builds without CUDA

        self._group, self._unit = group, ALIGNMENT * ranks
        allocator: Any = symmetric
        self._buffer: torch.Tensor = allocator.empty(LARGEST_BYTES, dtype=torch.uint8, device=device)
        allocator.rendezvous(self._buffer, group)

    def room(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor | None:
        """The buffer, as memory of that shape; None for what is not summed here."""
        count = shape[0] * shape[1] * dtype.itemsize
        if count == 0 or count > LARGEST_BYTES or count % self._unit:
            return None
        return self._buffer[:count].view(dtype).view(shape)

    def holds(self, part: torch.Tensor) -> bool:
        """Whether ``part`` was written into ``room``."""
        return part.data_ptr() == self._buffer.data_ptr()

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; to be used before the next product is written."""
        operations: Any = torch.ops.symm_mem
        operations.two_shot_all_reduce_(part.view(-1), "sum", self._group)
        return part
