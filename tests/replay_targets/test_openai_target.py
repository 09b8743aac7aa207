"""Servers with the OpenAI protocol as targets: what the tool sends them, and what it makes of their answers."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from pensieve.replay.command import replay
from pensieve.replay.targets.base import TurnFailed, TurnRequest
from pensieve.replay.targets.openai_target import OpenAITarget
from support.engine.checkpoints import tiny_checkpoint
from support.engine.hf_oracle import HfOracle
from support.replay import openai_stub
from support.replay.openai_stub import Counting, Model, Stub

ROOM = ("--vocab-size", "90", "--context-limit", "200")


@pytest.fixture
def stub(request: pytest.FixtureRequest) -> Iterator[Stub]:
    server = Stub(Counting(), **getattr(request, "param", {}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    rows = [
        {"session_id": s, "turn": t, "input_tokens": 5, "output_tokens": 3} for s in "ab" for t in range(3)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(replay, ["--max-lag", "60", *arguments])


def spec(tokens: int = 4, output: int = 3, first: int = 10) -> TurnRequest:
    return TurnRequest(np.arange(first, first + tokens, dtype=np.int32), output, True)


async def test_the_whole_history_goes_out_as_token_ids(stub: Stub) -> None:
    target = OpenAITarget(stub.url)
    info = await target.open()
    assert info.context_limit == 512 and info.vocab_size == 0 and info.forces_lengths
    assert info.details["answers"] == info.details["prompt"] == "token ids"
    assert info.details["version"] == "1.2"
    stub.prompts.clear()
    session, came = await target.start_session(), []
    await target.turn(session, spec(), lambda count, at: came.append(count))
    usage = await target.turn(session, spec(2, 1, 30), lambda count, at: came.append(count))
    await target.close()
    assert stub.prompts == [[10, 11, 12, 13], [10, 11, 12, 13, 7, 8, 9, 30, 31]]
    assert came == [1, 1, 1, 1]
    assert usage is not None and usage.reconciles
    assert (usage.context_tokens, usage.recomputed_tokens, usage.new_tokens) == (9, 7, 2)


@pytest.mark.parametrize("stub", [{"strict": True}], indirect=True)
async def test_a_server_without_extensions(stub: Stub) -> None:
    target = OpenAITarget(stub.url)
    info = await target.open()
    assert not info.forces_lengths and info.details["answers"] == "drawn" and info.context_limit == 0
    assert "version" not in info.details
    stub.prompts.clear()
    session = await target.start_session()
    await target.turn(session, spec(4, 2), lambda count, at: None)
    await target.turn(session, spec(1, 1), lambda count, at: None)
    assert [len(prompt) for prompt in stub.prompts] == [4, 7]
    assert await target.evict() == "other token ids"
    await target.close()


@pytest.mark.parametrize("stub", [{"chat_only": True}], indirect=True)
async def test_a_server_that_only_chats(stub: Stub) -> None:
    target = OpenAITarget(stub.url)
    assert (await target.open()).details["api"] == "chat"
    stub.prompts.clear()
    session = await target.start_session()
    for first in (10, 20):
        await target.turn(session, spec(2, 2, first), lambda count, at: None)
    await target.close()
    roles = [message["role"] for message in stub.prompts[1]]
    assert roles == ["user", "assistant", "user"]
    assert stub.prompts[1][1]["content"] == "<7><8>"
    assert stub.prompts[1][0]["content"] != stub.prompts[1][2]["content"]


class Endless(Counting):
    """Never comes to an end; ``hung_up`` when nobody reads on."""

    def __init__(self) -> None:
        self.hung_up = threading.Event()

    def answer(self, prompt: list[int], limit: int, **more: object) -> Iterator[int]:
        try:
            while True:
                time.sleep(0.01)
                yield 7
        finally:
            self.hung_up.set()


async def test_a_turn_that_is_given_up_is_given_up_at_the_server(stub: Stub) -> None:
    """Otherwise the next run would meet the load of this one."""
    target = OpenAITarget(stub.url)
    await target.open()
    stub.model, asked = Endless(), len(stub.prompts)
    turn = asyncio.create_task(target.turn(await target.start_session(), spec(), lambda count, at: None))
    while len(stub.prompts) == asked:
        await asyncio.sleep(0.01)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert await asyncio.to_thread(stub.model.hung_up.wait, 30)
    await target.close()


async def test_nobody_there() -> None:
    target = OpenAITarget("http://127.0.0.1:1")
    with pytest.raises(TurnFailed, match="UNAVAILABLE"):
        await target.open()
    await target.close()


def test_answers_are_those_of_generate(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    prompt = list(range(5, 25))
    assert list(Model(folder).answer(prompt, 12)) == HfOracle(folder).generate(prompt, 12)


def test_a_sweep_over_rates_and_seeds(stub: Stub, dataset: str, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    result = invoke(dataset, "--target", stub.url, "--name", "Stub", "--rates", "300,600", "--seeds", "1,2", *ROOM,
                    "--json", str(out))  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["valid"] and report["unreached"] == []
    assert [(run["rate"], run["seed"]) for run in report["runs"]] == [(300, 1), (300, 2), (600, 1), (600, 2)]
    assert [(t["run"], t["rate"], t["seed"], t["target"]) for t in report["targets"]] == [
        (0, 300, 1, "Stub"), (1, 300, 2, "Stub"), (2, 600, 1, "Stub"), (3, 600, 2, "Stub"),
    ]  # fmt: skip
    assert [entry["rate"] for entry in report["intervals"]] == [300, 600]
    for summary in report["targets"]:
        assert summary["turns"]["completed"] == 6 and summary["receipts"]["checked"] == 6
        assert summary["tokens"]["recomputed"] == 2 * (8 + 16) and summary["tokens"]["output"] == 18
        assert summary["client"]["loop_lag_s"]["count"] > 0
    assert stub.resets == 3, "the prefix cache is emptied between runs"
    first_turns = {tuple(prompt) for prompt in stub.prompts if len(prompt) == 5}
    assert len(first_turns) == 2 * 4, "no run sends what an earlier one sent"


def test_closed_loop(stub: Stub, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    result = invoke("ultrachat", "--conversations", "6", "--scale-lengths", "0.05", "--clients", "2", "--target",
                    stub.url, *ROOM, "--json", str(out))  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["runs"][0]["clients"] == 2 and report["options"]["arrivals"]["rate"] is None
    (summary,) = report["targets"]
    assert summary["clients"] == 2 and 0 < summary["running_turns"]["max"] <= 2.001


def test_errors_of_a_server_are_recorded(stub: Stub, dataset: str, tmp_path: Path) -> None:
    stub.break_after = 4
    out = tmp_path / "r.json"
    result = invoke(dataset, "--target", stub.url, *ROOM, "--json", str(out))
    assert result.exit_code == 1
    (summary,) = json.loads(out.read_text())["targets"]
    assert set(summary["errors"]) == {"HTTP_500"} and summary["turns"]["completed"] == 3


def test_one_target_of_two_is_not_there(stub: Stub, dataset: str, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    result = invoke(
        dataset, "--target", "http://127.0.0.1:1", "--target", stub.url, *ROOM, "--json", str(out)
    )
    assert result.exit_code == 1 and "cannot be reached" in result.output
    report = json.loads(out.read_text())
    assert [entry["target"] for entry in report["unreached"]] == ["http://127.0.0.1:1"]
    assert report["targets"][0]["turns"]["completed"] == 6


def test_a_late_client_reports_nothing(stub: Stub, dataset: str, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    arguments = [dataset, "--target", stub.url, *ROOM, "--json", str(out), "--max-lag", "1e-9"]
    result = CliRunner().invoke(replay, arguments)
    assert result.exit_code == 1
    assert "the client was too late" in result.output and "turns/s" not in result.output
    assert "fewer --conversations" in result.output, "what to do about it"
    report = json.loads(out.read_text())
    assert not report["valid"] and report["invalid_reasons"] and not report["targets"][0]["valid"]


def test_unknown_sizes_must_be_given(stub: Stub, dataset: str) -> None:
    result = invoke(dataset, "--target", stub.url)
    assert result.exit_code == 1 and "--vocab-size" in result.output


def test_a_target_is_started_and_stopped(dataset: str, tmp_path: Path) -> None:
    port = free_port()
    command = f"http://127.0.0.1:{port} {sys.executable} {openai_stub.__file__} --port {port}"
    out = tmp_path / "r.json"
    result = invoke(dataset, "--start", command, "--name", "stub", *ROOM, "--json", str(out))
    assert result.exit_code == 0, result.output
    (summary,) = json.loads(out.read_text())["targets"]
    assert summary["target"] == "stub" and "openai_stub" in summary["details"]["started"]
    assert invoke(dataset, "--target", f"http://127.0.0.1:{port}", *ROOM).exit_code == 1, "it is gone"


@pytest.mark.parametrize("command", ["nowhere-to-be-found", f"{sys.executable} -c 'print(42)'"])
def test_a_target_that_does_not_start(dataset: str, command: str) -> None:
    result = invoke(dataset, "--start", command, *ROOM)
    assert result.exit_code == 1 and "NOT_STARTED" in result.output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
