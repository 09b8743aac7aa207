"""Host memory that a GPU can read and write in place.

torch rounds its own pinned tensors up to the next power of two, which turns 40 GiB into 64. So this module allocates
plain memory and registers it with CUDA once, when the server starts; that takes a while, so it says how far it is.
("Pages" here are the operating system's.)
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

SEGMENT_BYTES = 1 << 30
"""Registered at a time, so that progress can be shown and the driver's lock is not held for long."""
TOUCH_BYTES = 64 << 20
"""One thread fills so much at a time."""
SHOW_AFTER_SECONDS = 2.0
MOST_THREADS = 16


class PinnedMemory:
    """``num_bytes`` of zeros, page-aligned and registered with CUDA until ``close``."""

    def __init__(self, num_bytes: int, *, unit: int = 1, threads: int | None = None) -> None:
        """``unit``: the bytes of the largest copy. No copy may straddle two registrations, so no unit is cut in two.

        Raises RuntimeError when the memory cannot be had or registered.
        """
        self._registered: list[int] = []
        self.tensor = torch.zeros(0, dtype=torch.uint8)
        if num_bytes == 0:
            return
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise RuntimeError(f"no host memory for {num_bytes} bytes: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer, larger pages: quicker to fill and to register
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        # Memory that is unmapped while registered poisons whatever the system puts there next. The finaliser holds the
        # tensor, so the registration goes first.
        self._finalizer = weakref.finalize(self, _unregister, self._registered, self.tensor)
        try:
            self._register(_segments(num_bytes, unit), threads or min(MOST_THREADS, os.cpu_count() or 1))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the registration; no copy may be under way. The CPU can still read the tensor."""
        _unregister(self._registered, self.tensor)

    def _register(self, segments: list[range], threads: int) -> None:
        """Touch all pages from many threads, then register them: on its own the driver faults them in one by one."""
        cudart: Any = torch.cuda.cudart()
        base, values = self.tensor.data_ptr(), self.tensor.numpy()
        with _progress(segments[-1].stop) as advance, ThreadPoolExecutor(threads) as pool:
            for segment in segments:
                starts = range(segment.start, segment.stop, TOUCH_BYTES)
                list(pool.map(lambda at, stop=segment.stop: _touch(values, at, stop), starts))
                error = int(cudart.cudaHostRegister(base + segment.start, len(segment), 0))
                if error:
                    raise RuntimeError(
                        f"CUDA cannot pin {segments[-1].stop} bytes of host memory (error {error} at byte "
                        f"{segment.start}): give a smaller host cache, or raise the limit of locked memory"
                    )
                self._registered.append(base + segment.start)
                advance(len(segment))


def _unregister(addresses: list[int], memory: torch.Tensor) -> None:
    """Take back all registrations inside ``memory``, which is alive until this returns."""
    cudart: Any = torch.cuda.cudart() if addresses else None
    while addresses:
        torch.cuda.check_error(int(cudart.cudaHostUnregister(addresses.pop())))


def _touch(values: np.ndarray[tuple[int], np.dtype[np.uint8]], start: int, stop: int) -> None:
    """Write once to every page of ``[start, stop)``, at most ``TOUCH_BYTES`` of it."""
    values[start : min(start + TOUCH_BYTES, stop) : mmap.PAGESIZE] = 0


def _segments(num_bytes: int, unit: int) -> list[range]:
    """``[0, num_bytes)`` in registrations that begin at multiples of both a memory page and ``unit``."""
    step = unit * mmap.PAGESIZE // np.gcd(unit, mmap.PAGESIZE)
    size = int(max(1, SEGMENT_BYTES // step) * step)
    return [range(start, min(start + size, num_bytes)) for start in range(0, num_bytes, size)]


class _Advance:
    """Tells a progress bar how far it is, once the work has taken long enough to be worth one."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._started = time.monotonic()
        self._task: TaskID | None = None

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._task is None and time.monotonic() - self._started > SHOW_AFTER_SECONDS:
            self._task = self._progress.add_task("pinning host cache", total=self._total)
        if self._task is not None:
            self._progress.update(self._task, completed=self._done)


@contextmanager
def _progress(total: int) -> Iterator[_Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Advance(progress, total)
