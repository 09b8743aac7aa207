"""Servers that a program starts for itself never outlive the block that holds them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve import own_server, spawn
from pensieve.spawn import ServerProcess, SpawnError, serving, wait_addresses
from support.processes import children, until

DEMO = ("--model", "demo", "--store", "memory:")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import os; os.kill(os.getpid(), 9)", "it ended with signal 9$"),
        ("raise SystemExit(3)", "it ended with status 3$"),
        ("print('hello')", "it said 'hello'$"),
        ("import time; time.sleep(60)", r"it was not ready in 0\.5 s$"),
    ],
)
def test_why_a_server_did_not_start(program: str, why: str) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        with pytest.raises(SpawnError, match=why):
            wait_addresses(process, 0.5 if "sleep" in program else 30.0)
        process.kill()


def test_a_server_that_is_not_ready_yet_is_killed() -> None:
    with ServerProcess(*DEMO, wait=False) as server:
        assert server.running and not server.ready
    assert not server.running


def test_the_engine_of_a_server_is_found_again_after_its_death() -> None:
    """A door for HTTP is another child of the server."""
    with ServerProcess(*DEMO, "--http", "127.0.0.1:0") as server:
        engine, before = server.engine_pid, children(server.pid)
        assert engine is not None and len(before) > 1
        os.kill(engine, signal.SIGKILL)
        until(lambda: server.engine_pid not in (None, *before), "no other engine")
    assert server.engine_pid is None


def test_when_one_of_several_servers_fails_all_of_them_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ServerProcess] = []

    class Noted(ServerProcess):
        def __init__(self, *arguments: str, wait: bool) -> None:
            super().__init__(*arguments, wait=wait)
            started.append(self)

    monkeypatch.setattr(spawn, "ServerProcess", Noted)
    with (
        pytest.raises(SpawnError, match=r"did not start[\s\S]*--no-such-option"),
        serving(["--no-such-option"], DEMO),
    ):
        pytest.fail("the block must not be entered")
    assert [server.running for server in started] == [False, False]


@pytest.mark.parametrize(
    ("log", "line", "more"),
    [
        ("pensieve serve: no room", "no room", False),
        ("INFO loading\npensieve serve: no room", "no room", True),
        (
            "pensieve serve: ignoring X: no such option\nTraceback (most recent call last):\nValueError",
            "",
            True,
        ),
        ("INFO loading", "", True),
        ("", "", False),
    ],
)
def test_why_a_server_of_its_own_did_not_start_is_one_line(
    log: str, line: str, more: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest stands in a file, which is named, and nobody else may read."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    error = SpawnError(f"the server did not start: it ended with status 1:\n{log}")
    error.log = log
    kept = tmp_path / "pensieve" / "own-server.log"
    told = f"the server did not start: {line or 'it ended with status 1'}"
    assert own_server.explain_failure(error) == (f"{told} (its log: {kept})" if more else told)
    assert kept.exists() == more
    if more:
        assert kept.read_text() == f"{log}\n" and kept.stat().st_mode & 0o777 == 0o600
        monkeypatch.setenv("XDG_STATE_HOME", str(kept))
        unwritten = own_server.explain_failure(error)
        assert unwritten.startswith(f"{told} (its log cannot be written to ") and "\n" not in unwritten
