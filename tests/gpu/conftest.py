"""Several test processes on one GPU, as with ``make test-gpu GPU_ARGS='-n 8'``: who needs all of its memory has it
alone."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

_LOCK = pytest.StashKey[int | None]()
"""Descriptor of the locked file while this process keeps the device from one test to the next."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Share the device with tests of other processes, or keep it from them if the test is marked ``whole_device``, and
    until the first that is not: such tests may have fixtures in common."""
    marked = [each is not None and each.get_closest_marker("whole_device") for each in (item, nextitem)]
    lock = item.session.stash.get(_LOCK, None)
    if lock is None:
        lock = os.open(Path(tempfile.gettempdir(), "pensieve-gpu-tests.lock"), os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX if marked[0] else fcntl.LOCK_SH)
    item.session.stash[_LOCK] = lock if all(marked) else None
    try:
        return (yield)
    finally:
        if not all(marked):
            torch.cuda.empty_cache()
            os.close(lock)
