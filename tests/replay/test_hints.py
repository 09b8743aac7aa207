"""What a replay tells of the time after a turn, and that sessions are warmed in time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pensieve.core import Hints, Usage
from pensieve.replay.command import replay as command
from pensieve.replay.load.schedule import Arrivals, Due, Script, scripts
from pensieve.replay.load.workload import Conversation, TurnLengths
from pensieve.replay.play.runner import hint_of, replay
from pensieve.replay.records import Outcome, RunOptions
from pensieve.replay.targets.base import OnTokens, TargetInfo, TurnFailed, TurnRequest
from pensieve.v1 import pensieve_pb2 as pb
from support.service.paced_server import PacedConversations, in_thread

INFO = TargetInfo(vocab_size=50, context_limit=1000, takes_hints=True)
TALK = Conversation("a", (TurnLengths(4, 3), TurnLengths(2, 5), TurnLengths(1, 1)))


class Told:
    """A target that notes what it is told, and when (seconds)."""

    name = "told"

    def __init__(self) -> None:
        self.hints: list[Hints | None] = []
        self.turns: list[float] = []
        self.warmed: list[float] = []
        self.answers = iter(["accepted", "no_room"])

    async def open(self) -> TargetInfo:
        return INFO

    async def start_session(self) -> str:
        return "s"

    async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
        self.hints.append(spec.hints)
        self.turns.append(time.perf_counter())
        on_tokens(spec.output_tokens, time.perf_counter())
        return None

    async def warm(self, session: str) -> str:
        self.warmed.append(time.perf_counter())
        answer = next(self.answers, None)
        if answer is None:
            raise TurnFailed("UNAVAILABLE", "down")
        return answer

    async def end_session(self, session: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is open."""


async def play(target: Told, pauses: tuple[float, ...], **options: Any) -> Outcome:
    turns = Conversation("a", (TurnLengths(1, 1),) * len(pauses))
    script = Script(0, turns, tuple(Due(0.0, pause) for pause in pauses))
    return await replay(target, INFO, [script], RunOptions(**options))


async def test_without_the_option_nothing_is_told() -> None:
    target = Told()
    await play(target, (0.0, 0.01, 0.01))
    assert target.hints == [None] * 3 and not target.warmed


async def test_the_pause_that_comes_is_told_and_the_last_turn_says_so() -> None:
    target = Told()
    await play(target, (0.0, 0.02, 0.05), hints=0.0)
    assert target.hints == [Hints(next_turn_s=0.02), Hints(next_turn_s=0.05), Hints(finished=True)]
    assert target.turns[1] - target.turns[0] >= 0.02


def test_recorded_times_are_counted_from_the_turn() -> None:
    script = Script(0, TALK, (Due(1.0, 0.0), Due(4.0, 0.0), Due(4.5, 0.0)))
    assert hint_of(script, 0, 1.25, noise=0.0, seed=0) == Hints(next_turn_s=2.75)
    assert hint_of(script, 1, 9.0, noise=0.0, seed=0) == Hints(next_turn_s=0.0), "it is late already"


def test_errors_are_lognormal_and_the_same_each_time() -> None:
    talks = [Conversation(str(n), TALK.turns) for n in range(2000)]
    drawn = scripts(talks, Arrivals(think_time_s=10.0, seed=5))

    def factors(noise: float, seed: int = 0) -> list[float]:
        told = [hint_of(script, 0, 0.0, noise=noise, seed=seed).next_turn_s or 0.0 for script in drawn]
        return [
            math.log(said / script.due[1].after_answer_s) for said, script in zip(told, drawn, strict=True)
        ]

    errors = factors(0.5)
    assert statistics.mean(errors) == pytest.approx(0.0, abs=0.05)
    assert statistics.stdev(errors) == pytest.approx(0.5, rel=0.1)
    assert factors(0.5) == errors != factors(0.5, seed=1)
    assert factors(1.0) == pytest.approx([2 * error for error in errors])


async def test_sessions_are_warmed_before_their_turns() -> None:
    target = Told()
    outcome = await play(target, (0.0, 0.3, 0.3, 0.0, 0.3), warm_ahead_s=0.1)
    assert outcome.warm_calls == {"accepted": 1, "no_room": 1, "UNAVAILABLE": 1}
    assert not outcome.records[-1].error, "a wish that fails costs no turn"
    for warmed, turn in zip(target.warmed, (target.turns[n] for n in (1, 2, 4)), strict=True):
        assert 0.05 < turn - warmed < 0.25
    assert target.hints == [None] * 5


async def test_no_turn_waits_for_its_warming() -> None:
    class Slow(Told):
        async def warm(self, session: str) -> str:
            self.warmed.append(time.perf_counter())
            await asyncio.sleep(60)
            return "accepted"

    target = Slow()
    began = time.perf_counter()
    outcome = await play(target, (0.0, 0.05), warm_ahead_s=10.0)
    assert len(outcome.records) == 2 and target.warmed and time.perf_counter() - began < 30
    assert outcome.warm_calls == {}, "what is not answered by the end does not count"


class Hinted(PacedConversations):
    """Notes the hints and wishes that come."""

    def __init__(self) -> None:
        super().__init__()
        self.hints: list[pb.TurnHints] = []

    async def StreamTurn(self, request: Any, context: Any) -> Any:
        self.hints.append(request.turn.hints)
        async for response in super().StreamTurn(request, context):
            yield response

    async def WarmSession(self, request: Any, context: Any) -> pb.WarmSessionResponse:
        self.log.append(("warmed", request.session))
        return pb.WarmSessionResponse(refused="nothing_to_do")


@pytest.fixture
def server() -> Iterator[tuple[Hinted, str]]:
    service = Hinted()
    with in_thread(service) as address:
        yield service, address


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    rows = [{"session_id": "a", "turn": t, "input_tokens": 5, "output_tokens": 3} for t in range(3)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments, "--max-lag", "60"])  # however busy the machine is


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_command(server: tuple[Hinted, str], dataset: str, tmp_path: Path, processes: str) -> None:
    service, address = server
    out = tmp_path / "r.json"
    result = invoke(
        *(dataset, "--target", f"pensieve://{address}", "--json", str(out), "--rate", "1000"),
        # With this seed both pauses are long enough for a busy machine: nobody warms for a turn that is due.
        *("--think-time", "0.5", "--seed", "3", "--hints", "0", "--warm-ahead", "30"),
        *("--processes", processes),
    )
    assert result.exit_code == 0, result.output
    first, second, last = service.hints
    assert 0 < first.next_turn_in.ToNanoseconds() != second.next_turn_in.ToNanoseconds() > 0
    assert last.session_finished and not last.HasField("next_turn_in") and not first.session_finished
    assert service.count("warmed") == 2
    report = json.loads(out.read_text())
    assert (report["options"]["run"]["hints"], report["options"]["run"]["warm_ahead_s"]) == (0.0, 30.0)
    assert report["targets"][0]["warm_calls"] == {"nothing_to_do": 2}


def test_other_targets_cannot_be_told(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def plain(_: object) -> TargetInfo:
        return dataclasses.replace(INFO, takes_hints=False)

    monkeypatch.setattr("pensieve.replay.targets.openai_target.OpenAITarget.open", plain)
    for option in ("--hints", "--warm-ahead"):
        result = invoke(dataset, "--target", "http://127.0.0.1:1", option, "0")
        assert result.exit_code == 1 and "http://127.0.0.1:1 takes no hints" in result.output
