"""The worker of a divided model, and the loop of the ranks that it leads.

Rank 0 sends each plan to the other ranks and executes its own share. A rank other than rank 0 executes the plans that
it receives until rank 0 sends a stop.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import torch

from pensieve.config import EngineOptions
from pensieve.engine.plan import PendingStep, Plan, SampleSpec, StepResult, StepWorker
from pensieve.engine.ranks.codec import decode, encode
from pensieve.engine.ranks.collectives import join
from pensieve.engine.ranks.ring import RingReader, RingWriter, SharedRing
from pensieve.engine.ranks.supervisor import RankSupervisor
from pensieve.engine.worker.sizing import WorkerInfo, resolve_device
from pensieve.engine.worker.torch_worker import Worker, build_worker
from pensieve.model.arch import Arch
from pensieve.model.folder import load_arch
from pensieve.model.shard import Shard


class FollowerRanks(Protocol):
    """Lifecycle of the other ranks."""

    def on_failure(self) -> None:
        """A step failed on this rank. Does not return if the exit of another rank was the cause."""
        ...

    def before_stop(self) -> None:
        """The ranks are about to receive the stop message: from now on a clean exit is no failure."""
        ...

    def wait_stopped(self) -> None:
        """Wait until all ranks have exited. All plans are done and the stop message is sent."""
        ...

    def kill(self) -> None:
        """Kill the ranks at once."""
        ...


class LeadingWorker:
    """Rank 0's worker and its followers, as one ``StepWorker``."""

    def __init__(self, worker: Worker, writer: RingWriter, followers: FollowerRanks) -> None:
        self._worker, self._writer, self._followers = worker, writer, followers
        self._broken = False

    @property
    def arch(self) -> Arch:
        """The architecture of one rank's shard."""
        return self._worker.arch

    @property
    def info(self) -> WorkerInfo:
        return self._worker.info

    def run(self, plan: Plan) -> StepResult:
        return self.launch(plan).result()

    def launch(self, plan: Plan) -> PendingStep:
        """See ``StepWorker.launch``. The plan goes to the other ranks first: each has to pack it."""
        with self.reporting_failures():
            self._writer.send(encode(plan))
            return _LeaderStep(self, self._worker.launch(plan))

    def total_result(self, result: StepResult) -> StepResult:
        """Return the result for all ranks: bytes copied in total, the largest backlog, and the least memory.

        A rank that could not grow keeps less memory than the others until the next plan that names it. The engine uses
        only pages that all ranks back.
        """
        memory = result.memory
        if memory is not None:
            least = self._writer.least_memory()
            memory = min(memory[0], least[0]), min(memory[1], least[1])
        return replace(
            result,
            swap_in_bytes=result.swap_in_bytes * self.info.ranks,
            swap_out_bytes=result.swap_out_bytes * self.info.ranks,
            swap_out_backlog=max(result.swap_out_backlog, self._writer.max_backlog()),
            memory=memory,
        )

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Report exceptions to ``FollowerRanks``: another rank's exit may be the cause."""
        try:
            yield
        except Exception:
            self._broken = True
            self._followers.on_failure()
            raise

    def close(self) -> None:
        """Stop all ranks and release the memory of this one. After a failure the others may wait forever in a
        collective operation. Then they are killed, and memory is released with the process."""
        if self._broken:
            self._followers.kill()
            return
        with self.reporting_failures():
            self._followers.before_stop()
            self._writer.send(encode(None))
            self._worker.close()
        self._followers.wait_stopped()


@dataclass(frozen=True, slots=True)
class _LeaderStep:
    leader: LeadingWorker
    step: PendingStep

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        with self.leader.reporting_failures():
            self.step.choose(specs)

    def result(self) -> StepResult:
        with self.leader.reporting_failures():
            return self.leader.total_result(self.step.result())


MAX_IN_FLIGHT: Final = 2
"""Most steps launched but not yet waited for: as many as the engine on rank 0 has."""
IDLE_S: Final = 0.002
"""Without a plan for this long, wait for the launched steps, so that none of their memory is held."""


def follow(reader: RingReader, worker: StepWorker) -> None:
    """Execute plans in order. Propagates the worker's exceptions: then this rank must exit, and all others too."""
    in_flight: deque[PendingStep] = deque()
    while True:
        message = reader.receive(IDLE_S if in_flight else None)
        plan = None
        if message is not None:
            plan = decode(message)
            if plan is None:
                break
            in_flight.append(worker.launch(plan))
        while len(in_flight) > (MAX_IN_FLIGHT - 1 if message is not None else 0):
            result = in_flight.popleft().result()
            reader.report_backlog(result.swap_out_backlog)
            if result.memory is not None:
                reader.report_memory(result.memory)
        if plan is not None and plan.chooses_late:
            # Only now: it may wait for rank 0, which may wait for the reports of the step before.
            in_flight[-1].choose(plan.specs)
    while in_flight:
        in_flight.popleft().result()


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
