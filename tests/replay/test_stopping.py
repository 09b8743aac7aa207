"""A replay that ends with its window: what is in flight is neither completed nor failed, and nothing is left over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from pensieve.core import Usage
from pensieve.replay.command import replay as command
from pensieve.replay.load.schedule import Due, Script
from pensieve.replay.load.workload import Conversation, TurnLengths
from pensieve.replay.measure import Window, active_sessions, client_lag, cut_to_window, is_clean, summarise
from pensieve.replay.play.runner import replay
from pensieve.replay.records import Outcome, RunOptions, TurnRecord
from pensieve.replay.targets.base import OnTokens, TargetInfo, TurnRequest
from support.service.paced_server import PacedConversations, in_thread

INFO = TargetInfo(50, 1000)
STOP_S = 0.6


class Hanging:
    """Answers a first turn at once, and later ones never. ``slow_opening``: a conversation takes longer to open than
    the replay lasts."""

    name = "hanging"

    def __init__(self, *, slow_opening: bool = False) -> None:
        self.slow_opening = slow_opening
        self.opened: list[str] = []
        self.turns: dict[str, int] = {}
        self.broken: list[str] = []
        self.ended: list[str] = []

    async def open(self) -> TargetInfo:
        return INFO

    async def start_session(self) -> str:
        if self.slow_opening:
            await asyncio.sleep(STOP_S + 0.2)
        self.opened.append(f"s{len(self.opened)}")
        return self.opened[-1]

    async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
        self.turns[session] = self.turns.get(session, 0) + 1
        on_tokens(1, time.perf_counter())
        if self.turns[session] > 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.broken.append(session)
                raise
        return None

    async def end_session(self, session: str) -> None:
        self.ended.append(session)

    async def close(self) -> None: ...


def script(number: int, *due: Due, turns: int = 3) -> Script:
    dues = due + (Due(0.0, 0.0),) * (turns - len(due))
    return Script(number, Conversation(str(number), (TurnLengths(2, 1),) * turns), dues)


LATER = Due(0.0, 1000.0)
SCRIPTS = (
    script(0),  # its second turn hangs
    script(1, Due(0.0, 0.0), LATER),  # in a pause when the replay stops
    script(2, Due(1000.0, 0.0)),  # never started
)


async def stopped(target: Hanging) -> Outcome:
    return await replay(target, INFO, SCRIPTS, RunOptions(stop_s=STOP_S))


async def test_what_is_in_flight_is_cut_short() -> None:
    target = Hanging()
    outcome = await stopped(target)
    assert [(r.conversation, r.turn, r.error) for r in outcome.records] == [(0, 0, ""), (1, 0, "")]
    flying, paused = sorted(outcome.cut_short, key=lambda record: record.conversation)
    assert (flying.conversation, flying.turn, flying.done_s) == (0, 1, STOP_S) and flying.sent_s
    assert (paused.conversation, paused.turn, paused.done_s) == (1, 1, STOP_S) and not paused.sent_s
    assert outcome.skipped_turns == 0 and outcome.duration_s >= STOP_S
    assert target.broken == ["s0"] and sorted(target.ended) == target.opened == ["s0", "s1"]


async def test_the_report_counts_neither_failures_nor_completions() -> None:
    outcome, window = cut_to_window(await stopped(Hanging()), Window(0.0, STOP_S))
    assert window["rule"] == "given" and window["cut_short"] == 1 and window["turns_outside"] == 0
    summary = summarise(outcome)
    assert summary["turns"] == {"completed": 2, "failed": 0, "skipped": 0} and is_clean(summary)


async def test_a_session_that_was_still_opening_is_deleted_too() -> None:
    target = Hanging(slow_opening=True)
    outcome = await stopped(target)
    assert not outcome.records and len(outcome.cut_short) == 2
    assert sorted(target.ended) == target.opened == ["s0", "s1"]


async def test_a_replay_that_ends_earlier_is_not_stopped() -> None:
    outcome = await replay(Hanging(), INFO, [script(0, turns=1)], RunOptions(stop_s=60.0))
    assert len(outcome.records) == 1 and not outcome.cut_short and outcome.duration_s < 60.0


def flow(stop: float) -> Outcome:
    """A steady flow, a turn each second of 4 s each, cut at ``stop``."""
    whole = [TurnRecord(n, 0, 1, float(n), n + 0.001, [(1, n + 1.0)], n + 4.0) for n in range(100)]
    ended = tuple(record for record in whole if record.done_s < stop)
    flying = [record for record in whole if record.sent_s < stop <= record.done_s]
    short = tuple(TurnRecord(r.conversation, 0, 1, r.due_s, r.sent_s, [], stop) for r in flying)
    return Outcome("t", INFO, ended, 0, stop, cut_short=short)


def test_a_steady_load_that_is_cut_is_steady() -> None:
    """Without the turns that were cut the load would seem to fall to nothing."""
    outcome, told = cut_to_window(flow(20.0), Window(10.0, 10.0))
    assert told["steady"] is True and told["cut_short"] == 4
    active = active_sessions(outcome.records, outcome.outside, outcome.window_s)
    assert active["mean"] == pytest.approx(4.0, abs=0.1)
    assert len(outcome.records) == 10


def test_sends_that_were_cut_short_count_for_the_clients_lag() -> None:
    late = TurnRecord(0, 0, 1, 1.0, 4.0, [], 5.0)
    assert not client_lag(Outcome("t", INFO, (), 0, 5.0, cut_short=(late,)), 0.25)["valid"]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_sweep_goes_on_after_a_stop(processes: str, tmp_path: Path) -> None:
    """Through the command: turns of minutes are cut, their sessions deleted before the next run, and all is well."""
    service = PacedConversations(token_s=60.0)
    trace, out = tmp_path / "trace.jsonl", tmp_path / "r.json"
    rows = [{"session_id": s, "turn": 0, "input_tokens": 2, "output_tokens": 9} for s in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with in_thread(service) as address:
        arguments = [str(trace), "--target", f"pensieve://{address}", "--rates", "0,1000", "--max-lag", "60",
                     "--warm-up", "0.1", "--window", "1.9", "--stop-after-window", "--processes", processes,
                     "--json", str(out)]  # fmt: skip
        result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    for summary in report["targets"]:
        assert summary["window"]["cut_short"] == 4 and summary["window"]["end_s"] == 2.0
        assert summary["turns"] == {"completed": 0, "failed": 0, "skipped": 0}
        assert summary["running_turns"]["max"] == pytest.approx(4.0), "until the stop"
    assert report["options"]["run"]["stop_s"] == 2.0
    kinds = [kind for kind, _ in service.log]
    assert kinds.count("deleted") == 8
    second = [index for index, kind in enumerate(kinds) if kind == "sent"][4:]
    assert kinds[: min(second)].count("deleted") == 4, "before the next run begins"
    assert service.count("broken") == 8 and not service.count("done")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_sweep_that_is_stopped_leaves_the_runs_it_has_done(
    number: int, status: int, tmp_path: Path
) -> None:
    service = PacedConversations(token_s=0.01)
    trace, out = tmp_path / "trace.jsonl", tmp_path / "r.json"
    rows = [{"session_id": "s", "turn": turn, "input_tokens": 2, "output_tokens": 2} for turn in range(40)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with in_thread(service) as address:
        arguments = ["--target", f"pensieve://{address}", "--rates", "1000,999", "--max-lag", "60", "--warm-up", "0.1",
                     "--window", "0.9", "--stop-after-window", "--json", str(out)]  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pensieve", "replay", str(trace), *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            deadline = time.monotonic() + 60
            while not out.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == status
    assert f"stopped: {out} has 1 of 2 runs" in errors and "Traceback" not in errors
    report = json.loads(out.read_text())
    assert [(summary["run"], summary["rate"]) for summary in report["targets"]] == [(0, 1000.0)]
    assert report["command"][:2] == ["pensieve", "replay"] and report["valid"]


def test_a_pipe_gets_one_report(tmp_path: Path) -> None:
    """``--json /dev/stdout | jq``: what is kept after each run is for a file that is written over."""
    service = PacedConversations(token_s=0.001)
    trace, pipe = tmp_path / "trace.jsonl", tmp_path / "pipe"
    trace.write_text(json.dumps({"session_id": "s", "turn": 0, "input_tokens": 2, "output_tokens": 2}) + "\n")
    os.mkfifo(pipe)
    with in_thread(service) as address:
        arguments = ["--target", f"pensieve://{address}", "--rates", "1000,999", "--max-lag", "60"]
        command = [
            sys.executable,
            "-P",
            "-m",
            "pensieve",
            "replay",
            str(trace),
            *arguments,
            "--json",
            str(pipe),
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            report = json.loads(pipe.read_text())
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
    assert [summary["run"] for summary in report["targets"]] == [0, 1]
