"""``bench/common/simulation_speed.py``: which differences between two reports count."""

from __future__ import annotations

from typing import Any

import pytest

from support.replay.benches import load_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_bench("common/simulation_speed", monkeypatch)


def report(bench: Any, **numbers: Any) -> dict[str, Any]:
    row = {"target": "lru", "hit_rate": 0.5, "wall_s": 1.0, "peak_rss_mib": 50.0}
    return {**dict.fromkeys(bench.COMPARED), "created": "now", "targets": [{**row, **numbers}]}


def test_times_and_memory_do_not_count(bench: Any) -> None:
    ours, theirs = report(bench), report(bench, wall_s=2.0, peak_rss_mib=60.0)
    assert bench.findings(ours) == bench.findings({**theirs, "created": "then"})


def test_what_was_simulated_counts(bench: Any) -> None:
    assert bench.findings(report(bench)) != bench.findings(report(bench, hit_rate=0.5 + 1e-16 * 2))
    assert bench.findings(report(bench)) != bench.findings({**report(bench), "workload": {"turns": 1}})
