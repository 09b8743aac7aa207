"""Clients that resend their history: the load on a stand-in that caches prefixes, the report, and the whole program."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from pensieve import demo
from support.replay.benches import BENCH, load_bench

MODEL = Path(demo.__file__).parent / "model"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_bench("http_door/peers", monkeypatch)


@pytest.fixture
def stand_in(bench: Any) -> Iterator[str]:
    """Its address."""
    from stand_ins.chat_server import ChatStandIn

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(ChatStandIn(MODEL).app(), log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def played(bench: Any, url: str, load: str, answer: int = 8) -> dict[str, Any]:
    words, sizes = bench.Words.of(MODEL), dataclasses.replace(bench.SMALL, answer=answer)
    trial = bench.ChatTrial(url, words, sizes, bench.LOADS[load](words), random.Random(1))
    asyncio.run(trial.play())
    return {**trial.row(), "error": ""}


def test_answers_that_read_back_the_same_are_found_again(bench: Any, stand_in: str) -> None:
    """All that was said before is known, but for a part of a block."""
    row = played(bench, stand_in, "answers read back the same")
    assert (row["turns"], row["later_turns"], row["failed"]) == (12, 8, 0), row["failures"]
    assert row["other_tokens_share"] == 0
    assert (
        row["computed_tokens_mean"] < 20 + 4 + 16
    )  # the longest turn, the template's marks, a part of a block
    assert row["first_token_s"]["p50"] > 0 and row["output_tokens"] == 12 * 8


def test_answers_that_read_back_otherwise_are_not(bench: Any, stand_in: str) -> None:
    same, other = (played(bench, stand_in, load, answer=60) for load in bench.LOADS)
    assert other["failed"] == 0 and other["other_tokens_share"] > 0
    # From where the two ways part, which is somewhere in the answer: computed anew is its rest.
    assert other["computed_tokens_mean"] > same["computed_tokens_mean"] + 60 / 4


def test_conversations_that_fail_are_counted_and_reported(bench: Any, stand_in: str) -> None:
    """A stand-in that has nothing to draw from breaks its stream off."""
    trial = bench.ChatTrial(stand_in, bench.Words.of(MODEL), bench.SMALL, (), random.Random(1))
    asyncio.run(trial.play())
    row = {**trial.row(), "error": ""}
    assert (row["turns"], row["failed"], row["first_token_s"]) == (0, 4, None)
    lives = [{"system": "vLLM", "start_s": 3.0, "error": "", "loads": {"warm up": row}}]
    report = {"command": "x", "device": "", "commit": "", "model": "m", "sizes": {}, "lives": lives}
    assert f"* vLLM, warm up: {row['failures'][0][:40]}" in bench.as_markdown(report)


def test_a_server_that_does_not_start_is_in_the_report(bench: Any, tmp_path: Path) -> None:
    system = bench.System("vLLM", ("false",), 1.0, "http://127.0.0.1:{port}")
    run = bench.DoorRun(
        tmp_path, bench.SMALL, bench.Words.of(MODEL), tmp_path, 64, time.monotonic() + 60,
        {"command": "x", "device": "", "commit": "", "model": "m", "sizes": {}, "lives": []},
    )  # fmt: skip
    asyncio.run(bench.measure(run, [system], tmp_path / "scratch"))
    assert run.failed and "ended with status 1" in run.report["lives"][0]["error"]
    assert "ended with status 1" in (tmp_path / "door_peers.md").read_text()


def test_the_whole_program_in_small(bench: Any, tmp_path: Path) -> None:
    """Real servers: behind the door all that was said stays cached, also where its text reads back otherwise."""
    command = [sys.executable, str(BENCH / "http_door" / "peers.py"), "--out", str(tmp_path), "--small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "door_peers.json").read_text())
    ours, other = report["lives"]
    assert (ours["system"], other["system"]) == ("Pensieve", "stand-in")
    for load in bench.LOADS:
        mine, theirs = ours["loads"][load], other["loads"][load]
        assert mine["turns"] == theirs["turns"] == 12
        # New are the longest turn, the template's marks, and of the answer the last token, whose KV nobody had.
        assert mine["computed_tokens_mean"] < 20 + 4 + 1
        assert mine["computed_tokens_mean"] < theirs["computed_tokens_mean"]
    assert ours["loads"]["answers read back otherwise"]["other_tokens_share"] > 0
    page = (tmp_path / "door_peers.md").read_text()
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1
