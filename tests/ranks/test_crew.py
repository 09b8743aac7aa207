"""A rank that fails says why, and the engine's process ends with it: whatever it is doing, and in the same way."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pensieve.debug import child_environment

pytestmark = pytest.mark.timeout(300)
ENGINE = """
import os, time
from pensieve.config import EngineOptions
from pensieve.engine.ranks.crew import Crew
from pensieve.engine.ranks.ring import SharedRing

ring = SharedRing.create(1)
options = EngineOptions(model="/nowhere", tensor_parallel=2)
Crew(options, "cpu", ring=ring.fd, meeting=os.open("/", os.O_RDONLY))  # where nobody can meet
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
