"""Which cost model an engine gets: a file, the stored profile, a quick measurement or an estimate."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pensieve.config import EngineOptions, KvDtypeName
from pensieve.core import Sampling
from pensieve.engine import cost_profiles as profiles
from pensieve.engine.cost import CostModel, CostProfileError
from pensieve.engine.cost_profiles import (
    estimate,
    fingerprint,
    load_or_measure_cost,
    prober,
    profile_path,
    quick_points,
)
from pensieve.engine.plan import Plan, Sampled, StepResult, SynchronousWorker
from pensieve.model.arch import Arch, Layer, Rope

ARCH = Arch(
    family="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    layers=(Layer(rope=Rope(theta=10000.0)),) * 2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_limit=4096,
    norm="rms",
    norm_eps=1e-5,
    activation="silu",
    gated_mlp=True,
)


@dataclass
class Info:
    device: str = "cuda"
    dtype: str = "bfloat16"
    device_chunks: int = 1024
    chunk_tokens: int = 32
    context_limit: int = 4096
    max_batch_tokens: int = 256
    ranks: int = 1
    device_floor: int | None = None
    fp8: bool = False
    kv_dtype: KvDtypeName = "auto"


class Worker(SynchronousWorker):
    """Each step takes ``other + per_token * context`` on the clock that it keeps."""

    def __init__(self, **info: Any) -> None:
        self.arch, self.info = ARCH, Info(**info)
        self.steps, self.now = 0, 0.0

    def run(self, plan: Plan) -> StepResult:
        (span,) = plan.spans
        assert len(span.tokens) <= self.info.max_batch_tokens
        assert plan.page_tables[0].max() < self.info.device_chunks
        self.steps += 1
        self.now += 0.01 + 1e-5 * span.end
        return StepResult(sampled=(Sampled(span.request, 0),))

    def close(self) -> None: ...

    def clock(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiles, "device_name", lambda info: f"A {info.device.upper()} (80 GB)")
    yield tmp_path / "pensieve" / "profiles"


def options(cost_profile: str = "auto", **values: Any) -> EngineOptions:
    return EngineOptions(model="/models/thirteen", cost_profile=cost_profile, **values)


def test_a_gpu_is_measured_once(cache: Path) -> None:
    worker = Worker()
    first = load_or_measure_cost(options(), worker)
    assert worker.steps > 0
    (path,) = cache.iterdir()
    assert path.name == f"llama-{fingerprint(ARCH)}-a-cuda-80-gb-bfloat16-chunk32.json"
    written = json.loads(path.read_text())
    assert (written["model"], written["device_name"]) == ("/models/thirteen", "A CUDA (80 GB)")
    again = Worker()
    assert load_or_measure_cost(options(), again) == first
    assert again.steps == 0
    coded = Worker(kv_dtype="fp8")
    load_or_measure_cost(options(), coded)
    assert coded.steps > 0, "its attention takes other times"
    assert profile_path(coded, "A CUDA (80 GB)").name.endswith("-bfloat16-kv-fp8-chunk32.json")
    assert profile_path(Worker(fp8=True), "A CUDA (80 GB)").name.endswith("-bfloat16-fp8-chunk32.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 1, "attention": [["a", 1]], "other_seconds": 1, "chunk_tokens": 32}',
        '{"format": 1, "attention": [[1, 1], [2, 2]], "other_seconds": "much", "chunk_tokens": 32}',
        '{"format": 1, "attention": [[Infinity, 1], [2, 2]], "other_seconds": 1, "chunk_tokens": 32}',
        '{"format": 1, "attention": [[1, NaN], [2, 2]], "other_seconds": 1, "chunk_tokens": 32}',
        '{"format": 1, "attention": [[1, 1], [2, 2]], "other_seconds": 1, "chunk_tokens": 16}',
        '{"format": 99}',
        "\\ud800",
    ],
)
def test_a_damaged_profile_is_measured_again(
    cache: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()
    path = profile_path(worker, "A CUDA (80 GB)")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    cost = load_or_measure_cost(options(), worker)
    assert [record.levelno for record in caplog.records if "replacing" in record.message] == [logging.WARNING]
    assert worker.steps > 0
    assert load_or_measure_cost(options(), Worker()) == cost


def test_not_even_text(cache: Path) -> None:
    path = profile_path(Worker(), "A CUDA (80 GB)")
    path.mkdir(parents=True)  # cannot be read, cannot be replaced
    worker = Worker()
    assert load_or_measure_cost(options(), worker).chunk_tokens == 32
    assert worker.steps > 0


def test_a_cpu_is_not_measured_at_start(cache: Path) -> None:
    worker = Worker(device="cpu", dtype="float32")
    assert load_or_measure_cost(options(), worker) == estimate(worker)
    assert worker.steps == 0
    assert not cache.exists()


def test_a_cpu_uses_what_is_stored(cache: Path) -> None:
    worker = Worker(device="cpu", dtype="float32")
    path = profile_path(worker, "A CPU (80 GB)")
    path.parent.mkdir(parents=True)
    profile = {"format": 1, "attention": [[32, 1.0], [64, 2.0]], "other_seconds": 3.0, "chunk_tokens": 32}
    path.write_text(json.dumps(profile))
    assert load_or_measure_cost(options(), worker) == CostModel(((32, 1.0), (64, 2.0)), 3.0, 32)


def test_estimate_looks_at_nothing(cache: Path) -> None:
    worker = Worker()
    assert load_or_measure_cost(options("estimate"), worker) == estimate(worker)
    assert worker.steps == 0


def test_a_file_must_be_right(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text('{"format": 1, "attention": [[16, 1], [32, 2]], "other_seconds": 1, "chunk_tokens": 16}')
    with pytest.raises(CostProfileError, match="chunks of 16 tokens, not 32"):
        load_or_measure_cost(options(str(path)), Worker())
    assert load_or_measure_cost(options(str(path), chunk_tokens=16), Worker()).chunk_tokens == 16
    path.write_text("{}")
    with pytest.raises(CostProfileError, match=r"own\.json"):
        load_or_measure_cost(options(str(path)), Worker())


@pytest.mark.parametrize("info", [{"device_chunks": 3}, {"context_limit": 100}, {"max_batch_tokens": 16}])
def test_too_small_to_measure(cache: Path, info: dict[str, int]) -> None:
    worker = Worker(**info)
    assert load_or_measure_cost(options(), worker) == estimate(worker)
    assert not cache.exists()


def test_quick_points_recover_the_cost_and_stop_in_time() -> None:
    worker = Worker()
    points = quick_points(worker, seconds=1000.0, clock=worker.clock)
    assert [point.context for point in points] == [32, 128, 512, 2048]
    assert [point.seconds for point in points] == pytest.approx(
        [0.01 + 1e-5 * point.context for point in points]
    )
    hurried, slow = Worker(), Worker()
    assert len(quick_points(hurried, seconds=0.5, clock=hurried.clock)) == 3
    assert hurried.now < 0.5
    assert len(quick_points(slow, seconds=0.0, clock=slow.clock)) == 2


def test_a_probe_keeps_to_the_limit_of_a_step() -> None:
    list(prober(Worker(max_batch_tokens=32)).measure(256, repeats=1))  # the worker checks


def test_fingerprint_is_of_the_computation() -> None:
    same = dataclasses.replace(
        ARCH, eos_token_ids=(1, 2), generation=Sampling(temperature=0.7), dtype="float16"
    )
    assert fingerprint(same) == fingerprint(ARCH)
    for change in (
        {"num_kv_heads": 4},
        {"context_limit": 8192},
        {"layers": (Layer(),) * 2},
        {"vocab_size": 101},
    ):
        assert fingerprint(dataclasses.replace(ARCH, **change)) != fingerprint(ARCH)  # type: ignore[arg-type]


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profiles.profile_directory() == tmp_path / ".cache" / "pensieve" / "profiles"
