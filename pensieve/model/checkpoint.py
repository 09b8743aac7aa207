"""The safetensors files of a model folder as one table of tensors, read directly into device memory.

A tensor is a view of the mapped file: it is read when it is copied, piece by piece, in several threads. On a CPU it is
copied directly. To a GPU each piece passes through pinned memory, because the driver copies anything else through a
small buffer of its own, at a fraction of the bus speed. Beside source and target this uses at most ``threads * 2 *
PIECE_BYTES`` on the host, and as much again on the device when the dtype changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open

from pensieve.kernels.fp8_reference import code_dtype, encode
from pensieve.machine import usable_cores
from pensieve.model.arch import ModelError
from pensieve.model.folder import INDEX, SINGLE, read_json, weight_files
from pensieve.model.quantisation import quantisation_of
from pensieve.model.tensor_source import WHOLE_TENSOR, TensorSlice
from pensieve.model.unpacking import UNUSED, PackedTensor, packed_tensors

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


PROGRESS_BYTES: Final = 1 << 30
"""Loading less than this shows no progress bar."""

COMPARED_BYTES: Final = 16 << 20
"""Two tensors are compared in pieces of this size."""

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers of old checkpoints, which are computed here."""


@dataclass(frozen=True, slots=True)
class _Conversion:
    """Parts of a tensor that is not copied as it is stored, and their targets."""

    name: str
    parts: list[torch.Tensor]
    """Views of the tensor; of an unpacked one, without storage."""
    targets: list[torch.Tensor]
    scales: list[torch.Tensor] | None
    """Targets of the scales of rows, if the values become codes."""


class Checkpoint:
    """Tensors by name over all safetensors files of a folder; records the tensors that were requested."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Read the headers of all files. Raises ModelError when one is missing or unreadable, and when quantised
        weights are incomplete."""
        self.name = str(folder)
        self._folder, self._dtype, self._device = folder, dtype, device
        self._where: dict[str, Any] = {}
        self._order: dict[str, int] = {}
        self._fills: dict[str, list[TensorFill]] = {}
        self._conversions: list[_Conversion] = []
        read = weight_files(folder)
        self.stale_index = read[0].name == SINGLE and (folder / INDEX).is_file()
        """Whether an index exists beside the single file, and so is not read."""
        for number, file in enumerate(read):
            try:
                handle: Any = safe_open(file, framework="pt", device="cpu")
                names = handle.keys()
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file}: cannot be read ({error})") from error
            self._where.update(dict.fromkeys(names, handle))
            self._order.update(dict.fromkeys(names, number))
        self._packed = self._packed_tensors()
        """Quantised tensors, by the name of what they unpack to."""

    def __contains__(self, name: str) -> bool:
        return name in self._where or name in self._packed

    def _read(self, name: str) -> torch.Tensor:
        """A view of the mapped file: nothing is read yet."""
        found: torch.Tensor = self._where[name].get_tensor(name)
        return found

    def get(
        self,
        names: Sequence[str],
        shape: tuple[int, ...],
        tensor_slice: TensorSlice = WHOLE_TENSOR,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See ``TensorSource.get``. The result is allocated but has no values before ``load``."""
        stretches, shape = self._stretches(names, shape, tensor_slice)
        fused = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        # The parts are copied into one tensor: concatenating them later would need the memory twice.
        self._fill(names, stretches, fused, None)
        return fused

    def get_codes(
        self, names: Sequence[str], shape: tuple[int, ...], tensor_slice: TensorSlice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``TensorSource.get_codes``."""
        stretches, shape = self._stretches(names, shape, tensor_slice)
        codes = torch.empty(shape, dtype=code_dtype(self._device, self._dtype), device=self._device)
        scales = torch.empty(shape[0], dtype=torch.float32, device=self._device)
        self._fill(names, stretches, codes, scales)
        return codes, scales

    def has_codes(self, names: Sequence[str]) -> bool:
        return all(name in self._packed and self._packed[name].has_codes(self._read) for name in names)

    def _stretches(
        self, names: Sequence[str], shape: tuple[int, ...], tensor_slice: TensorSlice
    ) -> tuple[list[list[torch.Tensor]], tuple[int, ...]]:
        """Return the wanted parts of each tensor, and the shape of all together. Raises ModelError."""
        missing = [name for name in names if name not in self]
        if missing:
            raise ModelError(
                f"{self._folder}: no tensor {missing[0]} among {len(self._where)} in the checkpoint"
            )
        parts = [
            torch.empty(self._packed[name].shape, device="meta") if name in self._packed else self._read(name)
            for name in names
        ]
        found = _joined_shape(parts)
        if found != shape:
            written = list(found) if found else ", ".join(str(list(part.shape)) for part in parts)
            raise ModelError(
                f"{self._folder}: {' + '.join(names)} has shape {written}, config.json says {list(shape)}"
            )
        stretches = tensor_slice.stretches(parts)
        parts = [part for own in stretches for part in own]
        return stretches, (sum(len(part) for part in parts), *parts[0].shape[1:])

    def _fill(
        self,
        names: Sequence[str],
        stretches: list[list[torch.Tensor]],
        fused: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> None:
        """Note what ``load`` fills ``fused`` with, and ``scales`` if it becomes codes."""
        lengths = [len(part) for own in stretches for part in own]
        targets, rows = iter(fused.split(lengths)), None if scales is None else iter(scales.split(lengths))
        for name, own in zip(names, stretches, strict=True):
            mine = [next(targets) for _ in own]
            if name in self._packed or rows is not None:
                its_rows = None if rows is None else [next(rows) for _ in own]
                self._conversions.append(_Conversion(name, own, mine, its_rows))
            else:
                self._fills[name] = [TensorFill(*pair) for pair in zip(own, mine, strict=True)]

    def same(self, one: str, other: str) -> bool:
        if one in self._packed or other in self._packed:
            return one == other
        first, second = self._read(one), self._read(other)
        if first.shape != second.shape:
            return False
        rows = max(1, COMPARED_BYTES // max(1, first[:1].nbytes))
        return all(
            torch.equal(a.to(self._dtype), b.to(self._dtype))
            for a, b in zip(first.split(rows), second.split(rows), strict=True)
        )

    def require_all_used(self, *, but: Collection[str] = (), ignored: tuple[str, ...] = ()) -> None:
        """Raises ModelError on unrequested tensors, except ``but`` and those whose name begins with one of
        ``ignored``: they would silently have no effect."""
        left = {name for name in self._where if not name.endswith(_IGNORED_SUFFIXES)} - set(self._fills)
        left -= {name for one in self._conversions for name in self._stored(one.name)}
        if self._packed:
            left = {name for name in left if not name.endswith(UNUSED)}
        left = {name for name in left if not name.startswith(ignored)} - set(but)
        if left:
            names = ", ".join(sorted(left)[:3])
            raise ModelError(
                f"{self._folder}: {len(left)} tensors that this architecture has no use for: {names}"
            )

    def load(self) -> None:
        """Fill every tensor that ``get`` returned, in file order."""
        placed = [(self._order[name], fill) for name, own in self._fills.items() for fill in own]
        placed.sort(key=lambda found: (found[0], found[1].source.data_ptr()))
        fills = [fill for _, fill in placed]
        converted = sorted(self._conversions, key=lambda one: self._order[self._stored(one.name)[0]])
        sizes = [sum(self._read(name).nbytes for name in self._stored(one.name)) for one in converted]
        total = sum(fill.source.nbytes for fill in fills) + sum(sizes)
        with progress_bar(total) as progress:
            task = progress.add_task(f"loading {self._folder.name}", total=total)
            fill_all(fills, self._device, lambda count: progress.advance(task, count))
            for one, size in zip(converted, sizes, strict=True):
                self._convert(one)
                progress.advance(task, size)

    def _stored(self, name: str) -> list[str]:
        """Return the names of the stored tensors that a tensor is made of, the largest first."""
        packed = self._packed.get(name)
        return [name] if packed is None else list(packed.stored)

    def _convert(self, one: _Conversion) -> None:
        packed, rows = self._packed.get(one.name), None
        try:
            if packed is None:
                values = self._read(one.name)
            elif one.scales is not None and packed.has_codes(self._read):
                values, rows = packed.codes(self._read, self._device)
            else:
                values = packed.unpack(self._read, self._device)
        except ModelError as error:
            raise ModelError(f"{self._folder}: {error}") from error
        for index, (part, target) in enumerate(zip(one.parts, one.targets, strict=True)):
            own = values.as_strided(part.shape, part.stride(), part.storage_offset())
            if one.scales is None:
                target.copy_(own)
            elif rows is None:
                encode(own, target, one.scales[index])
            else:
                # A stretch has all columns of its rows.
                first = part.storage_offset() // part.stride(0)
                target.copy_(own)
                one.scales[index].copy_(rows[first : first + len(part)])

    def _packed_tensors(self) -> dict[str, PackedTensor]:
        """Raises ModelError."""
        try:
            kind = quantisation_of(read_json(self._folder / "config.json") or {})
            return {} if kind is None else packed_tensors(kind, self._where, self._read)
        except ModelError as error:
            raise ModelError(f"{self._folder}: {error}") from error


def _joined_shape(parts: list[torch.Tensor]) -> tuple[int, ...] | None:
    """Return the shape of the parts concatenated along the first axis; None when they do not fit."""
    rest = {part.shape[1:] for part in parts}
    if len(rest) > 1 or not all(part.ndim for part in parts):
        return None
    return (sum(len(part) for part in parts), *rest.pop())


def progress_bar(total_bytes: int) -> Progress:
    """Return a progress bar for loading ``total_bytes``; invisible for small loads."""
    # On stderr: the server's stdout carries only its ready line.
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    console = Console(stderr=True)
    return Progress(*columns, transient=True, disable=total_bytes < PROGRESS_BYTES, console=console)
