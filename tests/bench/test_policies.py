"""The study of eviction policies: what it runs, that the numbers are those of the simulation, and its page."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pensieve.simulate.scenario.policies import NAMES
from support.replay.benches import load_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_bench("policies", monkeypatch)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_bench("policy_study/report", monkeypatch)


@pytest.fixture
def traces(tmp_path: Path, bench: ModuleType) -> Path:
    """Two traces of the names that the study asks for."""
    rows = [
        {
            "session_id": f"s{s}",
            "turn": t,
            "input_tokens": 30 + 7 * s,
            "output_tokens": 20,
            "timestamp_s": s + 40.0 * t,
        }
        for s in range(12)
        for t in range(1 + s % 4)
    ]
    for name in (bench.SHAREGPT, bench.MOONCAKE):
        (tmp_path / name).write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    return tmp_path


def test_every_policy_meets_every_load(bench: ModuleType) -> None:
    all_runs = bench.runs(bench.PARTS, bench.SEEDS, 1.0)
    groups = {run.group for run in all_runs}
    assert len(groups) == 3 * len(bench.WORKLOADS) + len(bench.RATES) + len(bench.THINK_TIMES_S)
    for group in groups:
        own = [run for run in all_runs if run.group == group]
        assert {run.policy for run in own} == set(NAMES)
        assert len({(run.workload, run.device_tokens, run.host_tokens) for run in own}) == 1, (
            "not the same memory"
        )
        seeds = [run.seed for run in own if run.policy == "retention"]
        assert seeds == [run.seed for run in own if run.policy == "gittins"] and len(set(seeds)) == len(seeds)
    quick, whole = (bench.runs(("rates",), (1,), scale)[0].workload.sessions for scale in (0.1, 1.0))
    assert quick == whole // 10


def test_a_run_is_what_the_simulator_says(bench: ModuleType, traces: Path) -> None:
    runs = bench.runs(tuple(bench.WORKLOADS), (1,), 0.01)
    for workload in {run.workload.title: run for run in runs if run.policy == "gittins"}.values():
        row = bench.result(replace(workload, device_tokens=2048, host_tokens=2048), traces)
        assert row["violations"] == 0 and row["turns"] > 0 and row["group"] == workload.group
        assert row["hit_rate"] == pytest.approx(1 - row["recomputed_tokens"] / row["history_tokens"])


def rows_of(costs: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {"part": "rates", "group": "g", "policy": policy, "seed": seed, "device_tokens": 1, "host_tokens": 2,
         "turns": 5, "hit_rate": 0.5, "device_hit_rate": 0.25, "host_hit_rate": 0.3, "recomputed_tokens": cost * 10,
         "history_tokens": 1000, "recomputed_cost_s": cost, "ttft_warm_mean_s": 0.01}
        for policy, values in costs.items()
        for seed, cost in enumerate(values)
    ]  # fmt: skip


def test_ratios_are_taken_seed_by_seed(page: ModuleType) -> None:
    rows = rows_of(
        {"retention": [10.0, 40.0], "gittins": [5.0, 40.0], "arc": [20.0], "clairvoyant": [0.0, 4.0]}
    )
    lines = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")] for line in page.table(rows)
    }
    assert lines["gittins"][7] == "0.750 (0.500 to 1.000)"  # not 45 / 50
    assert lines["arc"][7] == "2.000"  # against the same seed of retention
    assert lines["gittins"][8] == "-"  # the bound recomputes nothing: no ratio
    assert lines["retention"][6] == "25.0 (10.0 to 40.0)"


def test_the_page_has_every_group_and_its_command(page: ModuleType) -> None:
    about = {"rate": 4.0, "machine": "m"}
    report = {
        "commands": {"rates": "python bench/policies.py"}, "commit": "abc", "machine": "x86",
        "rows": rows_of({"retention": [1.0], "clairvoyant": [0.5]}), "workloads": {"g": about},
    }  # fmt: skip
    text = page.markdown(report, "Words.\n")
    assert text.startswith("# Eviction policies\n\nWords.\n\n## Rising rates")
    assert (
        "`python bench/policies.py`" in text
        and "**g** — 4 turns/s, 5 turns" in text
        and "Think time" not in text
    )


def test_the_picture_compares_policies_on_the_same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(policy: str, seed: int, lost: int, group: str, part: str) -> dict[str, Any]:
        share = {"recomputed_tokens": lost, "history_tokens": 200}
        return {"part": part, "group": group, "policy": policy, "seed": seed, **share}

    plot = load_bench("policy_study/plot", monkeypatch)
    rows = [
        row("lru", 4, 20, "fast", "rates"),
        row("lru", 4, 10, "slow", "rates"),
        row("lru", 5, 90, "fast", "rates"),
        row("arc", 4, 30, "fast", "rates"),
        row("arc", 4, 20, "slow", "rates"),
        row("arc", 4, 40, "60 s", "think"),
    ]
    workloads = {"fast": {"rate": 9.0}, "slow": {"rate": 3.0}, "60 s": {"think_s": 60.0}}
    report = {"rows": rows, "workloads": workloads}
    assert plot.lines(report, "rates", "rate") == {
        "lru": [(3.0, 5.0), (9.0, 10.0)],
        "arc": [(3.0, 10.0), (9.0, 15.0)],
    }
    rates, think = plot.draw(report).axes
    assert [list(line.get_xdata()) for line in rates.lines] == [[3.0, 9.0], [3.0, 9.0]]
    assert [list(line.get_ydata()) for line in think.lines] == [[20.0]]
