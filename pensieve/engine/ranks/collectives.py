"""Collective operations of the ranks of one model: gloo on a CPU, NCCL and ``symmetric`` memory on GPUs.

The ranks meet through an inherited memory file, so no port has to be free and nothing is left behind. The
libraries open further ports, picked by the system, on the loopback interface.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from pensieve.config import EngineOptions
from pensieve.engine.ranks.symmetric import SymmetricSums, TwoShotBuffer
from pensieve.model.collective import BufferIndex, Collective, ReduceBuffer

log = logging.getLogger(__name__)

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
