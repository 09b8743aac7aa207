"""Sums and exchanges among the ranks of one model: by gloo on a CPU, by NCCL and ``symmetric`` memory on GPUs.

The ranks find each other through memory that they inherit, so that no port has to be free and nothing is left behind.
What the libraries open besides is on the loopback interface, at ports that the system picks.
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

from pensieve.engine.ranks.symmetric import SymmetricSums
from pensieve.model.collective import BufferIndex, Collective, ReduceBuffer

log = logging.getLogger(__name__)

dist: Any = torch.distributed  # its types leave out the half of what is used here

SETTINGS: Final = {
    "GLOO_SOCKET_IFNAME": "lo",
    "GLOO_DEVICE_TRANSPORT": "TCP",
    "NCCL_SOCKET_IFNAME": "lo",
    # NVLink multicast needs a fabric manager that many hosts and containers do not have; a start fails without.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
PATIENCE: Final = timedelta(minutes=30)
"""For a rank that still loads its weights. One that hangs while serving is noticed by who waits for the engine."""


class RankLost(RuntimeError):
    """Another rank has ended in the middle of what all do together; why, it has said itself."""


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(str(error)) from error


class GlooCollective(Collective):
    """``pensieve.model.collective.Collective`` on a CPU: each call returns when it is done. Raises RankLost."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        """Waits for all ranks; they have the same ``store`` (a ``torch.distributed.Store``)."""
        self.rank, self.ranks = rank, ranks
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("ranks", store), rank, ranks, PATIENCE)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        if part.numel():
            with _together():
                self._group.allreduce([part]).wait()
        return part

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        whole = part.new_empty((self.ranks, *part.shape))
        if part.numel():
            with _together():
                self._group.allgather([list(whole)], [part]).wait()
        return whole

    def broadcast(self, values: torch.Tensor) -> None:
        with _together():
            self._group.broadcast([values]).wait()

    def all_reduce_min(self, numbers: list[int]) -> list[int]:
        found: list[int] = self.all_gather(torch.tensor(numbers)).amin(0).tolist()
        return found

    def close(self) -> None:
        """Leave; the others may have left already."""


class NcclCollective(Collective):
    """``pensieve.model.collective.Collective`` on GPUs, rank by rank; each process has made its own the current one."""

    def __init__(self, store: Any, rank: int, ranks: int, *, symmetric: bool) -> None:
        """Waits for all ranks; they have the same ``store`` (a ``torch.distributed.Store``). ``symmetric``: sums
        are left to ``SymmetricSums`` if that can be."""
        self.rank, self.ranks = rank, ranks
        self._symmetric: SymmetricSums | None = None
        self._device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=ranks, timeout=PATIENCE, device_id=self._device
        )
        if symmetric:
            self._symmetric = self._symmetric_sums()

    def _symmetric_sums(self) -> SymmetricSums | None:
        """None, on all ranks, where one cannot have them."""
        sums = None
        try:
            sums = SymmetricSums(dist.group.WORLD.group_name, self.rank, self.ranks, self._device)
        except (ImportError, RuntimeError) as error:
            log.warning("sums over ranks go by NCCL, since there is no symmetric memory: %s", error)
        return sums if self.all_reduce_min([sums is not None]) == [1] else None

    def reduce_buffer(
        self, shape: tuple[int, int], dtype: torch.dtype, slot: BufferIndex
    ) -> ReduceBuffer | None:
        return self._symmetric.reduce_buffer(shape, dtype, slot) if self._symmetric is not None else None

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
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
        """Leave, when all work is done."""
        dist.destroy_process_group()


RankCollective = GlooCollective | NcclCollective


def join(device: str, rank: int, ranks: int, fd: int, *, symmetric: bool) -> RankCollective:
    """Meet the other ranks, who have the same empty memory file ``fd``. On GPUs, rank r takes the r-th, and
    ``symmetric`` has the fastest way chosen for each size of sum. Raises ValueError when gloo finds no way."""
    for name, value in SETTINGS.items():
        os.environ[name] = value
    store = dist.FileStore(f"/proc/self/fd/{fd}", ranks)
    if device == "cuda":
        torch.cuda.set_device(rank)
        return NcclCollective(store, rank, ranks, symmetric=symmetric)
    try:
        return GlooCollective(store, rank, ranks)
    except RuntimeError as error:
        raise ValueError(f"the ranks cannot meet on the loopback interface, is it up? {error}") from error
