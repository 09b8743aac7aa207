"""What keeps the log of a server during an evaluation; and the server that dies in the tests of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from support.replay.benches import BENCH
from support.replay.dying_server import LAST_WORDS, STATUS

SUPPORT = Path(__file__).parents[1] / "support"


def start_wrapped(log: Path, code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(BENCH / "evaluation" / "server.py"), str(log), sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_the_log_keeper_passes_output_and_status_on(tmp_path: Path) -> None:
    code = "import os, sys; print('one', flush=True); print('two', file=sys.stderr); os._exit(5)"
    process = start_wrapped(tmp_path / "log", code)
    output, _ = process.communicate(timeout=20)
    assert output == b"one\ntwo\n" and process.returncode == 5
    kept = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert [line.split(" ")[-1] for line in kept] == ["one", "two"]
    assert all(float(line.split()[0]) < 20 for line in kept)


def test_the_log_keeper_says_when_there_is_no_such_program(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCH / "evaluation" / "server.py"),
        str(tmp_path / "log"),
        "no-such-program",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 127 and "no-such-program" in done.stdout and not done.stderr
    assert "no-such-program" in (tmp_path / "log").read_text(encoding="utf-8")


def test_the_log_keeper_passes_sigterm_on(tmp_path: Path) -> None:
    process = start_wrapped(tmp_path / "log", "import time; print('up', flush=True); time.sleep(99)")
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    process.stdout.close()


def test_the_log_keeper_ends_with_its_reader(tmp_path: Path) -> None:
    endless = "import time\nwhile True: print('x', flush=True); time.sleep(0.01)"
    process = start_wrapped(tmp_path / "log", endless)
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 128 + signal.SIGTERM


def test_statuses_of_the_dying_server_are_its_own() -> None:
    command = [sys.executable, str(SUPPORT / "replay" / "dying_server.py"), "0", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == STATUS and LAST_WORDS in done.stdout
