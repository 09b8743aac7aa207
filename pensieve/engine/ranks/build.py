"""Makes the worker for the options: a single one, or one that leads the ranks of a divided model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

from pensieve.config import EngineOptions
from pensieve.engine.ranks.collectives import join
from pensieve.engine.ranks.leader import LeadingWorker
from pensieve.engine.ranks.ring import RingWriter, SharedRing
from pensieve.engine.ranks.supervisor import RankSupervisor
from pensieve.engine.worker.sizing import resolve_device
from pensieve.engine.worker.torch_worker import Worker, build_worker
from pensieve.model.folder import load_arch
from pensieve.model.shard import Shard

GPU_SPIN_S: Final = 0.002
"""On GPUs a rank spins this long for the next plan, longer than most steps take. On a CPU, whose cores do the
computing, it sleeps between polls from the start."""


def build_workers(options: EngineOptions) -> Worker:
    """Return the worker of an engine. When the model is divided, this process becomes rank 0 and starts the
    others. Raises ModelError when the model cannot be served or divided this way, ValueError when an option
    cannot be satisfied on this machine."""
    ranks = options.tensor_parallel
    if ranks == 1:
        return build_worker(options)
    arch = load_arch(Path(options.model))
    device = resolve_device(options, arch).device
    Shard(0, ranks).arch(arch)
    if device == "cuda":
        check_gpus([torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())], ranks)
    ring, meeting = SharedRing.create(ranks - 1), os.memfd_create("pensieve-meeting")
    supervisor = RankSupervisor(options, device, ring=ring.fd, meeting=meeting)
    try:
        collective = join(device, 0, meeting, options)
        worker = build_worker(options, collective)
    except Exception:
        supervisor.on_failure()
        supervisor.kill()
        raise
    supervisor.leave_group = collective.close
    return LeadingWorker(worker, RingWriter(ring, spin_s=spin_seconds(device)), supervisor)


def check_gpus(names: list[str], ranks: int) -> None:
    """Raises ValueError unless there are ``ranks`` GPUs, all of one kind."""
    if len(names) < ranks:
        raise ValueError(f"tensor parallel {ranks}: there are only {len(names)} GPUs here")
    if len({*names[:ranks]}) > 1:
        kinds = ", ".join(sorted({*names[:ranks]}))
        raise ValueError(
            f"tensor parallel {ranks}: the first {ranks} GPUs are of different kinds ({kinds}); choose alike ones with "
            "CUDA_VISIBLE_DEVICES"
        )


def spin_seconds(device: str) -> float:
    """Return how long a rank spins before it sleeps between polls."""
    return GPU_SPIN_S if device == "cuda" else 0.0
