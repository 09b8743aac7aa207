"""The worker that an engine sees when its model is divided over ranks: passes each plan on, and does its own share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from pensieve.engine.plan import PendingStep, Plan, StepResult
from pensieve.engine.ranks.codec import encode
from pensieve.engine.ranks.ring import RingWriter
from pensieve.engine.worker.sizing import WorkerInfo
from pensieve.engine.worker.torch_worker import Worker
from pensieve.model.arch import Arch


class FollowerRanks(Protocol):
    """The other ranks, as those whose life and end somebody looks after."""

    def on_failure(self) -> None:
        """Something went wrong here. If it was because another rank has ended, this does not return."""
        ...

    def before_stop(self) -> None:
        """They are about to be told to leave: one that ends well is no failure from now on."""
        ...

    def wait_stopped(self) -> None:
        """All plans are done and all ranks have been told to leave; returns when they have."""
        ...

    def kill(self) -> None:
        """End them, wherever they are."""
        ...


class LeadingWorker:
    """Rank 0's worker with the ranks that follow it, as one ``StepWorker``."""

    def __init__(self, worker: Worker, writer: RingWriter, others: FollowerRanks) -> None:
        self._worker, self._writer, self._others = worker, writer, others
        self._broken = False

    @property
    def arch(self) -> Arch:
        """Of one rank's shard."""
        return self._worker.arch

    @property
    def info(self) -> WorkerInfo:
        return self._worker.info

    def run(self, plan: Plan) -> StepResult:
        """Launch a step and wait for it."""
        return self.launch(plan).result()

    def launch(self, plan: Plan) -> PendingStep:
        """See ``StepWorker.launch``. The other ranks hear of the plan first: each has to pack it."""
        with self.blaming():
            self._writer.send(encode(plan))
            return _LedStep(self, self._worker.launch(plan))

    def completed(self, result: StepResult) -> StepResult:
        """A result as it is for all ranks: what was copied is counted on all, what is left by the slowest."""
        return replace(
            result,
            swap_in_bytes=result.swap_in_bytes * self.info.ranks,
            swap_out_bytes=result.swap_out_bytes * self.info.ranks,
            swap_out_backlog=max(result.swap_out_backlog, self._writer.max_backlog()),
        )

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """What goes wrong inside may be because another rank is gone."""
        try:
            yield
        except Exception:
            self._broken = True
            self._others.on_failure()
            raise

    def close(self) -> None:
        """Let all ranks leave, and release the memory of this one.

        After a failure the others may wait for a sum that never comes, and whoever waits for them would wait as long:
        then they are ended, and memory is released with the process.
        """
        if self._broken:
            self._others.kill()
            return
        with self.blaming():
            self._others.before_stop()
            self._writer.send(encode(None))
            self._worker.close()
        self._others.wait_stopped()


@dataclass(frozen=True, slots=True)
class _LedStep:
    leader: LeadingWorker
    step: PendingStep

    def result(self) -> StepResult:
        with self.leader.blaming():
            return self.leader.completed(self.step.result())
