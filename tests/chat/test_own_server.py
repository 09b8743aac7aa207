"""A chat with a server of its own that ends in any way: no process is left, and the next chat goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.cli import main as cli
from support.engine.fake_engine import Script
from support.lengths import LONG
from support.processes import alive, children, until
from support.service import faked_pensieve
from support.service.server_process import model_folder
from support.terminal import Terminal

pytestmark = pytest.mark.timeout(200)
CLOSED = "the terminal is closed"


def chat(folder: Path, *arguments: str) -> Terminal:
    return Terminal(
        *("chat", "--plain", "--max-tokens", "100", "--model", str(folder / "model")),
        *("--store", f"sqlite:///{folder / 'history.sqlite3'}", *arguments),
        program=faked_pensieve.PROGRAM,
        columns=100,
        environment={"XDG_STATE_HOME": str(folder), **faked_pensieve.environment()},
    )


def family(pid: int) -> list[int]:
    """All processes below one."""
    found = children(pid)
    return [*found, *(far for near in found for far in family(near))]


@pytest.mark.parametrize("end", ["SIGKILL", CLOSED, *(["SIGTERM", "SIGHUP"] if LONG else [])])
def test_it_takes_its_server_along(tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str) -> None:
    # The first life says a part and then no more: the chat ends in mid-answer.
    model_folder(tmp_path / "model", Script(hang_at_step=80, only_in_life=str(tmp_path / "first")))
    with chat(tmp_path, "--new") as first:
        first.prompt()
        first.enter("Tell me all of it.")
        first.expect("ABC")
        left = family(first.process.pid)
        assert len(left) == 2, "a server and its engine"
        if end == CLOSED:
            first.close()
        else:
            first.process.send_signal(getattr(signal, end))
        first.process.wait(60)
        until(lambda: not any(map(alive, left)), "a process is left")
    with pytest.raises(SystemExit) as ended:
        cli.main(["store", "check", "--store", f"sqlite:///{tmp_path / 'history.sqlite3'}"])
    assert ended.value.code == 0, capsys.readouterr().out
    with chat(tmp_path, "--session", "last") as second:
        assert "this line was not answered last time" in second.prompt()
        second.enter("")
        second.expect("tokens of context")
        second.prompt()
        second.enter("/history")
        assert second.prompt().count("Tell me all of it.") == 1
        second.enter("/bye")
        assert second.end() == 0


def test_what_does_not_end_by_itself_is_killed() -> None:
    stubborn = (
        "import signal, time; from pensieve.lifeline import terminate_on_eof; "
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); "
        "terminate_on_eof(0, 0.1); print('up', flush=True)\nwhile True: time.sleep(60)"
    )
    command = [sys.executable, "-P", "-c", stubborn]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "up\n"
            process.stdin.close()
            assert process.stdout.readline() == "asked\n"
            assert process.wait(30) == -signal.SIGKILL
        finally:
            process.kill()
