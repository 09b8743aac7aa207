"""The ranks of a divided model as threads of one process: their collectives, and workers around a checkpoint.

Everything but processes and the transport between them is what serves: shards, plans as bytes through the ring,
followers, the leading worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.engine.plan import StepWorker
from pensieve.engine.ranks.codec import encode
from pensieve.engine.ranks.collectives import SETTINGS, GlooCollective
from pensieve.engine.ranks.leader import LeadingWorker, follow
from pensieve.engine.ranks.ring import RingReader, RingWriter, SharedRing
from pensieve.engine.worker.sizing import DTYPES
from pensieve.engine.worker.torch_worker import TorchWorker
from pensieve.model.arch import Arch
from pensieve.model.collective import AddNorm, BufferIndex, Collective, ReduceBuffer
from pensieve.model.folder import load_arch
from pensieve.model.ops import INVARIANT_OPS, TORCH_OPS
from pensieve.model.shard import Shard
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights
from support.engine.checkpoints import Family
from support.engine.exactness import Bench, checkpoint_of
from support.model import recurrent_models

PATIENCE_S = 60.0


class Exchange:
    """Where the threads of one group hand each other tensors."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks)
        self._offered: list[torch.Tensor] = [torch.empty(0)] * ranks

    def swap(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor. Real ranks would wait for ever, or add up what does not belong together."""
        self._offered[rank] = tensor
        try:
            self._barrier.wait(PATIENCE_S)
            found = list(self._offered)
            self._barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError as error:
            # Another rank has found so first, or has failed at what it was told to do, and left.
            raise AssertionError("a rank is gone") from error
        assert len({one.shape for one in found}) == 1, "the ranks are not in the same place"
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadCollective(Collective):
    """``pensieve.model.collective.Collective`` of one thread."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self.rank, self.ranks = exchange, rank, exchange.ranks
        self._rooms = torch.empty(2, 1 << 19, dtype=torch.uint8)

    def reduce_buffer(
        self, shape: tuple[int, int], dtype: torch.dtype, slot: BufferIndex
    ) -> ReduceBuffer | None:
        """Of even numbers of rows only: as on GPUs, some sums have it and some do not."""
        if shape[0] % 2 or shape[0] == 0:
            return None
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        return ThreadRoom(self, self._rooms[slot, :num_bytes].view(dtype).view(shape))

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        total = torch.stack([one.clone() for one in self._exchange.swap(self.rank, part.clone())]).sum(0)
        return part.copy_(total)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange.swap(self.rank, part))

    def broadcast(self, values: torch.Tensor) -> None:
        values.copy_(self._exchange.swap(self.rank, values.clone())[0])

    def all_reduce_min(self, numbers: list[int]) -> list[int]:
        found: list[int] = self.all_gather(torch.tensor(numbers)).amin(0).tolist()
        return found


class ThreadRoom(ReduceBuffer):
    """Memory that holds nothing but what was made in it."""

    pieces = 3

    def __init__(self, together: ThreadCollective, memory: torch.Tensor) -> None:
        self._together, self.memory = together, memory.fill_(torch.nan)
        self._passed = torch.full_like(memory, torch.nan)

    def rows_ready(self, start: int, end: int) -> None:
        self._passed[start:end] = self.memory[start:end]

    def add_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_norm(x, self._together.all_reduce(self._passed), weight, bias, eps)


class RankThreads:
    """Followers of one leading worker, each a thread (``leader.FollowerRanks``)."""

    def __init__(self, exchange: Exchange, ring: SharedRing, workers: list[StepWorker]) -> None:
        self.errors: list[Exception] = []
        self._exchange = exchange
        self._threads = [
            threading.Thread(
                target=self._run, args=(RingReader(ring, number, spin_s=0.0), worker), daemon=True
            )
            for number, worker in enumerate(workers)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, reader: RingReader, worker: StepWorker) -> None:
        try:
            follow(reader, worker)
        except Exception as error:
            self.errors.append(error)
            self._exchange.abort()

    def on_failure(self) -> None:
        self._exchange.abort()

    def kill(self) -> None:
        self._exchange.abort()

    def before_stop(self) -> None: ...

    def wait_stopped(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


class RankBench(Bench):
    """As ``Bench``, with workers whose model is divided over ``ranks`` threads."""

    def __init__(
        self,
        family: Family | recurrent_models.Family,
        folder: Path,
        ranks: int,
        *,
        dtype: str = "float32",
        invariant: bool = False,
        **overrides: Any,
    ) -> None:
        """``invariant``: as with ``--invariant``; the threads then meet through gloo, as processes do."""
        super().__init__(family, folder, dtype=dtype, invariant=invariant, **overrides)
        self.ranks = ranks
        self.ordered = True
        """Whether sums in invariant steps are computed in rank order."""
        self.mutants: dict[int, Callable[[StepWorker], StepWorker]] = {}
        """What is wrong with a rank's worker, by rank."""
        checkpoint = checkpoint_of(family, folder, **overrides)
        whole = load_arch(checkpoint)
        shards = [Shard(rank, ranks) for rank in range(ranks)]
        self._archs = [shard.arch(whole) for shard in shards]
        self._weights = [
            load_weights(checkpoint, whole, dtype=DTYPES[dtype], shard=shard) for shard in shards
        ]
        self._open: tuple[RingWriter, RankThreads] | None = None

    @property
    def cached_arch(self) -> Arch:
        return self._archs[0]

    def worker(
        self, cache: CacheConfig, scheduler: SchedulerConfig, *, cuda_graphs: bool | None = None
    ) -> StepWorker:
        self.close()
        info = self.info(cache, scheduler, self.ranks)
        exchange, ring = Exchange(self.ranks), SharedRing.create(self.ranks - 1)
        ops = INVARIANT_OPS if self.invariant else TORCH_OPS
        models = [
            Transformer(arch, weights, ops, collective)
            for arch, weights, collective in zip(
                self._archs, self._weights, self._collectives(exchange), strict=True
            )
        ]
        workers = [TorchWorker(model, info) for model in models]
        broken = [self.mutants.get(rank, lambda same: same)(worker) for rank, worker in enumerate(workers)]
        writer = RingWriter(ring, spin_s=0.0)
        others = RankThreads(exchange, ring, broken[1:])
        self._open = writer, others
        return LeadingWorker(workers[0], writer, others)

    def _collectives(self, exchange: Exchange) -> Sequence[Collective]:
        if not self.invariant:
            return [ThreadCollective(exchange, rank) for rank in range(self.ranks)]
        os.environ.update(SETTINGS)
        store = torch.distributed.HashStore()
        with ThreadPoolExecutor(self.ranks) as threads:
            joining = [
                threads.submit(GlooCollective, store, rank, self.ranks, ordered=self.ordered)
                for rank in range(self.ranks)
            ]
            return [one.result(PATIENCE_S) for one in joining]

    def close(self) -> None:
        """End the threads of the latest worker, should somebody have left it open."""
        if self._open is not None:
            writer, others = self._open
            self._open = None
            if not others.errors:
                writer.send(encode(None))
            others.wait_stopped()
