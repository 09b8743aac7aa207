"""Collective operations of the ranks of one model: gloo on a CPU, NCCL and symmetric memory on GPUs.

The ranks meet through an inherited memory file, so no port has to be free and nothing is left behind. The
libraries open further ports, picked by the system, on the loopback interface.

With symmetric memory, kernels and copies access the other GPUs' memory directly.
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
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from pensieve.config import EngineOptions
from pensieve.model.collective import AddNorm, BufferIndex, Collective, ReduceBuffer

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


dist: Any = torch.distributed  # its types omit half of what is used here

SETTINGS: Final = {
    "GLOO_SOCKET_IFNAME": "lo",
    "GLOO_DEVICE_TRANSPORT": "TCP",
    "NCCL_SOCKET_IFNAME": "lo",
    # NVLink multicast needs a fabric manager, which many hosts and containers lack; the start fails without
    # one.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
TIMEOUT: Final = timedelta(minutes=30)
"""For a rank that still loads its weights. The front end notices an engine that hangs while serving."""


class RankLost(RuntimeError):
    """Another rank exited during a collective operation; its own message gives the cause."""


@contextmanager
def _raise_rank_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(str(error)) from error


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``parts`` [ranks, ...] in rank order, computed in float32 and rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


class GlooCollective(Collective):
    """``pensieve.model.collective.Collective`` on a CPU: each call returns when it is done. Raises RankLost."""

    def __init__(self, store: Any, rank: int, ranks: int, *, ordered: bool = False) -> None:
        """Wait for all ranks, which pass the same ``store`` (a ``torch.distributed.Store``). ``ordered``: sums are
        computed in rank order; gloo's own order depends on the size of the part."""
        self.rank, self.ranks, self._ordered = rank, ranks, ordered
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("ranks", store), rank, ranks, TIMEOUT)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        if self._ordered:
            return sum_in_order(self.all_gather(part))
        if part.numel():
            with _raise_rank_lost():
                self._group.allreduce([part]).wait()
        return part

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        whole = part.new_empty((self.ranks, *part.shape))
        if part.numel():
            with _raise_rank_lost():
                self._group.allgather([list(whole)], [part]).wait()
        return whole

    def broadcast(self, values: torch.Tensor) -> None:
        with _raise_rank_lost():
            self._group.broadcast([values]).wait()

    def all_reduce_min(self, numbers: list[int]) -> list[int]:
        found: list[int] = self.all_gather(torch.tensor(numbers)).amin(0).tolist()
        return found

    def close(self) -> None:
        """Leave the group; the others may have left already."""


class NcclCollective(Collective):
    """``pensieve.model.collective.Collective`` on GPUs. Each process has already made its own GPU the current one."""

    def __init__(self, store: Any, rank: int, ranks: int, *, symmetric: bool, ordered: bool = False) -> None:
        """Wait for all ranks, which pass the same ``store``. ``symmetric``: use ``SymmetricSums`` where available.
        ``ordered``: only in rank order, as its fused kernel does; NCCL's own order depends on the size."""
        self.rank, self.ranks, self._ordered = rank, ranks, ordered
        self._symmetric: SymmetricSums | None = None
        self._device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT, device_id=self._device
        )
        if symmetric:
            self._symmetric = self._symmetric_sums()

    def _symmetric_sums(self) -> SymmetricSums | None:
        """Return the symmetric sums, or None on all ranks if one cannot have them."""
        sums = None
        try:
            sums = SymmetricSums(dist.group.WORLD.group_name, self.rank, self.ranks, self._device)
        except (ImportError, RuntimeError) as error:
            log.warning("all-reduce uses NCCL: symmetric memory is not available: %s", error)
        return sums if self.all_reduce_min([sums is not None]) == [1] else None

    def reduce_buffer(
        self, shape: tuple[int, int], dtype: torch.dtype, slot: BufferIndex
    ) -> ReduceBuffer | None:
        if self._symmetric is None:
            return None
        room = self._symmetric.reduce_buffer(shape, dtype, slot)
        return None if self._ordered and isinstance(room, TwoShotBuffer) else room

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        if self._ordered:
            return sum_in_order(self.all_gather(part))
        dist.all_reduce(part)
        return part

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        whole = part.new_empty((self.ranks, *part.shape))
        dist.all_gather_into_tensor(whole, part)
        return whole

    def broadcast(self, values: torch.Tensor) -> None:
        dist.broadcast(values, 0)

    def all_reduce_min(self, numbers: list[int]) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(values, dist.ReduceOp.MIN)
        found: list[int] = values.tolist()
        return found

    def close(self) -> None:
        dist.destroy_process_group()


RankCollective = GlooCollective | NcclCollective


def join(device: str, rank: int, fd: int, options: EngineOptions) -> RankCollective:
    """Join the other ranks through the empty memory file ``fd`` that all ranks share. On GPUs, rank r takes
    GPU r. Raises ValueError when gloo cannot connect the ranks."""
    ranks, ordered = options.tensor_parallel, bool(options.invariant)
    for name, value in SETTINGS.items():
        os.environ[name] = value
    store = dist.FileStore(f"/proc/self/fd/{fd}", ranks)
    if device == "cuda":
        torch.cuda.set_device(rank)
        symmetric = options.all_reduce == "auto"
        return NcclCollective(store, rank, ranks, symmetric=symmetric, ordered=ordered)
    try:
        return GlooCollective(store, rank, ranks, ordered=ordered)
    except RuntimeError as error:
        raise ValueError(f"the ranks cannot meet on the loopback interface, is it up? {error}") from error
