"""Servers that the tool starts: how they come up, and what is said of those that do not or that die at work."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pensieve.replay.command import replay
from pensieve.replay.load.schedule import Arrivals
from pensieve.replay.load.workload import Conversation, Dataset, Shaping, TurnLengths
from pensieve.replay.play.runner import ReplayWatcher
from pensieve.replay.records import RunOptions
from pensieve.replay.session import ReplayPlan, run
from pensieve.replay.targets.base import Target, TurnFailed
from pensieve.replay.targets.options import parse_start
from support.processes import alive, until
from support.service.paced_server import PacedConversations, in_thread
from support.store.redis_server import free_port

PLAN = ReplayPlan(
    Dataset("d", (Conversation("a", (TurnLengths(2, 1),)),), "0"), Shaping(), Arrivals(), RunOptions()
)


def started(command: str, timeout_s: float = 30.0) -> Target:
    return parse_start(command, None, name="it", timeout_s=timeout_s)


async def failure(command: str, timeout_s: float = 30.0) -> str:
    """What is said of a server that does not come up."""
    with pytest.raises(TurnFailed, match="NOT_STARTED") as caught:
        await started(command, timeout_s).open()
    return str(caught.value)


async def test_assignments_go_before_the_command() -> None:
    said = await failure("A='1 2' B=$A sh -c 'echo A=[$A] B=[$B]; exit 3'")
    assert "ended with status 3" in said and "A=[1 2] B=[$A]" in said, "nothing is expanded: this is no shell"


async def test_an_address_in_an_assignment_is_not_the_servers() -> None:
    said = await failure("ORIGIN=http://127.0.0.1:1 sh -c 'echo from $ORIGIN; exit 3'")
    assert "from http://127.0.0.1:1" in said


async def test_an_address_before_assignments() -> None:
    target = started("http://127.0.0.1:1 NAME=x sh -c 'echo I am $NAME; sleep 60'", 1.0)
    with pytest.raises(TurnFailed, match=r"(?s)not up within 1 s.*I am x"):
        await target.open()


@pytest.mark.parametrize("value", ["http://x COMMAND", "http://127.0.0.1:80 ", " "])
def test_what_is_no_command(value: str) -> None:
    with pytest.raises(click.BadParameter):
        started(value)


async def test_the_last_words_are_heard_when_a_child_lives_on() -> None:
    """The child keeps the pipe open; it goes with its process group."""
    said = await failure("sh -c 'sleep 1000 & echo no memory left >&2; exit 9'")
    assert "status 9" in said and "no memory left" in said


def test_it_ends_with_the_tool_however_that_ends(tmp_path: Path) -> None:
    """Kill -9: nobody is left to stop the server."""
    noted = tmp_path / "pid"
    tool = (
        "import asyncio, sys; from pensieve.replay.targets.options import parse_start; "
        "asyncio.run(parse_start(sys.argv[1], None, name='it', timeout_s=60).open())"
    )
    command = f"NAME={noted} sh -c 'echo $$ > $NAME.new; mv $NAME.new $NAME; exec sleep 1000'"
    with subprocess.Popen([sys.executable, "-P", "-c", tool, command]) as process:
        try:
            until(noted.exists, "not started")
            server = int(noted.read_text())
            assert alive(server)
        finally:
            process.kill()
        process.wait()
        until(lambda: not alive(server), "the server is left")


class Server:
    """A program that stands before the service of a test: it prints the ready line, then does what it is told."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder, self._address = folder, address

    def command(self, name: str, *lines: str) -> str:
        program = self._folder / f"{name}.py"
        ready = f"print('ready grpc={self._address} admin=127.0.0.1:1', flush=True)"
        head = ("import pathlib, sys, time", "print('warming up')")
        program.write_text("\n".join((*head, *lines[:-1], ready, *lines[-1:])))
        return shlex.join((sys.executable, str(program)))

    def dying(self, name: str) -> str:
        """Ends as soon as it is killed by ``die``."""
        wait = f"while not pathlib.Path({str(self._folder / 'die')!r}).exists(): time.sleep(0.01)"
        return self.command(name, f"{wait}\nprint('CUDA error: gone'); sys.exit(7)")

    def die(self) -> None:
        (self._folder / "die").touch()


class DyingAt(PacedConversations):
    """Its server dies as turn number ``at`` comes, which is never answered."""

    at = 0
    server: Server

    async def _answer(self, request: Any) -> Any:
        if self.count("sent") == self.at:
            self.server.die()
            await asyncio.sleep(600)
        async for response in super()._answer(request):
            yield response


@pytest.fixture
def service() -> DyingAt:
    return DyingAt()


@pytest.fixture
def server(service: DyingAt, tmp_path: Path) -> Iterator[Server]:
    with in_thread(service) as address:
        service.server = Server(tmp_path, address)
        yield service.server


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows = [{"session_id": "a", "turn": t, "input_tokens": 2, "output_tokens": 2} for t in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def replayed(dataset: str, tmp_path: Path, *arguments: str) -> tuple[Result, dict[str, Any]]:
    out = tmp_path / "r.json"
    sizes = ("--vocab-size", "100", "--context-limit", "512", "--max-lag", "60")
    result = CliRunner().invoke(replay, [dataset, *sizes, *arguments, "--json", str(out)])
    return result, json.loads(out.read_text())


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_server_that_dies_at_work_is_recorded_and_the_others_go_on(
    service: DyingAt, server: Server, dataset: str, tmp_path: Path, processes: str
) -> None:
    service.at = 2
    living = server.command("living", "time.sleep(600)")
    result, report = replayed(dataset, tmp_path, "--start", server.dying("dying"), "--start", living,
                              "--name", "dying", "--name", "living", "--processes", processes)  # fmt: skip
    assert result.exit_code == 1
    (lost,) = report["unreached"]
    assert (lost["target"], lost["run"]) == ("dying", 0)
    assert "DIED" in lost["error"] and "ended with status 7" in lost["error"]
    assert lost["error"].splitlines()[-1] == "CUDA error: gone"
    assert "replay: dying was lost in run 0" in result.output and "CUDA error: gone" in result.output
    (summary,) = report["targets"]
    assert summary["target"] == "living" and summary["turns"] == {"completed": 3, "failed": 0, "skipped": 0}


def test_runs_before_the_one_it_died_in_count(
    service: DyingAt, server: Server, dataset: str, tmp_path: Path
) -> None:
    service.at = 5
    result, report = replayed(dataset, tmp_path, "--start", server.dying("dying"), "--seeds", "1,2,3")
    assert result.exit_code == 1
    assert [(entry["run"], entry["seed"]) for entry in report["targets"]] == [(0, 1)]
    assert [entry["run"] for entry in report["unreached"]] == [1]


def test_a_report_is_written_when_the_only_server_died(
    service: DyingAt, server: Server, dataset: str, tmp_path: Path
) -> None:
    service.at = 1
    result, report = replayed(dataset, tmp_path, "--start", server.dying("dying"))
    assert result.exit_code == 1 and report["targets"] == [] and len(report["unreached"]) == 1


def test_the_log_is_kept_when_turns_fail(
    service: DyingAt, server: Server, dataset: str, tmp_path: Path
) -> None:
    service.refuse = True
    command = server.command("full", "print('a short queue')", "time.sleep(600)")
    result, report = replayed(dataset, tmp_path, "--start", command)
    assert result.exit_code == 1 and report["unreached"] == []
    (summary,) = report["targets"]
    assert summary["errors"] == {"RESOURCE_EXHAUSTED": 1}
    assert summary["server_log"][:2] == ["warming up", "a short queue"]


async def test_a_line_of_any_length_does_not_stop_the_reading(server: Server) -> None:
    target = started(server.command("verbose", "print('x' * 500_000)", "time.sleep(600)"))
    assert (await target.open()).vocab_size == 100
    await target.close()


async def test_the_start_is_watched(service: DyingAt, server: Server) -> None:
    class Starts(ReplayWatcher):
        def __init__(self) -> None:
            self.names: list[str] = []

        def starting(self, target: str) -> AbstractContextManager[None]:
            self.names.append(target)
            return nullcontext()

    watcher = Starts()
    target = started(server.command("living", "time.sleep(600)"))
    await run(PLAN, [target], watcher)
    assert watcher.names == ["it"]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_sigterm_stops_the_server_too() -> None:
    """One that listens, but is never ready: the replay is still waiting for it."""
    port = free_port()
    server = f"{shlex.quote(sys.executable)} -m http.server {port} --bind 127.0.0.1"
    command = [sys.executable, "-P", "-m", "pensieve", "replay", "sharegpt", "--conversations", "1"]
    program = subprocess.Popen(
        [*command, "--start", f"http://127.0.0.1:{port} {server}"], stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: listens(port), "the server did not start")
        program.terminate()
        assert program.wait(30) == 128 + signal.SIGTERM
    finally:
        program.kill()
    until(lambda: not listens(port), "the server outlived the replay")
