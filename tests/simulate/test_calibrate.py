"""``pensieve profile --machine``: the machine that comes out is the one that went in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from pensieve.cli.profile import profile
from pensieve.engine.plan import PendingStep, Plan, SampleSpec, StepResult
from pensieve.engine.worker.hybrid_sizing import sizes_for
from pensieve.simulate import calibrate
from pensieve.simulate.calibrate import (
    Calibrator,
    Sample,
    calibrate_machine,
    fit,
    machine_groups,
    relative_errors,
)
from pensieve.simulate.full import Clock, CostWorker
from pensieve.simulate.scenario.machine import Machine, MachineGroup, Work
from support.engine.checkpoints import tiny_checkpoint
from support.lengths import at_length, some
from support.model import recurrent_models

TRUTH = Machine(kv_bytes=4096, swap_bytes_per_s=2e9, layers=1, overlapped=False)
CHUNK = 32
FULL = MachineGroup(kind="full", layers=2, layer_bytes=2048)
WINDOWS = (FULL, MachineGroup(kind="window", layers=6, layer_bytes=2048, window=100))
STATES = (FULL, MachineGroup(kind="state", layers=6, layer_bytes=32768))
STATES_ALONE = (MachineGroup(kind="full", layers=0, layer_bytes=0), STATES[1])


class KnownWorker(CostWorker):
    """Takes as long as a machine would, on a clock of its own; says of itself what a worker says."""

    def __init__(self, machine: Machine, device: str) -> None:
        self.clock = Clock()
        self.in_flight = self.most_in_flight = 0
        super().__init__(machine, CHUNK, self.clock)
        self.info = SimpleNamespace(
            device=device, dtype="float32", device_chunks=1024, host_chunks=256, chunk_tokens=CHUNK,
            context_limit=8192, max_batch_tokens=2048, max_running=256, ranks=1, groups=machine.kv_groups(CHUNK),
        )  # fmt: skip
        if machine.groups:
            sizes = sizes_for(self.info.groups, CHUNK, 8192, ranks=1, on_gpu=device == "cuda")
            self.info.device_tier = sizes.device_layout(sizes.device_bytes(4 * 8192))
            self.info.host_tier = sizes.host_layout(sizes.host_bytes(8192))
        self.arch = SimpleNamespace(family="known", vocab_size=100, num_layers=machine.layers)

    def launch(self, plan: Plan) -> PendingStep:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return Waited(self, super().launch(plan))


@dataclass(frozen=True)
class Waited:
    worker: KnownWorker
    step: PendingStep

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        self.step.choose(specs)

    def result(self) -> StepResult:
        self.worker.in_flight -= 1
        return self.step.result()


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own, each pass takes as long as the one before."""
    monkeypatch.setattr(calibrate, "REPEATS", at_length(1, calibrate.REPEATS))


def worker(machine: Machine = TRUTH, device: str = "cpu") -> Any:
    return KnownWorker(machine, device)


def known(machine: Machine, device: str) -> tuple[Machine, list[Sample]]:
    """What is fitted to steps of a known machine, and other steps of that machine."""
    running = worker(machine, device)
    runs = Calibrator(running, machine, running.clock)
    samples = [sample for design in runs.designs(8192) for sample in runs.samples(*design)]
    others = [Work(700, 9, 4000.0, 350_000.0), Work(33, 33, 70_000.0, 0.0), Work(40, 1, 0.0, 40 * 3000.0)]
    seconds = [
        machine.step_seconds(tokens=w.tokens, rows=w.rows, kv_read=w.kv_read, pairs=w.pairs) for w in others
    ]
    return fit(machine, samples), [Sample(*pair) for pair in zip(others, seconds, strict=True)]


@pytest.mark.parametrize(
    ("device", "weights_s", "groups"),
    some(
        [
            ("cpu", 5.31e-3, ()),
            ("cuda", 5.31e-3, ()),
            ("cpu", 0.0, STATES),
            ("cuda", 0.0, WINDOWS),
            ("cpu", 0.0, ()),
            ("cuda", 0.0, ()),
        ],
        2,
    ),
)
@pytest.mark.usefixtures("one_pass")
def test_finds_the_machine(device: str, weights_s: float, groups: tuple[MachineGroup, ...]) -> None:
    """In steps that were not timed, too; and where a step is launched before the one before it has ended."""
    machine = msgspec.structs.replace(TRUTH, weights_s=weights_s, groups=groups, overlapped=device == "cuda")
    found, others = known(machine, device)
    assert found.mean_error is not None and found.mean_error < 0.005
    assert np.abs(relative_errors(found, others)).max() < 0.01
    assert found.token_s == pytest.approx(machine.token_s, rel=0.01)
    assert found.kv_s == pytest.approx(machine.kv_s, rel=0.01)
    # A window leaves few pairs. Their time hardly shows, so it is found less well, which costs no more than above.
    assert found.pair_s == pytest.approx(machine.pair_s, rel=0.3 if groups == WINDOWS else 0.02)


def test_finds_the_rate_of_copies() -> None:
    running = worker()
    rate = Calibrator(running, TRUTH, running.clock).swap_bytes_per_s()
    assert rate == pytest.approx(TRUTH.swap_bytes_per_s, rel=0.01)
    running.info.host_chunks = 0
    assert Calibrator(running, TRUTH, running.clock).swap_bytes_per_s() is None


@pytest.mark.parametrize("groups", [WINDOWS, STATES, STATES_ALONE], ids=["windows", "states", "states alone"])
def test_finds_the_rate_of_copies_of_two_groups(groups: tuple[MachineGroup, ...]) -> None:
    machine = msgspec.structs.replace(TRUTH, groups=groups, swap_bytes_per_s=2e6)
    running = worker(machine)
    rate = Calibrator(running, machine, running.clock).swap_bytes_per_s()
    assert rate == pytest.approx(machine.swap_bytes_per_s, rel=0.01)


def test_terms_are_never_negative_and_the_error_is_told() -> None:
    rng = np.random.default_rng(1)
    works = [Work(q, b, 1000.0 * b, 50.0 * q) for q in (1, 2, 8, 64, 512) for b in (1, 4, 16)]
    samples = [Sample(work, 0.01 + 1e-4 * work.tokens * rng.uniform(0.5, 1.5)) for work in works]
    found = fit(TRUTH, samples)
    wrong = np.abs(relative_errors(found, samples))
    assert (found.mean_error, found.worst_error) == (pytest.approx(wrong.mean()), pytest.approx(wrong.max()))
    assert 0.02 < wrong.mean() < 0.4
    assert min(found.weights_s, found.kv_s, found.pair_s, found.row_s, found.fixed_s) >= 0 < found.token_s


def test_a_model_on_paper_is_the_one_that_was_measured() -> None:
    for groups in (WINDOWS, STATES, STATES_ALONE):
        running = worker(msgspec.structs.replace(TRUTH, groups=groups))
        assert machine_groups(running.info) == groups


@pytest.mark.usefixtures("one_pass")
def test_says_what_a_device_does_beside() -> None:
    for device, layers, overlapped in (("cpu", 1, False), ("cuda", 24, True)):
        running = worker(msgspec.structs.replace(TRUTH, layers=24), device)
        said: list[str] = []
        found = calibrate_machine(running, "mine", 64, said.append, running.clock)
        assert (found.name, found.layers, found.overlapped) == ("mine", layers, overlapped)
        assert "4 x 64 tokens" in said
        assert running.most_in_flight == 1 + overlapped


@pytest.mark.usefixtures("one_pass")
def test_copies_that_cost_nothing_leave_the_rate_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, where a few chunks may take as long as many."""
    monkeypatch.setattr(Calibrator, "_swap", lambda self, plan, copies: 1e-3)
    running = worker()
    assert Calibrator(running, TRUTH, running.clock).swap_bytes_per_s() is None
    found = calibrate_machine(running, "mine", 64, lambda design: None, running.clock)
    assert found.swap_bytes_per_s == Machine().swap_bytes_per_s


def test_steps_that_cost_nothing_cannot_be_fitted() -> None:
    samples = [Sample(Work(tokens, 1, 0, 0), 1e-3) for tokens in (1, 10, 100)]
    with pytest.raises(ValueError, match="steps of more tokens took no longer"):
        fit(TRUTH, samples)


@pytest.mark.parametrize("family", some(["llama", "gemma3_text", "bamba"], 2))
def test_profile_writes_what_simulate_reads(family: Any, tmp_path: Path) -> None:
    machine, cost = tmp_path / "machine.json", tmp_path / "cost.json"
    if family == "bamba":
        model = tmp_path / "bamba"
        recurrent_models.make_model("bamba", model)
    else:
        model = tiny_checkpoint(family, tmp_path)
    arguments = [
        "--model",
        str(model),
        "--device",
        "cpu",
        "--longest",
        "64",
        "--repeats",
        "1",
        "--threads",
        "1",
    ]
    result = CliRunner().invoke(profile, [*arguments, "--output", str(cost), "--machine", str(machine)])
    assert result.exit_code == 0, result.output
    assert f"wrote {machine}: its formula errs by" in result.stderr
    found = Machine.from_json(machine)
    assert found.swap_bytes_per_s > 0 and found.mean_error is not None and not found.overlapped
    assert [group.kind for group in found.groups] == {
        "llama": [], "gemma3_text": ["full", "window"], "bamba": ["full", "state"],
    }[family]  # fmt: skip
    written = json.loads(cost.read_text())
    assert written["format"] == 1
    assert written["model"] == model.name and found.name.startswith(f"{model.name} on "), "not where it lies"
    if family != "llama":
        return
    result = CliRunner().invoke(
        profile, [*arguments, "--output", str(cost), "--machine", str(tmp_path / "no" / "m")]
    )
    assert result.exit_code == 1 and "cannot write" in result.output
