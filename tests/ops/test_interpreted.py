"""Results of all kernels without a GPU: under Triton's interpreter, in one process for all."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from support.sources import ROOT

PLUGIN = "support.kernels.quick_interpreter"
LEAST = {
    "attention": 42,
    "chunk_copy": 20,
    "decoder": 40,
    "experts": 12,
    "parties": 18,
    "recurrence": 11,
    "invariant": 10,
    "coded": 20,
    "accepted": 8,
}
"""Tests of ``tests/support/kernels/interpreted_NAME.py`` that must pass."""


@pytest.mark.timeout(600)
def test_kernels_equal_their_reference() -> None:
    """Triton chooses its interpreter when it is imported: hence a process of its own."""
    files = [f"tests/support/kernels/interpreted_{name}.py" for name in LEAST]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", PLUGIN, *files],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "tests")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"^PASSED .*/interpreted_(\w+)\.py::", done.stdout, re.MULTILINE)
    assert [name for name, least in LEAST.items() if passed.count(name) < least] == [], done.stdout
