"""Swapping alongside the model: chunks are copied in and out while steps run.

``queue`` orders the work and says why; ``mechanisms`` chooses how the bytes move; ``CudaLanes`` queues it on
three CUDA streams. A worker calls, from one thread and for each plan in order::

    swap.before_step(plan)
    ... queue the step's kernels on the compute stream; in each, before layer l's KV is written: swap.wait(l) ...
    swap.after_step(plan)

Only ``drain`` and ``close`` wait for the device.
"""

from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from pensieve.engine.kv.grid import Grid
from pensieve.engine.kv.mechanisms import (
    Choice,
    RunCopy,
    calibrate,
    calls_for,
    choose,
    layer_groups,
    make_copy,
)
from pensieve.engine.kv.pools import GroupPages, HybridPools, KvTiers
from pensieve.engine.kv.queue import Pairs, SecondGroup, Sizes, SwapQueue
from pensieve.engine.kv.recomputed import RestoreMismatch
from pensieve.engine.kv.timeline import Lane, Mark
from pensieve.engine.plan import Plan
from pensieve.kernels.attention.plan import multiprocessors_of
from pensieve.kernels.chunk_checksum import ChunkChecksum
from pensieve.kernels.chunk_copy import ChunkCopy, runs_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _GroupLanes:
    """The copies of one KV group's pages."""

    layers: tuple[int, ...]
    """Layers of the model, ascending."""
    runs: torch.Tensor
    """Device pages, [L, P, words]."""
    into: RunCopy
    out: RunCopy
    on_device: ChunkCopy
    failed: torch.Tensor
    """int32, pinned: not 0 for each host page that came back changed."""
    host_first: int
    host_step: int
    """Host page ``host_first + n * host_step`` is number n of ``failed``."""
    checksum: ChunkChecksum | None

    def numbers(self, layers: range) -> range:
        """Return which of the group's layers are among these layers of the model."""
        return range(
            bisect.bisect_left(self.layers, layers.start), bisect.bisect_left(self.layers, layers.stop)
        )

    @property
    def page_bytes(self) -> int:
        return len(self.layers) * self.runs.shape[2] * self.runs.itemsize


class CudaLanes:
    """``queue.Lanes`` on one GPU. The host pool must be pinned."""

    def __init__(self, pools: KvTiers, compute: torch.cuda.Stream, *, mechanism: str, verify: bool) -> None:
        """Raises ValueError for an unknown or unavailable mechanism."""
        # Groups without layers have no bytes to copy.
        with_layers = {number: pages for number, pages in enumerate(pools.groups) if pages.layers}
        self._device = next(iter(with_layers.values())).device.device
        # A step waits for its copies in, so they get priority where programs compete for multiprocessors.
        self.streams = {
            Lane.COMPUTE: compute,
            Lane.IN: torch.cuda.Stream(self._device, priority=-1),
            Lane.OUT: torch.cuda.Stream(self._device),
        }
        self.choices: dict[Lane, Choice] = {}
        """With two KV groups: those of the second."""
        self._num_layers = pools.num_layers
        self._groups = {
            number: self._group(pages, mechanism, verify=verify) for number, pages in with_layers.items()
        }
        self.groups = layer_groups(pools.num_layers)
        self._arrived = {group.start: torch.cuda.Event(external=True) for group in self.groups}
        for event in self._arrived.values():
            # torch creates an event when it is first recorded, and graph capture drops a wait for an event
            # that does not exist yet.
            event.record(self.streams[Lane.IN])
        # Pools and checksums are zeroed on the current stream, which none of the three waits for.
        torch.cuda.synchronize(self._device)

    def _group(self, pages: GroupPages, mechanism: str, *, verify: bool) -> _GroupLanes:
        inside, outside = runs_of(pages.device), runs_of(pages.host.transpose(0, 1), chunk_first=True)
        into = self._choose(Lane.IN, mechanism, inside, outside)
        out = self._choose(Lane.OUT, mechanism, outside, inside)
        # No link limits copies on the device.
        on_device = ChunkCopy(inside, inside, programs=multiprocessors_of(self._device))
        nothing = self.prepare(np.zeros((1, 2), np.int32))
        for copy in (into, out, on_device):
            copy.warm_up(nothing)
        host_pages = -(-pages.host.shape[1] // pages.host_step)
        failed = torch.zeros(host_pages, dtype=torch.int32, pin_memory=True)
        checksum = None
        if verify:
            checksum = ChunkChecksum(inside, host_pages, failed, page_step=pages.host_step)
        return _GroupLanes(
            layers=pages.layers,
            runs=inside,
            into=into,
            out=out,
            on_device=on_device,
            failed=failed,
            host_first=pages.host_first,
            host_step=pages.host_step,
            checksum=checksum,
        )

    def _choose(self, lane: Lane, mechanism: str, dst: torch.Tensor, src: torch.Tensor) -> RunCopy:
        choice = Choice(mechanism, {})
        if mechanism == "auto":
            choice = choose(calibrate(dst.shape[2], self._device, inwards=lane is Lane.IN))
        self.choices[lane] = choice
        measured = ", ".join(
            f"{name} {trial.gb_per_s:.1f} GB/s {trial.submit_us_per_run:.2f} µs CPU per run"
            for name, trial in choice.trials.items()
        )
        log.info("swap %s by %s (%s)", lane.value, choice.mechanism, measured or "as requested")
        return make_copy(choice.mechanism, dst, src)

    def mark(self, lane: Lane) -> Mark:
        event = torch.cuda.Event(enable_timing=lane is not Lane.COMPUTE)
        event.record(self.streams[lane])
        return event

    def follow(self, lane: Lane, after: Lane, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self.streams[lane].wait_event(mark)

    def prepare(self, pairs: Pairs) -> torch.Tensor:
        """See ``Lanes.prepare``: int32 [n, 2], pinned, so that kernels can read it in place."""
        prepared = torch.empty(pairs.shape, dtype=torch.int32, pin_memory=True)
        prepared.numpy()[:] = pairs
        return prepared

    def copy_out(self, group: int, prepared: object, first: int, count: int) -> None:
        assert isinstance(prepared, torch.Tensor)
        lanes = self._groups[group]
        with torch.cuda.stream(self.streams[Lane.OUT]):
            lanes.out(prepared, first=first, count=count, layers=range(len(lanes.layers)))
            if lanes.checksum is not None:
                lanes.checksum.keep(prepared, first, count)

    def copy_in(self, prepared: dict[int, object]) -> None:
        parts = []
        for group, pairs in prepared.items():
            assert isinstance(pairs, torch.Tensor)
            parts.append((self._groups[group], pairs))
        num_bytes = sum(len(pairs) * lanes.page_bytes for lanes, pairs in parts)
        with torch.cuda.stream(self.streams[Lane.IN]):
            # One event per group of layers: the model waits at a group's first layer for the whole group.
            for layers, together in calls_for(self.groups, num_bytes // self._num_layers):
                for lanes, pairs in parts:
                    numbers = lanes.numbers(layers)
                    if numbers:
                        lanes.into(pairs, first=0, count=len(pairs) * len(numbers), layers=numbers)
                        if lanes.checksum is not None:
                            lanes.checksum.compare(pairs, numbers)
                for layer_group in together:
                    self._arrived[layer_group.start].record()

    def copy_on_device(self, pairs: dict[int, Pairs]) -> None:
        with torch.cuda.stream(self.streams[Lane.COMPUTE]):
            # torch keeps pinned memory alive only for its own copies: the numbers go to the device before
            # they are used.
            numbers = {
                group: self.prepare(pages).to(self._device, non_blocking=True)
                for group, pages in pairs.items()
            }
            if len(pairs) == 1:
                ((group, pages),) = pairs.items()
                self._copy_in_group(self._groups[group], pages, numbers[group])
                return
            # A page of one group may be written where one of the other is read: do all reads first.
            ends = {group: part.long().unbind(1) for group, part in numbers.items()}
            read = {
                group: self._groups[group].runs.index_select(1, source) for group, (source, _) in ends.items()
            }
            for group, (_, target) in ends.items():
                for layer, values in zip(self._groups[group].runs, read[group], strict=True):
                    layer.index_copy_(0, target, values)

    def _copy_in_group(self, lanes: _GroupLanes, pairs: Pairs, numbers: torch.Tensor) -> None:
        if np.isin(pairs[:, 0], pairs[:, 1]).any():
            # Some page is both read and written: do all reads of a layer first.
            source, target = numbers.long().unbind(1)
            for layer in lanes.runs:
                layer.index_copy_(0, target, layer.index_select(0, source))
        else:
            lanes.on_device(numbers)

    def wait(self, layer: int) -> None:
        """See ``SwapEngine.wait``."""
        event = self._arrived.get(layer)
        if event is not None:
            event.wait()

    def failed_pages(self) -> list[int]:
        """Return the host pages whose slices are known to have come back changed. Does not wait."""
        return [
            lanes.host_first + int(number) * lanes.host_step
            for lanes in self._groups.values()
            for number in np.flatnonzero(lanes.failed.numpy())
        ]

    def synchronize(self) -> None:
        self.streams[Lane.IN].synchronize()
        self.streams[Lane.OUT].synchronize()


@dataclass(frozen=True, slots=True)
class SwapCounters:
    """Copies completed since the counters were last read. Seconds are time on the wire, without time in the queue."""

    in_bytes: int
    out_bytes: int
    in_seconds: float
    out_seconds: float
    backlog: int
    """Chunks of launched plans not yet copied out."""


def sizes_of(pools: KvTiers) -> Sizes:
    """Return the sizes of a worker's pools."""
    first = pools.groups[0]
    device_pages, host_pages = pools.padding_page, first.host.shape[1]
    second: SecondGroup | None = None
    single: Grid | None = None
    if isinstance(pools, HybridPools):
        device, host = (tier.grids for tier in pools.tiers)
        device_pages = device[0].end
        if len(pools.groups) > 1:
            host_pages, group = host[0].end, pools.kv_groups[1]
            second = SecondGroup(len(group.layers), group.page_bytes, group.window, device, host)
        else:
            single = device[0]
    layers = len(first.layers)
    return Sizes(device_pages, host_pages, pools.chunk_tokens, layers, first.page_bytes, second, single)


class SwapEngine:
    """All copies between the pools of one worker, in the right order with its steps."""

    lanes_type: ClassVar[type[CudaLanes]] = CudaLanes

    def __init__(
        self,
        pools: KvTiers,
        compute: torch.cuda.Stream,
        *,
        pipelined: bool,
        mechanism: str = "auto",
        verify: bool = False,
    ) -> None:
        """``pipelined``: steps begin before their swap-in is complete. ``mechanism``: one of
        ``mechanisms.MECHANISMS``. ``verify``: check chunks when they return. Raises ValueError for an unknown
        or unavailable mechanism."""
        self._lanes = self.lanes_type(pools, compute, mechanism=mechanism, verify=verify)
        self._queue = SwapQueue(self._lanes, sizes_of(pools), pipelined=pipelined)
        self._before = SwapCounters(0, 0, 0.0, 0.0, 0)

    @property
    def lanes(self) -> CudaLanes:
        """For tests and tools."""
        return self._lanes

    def before_step(self, plan: Plan) -> None:
        """See ``SwapQueue.before_step``. Raises ValueError when a copy names a page that does not exist."""
        self._queue.before_step(plan)

    def marks_of(self, start: int, stop: int) -> list[Mark]:
        """See ``SwapQueue.marks_of``."""
        return self._queue.marks_of(start, stop)

    def wait(self, layer: int) -> None:
        """Make the current stream wait until ``layer`` has been swapped in.

        Can be captured in a CUDA graph: each replay waits for the last swap-in before its launch. A step with
        spans whose plan swaps in must call it for every layer.
        """
        self._lanes.wait(layer)

    def after_step(self, plan: Plan) -> None:
        """Record that the step's kernels have been queued, or that there were none."""
        self._queue.after_step(plan)

    def counters(self) -> SwapCounters:
        """Return what was copied since the last call, without waiting. Raises RestoreMismatch if a chunk came
        back changed."""
        self._queue.settle()
        self._queue.feed()
        self._check()
        into, out = self._queue.lines[Lane.IN], self._queue.lines[Lane.OUT]
        total = SwapCounters(
            into.finished_bytes, out.finished_bytes, into.finished_seconds, out.finished_seconds, 0
        )
        before, self._before = self._before, total
        return SwapCounters(
            total.in_bytes - before.in_bytes,
            total.out_bytes - before.out_bytes,
            total.in_seconds - before.in_seconds,
            total.out_seconds - before.out_seconds,
            self._queue.backlog,
        )

    def drain(self) -> None:
        """Finish all copies out of launched plans, and wait for all copies."""
        self._queue.flush()
        self._lanes.synchronize()
        self._queue.settle()

    def close(self) -> None:
        """Wait for all copies; none may be queued afterwards. Raises RestoreMismatch like ``counters``."""
        self.drain()
        self._check()

    def _check(self) -> None:
        failed = self._lanes.failed_pages()
        if failed:
            raise RestoreMismatch(f"host chunks {failed} came back changed")
