"""The worker that leads: what it makes of results, and of failures."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pensieve.engine.plan import Plan, SampleSpec, StepResult
from pensieve.engine.ranks.codec import decode
from pensieve.engine.ranks.leader import LeadingWorker
from pensieve.engine.ranks.ring import RingReader, RingWriter, SharedRing


class Scripted:
    """Worker and others in one, who note what is asked of them."""

    def __init__(self, result: StepResult | None) -> None:
        self._result = result
        self.info = SimpleNamespace(ranks=3)
        self.noted: list[str] = []

    def launch(self, plan: Plan) -> Scripted:
        self.noted.append(f"launch {plan.step}")
        return self

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        self.noted.append(f"choose {len(specs)}")

    def result(self) -> StepResult:
        if self._result is None:
            raise RuntimeError("no memory")
        return self._result

    def close(self) -> None:
        self.noted.append("close")

    def on_failure(self) -> None:
        self.noted.append("failed")

    def before_stop(self) -> None:
        self.noted.append("leaving")

    def wait_stopped(self) -> None:
        self.noted.append("left")

    def kill(self) -> None:
        self.noted.append("abandon")


def leading(scripted: Scripted, ring: SharedRing) -> LeadingWorker:
    return LeadingWorker(cast(Any, scripted), RingWriter(ring, spin_s=0.0), scripted)


def test_results_are_those_of_all_ranks() -> None:
    ring, scripted = SharedRing.create(2), Scripted(StepResult((), 10, 20, 0.5, 0.25, swap_out_backlog=4))
    readers = [RingReader(ring, number, spin_s=0.0) for number in range(2)]
    leader = leading(scripted, ring)
    readers[1].report_backlog(7)
    assert leader.launch(Plan(5)).result() == StepResult((), 30, 60, 0.5, 0.25, swap_out_backlog=7)
    readers[1].report_backlog(3)
    assert leader.run(Plan(6)).swap_out_backlog == 4
    leader.close()
    assert scripted.noted == ["launch 5", "launch 6", "leaving", "close", "left"]
    for reader in readers:
        heard = [decode(reader.receive(1.0) or b"") for _ in range(3)]
        assert [plan and plan.step for plan in heard] == [5, 6, None]


def test_memory_is_what_all_ranks_have() -> None:
    ring, scripted = SharedRing.create(2), Scripted(StepResult(memory=(100, 20)))
    readers = [RingReader(ring, number, spin_s=0.0) for number in range(2)]
    leader = leading(scripted, ring)
    readers[0].report_memory((100, 10))
    readers[1].report_memory((90, 20))
    assert leader.run(Plan(1, memory=(100, 20))).memory == (90, 10)
    for reader in readers:
        plan = decode(reader.receive(1.0) or b"")
        assert plan is not None and plan.memory == (100, 20)


def test_after_a_failure_nobody_is_waited_for() -> None:
    ring, scripted = SharedRing.create(1), Scripted(None)
    leader = leading(scripted, ring)
    with pytest.raises(RuntimeError, match="no memory"):
        leader.run(Plan(1))
    leader.close()
    assert scripted.noted == ["launch 1", "failed", "abandon"]
