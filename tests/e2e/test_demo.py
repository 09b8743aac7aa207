"""``pensieve demo`` as a newcomer runs it, in small: real servers, the demo model, output into a pipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ["--context", "300", "--sessions", "6", "--turns", "6", "--device-cache", "256tokens"]
SMALL += ["--host-cache", "512tokens"]


@pytest.mark.timeout(300)
def test_the_demo_in_small() -> None:
    folder = Path(sys.executable).parent
    command = [str(folder / "pensieve"), "demo", *SMALL]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert "All 22 answers are the same on both, 17 of 17 recalled facts right;" in lines
    assert sum(line.startswith("turn ") for line in lines) == 22
    assert any(line.startswith("Every answer is right and every receipt adds up.") for line in lines)
    assert any("after the kill the answer went on" in line or "over before" in line for line in lines)
    too_wide = [line for line in lines if len(line) > 80]
    assert too_wide == [] and len(lines) <= 75
    assert "\x1b" not in result.stdout
