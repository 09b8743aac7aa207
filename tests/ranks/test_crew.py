"""A rank that fails says why, and the engine's process ends with it: whatever it is doing, and in the same way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import msgspec
import pytest

from pensieve.config import EngineOptions
from pensieve.debug import child_environment
from support.processes import alive, until

pytestmark = pytest.mark.timeout(300)
ENGINE = """
import os, time
from pensieve.config import EngineOptions
from pensieve.engine.ranks.supervisor import RankSupervisor
from pensieve.engine.ranks.ring import SharedRing

ring = SharedRing.create(1)
options = EngineOptions(model="/nowhere", tensor_parallel=2)
RankSupervisor(options, "cpu", ring=ring.fd, meeting=os.open("/", os.O_RDONLY))  # where nobody can meet
time.sleep(200)
"""


def test_a_rank_that_fails_ends_the_engine_with_its_words() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", ENGINE],
        env=child_environment(failpoints=False),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("engine: rank 1: ")


def test_a_rank_that_fails_unexpectedly_says_where() -> None:
    command = [sys.executable, "-P", "-m", "pensieve.engine.ranks.host", "--parent", str(os.getpid())]
    command += ["--device", "cpu", "--ring", "0", "--meeting", "0", "--rank", "1"]
    done = subprocess.run(
        command,
        input=msgspec.msgpack.encode(EngineOptions(model="/nowhere", tensor_parallel=2)),
        env=child_environment(failpoints=False),
        capture_output=True,
        timeout=60,
        check=False,
    )
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 1
    assert "Traceback (most recent call last):" in lines
    assert lines[-1].startswith("engine: rank 1: DistStoreError: "), "there is no place to meet at"


def test_a_rank_is_bound_to_the_engine_before_it_imports_torch() -> None:
    """That takes seconds, in which an engine that is killed could leave it behind."""
    code = "import sys, pensieve.engine.ranks.host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0


LEAVING = """
import os, subprocess, sys, time
from pensieve.config import EngineOptions
from pensieve.engine.ranks import supervisor

start, (held, leave) = subprocess.Popen, os.pipe()
supervisor.subprocess.Popen = lambda command, stdin, **_: start(
    ["sh", "-c", f"cat >/dev/null; cat <&{held}"], stdin=stdin, pass_fds=(held,)
)
others = supervisor.RankSupervisor(EngineOptions(model="/nowhere", tensor_parallel=3), "cpu", ring=0, meeting=0)
if sys.argv[1] == "told":
    others.before_stop()
os.close(leave)
for process in others._processes.values():
    process.wait()
time.sleep(2 * supervisor.LOOK_S)
others.wait_stopped()
print("all have left")
"""


@pytest.mark.parametrize(("told", "status"), [("told", 0), ("not told", 1)])
def test_a_rank_that_leaves_first_is_waited_for_only_if_it_was_told_to(told: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LEAVING, told], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == status, done.stderr
    assert ("all have left" in done.stdout) == (told == "told")
    assert ("unexpectedly" in done.stderr) == (told != "told")


STRUCK = """
import signal, subprocess, sys, time
from pensieve.config import EngineOptions
from pensieve.engine.ranks import supervisor

start, supervisor.LOOK_S, supervisor.STOPPED_LOOKS = subprocess.Popen, 0.05, 1
none = subprocess.DEVNULL
supervisor.subprocess.Popen = lambda command, stdin, **_: start(["sleep", "60"], stdin=stdin, stdout=none, stderr=none)
others = supervisor.RankSupervisor(EngineOptions(model="/nowhere", tensor_parallel=2), "cpu", ring=0, meeting=0)
print(others._processes[1].pid, flush=True)
others._processes[1].send_signal(int(sys.argv[1]))
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "ended with signal 9 (killed from outside, or by the kernel for lack of memory)"),
        (signal.SIGSTOP, "was stopped (SIGSTOP, a debugger)"),
    ],
)
def test_what_was_done_to_a_rank_is_said(number: signal.Signals, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", STRUCK, str(int(number))],
        env=child_environment(failpoints=False),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    rank = int(done.stdout)
    try:
        # It is killed just before the engine ends, and may take a moment longer.
        until(lambda: not alive(rank), "a rank that had not asked to be killed with the engine outlives it")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, f"engine: rank 1 {said}\n")
