"""The engine's worker when its model is divided: sends each plan to the other ranks and executes its own share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from pensieve.engine.plan import PendingStep, Plan, SampleSpec, StepResult
from pensieve.engine.ranks.codec import encode
from pensieve.engine.ranks.ring import RingWriter
from pensieve.engine.worker.sizing import WorkerInfo
from pensieve.engine.worker.torch_worker import Worker
from pensieve.model.arch import Arch


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
