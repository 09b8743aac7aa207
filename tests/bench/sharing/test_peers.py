"""Loads with common beginnings, on a client that only counts; the stream of an OpenAI answer; the report."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.replay.benches import load_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_bench("sharing/peers", monkeypatch)


@pytest.fixture
def clients(bench: Any) -> Any:
    from sharing import clients

    return clients


class CountingClient:
    """Answers at once, and keeps what it was asked."""

    def __init__(self, clients: Any, refuses: str = "") -> None:
        self.clients, self.refuses = clients, refuses
        self.begun: list[list[int]] = []
        self.unshared = self.forked = self.forgotten = 0
        self.draws: list[Any] = []

    async def open(self) -> None: ...

    async def begin(self, history: Sequence[int], *, shared: bool = True) -> Any:
        self.begun.append(list(history))
        self.unshared += not shared
        return self.clients.Context(ids=list(history))

    async def fork(self, context: Any) -> Any:
        self.forked += 1
        return self.clients.Context(ids=list(context.ids))

    async def turn(self, context: Any, new: Sequence[int], draw: Any, *, goes_on: bool = False) -> Any:
        if self.refuses:
            raise self.clients.Refused(self.refuses)
        self.draws.append(draw)
        await asyncio.sleep(0.001)
        at = time.perf_counter()
        return self.clients.Answer(at, at, draw.tokens * draw.count, len(context.ids))

    async def forget(self, contexts: Sequence[Any]) -> None:
        self.forgotten += len(contexts)

    def used_tokens(self) -> float:
        return 7.0

    async def close(self) -> None: ...


def played(bench: Any, clients: Any, load: str, client: CountingClient | None = None) -> tuple[Any, Any]:
    client = client or CountingClient(clients)
    trial = bench.Trial(client, bench.loads.SMALL, random.Random(1))
    asyncio.run(bench.LOADS[load](trial))
    return client, trial.row()


@pytest.mark.parametrize(
    ("load", "turns"),
    [
        ("prompt, cold", 6),
        ("prompt, warm", 6),
        ("prompt, stream", 6),
        ("agents", 6),
        ("candidates, seeded", 3),
    ],
)
def test_loads(bench: Any, clients: Any, load: str, turns: int) -> None:
    client, row = played(bench, clients, load)
    assert (row["turns"], row["failed"]) == (turns, 0)
    assert row["first_token_s"]["p50"] > 0 and row["turns_per_s"] > 0 and row["kv_peak_tokens"] == 7
    if load.startswith("prompt"):
        assert len({tuple(history) for history in client.begun}) == 1
        assert len(client.begun) == 6 + (load != "prompt, cold")
    if load == "agents":
        assert (len(client.begun), client.forked) == (2, 6)
    if load.startswith("candidates"):
        drawn = [draw for draw in client.draws if draw.count > 1]
        assert [draw.seed for draw in drawn] == [0, 1000, 2000] and all(
            draw.temperature == 1 for draw in drawn
        )
        assert row["output_tokens_per_s"] * row["wall_s"] == pytest.approx(3 * 2 * 6)


def test_sharing_off(bench: Any, clients: Any) -> None:
    assert played(bench, clients, "prompt, cold, sharing off")[0].unshared == 6


def test_turns_that_fail_are_counted(bench: Any, clients: Any) -> None:
    row = played(bench, clients, "prompt, cold", CountingClient(clients, "no"))[1]
    assert (row["turns"], row["failed"], row["first_token_s"]) == (0, 6, None)


def test_both_systems_get_the_same_tokens(bench: Any, clients: Any) -> None:
    one, other = (played(bench, clients, "agents")[0] for _ in range(2))
    assert one.begun == other.begun


def test_a_stream_of_several_answers(clients: Any) -> None:
    events = [
        {"choices": [{"index": 1, "text": ""}]},
        {"choices": [{"index": 1, "text": "a"}]},
        {"choices": [{"index": 0, "text": "b"}]},
        {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}},
    ]
    data = (
        b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    )
    seen = clients.Stream(2, whole=False)
    for at in range(0, len(data), 5):
        seen.feed(data[at : at + 5], float(at))
    assert seen.first[1] < seen.first[0]
    assert seen.usage()["completion_tokens"] == 3


def test_an_error_in_a_stream(clients: Any) -> None:
    with pytest.raises(clients.Refused, match="broken"):
        clients.Stream(1, whole=False).feed(b'data: {"error": {"message": "broken"}}\n\n', 1.0)


def test_the_report(bench: Any, clients: Any, tmp_path: Path) -> None:
    row = {**played(bench, clients, "agents")[1], "error": ""}
    lives = [
        {"system": name, "round": 1, "loads": {"agents": row}, "start_s": 3.0, "error": ""}
        for name in ("Pensieve", "vLLM")
    ]
    report = {"command": "x", "device": "", "commit": "", "model": "m", "sizes": {}, "lives": lives}
    lines = bench.as_markdown(report).splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert any(line.startswith("* agents, Pensieve ÷ vLLM: turns/s 1.00, first p50 1.00") for line in lines)


def test_a_server_that_does_not_start_is_in_the_report(bench: Any, tmp_path: Path) -> None:
    system = bench.System("vLLM", ("false",), 1.0, "http://127.0.0.1:{port}")
    run = bench.Run(tmp_path, bench.loads.SMALL, ["agents"], tmp_path, 64, time.monotonic() + 60)
    run.report = {"command": "x", "device": "", "commit": "", "model": "m", "sizes": {}, "lives": []}
    asyncio.run(bench.measure(run, [system], 1, tmp_path / "scratch"))
    assert "ended with status 1" in run.report["lives"][0]["error"]
    assert "ended with status 1" in (tmp_path / "sharing_peers.md").read_text()
