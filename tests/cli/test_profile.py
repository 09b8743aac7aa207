"""``pensieve profile``: the cost model that comes out is the one that went in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from pensieve.cli.profile import profile
from pensieve.engine.cost import CostModel
from pensieve.engine.cost_profiles import CostPoint, Prober, split_attention
from pensieve.engine.plan import Plan, Sampled, StepResult, SynchronousWorker
from pensieve.engine.worker import kv_error
from pensieve.model.folder import load_arch
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights
from support.engine.checkpoints import tiny_checkpoint


class CostlyWorker(SynchronousWorker):
    """Takes ``other + per_token × (context seen)`` for each step, on a clock of its own; refuses a hole in the KV."""

    def __init__(self, chunk_tokens: int, other: float, per_token: float) -> None:
        self.now = 0.0
        self.written: set[int] = set()
        self._chunk_tokens, self._other, self._per_token = chunk_tokens, other, per_token

    def run(self, plan: Plan) -> StepResult:
        (span,) = plan.spans
        (pages,) = plan.page_tables
        assert self.written >= set(range(span.start)), "attends to KV that was never computed"
        assert len(pages) * self._chunk_tokens >= span.end
        assert len(set(pages.tolist())) == len(pages)
        assert span.tokens.min() >= 0
        self.written |= set(range(span.start, span.end))
        self.now += self._other + self._per_token * span.end
        return StepResult(sampled=(Sampled(span.request, 0),))

    def close(self) -> None: ...


@pytest.mark.parametrize("chunk_tokens", [1, 32])
def test_recovers_the_cost_that_the_worker_has(chunk_tokens: int) -> None:
    worker = CostlyWorker(chunk_tokens, other=0.5, per_token=0.001)
    prober = Prober(worker, chunk_tokens=chunk_tokens, vocab_size=50, clock=lambda: worker.now)
    points = list(prober.measure(4096, repeats=3))
    assert [point.context for point in points] == [2**i for i in range(13) if 2**i >= chunk_tokens]
    attention, other = split_attention(points)
    assert other == pytest.approx(0.5)
    assert [cost for _, cost in attention] == pytest.approx([0.001 * point.context for point in points])


def test_noise_never_makes_a_cost_negative_or_falling() -> None:
    attention, other = split_attention(
        [CostPoint(32, 1.0), CostPoint(64, 0.9), CostPoint(128, 1.1), CostPoint(256, 1.05)]
    )
    costs = [cost for _, cost in attention]
    assert other == 0.9
    assert costs == sorted(costs)
    assert min(costs) >= 0


def test_one_point_is_no_profile() -> None:
    with pytest.raises(ValueError, match="two points"):
        split_attention([CostPoint(32, 1.0)])


def test_a_slow_run_does_not_count() -> None:
    worker = CostlyWorker(32, other=0.5, per_token=0.0)
    hiccups = iter([0.0, 9.0] + [0.0] * 100)

    def clock() -> float:
        worker.now += next(hiccups)
        return worker.now

    (first, *_) = Prober(worker, chunk_tokens=32, vocab_size=50, clock=clock).measure(64, repeats=3)
    assert first.seconds == pytest.approx(0.5)
    assert np.isfinite(first.seconds)


def test_writes_what_the_engine_reads(tmp_path: Path) -> None:
    model, written = tiny_checkpoint("llama", tmp_path), tmp_path / "cost.json"
    arguments = ["--model", str(model), "--device", "cpu", "--longest", "300", "--chunk-tokens", "16"]
    result = CliRunner().invoke(profile, [*arguments, "--repeats", "2", "--output", str(written)])
    assert result.exit_code == 0, result.output
    cost = CostModel.from_json(written)
    assert cost.chunk_tokens == 16
    assert [context for context, _ in cost.attention] == [16, 32, 64, 128, 256]
    assert (cost.cost([16, 256, 4096]) > 0).all()
    report = json.loads(written.read_text())
    assert (report["device"], report["dtype"], report["family"]) == ("cpu", "float32", "llama")


def test_the_error_of_8_bits() -> None:
    """On the demo model: fp8 is coarser than int8, and neither changes much."""
    result = CliRunner().invoke(profile, ["--kv-error", "--device", "cpu", "--threads", "1"])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()[2:]]
    assert [row[0] for row in rows] == ["fp8", "int8"]
    mean = [float(row[1].rstrip(",")) for row in rows]
    assert 0.1 > mean[0] > mean[1] > 1e-3
    assert all(int(row[5]) < 60 and row[7] == "1024" for row in rows)


def test_the_error_without_8_bits_is_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tiny_checkpoint("gemma2", tmp_path)
    model = Transformer(load_arch(folder), load_weights(folder, load_arch(folder), dtype=torch.float32))
    monkeypatch.setattr(kv_error, "CODES", {"none": None, "int8": torch.int8})
    none, int8 = kv_error.kv_errors(model, list(range(3, 90)))
    assert (none.spread, none.worst, none.changed, none.loss) == (0, 0, 0, 0)
    assert int8.worst > int8.spread > 0


def test_is_kept_for_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny_checkpoint("llama", tmp_path) / "config.json").read_bytes())
    arguments = ["--model", str(folder), "--device", "cpu", "--longest", "64", "--load-format", "dummy"]
    result = CliRunner().invoke(profile, [*arguments, "--repeats", "1"])
    assert result.exit_code == 0, result.output
    (kept,) = (tmp_path / "cache" / "pensieve" / "profiles").iterdir()
    assert f"wrote {kept}" in result.stderr
    assert json.loads(kept.read_text())["repeats"] == 1
    result = CliRunner().invoke(profile, [*arguments, "--repeats", "1", "--output", "-"])
    assert json.loads(result.stdout)["format"] == 1


def test_nowhere_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = [
        "--device",
        "cpu",
        "--longest",
        "64",
        "--repeats",
        "1",
        "--output",
        str(tmp_path / "file" / "x"),
    ]
    result = CliRunner().invoke(profile, ["--model", str(tiny_checkpoint("llama", tmp_path)), *arguments])
    assert result.exit_code == 1
    assert "cannot write" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--longest", "100000"], 2, "limit is 512 tokens"),
        (["--longest", "40"], 2, "two chunks, 64 tokens"),
        (["--model", "/no/such/model"], 2, "no such folder"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    model = tiny_checkpoint("llama", tmp_path)
    result = CliRunner().invoke(profile, ["--model", str(model), "--device", "cpu", *arguments])
    assert result.exit_code == code
    assert said in result.output
