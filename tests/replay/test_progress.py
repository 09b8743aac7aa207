"""The lines on the terminal while a replay runs."""

from __future__ import annotations

import io

from rich.console import Console

from pensieve.core import Usage
from pensieve.replay.command import LiveProgress
from pensieve.replay.load.schedule import Arrivals
from pensieve.replay.load.workload import Conversation, Dataset, Shaping, TurnLengths
from pensieve.replay.records import RunOptions, TurnRecord
from pensieve.replay.session import ReplayPlan, run
from pensieve.replay.targets.base import OnTokens, TargetInfo, TurnRequest


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def turn(tokens: int, error: str = "") -> TurnRecord:
    return TurnRecord(0, 0, 1, 0.0, 0.5, arrivals=[(tokens, 1.0)], error=error)


def shown(live: LiveProgress, clock: Clock) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(live.progress)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def live_progress(clock: Clock, *, terminal: bool = True) -> LiveProgress:
    return LiveProgress(
        Console(file=io.StringIO(), force_terminal=terminal, width=140, color_system=None), clock=clock
    )


def test_turns_tokens_per_second_and_errors() -> None:
    clock = Clock()
    live = live_progress(clock)
    each = live.run("[b]here[/b]", 4)
    clock.now = 2.0
    each.on_turn_end(turn(30))
    each.on_turn_end(turn(10, "UNAVAILABLE"))
    text = shown(live, clock)
    assert "[b]here[/b]" in text and "2/4" in text
    assert "20 tok/s" in text and "1 errors" in text
    clock.now = 60.0
    each.on_turn_end(turn(50))
    assert " 5 tok/s" in shown(live, clock), "of the last ten seconds"


def test_each_run_has_a_line_of_its_own() -> None:
    clock = Clock()
    live = live_progress(clock)
    live.run("same", 2).on_turn_end(turn(1))
    live.run("same", 3)
    text = shown(live, clock)
    assert "1/2" in text and "0/3" in text


def test_a_server_that_starts_is_shown_until_it_is_up() -> None:
    clock = Clock()
    live = live_progress(clock)
    with live.starting("vllm"):
        assert "vllm is starting" in shown(live, clock) and "0:00:0" in shown(live, clock)
    assert "vllm" not in shown(live, clock)


def test_silent_where_no_terminal_is() -> None:
    live = live_progress(Clock(), terminal=False)
    with live:
        live.run("x", 1).on_turn_end(turn(1))
    file = live.progress.console.file
    assert isinstance(file, io.StringIO) and file.getvalue().strip() == ""


def test_what_is_sent_and_has_not_ended_is_running() -> None:
    clock = Clock()
    live = live_progress(clock)
    line = live.run("x", 3)
    line.on_send()
    line.on_send()
    assert "2 running" in shown(live, clock)
    line.on_turn_end(turn(1))
    assert "1 running" in shown(live, clock)
    line.on_turn_end(TurnRecord(1, 0, 1, 0.0, error="UNAVAILABLE"))
    assert "1 running" in shown(live, clock), "a conversation that could not be opened sent no turn"
    line.on_turn_end(turn(1))
    assert "0 running" in shown(live, clock) and "3/3" in shown(live, clock)


class Silent:
    """Answers at once, without tokens."""

    name = "silent"

    async def open(self) -> TargetInfo:
        return TargetInfo(50, 100)

    async def start_session(self) -> str:
        return "s"

    async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
        return None

    async def end_session(self, session: str) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_a_replay_tells_of_its_sends() -> None:
    live = live_progress(Clock())
    talks = (
        Conversation("a", (TurnLengths(2, 1), TurnLengths(2, 1))),
        Conversation("b", (TurnLengths(2, 1),)),
    )
    plan = ReplayPlan(Dataset("d", talks, "0"), Shaping(), Arrivals(), RunOptions(force_lengths=False))
    await run(plan, [Silent()], live)
    text = shown(live, Clock())
    assert "3/3" in text and "0 running" in text
