"""Ctrl-C while simulations run side by side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import children, until


@pytest.mark.parametrize("everybody", [True, False], ids=["as a terminal", "as a supervisor"])
def test_it_ends_at_once_and_without_a_traceback(everybody: bool) -> None:
    """Simulations that were begun, and those that wait for their turn, would take minutes."""
    words = [
        "simulate",
        "sharegpt",
        "--sessions",
        "4000",
        "--rates",
        "5,10,15,20,25,30",
        "--think-time",
        "10",
    ]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "pensieve", *words, "--jobs", "2"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            until(lambda: program.poll() is not None or len(workers(program.pid)) == 2, "no workers began")
            if program.poll() is None:
                (os.killpg if everybody else os.kill)(program.pid, signal.SIGINT)
            _, said = program.communicate(timeout=20)
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
    assert (program.returncode, said.strip()) == (130, "")


def workers(pid: int) -> list[int]:
    return [child for child in children(pid) if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
