"""Runs tests of kernels in a process of their own, where Triton interprets kernels: it decides that when imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from support.sources import ROOT


def passed_under_interpreter(name: str) -> int:
    """How many tests of ``tests/support/kernels/NAME.py`` pass under Triton's interpreter; none may fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"tests/support/kernels/{name}.py"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])
