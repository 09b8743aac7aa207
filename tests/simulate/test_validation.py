"""``pensieve simulate`` against a server: the same recorded turns, the same counts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from support.benches import load_bench

SECONDS = 36.0
TTFT_FACTOR = 2.5
"""Either way. Wider than the benchmark's limit: this server shares its cores with its client and with whatever else is
tested, and what that adds to a first token is not the same from one second to the next."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_bench("validate_simulation", monkeypatch)


def talks(session: Any, turn: Any) -> list[Any]:
    """Sessions that come back after a second, and sessions that take five: who is evicted is beyond doubt."""
    rng = random.Random(5)
    found = []
    for number in range(24):
        turns, shortest, longest = (14, 1.2, 1.6) if number % 5 < 2 else (5, 6.0, 7.0)
        pauses = [0.0, *(rng.uniform(shortest, longest) for _ in range(turns - 1))]
        lengths = [turn(rng.randrange(28, 52), rng.randrange(3, 6), pause) for pause in pauses]
        found.append(session(number, 0.25 * number, tuple(lengths)))
    return found


@pytest.mark.timeout(240)
def test_counts_of_a_server(bench: Any, tmp_path: Path) -> None:
    from serving_load import Session, Turn  # type: ignore[import-not-found]  # bench/ is on the path now
    from serving_run import Protocol  # type: ignore[import-not-found]

    files = bench.Files(tmp_path, "cpu")
    worker = ("--device", "cpu", "--threads", "1")
    bench.profile(files, "demo", [*worker, "--longest", "256", "--repeats", "1"])
    tiers = ("--device-cache", "2560tokens", "--host-cache", "2560tokens")
    bench.serve_load(files, "demo", [*worker, *tiers], talks(Session, Turn), Protocol(SECONDS, SECONDS, 1))
    report = bench.compare(files, rescale=True)
    server = report["server"]
    assert server["turns"] > 200
    assert min(server[name] for name in bench.SOURCES) > 0.05 * server["context"], f"no pressure: {server}"
    for engine in bench.ENGINES:
        assert report[engine]["turns"] == server["turns"] and report[engine]["context"] == server["context"]
        found = report["errors"][engine]
        assert all(abs(found[name]) <= bench.TOKENS_LIMIT for name in bench.SOURCES), report
        assert 1 / TTFT_FACTOR <= 1 + found["ttft_s"] <= TTFT_FACTOR, report
