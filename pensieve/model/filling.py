"""Copies tensors from mapped files to the device, piece by piece, in several threads.

A tensor of a safetensors file is a view of the mapped file: it is read when it is copied. On a CPU it is
copied directly. To a GPU each piece passes through pinned memory, because the driver copies anything else
through a small buffer of its own, at a fraction of the bus speed. Beside source and target this uses at most
``threads * 2 * PIECE_BYTES`` on the host, and as much again on the device when the dtype changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from pensieve.machine import usable_cores

PIECE_BYTES: Final = 4 << 20
"""76 µs of a PCIe 5 link: large compared with the cost of a call, small enough for two buffers per thread."""
MOST_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class TensorFill:
    """One tensor and its contiguous target of the same shape; the source may be some columns of a matrix,
    or of several."""

    source: torch.Tensor
    target: torch.Tensor


class Mover(Protocol):
    """Copies pieces in order; each thread has its own."""

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start copying ``source`` to ``target`` of the same shape, casting if needed."""
        ...

    def finish(self) -> None: ...


class DirectMover:
    """Copies pieces to main memory, synchronously."""

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def finish(self) -> None:
        pass


class StagedMover:
    """Copies pieces through two buffers: one is filled from the file while the other is copied to the device."""

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self._device = device
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._left: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        self._wait(turn)
        read = source.view(torch.uint8)
        buffer = self._buffers[turn][: source.nbytes].view(read.shape)
        # NumPy's copy runs in this thread alone; torch's would start a thread team in each of ours.
        buffer.numpy()[...] = read.numpy()
        staged = buffer.view(source.dtype)
        if source.dtype != target.dtype:
            staged = staged.to(self._device, non_blocking=True)
        target.copy_(staged, non_blocking=True)
        if self._device.type == "cuda":
            event = self._left[turn] = torch.cuda.Event()
            event.record()

    def finish(self) -> None:
        self._wait(0)
        self._wait(1)

    def _wait(self, turn: int) -> None:
        event, self._left[turn] = self._left[turn], None
        if event is not None:
            event.synchronize()


def pieces(fills: list[TensorFill]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of sources and targets, at most ``PIECE_BYTES`` in either dtype, but at least one row of a matrix."""
    for fill in fills:
        yield from _pieces(fill.source, fill.target)


def _pieces(source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    row = 1
    if source.is_contiguous():
        source, target = source.view(-1), target.view(-1)
    else:
        row = source[0].numel()
    row_bytes = row * max(source.element_size(), target.element_size())
    if source.ndim > 2 and row_bytes > PIECE_BYTES:
        for part, its_target in zip(source, target, strict=True):
            yield from _pieces(part, its_target)
        return
    step = max(1, PIECE_BYTES // row_bytes)
    for start in range(0, len(source), step):
        yield source[start : start + step], target[start : start + step]


def fill_all(
    fills: list[TensorFill],
    device: torch.device,
    advance: Callable[[int], None],
    *,
    threads: int | None = None,
    make_mover: Callable[[], Mover] | None = None,
) -> None:
    """Copy every source to its target. ``advance`` gets the bytes read, piece by piece. ``threads``: None
    picks a number for the device; a CPU needs only one, since torch copies with all cores there."""
    on_gpu = device.type == "cuda"
    make_mover = make_mover or ((lambda: StagedMover(device)) if on_gpu else DirectMover)
    threads = threads or (min(MOST_THREADS, usable_cores()) if on_gpu else 1)
    todo, lock = pieces(fills), threading.Lock()

    def take() -> tuple[torch.Tensor, torch.Tensor] | None:
        with lock:
            return next(todo, None)

    def drain() -> None:
        with torch.cuda.device(device) if on_gpu else nullcontext():
            mover = make_mover()
            while (piece := take()) is not None:
                mover.move(*piece)
                advance(piece[0].nbytes)
            mover.finish()

    if threads == 1:
        drain()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        for running in [pool.submit(drain) for _ in range(threads)]:
            running.result()
