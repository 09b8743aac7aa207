"""Two ways to move runs between the pools, the choice between them, and the calls of a swap-in.

*batch* is the driver's ``cuMemcpyBatchAsync``, which feeds the copy engines. It can use the whole link in both
directions at once and disturbs a concurrent step least. But it takes a third to two thirds of a microsecond of CPU
time per run, and two to three for a run of 16 KiB from the host (``bench/results/ops_swap_h200.md``).

*kernel* is ``pensieve.kernels.chunk_copy``: a few programs that read and write pinned memory in place. It is
as fast at any size of run, and a launch costs the same for any number of runs. But both directions at once
share the rate of one.

Which is better depends on run size, direction, link and driver, so it is measured at start-up.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pensieve.core import Ints
from pensieve.kernels.chunk_copy import IN_PROGRAMS, OUT_PROGRAMS, WORD, ChunkCopy, check_runs

MECHANISMS = ("auto", "batch", "kernel")
TRIAL_BYTES, TRIAL_RUNS, TRIAL_LAYERS, TRIALS = 32 << 20, 2048, 8, 3
"""Limits of a trial copy. A few small runs would not fill the driver's queue and would look too fast."""
STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the source is read at its place in the stream, not when the call is made."""
VERSION = 12080
"""First driver API with the call: CUDA 12.8."""
ENOUGH = 0.75
"""The copy engines are chosen from this fraction of the kernel's rate on, because they disturb concurrent work less:
matrix products that use all multiprocessors wait where a copy's programs run. On an H200, a step of 256 tokens (9.4
ms of products) during a swap-in of 420 MB took 10.1 ms with the copy engines, 12.0 ms with the kernel."""

LARGEST_GROUP = 8
CALL_BYTES = 4 << 20
"""About 80 µs on the wire: twice the CPU time of a call."""

Addresses = npt.NDArray[np.uint64]


class RunCopy(Protocol):
    """See ``ChunkCopy``."""

    def __call__(self, pairs: torch.Tensor, *, first: int, count: int, layers: range) -> None: ...

    def warm_up(self, pairs: torch.Tensor) -> None: ...


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class _Driver:
    """The one driver call that torch does not wrap."""

    def __init__(self) -> None:
        """Raises OSError if the driver lacks the call."""
        library, found, status = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
        error = library.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync", ctypes.byref(found), VERSION, ctypes.c_uint64(0), ctypes.byref(status)
        )
        if error or not found.value:
            raise OSError("this NVIDIA driver has no cuMemcpyBatchAsync: it is older than CUDA 12.8")
        pointer = ctypes.c_void_p
        kinds = (pointer, pointer, pointer, ctypes.c_size_t, pointer, pointer, ctypes.c_size_t, pointer)
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, *kinds, pointer)(found.value)
        self._attributes, self._first = _Attributes(STREAM_ORDER), ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)

    def copy(self, dst: Addresses, src: Addresses, sizes: Addresses, stream: torch.cuda.Stream) -> None:
        """Queue ``sizes[i]`` bytes from address ``src[i]`` to ``dst[i]``, contiguous [n] each. Raises RuntimeError."""
        error = self._call(
            dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, len(dst), ctypes.byref(self._attributes),
            ctypes.byref(self._first), 1, ctypes.byref(self._failed), stream.cuda_stream,
        )  # fmt: skip
        if error:
            raise RuntimeError(
                f"cuMemcpyBatchAsync: error {error} at copy {self._failed.value} of {len(dst)}"
            )


class BatchCopy:
    """``ChunkCopy`` with the copy engines. The driver refuses it on the default stream."""

    def __init__(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Raises OSError if the driver lacks the call."""
        check_runs(dst, src)
        self._driver = _Driver()
        self._dst, self._src = _RunAddresses(dst), _RunAddresses(src)
        self._run_bytes = dst.shape[2] * WORD.itemsize
        self._sizes = np.empty(0, np.uint64)
        self._last: tuple[torch.Tensor, Addresses, Addresses] | None = None

    def __call__(self, pairs: torch.Tensor, *, first: int, count: int, layers: range) -> None:
        """See ``ChunkCopy.__call__``; ``pairs`` must be on the host."""
        dst, src = (part[:, layers.start : layers.stop].ravel() for part in self._addresses(pairs))
        if len(self._sizes) < count:
            self._sizes = np.full(2 * count, self._run_bytes, dtype=np.uint64)
        self._driver.copy(
            dst[first : first + count], src[first : first + count], self._sizes, torch.cuda.current_stream()
        )

    def warm_up(self, pairs: torch.Tensor) -> None:
        """There is nothing to compile."""

    def _addresses(self, pairs: torch.Tensor) -> tuple[Addresses, Addresses]:
        """Return the addresses of all layers' runs, [n, L] each; cached for several calls in a row."""
        if self._last is None or self._last[0] is not pairs:
            pages = pairs.numpy().astype(np.int64)
            self._last = pairs, self._dst.for_pages(pages[:, 1]), self._src.for_pages(pages[:, 0])
        return self._last[1:]


class _RunAddresses:
    def __init__(self, runs: torch.Tensor) -> None:
        self._page_bytes = runs.stride(1) * WORD.itemsize
        self._layers = runs.data_ptr() + np.arange(len(runs)) * (runs.stride(0) * WORD.itemsize)

    def for_pages(self, pages: Ints) -> Addresses:
        """Return the addresses of these pages' runs, [n, L]."""
        return (self._layers + pages[:, None] * self._page_bytes).view(np.uint64)


@dataclass(frozen=True, slots=True)
class Trial:
    """Speed of a mechanism, copying some megabytes in runs of one size."""

    gb_per_s: float
    """From the call to the arrival of the last byte, on an idle link."""
    submit_us_per_run: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The mechanism for one direction, and the trials by mechanism; {} where there was no choice."""

    mechanism: str
    trials: dict[str, Trial]


def make_copy(mechanism: str, dst: torch.Tensor, src: torch.Tensor) -> RunCopy:
    """Return a copy function from ``src`` to ``dst``. Raises ValueError for an unknown or unavailable mechanism."""
    if mechanism == "kernel":
        return ChunkCopy(dst, src, programs=IN_PROGRAMS if dst.is_cuda else OUT_PROGRAMS)
    if mechanism != "batch":
        raise ValueError(f"unknown swap mechanism {mechanism!r}: give one of {', '.join(MECHANISMS)}")
    try:
        return BatchCopy(dst, src)
    except OSError as error:
        raise ValueError(f"swap mechanism 'batch': {error}") from error


def calibrate(run_words: int, device: torch.device, *, inwards: bool) -> dict[str, Trial]:
    """Measure each mechanism that works here on runs of ``run_words`` words, in temporary memory.

    Takes some tens of milliseconds, and the time to compile a kernel that is not in Triton's cache.
    """
    pages = max(1, min(TRIAL_BYTES // (run_words * WORD.itemsize), TRIAL_RUNS) // TRIAL_LAYERS)
    inside = torch.zeros((TRIAL_LAYERS, pages, run_words), dtype=WORD, device=device)
    host = torch.zeros((pages, TRIAL_LAYERS, run_words), dtype=WORD, pin_memory=True)
    outside = host.transpose(0, 1)
    order = np.random.default_rng(1)
    pairs = torch.empty((pages, 2), dtype=torch.int32, pin_memory=True)
    pairs.numpy()[:] = np.stack([order.permutation(pages) for _ in range(2)], axis=1)
    dst, src = (inside, outside) if inwards else (outside, inside)
    found = {"kernel": _measure(make_copy("kernel", dst, src), pairs, run_words)}
    # An older driver has only the kernel.
    with contextlib.suppress(OSError):
        found["batch"] = _measure(BatchCopy(dst, src), pairs, run_words)
    return found


def choose(trials: dict[str, Trial]) -> Choice:
    """Choose the copy engines, unless they are clearly slower."""
    batch, kernel = trials.get("batch"), trials["kernel"]
    enough = batch is not None and batch.gb_per_s >= ENOUGH * kernel.gb_per_s
    return Choice("batch" if enough else "kernel", trials)


def _measure(copy: RunCopy, pairs: torch.Tensor, run_words: int) -> Trial:
    """Return the best of several trials after one to warm up. Time is measured on the host: the driver sends
    small runs through the CPU when the link is idle, and blocks when its queue is full."""
    stream, total, submit = torch.cuda.Stream(), float("inf"), float("inf")
    runs = len(pairs) * TRIAL_LAYERS
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for trial in range(TRIALS + 1):
            started = time.perf_counter()
            copy(pairs, first=0, count=runs, layers=range(TRIAL_LAYERS))
            submitted = time.perf_counter() - started
            stream.synchronize()
            if trial:
                submit, total = min(submit, submitted), min(total, time.perf_counter() - started)
    return Trial(runs * run_words * WORD.itemsize / total / 1e9, submit / runs * 1e6)


def layer_groups(num_layers: int) -> tuple[range, ...]:
    """Return the groups of layers that arrive together: 1, 1, 2, 4, 8, … and back to 1.

    The first groups are small so that the model can begin, and the last so that little work remains after
    they arrive. Those between are larger to save calls.
    """
    head: list[int] = []
    tail: list[int] = []
    left, size = num_layers, 1
    while left:
        for sizes in (head, tail):
            if left:
                sizes.append(min(size, left))
                left -= sizes[-1]
        size = 1 if len(head) == 1 else min(LARGEST_GROUP, 2 * size)
    ends = list(itertools.accumulate(head + tail[::-1]))
    return tuple(range(*bounds) for bounds in itertools.pairwise([0, *ends]))


def calls_for(groups: Sequence[range], layer_bytes: int) -> Iterator[tuple[range, list[range]]]:
    """Yield the layers that each call brings in, and the groups that they form.

    A group that takes less time on the wire than its call takes on the CPU shares the call with the next
    ones. ``layer_bytes``: bytes of all chunks in one layer.
    """
    together: list[range] = []
    for group in groups:
        together.append(group)
        layers = range(together[0].start, group.stop)
        if len(layers) * layer_bytes >= CALL_BYTES or group is groups[-1]:
            yield layers, together
            together = []
