"""``pensieve demo`` as a newcomer runs it, in small: real servers, the demo model, output into a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import children

SMALL = ["--context", "300", "--sessions", "4", "--turns", "4", "--device-cache", "160tokens"]
SMALL += ["--host-cache", "96tokens"]


@pytest.mark.timeout(300)
def test_the_demo_in_small() -> None:
    """One of its servers is killed from outside on top of it: the demo goes on, and says so."""
    folder = Path(sys.executable).parent
    command = [str(folder / "pensieve"), "demo", *SMALL]
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None and demo.stderr is not None
        for line in demo.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("turn  5 "):
                server = min(children(demo.pid))
                assert b"serve" in Path(f"/proc/{server}/cmdline").read_bytes()
                os.kill(server, signal.SIGKILL)
        errors = demo.stderr.read()
    said = "\n".join(lines)
    assert demo.returncode == 0, said + errors
    assert "Pensieve: the server was ended once from outside; each turn went on." in lines
    assert "All 22 answers are the same on both, 17 of 17 recalled facts right;" in lines
    assert sum(line.startswith("turn ") for line in lines) == 22
    assert any(line.startswith("Every answer is right and every receipt adds up.") for line in lines)
    assert any("after the kill the answer went on" in line or "over before" in line for line in lines)
    too_wide = [line for line in lines if len(line) > 80]
    assert too_wide == [] and len(lines) <= 76
    assert "\x1b" not in said
