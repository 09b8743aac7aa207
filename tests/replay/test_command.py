"""``pensieve replay`` as a program, against a small server that speaks the protocol."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from pensieve.replay.command import replay
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as rpc
from support.service.paced_server import in_thread


class Servicer(rpc.ConversationServiceServicer):
    """Remembers lengths, says token 7, two at a time."""

    def __init__(self) -> None:
        self.contexts: dict[str, int] = {}
        self.specs: list[pb.TurnSpec] = []
        self.forget = False
        self.refuse = False

    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(version="0", model="tiny", vocab_size=100, context_limit=64)

    async def CreateSession(self, request: Any, context: Any) -> pb.CreateSessionResponse:
        name = f"sessions/{len(self.contexts)}"
        self.contexts[name] = 0
        return pb.CreateSessionResponse(session=pb.Session(name=name))

    async def DeleteSession(self, request: Any, context: Any) -> pb.DeleteSessionResponse:
        return pb.DeleteSessionResponse()

    async def StreamTurn(self, request: Any, context: Any) -> AsyncIterator[pb.StreamTurnResponse]:
        if self.refuse:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
        self.specs.append(request.turn)
        history, new = self.contexts[request.session], len(request.turn.input[0].tokens.ids)
        wanted = request.turn.sampling.max_output_tokens
        yield pb.StreamTurnResponse(accepted=pb.TurnAccepted())
        for offset in range(0, wanted, 2):
            delta = pb.TurnDelta(token_offset=offset, token_count=min(2, wanted - offset))
            yield pb.StreamTurnResponse(delta=delta)
        kept = 0 if self.forget else history
        usage = pb.Usage(
            context_tokens=kept + new, new_tokens=new, swapped_in_tokens=kept, output_tokens=wanted
        )
        usage.decode_time.FromMilliseconds(5)
        self.contexts[request.session] = history + new + wanted
        yield pb.StreamTurnResponse(completed=pb.Turn(state=pb.Turn.STATE_COMMITTED, usage=usage))


@pytest.fixture
def server() -> Iterator[tuple[Servicer, str]]:
    servicer = Servicer()
    with in_thread(servicer) as address:
        yield servicer, f"pensieve://{address}"


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    rows = [
        {"session_id": s, "turn": t, "input_tokens": 5, "output_tokens": 3}
        for s in ("a", "b")
        for t in range(10)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def invoke(*arguments: str) -> Result:
    if arguments[0] != "compare":
        arguments += "--max-lag", "60"  # however busy the machine is
    return CliRunner().invoke(replay, list(arguments))


def test_replay(server: tuple[Servicer, str], dataset: str, tmp_path: Path) -> None:
    servicer, target = server
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    result = invoke(dataset, "--target", target, "--json", str(out), "--html", str(page), "--rate", "1000")
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["schema"] == "pensieve.replay/1"
    assert report["workload"]["cut_conversations"] == 2
    assert report["workload"]["turns"] == 14, "seven turns of eight tokens stay below 64"
    tokens = report["targets"][0]["tokens"]
    assert tokens["swapped_in"] == 2 * 8 * sum(range(7))
    assert "turns/s" in result.output and "2 cut" in result.output
    assert "<html" in page.read_text()
    for spec in servicer.specs:
        assert spec.sampling.ignore_eos and spec.sampling.temperature == 0.0
        assert spec.sampling.min_output_tokens == spec.sampling.max_output_tokens == 3
        assert max(spec.input[0].tokens.ids) < 100


def test_options_reach_the_server(server: tuple[Servicer, str], dataset: str) -> None:
    servicer, target = server
    result = invoke(
        dataset, "--target", target, "--limit", "1", "--max-turns", "2", "--scale-lengths", "2",
        "--max-output-tokens", "4", "--no-force-lengths",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [len(spec.input[0].tokens.ids) for spec in servicer.specs] == [10, 10]
    assert [spec.sampling.max_output_tokens for spec in servicer.specs] == [4, 4]
    assert not servicer.specs[0].sampling.ignore_eos


def test_wrong_receipts_fail_the_command(server: tuple[Servicer, str], dataset: str) -> None:
    servicer, target = server
    servicer.forget = True
    result = invoke(dataset, "--target", target)
    assert result.exit_code == 1
    assert "the turn before had" in result.output


def test_failed_turns_fail_the_command(server: tuple[Servicer, str], dataset: str) -> None:
    servicer, target = server
    servicer.refuse = True
    result = invoke(dataset, "--target", target)
    assert result.exit_code == 1
    assert "RESOURCE_EXHAUSTED" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--target", "ftp://x:1"],
        ["--target", "pensieve://h:1", "--name", "a", "--name", "b"],
        ["--target", "pensieve://h:1", "--clients", "2", "--rate", "1"],
        ["--target", "pensieve://h:1", "--think-time", "1", "--think-per-token", "1"],
        ["--target", "pensieve://h:1", "--steady", "--window", "1"],
        ["--target", "pensieve://h:1", "--stop-after-window"],
        ["--target", "pensieve://h:1", "--stop-after-window", "--steady"],
        ["--target", "pensieve://h:1", "--processes", "3", "--clients", "2"],
        ["--target", "pensieve://h:1", "--processes", "3", "--concurrency", "2"],
        ["--target", "pensieve://h:1", "--conversations", "5"],
        ["--target", "pensieve://h:1", "--rates", "1,x"],
        ["--target", "pensieve://h:1", "--rates", "1,1"],
        ["--target", "pensieve://h:1", "--think-from", "TRACE"],
        ["--start", " "],
        ["--target", "localhost"],
        ["--target", "pensieve://h:1", "--time-scale", "2"],
        ["--target", "pensieve://h:1", "--limit", "0"],
    ],
)
def test_bad_options(dataset: str, arguments: list[str]) -> None:
    assert invoke(dataset, *arguments).exit_code == 2


def test_unreachable_target(dataset: str) -> None:
    result = invoke(dataset, "--target", "pensieve://127.0.0.1:1")
    assert result.exit_code == 1
    assert "cannot be reached" in result.output


def test_a_server_with_a_ready_line_is_started(
    server: tuple[Servicer, str], dataset: str, tmp_path: Path
) -> None:
    """The program that is started stands before the servicer of this test: only its ready line and its end count."""
    address = server[1].removeprefix("pensieve://")
    program = tmp_path / "program.py"
    steps = (
        "import pathlib, signal",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])",
        "print('warming up')",
        f"print('ready grpc={address} admin=127.0.0.1:1', flush=True)",
        "signal.sigwait([signal.SIGTERM])",
        f"pathlib.Path({str(tmp_path / 'stopped')!r}).touch()",
    )
    program.write_text("\n".join(steps))
    out = tmp_path / "r.json"
    result = invoke(
        dataset, "--start", f"{sys.executable} {program}", "--target", server[1], "--json", str(out)
    )
    assert result.exit_code == 0, result.output
    labels = [summary["target"] for summary in json.loads(out.read_text())["targets"]]
    assert labels == [server[1], f"{sys.executable} {program}"], "targets come before what is started"
    assert (tmp_path / "stopped").exists()


def test_compare_is_a_command_of_its_own(tmp_path: Path) -> None:
    assert "Usage: replay compare" in invoke("compare", "--help").output
    assert invoke("compare", str(tmp_path / "missing.json")).exit_code == 2
