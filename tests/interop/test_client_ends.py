"""Programs that end while a stream is read: in silence, unless they made a mistake of their own."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from support.faults.fake_faults import Fault
from support.processes import until
from support.service.fake_server import FakeServerThread


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        ("for piece in chat.stream('x'): ready.set()", ""),
        ("chat.send('x')", ""),
        ("next(chat.stream('x')); raise OSError('a mistake of its own')", "a mistake of its own"),
    ],
)
def test_a_program_that_ends_takes_its_daemon_threads_along_in_silence(reading: str, said: str) -> None:
    """What such a thread reads is cut off by the end, which is no error; its own errors are told as ever."""
    program = f"""
import sys, threading
from pensieve.client import Client
chat = Client(sys.argv[1]).create_session()
ready = threading.Event()
def read():
    {reading}
thread = threading.Thread(target=read, daemon=True)
thread.start()
sys.stdin.readline()
sys.exit(3)
"""
    with FakeServerThread() as server:
        server.fake.script.append(Fault(after=3, silent=True))
        command = [sys.executable, "-P", "-c", program, server.target]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            until(lambda: "StreamTurn" in server.fake.calls, "no turn was begun")
            time.sleep(0.5)  # for what has been sent to be read: afterwards the thread waits for more
            _, errors = child.communicate("\n", timeout=30)
    assert child.returncode == 3
    assert errors == "" if not said else errors.count("Traceback") == 1 and said in errors
