"""Makes the worker that options ask for: alone, or leading the ranks of a model that is divided."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

from pensieve.config import EngineOptions
from pensieve.engine.ranks.collectives import RankCollective, join
from pensieve.engine.ranks.leader import LeadingWorker
from pensieve.engine.ranks.ring import RingWriter, SharedRing
from pensieve.engine.ranks.supervisor import RankSupervisor
from pensieve.engine.worker.sizing import resolve_device
from pensieve.engine.worker.torch_worker import Worker, build_worker
from pensieve.model.folder import load_arch
from pensieve.model.shard import Shard

GPU_SPIN_S: Final = 0.002
"""Ranks beside GPUs look for the next plan without pause for so long: longer than most steps. On a CPU, whose cores do
the computing, they look with pauses from the first."""


def build_workers(options: EngineOptions) -> Worker:
    """The worker of an engine; when the model is divided, this process becomes rank 0 and starts the others.

    Raises ModelError when the model cannot be served or divided so, ValueError when an option cannot be followed here.
    """
    ranks = options.tensor_parallel
    if ranks == 1:
        return build_worker(options)
    arch = load_arch(Path(options.model))
    device = resolve_device(options, arch).device
    Shard(0, ranks).arch(arch)
    if device == "cuda":
        check_gpus([torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())], ranks)
    ring, meeting = SharedRing.create(ranks - 1), os.memfd_create("pensieve-meeting")
    crew = RankSupervisor(options, device, ring=ring.fd, meeting=meeting)
    try:
        together = join(device, 0, ranks, meeting, symmetric=options.all_reduce == "auto")
        worker = build_worker(options, together)
    except Exception:
        crew.on_failure()
        crew.kill()
        raise
    return LeadingWorker(
        worker, RingWriter(ring, spin_s=spin_seconds(device)), FollowerProcesses(crew, together)
    )


class FollowerProcesses:
    """``leader.FollowerRanks`` of real processes."""

    def __init__(self, crew: RankSupervisor, together: RankCollective) -> None:
        self._crew, self._together = crew, together

    def on_failure(self) -> None:
        self._crew.on_failure()

    def kill(self) -> None:
        self._crew.kill()

    def before_stop(self) -> None:
        self._crew.before_stop()

    def wait_stopped(self) -> None:
        self._together.close()
        self._crew.wait_stopped()


def check_gpus(names: list[str], ranks: int) -> None:
    """Raises ValueError unless there are so many GPUs, all of one kind."""
    if len(names) < ranks:
        raise ValueError(f"tensor parallel {ranks}: there are only {len(names)} GPUs here")
    if len({*names[:ranks]}) > 1:
        kinds = ", ".join(sorted({*names[:ranks]}))
        raise ValueError(
            f"tensor parallel {ranks}: the first {ranks} GPUs are of different kinds ({kinds}); choose alike ones with "
            "CUDA_VISIBLE_DEVICES"
        )


def spin_seconds(device: str) -> float:
    """How long a rank waits for another without pause."""
    return GPU_SPIN_S if device == "cuda" else 0.0
