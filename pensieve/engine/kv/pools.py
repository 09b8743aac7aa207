"""A worker's two KV pools, the pinned memory of the host pool, and the copies between pools in plain memory.

``KvPools`` has the pools of a model with one KV group, ``HybridPools`` those of two and those of an elastic
device tier, and ``KvTiers`` what they have in common.

With one group, the device pool is ``[L, P, 2, Hkv, N, D]``: layer first, so that attention of one layer reads one slab
and a step can wait for a single layer. The host pool is ``[C, L, 2, Hkv, N, D]``: chunk first, so that an evicted
chunk is one contiguous object. In both, keys and values of one page of one layer are one contiguous run, the unit that
is copied. Keys and values in 8 bits lie in runs of bytes instead (``kernels.kv_codec``). With a GPU the host pool is
pinned, and ``pensieve.engine.kv.swap`` does the copies. The copies in this module are for plain memory: they are done
when the call returns.

torch rounds its own pinned tensors up to the next power of two, which turns 40 GiB into 64. So
``PinnedMemory`` allocates plain memory and registers it with CUDA once at start-up. That takes a while, so it
shows its progress. (Its "pages" are the operating system's.)

With two groups there is one buffer per tier, in which pages of both groups lie.
The pools of an elastic device tier are of this kind with one KV group too: its pages lie in units there. In the host
tier they lie as in ``KvPools``.

``grid`` says where. A layer's view of its group's pages begins where the layer does in the first unit, and its page
stride is one layer page, so kernels use page numbers as with one group. All views of a tier overlap: the cache manager
hands each byte to one page at a time.
"""

from __future__ import annotations

import math
import mmap
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pensieve.config import KvDtypeName
from pensieve.engine.kv.grid import Grid, TierLayout
from pensieve.engine.kv.virtual.backing import Backing, UseMark
from pensieve.engine.kv.virtual.driver import DriverBackend
from pensieve.engine.kv.virtual.plain import PlainBackend
from pensieve.engine.kv.virtual.region import Backend, RegionSizes, handle_bytes, reserve
from pensieve.engine.plan import Copy, Plan
from pensieve.kernels import kv_codec, reference
from pensieve.model.arch import Arch
from pensieve.model.groups import KvGroup, aligned, conv_bytes, layer_page_bytes, state_shape

SEGMENT_BYTES = 1 << 30
"""Bytes registered in one call, so that progress can be shown and the driver's lock is held briefly."""
TOUCH_BYTES = 64 << 20
"""Bytes that one thread fills at a time."""
SHOW_AFTER_SECONDS = 2.0
MOST_THREADS = 16

GroupCopies = tuple[int, torch.Tensor, torch.Tensor]
"""A KV group, and source and target pages of copies in it, int64 [n] each."""


class PinnedMemory:
    """``num_bytes`` of zeros, page-aligned and registered with CUDA until ``close``."""

    def __init__(self, num_bytes: int, *, unit: int = 1, threads: int | None = None) -> None:
        """``unit``: bytes of the largest copy, which must not straddle two registrations. Raises RuntimeError
        when the memory cannot be allocated or registered."""
        self._registered: list[int] = []
        self.tensor = torch.zeros(0, dtype=torch.uint8)
        if num_bytes == 0:
            return
        memory = _map(num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer, larger pages: faster to fill and register
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        # Memory that is unmapped while registered corrupts whatever the system puts there next. The finaliser
        # holds the tensor, so the registration ends first.
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
        """Touch all pages from many threads, then register them: the driver alone would fault them in one by one."""
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


def _map(num_bytes: int) -> mmap.mmap:
    """Map zeros without touching them. Raises RuntimeError when the system refuses."""
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"no host memory for {num_bytes} bytes: {error}") from error


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in plain memory that take no memory until they are written.

    ``torch.zeros`` writes them all, which took 2.6 s of an engine's start for tiers of 2 GiB.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(_map(num_bytes), dtype=dtype).view(shape)


def _unregister(addresses: list[int], memory: torch.Tensor) -> None:
    """End all registrations inside ``memory``, which stays alive until this returns."""
    cudart: Any = torch.cuda.cudart() if addresses else None
    while addresses:
        torch.cuda.check_error(int(cudart.cudaHostUnregister(addresses.pop())))


def _touch(values: np.ndarray[tuple[int], np.dtype[np.uint8]], start: int, stop: int) -> None:
    """Write once to every page of ``[start, stop)``, at most ``TOUCH_BYTES`` of it."""
    values[start : min(start + TOUCH_BYTES, stop) : mmap.PAGESIZE] = 0


def _segments(num_bytes: int, unit: int) -> list[range]:
    """Divide ``[0, num_bytes)`` into segments that begin at multiples of both a memory page and ``unit``."""
    step = unit * mmap.PAGESIZE // np.gcd(unit, mmap.PAGESIZE)
    size = int(max(1, SEGMENT_BYTES // step) * step)
    return [range(start, min(start + size, num_bytes)) for start in range(0, num_bytes, size)]


class _Advance:
    """Advances a progress bar, which appears once the work has taken a while."""

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


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of one KV group in both tiers, as copies see them."""

    layers: tuple[int, ...]
    """Layers of the model, ascending: layer ``layers[i]`` is number i below."""
    page_bytes: int
    """Bytes of a page in all of the group's layers."""
    device: torch.Tensor
    """[L, P, ...]: a page of one layer is contiguous."""
    host: torch.Tensor
    """[L, C, ...]: likewise."""
    host_step: int = 1
    """From one host page number to the next that can be in use."""
    host_first: int = 0
    """Least host page number."""
    used_bytes: int = 0
    """Bytes of a layer page before its padding; 0: there is no padding."""


class KvTiers:
    """The memory of both tiers, by KV group. Only the cache manager knows which parts of it are valid."""

    device: torch.Tensor
    """All memory of the tier, in the shape that the subclass gives it."""
    host: torch.Tensor

    def __init__(
        self,
        groups: tuple[GroupPages, ...],
        *,
        num_layers: int,
        chunk_tokens: int,
        padding_page: int,
        pinned: PinnedMemory | None,
    ) -> None:
        self.groups = groups
        self.chunk_tokens = chunk_tokens
        self.num_layers = num_layers
        """Layers of the model."""
        self.padding_page = padding_page
        """A page that exists and that memory always backs, for unused entries of page tables."""
        self.backing: Backing | None = None
        """Memory of an elastic device tier; None: the tier has one size."""
        self._pinned = pinned
        # For each layer of the model: the groups that it is in, with its number there.
        self._members: list[list[tuple[int, int]]] = [[] for _ in range(num_layers)]
        for group, pages in enumerate(groups):
            for number, layer in enumerate(pages.layers):
                self._members[layer].append((group, number))

    def attention(self, layer: int) -> torch.Tensor:
        """Return the device pages of a layer of the model that attends, [P, 2, Hkv, N, D]."""
        raise NotImplementedError

    def in_window_group(self, layer: int) -> bool:
        """Whether the keys and values of a layer lie in the second group, and are found by its page tables."""
        return False

    def state(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the device pages of a recurrent layer of the model: the convolution's last inputs [P, C, W-1], in the
        model's dtype, and the recurrent state [P, H, K, V], float32."""
        raise NotImplementedError

    def close(self) -> None:
        """Unpin the host pool, and give an elastic device tier back. No copy or step may be under way or begin
        afterwards."""
        if self._pinned is not None:
            self._pinned.close()
        if self.backing is not None:
            self.backing.close()

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk that has a slice in every group."""
        return sum(group.page_bytes for group in self.groups)

    def bytes_of(self, copies: Sequence[Copy]) -> int:
        """Return the bytes that these copies move."""
        return sum(self.groups[copy.group].page_bytes for copy in copies)

    def grow(self, plan: Plan) -> tuple[int, int] | None:
        """Back the memory that a plan asks for, before it is queued. Return ``StepResult.memory``; ``shrink`` must
        follow unless it is None."""
        if plan.memory is None:
            return None
        if self.backing is None:
            raise ValueError(f"step {plan.step}: the device tier has one size")
        return self.backing.grow(*plan.memory)

    def shrink(self, marks: Sequence[UseMark] = ()) -> None:
        """Give back what the plan of the latest ``grow`` does without, once all marks are reached."""
        assert self.backing is not None
        self.backing.shrink(marks)

    def swap_out(self, copies: Sequence[Copy]) -> None:
        """Copy device pages to host pages, all layers of their groups."""
        for group, src, dst in _by_group(copies):
            pages = self.groups[group]
            for number in range(len(pages.layers)):
                reference.chunk_copy(pages.host[number], pages.device[number], dst, src)

    def copy_on_device(self, copies: Sequence[Copy]) -> None:
        """Copy device pages to device pages, all layers of their groups; every page is read before any is written."""
        parts = [part for part in _by_group(copies) if self.groups[part[0]].layers]
        if len(parts) == 1:
            ((group, src, dst),) = parts
            for layer in self.groups[group].device:
                reference.chunk_copy(layer, layer, dst, src)
            return
        # A page of one group may be written where one of the other is read.
        # Layer by layer: torch would first copy all of a tensor that is not contiguous, and not all may be backed.
        picked = [[layer[src] for layer in self.groups[group].device] for group, src, _ in parts]
        for (group, _, dst), values in zip(parts, picked, strict=True):
            for number, layer in enumerate(self.groups[group].device):
                layer.index_copy_(0, dst, values[number])

    def swap_in(self, copies: Sequence[Copy], *, pipelined: bool = True) -> LayerTransfers:
        """Begin to copy host pages to device pages; ``wait`` for each layer before using it."""
        transfers = LayerTransfers(self, copies)
        if not pipelined:
            transfers.finish()
        return transfers

    def copy_in(self, layer: int, parts: Sequence[GroupCopies]) -> None:
        """Copy one layer of the model from host pages to device pages, in all groups that it is in."""
        for group, number in self._members[layer]:
            pages = self.groups[group]
            for moved, src, dst in parts:
                if moved == group:
                    reference.chunk_copy(pages.device[number], pages.host[number], dst, src)


class KvFormat(NamedTuple):
    """How keys and values of a chunk are stored."""

    chunk_tokens: int
    dtype: torch.dtype
    codec: KvDtypeName = "auto"
    """``auto``: they have ``dtype``."""


class KvPools(KvTiers):
    """The memory of both tiers of a model with one KV group."""

    def __init__(
        self,
        arch: Arch,
        *,
        device_chunks: int,
        host_chunks: int,
        form: KvFormat,
        device: torch.device,
    ) -> None:
        """Allocate both pools, zeroed. Raises RuntimeError when memory runs out.

        In plain memory, the operating system provides and zeroes each page when a chunk first writes to it.
        """
        chunk_tokens, dtype, codec = form
        self._shape = arch.num_kv_heads, chunk_tokens, arch.head_dim
        self._code = kv_codec.CODES.get(codec)
        page: tuple[int, ...] = (2, *self._shape)
        if self._code is not None:
            page, dtype = (layer_page_bytes(arch, chunk_tokens, "", codec),), torch.uint8
        # One more page than chunks: unused entries of page tables point to it.
        device_shape = (arch.num_layers, device_chunks + 1, *page)
        on_gpu = device.type == "cuda"
        self.device = (
            torch.zeros(device_shape, dtype=dtype, device=device)
            if on_gpu
            else untouched_zeros(device_shape, dtype)
        )
        chunk_bytes = arch.num_layers * self.device[0, 0].nbytes
        pinned: PinnedMemory | None = None
        shape = (host_chunks, arch.num_layers, *page)
        if on_gpu:
            pinned = PinnedMemory(host_chunks * chunk_bytes, unit=chunk_bytes)
            self.host = pinned.tensor.view(dtype).view(shape)
        else:
            self.host = untouched_zeros(shape, dtype)
        layers = tuple(range(arch.num_layers))
        group = GroupPages(
            layers, chunk_bytes, self.device, self.host.transpose(0, 1),
            used_bytes=0 if self._code is None else kv_codec.used_bytes(*self._shape),
        )  # fmt: skip
        super().__init__(
            (group,),
            num_layers=arch.num_layers,
            chunk_tokens=chunk_tokens,
            padding_page=device_chunks,
            pinned=pinned,
        )

    def attention(self, layer: int) -> torch.Tensor:
        """See ``KvTiers.attention``."""
        pages = self.device[layer]
        return pages if self._code is None else kv_codec.pool_of(pages, *self._shape, self._code)


class LayerTransfers:
    """One step's swap-in. In plain memory the wait does the copy: each layer is copied when first needed, in order."""

    def __init__(self, pools: KvTiers, copies: Sequence[Copy]) -> None:
        self.seconds = 0.0
        self._pools = pools
        self._arrived = 0 if copies else pools.num_layers
        self._parts = _by_group(copies)

    def wait(self, layer: int) -> None:
        """Return when ``layer`` and all before it have arrived. Call before the step writes to that layer."""
        if layer < self._arrived:
            return
        started = time.perf_counter()
        for index in range(self._arrived, layer + 1):
            self._pools.copy_in(index, self._parts)
        self._arrived = layer + 1
        self.seconds += time.perf_counter() - started

    def finish(self) -> None:
        """Return when all layers have arrived. A plan that swaps in without computing needs this, too."""
        self.wait(self._pools.num_layers - 1)


def _by_group(copies: Sequence[Copy]) -> list[GroupCopies]:
    """Sort copies by their KV group."""
    found = []
    for group in sorted({copy.group for copy in copies}):
        pairs = [(copy.src, copy.dst) for copy in copies if copy.group == group]
        src, dst = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        found.append((group, src.contiguous(), dst.contiguous()))
    return found


WORD = torch.int64
"""Copies move pages as words of this type."""
ONE_STEP: Final = 256 << 20
"""Bytes of device memory that are mapped ahead at most, and that are kept for reuse: some units, as many as one plan
moves."""


class HybridPools(KvTiers):
    """The memory of both tiers of a model with two KV groups, or with an elastic device tier."""

    def __init__(
        self,
        arch: Arch,
        groups: tuple[KvGroup, ...],
        tiers: tuple[TierLayout, TierLayout],
        *,
        form: KvFormat,
        device: torch.device,
        floor: int | None = None,
    ) -> None:
        """Allocate both pools, zeroed, as large as ``tiers`` (device, host) say: layer pages are multiples of 16
        bytes. Raises RuntimeError or MemoryError when memory runs out.

        ``floor``: bytes of the device tier that are backed at least. The tier is then elastic: ``backing`` says how
        much of it is, and new memory may hold anything. None: all of it is.

        In plain memory, the operating system provides and zeroes each page when a slice first writes to it.
        """
        self.kv_groups, self.tiers = groups, tiers
        on_gpu = device.type == "cuda"
        pinned: PinnedMemory | None = None
        device_bytes, host_bytes = (aligned(tier.num_bytes) for tier in tiers)
        backing: Backing | None = None
        if floor is not None:
            backing = back_tier(tiers[0], floor, device)
            self.device = backing.region.tensor
        elif on_gpu:
            self.device = torch.zeros(device_bytes, dtype=torch.uint8, device=device)
        else:
            self.device = untouched_zeros((device_bytes,), torch.uint8)
        if on_gpu:
            # A copy must not straddle two registrations. So they begin where a layer page of either group does, if
            # both grids begin at byte 0, and else there is only one.
            unit = math.lcm(*(group.layer_page_bytes for group in groups if group.layers))
            if tiers[1].grids[1].offset:
                unit = host_bytes
            pinned = PinnedMemory(host_bytes, unit=unit)
            self.host = pinned.tensor
        else:
            self.host = untouched_zeros((host_bytes,), torch.uint8)
        grids = [tier.grids for tier in tiers]
        chunk_tokens, dtype, codec = form
        kv_shape = (2, arch.num_kv_heads, chunk_tokens, arch.head_dim)
        code = kv_codec.CODES.get(codec)
        used = 0 if code is None or not groups[0].layers else kv_codec.used_bytes(*kv_shape[1:])
        pages = tuple(
            GroupPages(
                group.layers, group.page_bytes, _runs(self.device, grids[0][number]),
                _runs(self.host, grids[1][number]), max(1, grids[1][number].stride), grids[1][number].first, used,
            )
            if len(groups) > 1
            else GroupPages(
                group.layers, group.page_bytes, _runs(self.device, grids[0][0]), _chunks(self.host, group),
                used_bytes=used,
            )
            for number, group in enumerate(groups)
        )  # fmt: skip
        super().__init__(
            pages,
            num_layers=arch.num_layers,
            chunk_tokens=chunk_tokens,
            padding_page=0,
            pinned=pinned,
        )
        self.backing = backing
        self._attention: dict[int, torch.Tensor] = {}
        self._states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for number, group in enumerate(groups):
            for index, layer in enumerate(group.layers):
                grid = grids[0][number]
                if group.kind != "state":
                    self._attention[layer] = _view(self.device, grid, index, kv_shape, code or dtype)
                else:
                    self._states[layer] = self._state_views(arch, grid, index, dtype)

    def _state_views(
        self, arch: Arch, grid: Grid, index: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = state_shape(arch)
        conv = _view(self.device, grid, index, (shape.conv_channels, shape.conv_width - 1), dtype)
        skipped = conv_bytes(shape, str(dtype).removeprefix("torch."))
        recurrent = (shape.heads, shape.key_dim, shape.value_dim)
        return conv, _view(self.device, grid, index, recurrent, torch.float32, skipped)

    def attention(self, layer: int) -> torch.Tensor:
        """See ``KvTiers.attention``."""
        return self._attention[layer]

    def in_window_group(self, layer: int) -> bool:
        """See ``KvTiers.in_window_group``."""
        return any(group.kind == "window" and layer in group.layers for group in self.kv_groups[1:])

    def state(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``KvTiers.state``."""
        return self._states[layer]


def back_tier(tier: TierLayout, floor: int, device: torch.device) -> Backing:
    """Reserve the buffer of an elastic device tier, and back its permanent part. Raises MemoryError.

    Page 0 of each group is permanent, at whatever byte its layers lie: unused entries of page tables name it. With one
    group the floor is permanent too; with two, either end may need it.
    """
    on_gpu = device.type == "cuda"
    units = [size.unit_bytes for size in tier.sizes if size.unit_bytes]
    # The last layer of a page 0 lies within a unit of the start of its grid.
    first = max(grid.address(grid.size.unit_pages * grid.size.layers) for grid in tier.grids if grid.units)
    permanent = min(max(first, floor if len(tier.sizes) == 1 else 0), tier.num_bytes)
    sizes = RegionSizes(
        permanent,
        handle_bytes(min(units), tier.num_bytes),
        ahead=ONE_STEP if on_gpu else 0,
        kept=ONE_STEP if on_gpu else 0,
    )
    backend: Backend = DriverBackend(device) if on_gpu else PlainBackend()
    return Backing(reserve(tier.num_bytes, backend, sizes), threaded=on_gpu)


def _view(
    buffer: torch.Tensor, grid: Grid, layer: int, shape: tuple[int, ...], dtype: torch.dtype, skipped: int = 0
) -> torch.Tensor:
    """View the values of one layer's pages, [P, *shape], that begin ``skipped`` bytes into each layer page."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    stride, start = grid.size.layer_page_bytes, grid.address(0, layer) + skipped
    assert stride % dtype.itemsize == start % dtype.itemsize == 0
    values = buffer.view(dtype)
    return values.as_strided(
        (grid.end, *shape), (stride // dtype.itemsize, *strides), start // dtype.itemsize
    )


def _runs(buffer: torch.Tensor, grid: Grid) -> torch.Tensor:
    """View all layers' pages as words, [L, P, words]. The pages of one layer do not overlap."""
    words = grid.size.layer_page_bytes // WORD.itemsize
    shape = (grid.size.layers, grid.end, words)
    return buffer.view(WORD).as_strided(
        shape, (grid.size.unit_pages * words, words, 1), grid.address(0) // WORD.itemsize
    )


def _chunks(host: torch.Tensor, group: KvGroup) -> torch.Tensor:
    """View the host pages of a single group as words, [L, C, words]: a chunk is contiguous."""
    layers, words = len(group.layers), group.layer_page_bytes // WORD.itemsize
    chunks = host.nbytes // group.page_bytes
    return host.view(WORD)[: chunks * layers * words].view(chunks, layers, words).transpose(0, 1)
