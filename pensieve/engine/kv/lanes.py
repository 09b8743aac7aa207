"""The three CUDA streams of the swap engine, and the copies that are queued on them."""

from __future__ import annotations

import logging

import numpy as np
import torch

from pensieve.engine.kv.groups import calls_for, layer_groups
from pensieve.engine.kv.mechanisms import Choice, RunCopy, calibrate, choose, make_copy
from pensieve.engine.kv.pools import KvPools
from pensieve.engine.kv.queue import Pairs
from pensieve.engine.kv.timeline import Lane, Mark
from pensieve.kernels.attention.plan import multiprocessors_of
from pensieve.kernels.chunk_checksum import ChunkChecksum
from pensieve.kernels.chunk_copy import ChunkCopy, runs_of

log = logging.getLogger(__name__)


class CudaLanes:
    """``swap_queue.Lanes`` on one GPU. The host pool must be pinned."""

    def __init__(self, pools: KvPools, compute: torch.cuda.Stream, *, mechanism: str, verify: bool) -> None:
        """Raises ValueError for a mechanism that is unknown or impossible here."""
        self._pools = pools
        self._inside, outside = runs_of(pools.device), runs_of(pools.host, chunk_first=True)
        device = pools.device.device
        # Copies in hold a step up, so they go first where programs compete for multiprocessors.
        self.streams = {
            Lane.COMPUTE: compute,
            Lane.IN: torch.cuda.Stream(device, priority=-1),
            Lane.OUT: torch.cuda.Stream(device),
        }
        self._run_bytes = self._inside.shape[2] * self._inside.itemsize
        self.choices: dict[Lane, Choice] = {}
        self._in = self._choose(Lane.IN, mechanism, self._inside, outside)
        self._out = self._choose(Lane.OUT, mechanism, outside, self._inside)
        self._on_device = ChunkCopy(
            self._inside,
            self._inside,
            programs=multiprocessors_of(device),  # no link limits these
        )
        nothing = self.prepare(np.zeros((1, 2), np.int32))
        for copy in (self._in, self._out, self._on_device):
            copy.warm_up(nothing)
        self.groups = layer_groups(pools.num_layers)
        self._arrived = {group.start: torch.cuda.Event(external=True) for group in self.groups}
        for event in self._arrived.values():
            # torch makes an event when it is first recorded; a graph that waits for one not made yet drops the wait.
            event.record(self.streams[Lane.IN])
        self._failed = torch.zeros(len(pools.host), dtype=torch.int32, pin_memory=True)
        self._checksum = ChunkChecksum(self._inside, len(pools.host), self._failed) if verify else None

    def _choose(self, lane: Lane, mechanism: str, dst: torch.Tensor, src: torch.Tensor) -> RunCopy:
        choice = Choice(mechanism, {})
        if mechanism == "auto":
            choice = choose(calibrate(dst.shape[2], self._inside.device, inwards=lane is Lane.IN))
        self.choices[lane] = choice
        measured = ", ".join(
            f"{name} {trial.gb_per_s:.1f} GB/s {trial.submit_us_per_run:.2f} µs CPU a run"
            for name, trial in choice.trials.items()
        )
        log.info("swap %s by %s (%s)", lane.value, choice.mechanism, measured or "as asked for")
        return make_copy(choice.mechanism, dst, src)

    def mark(self, lane: Lane) -> Mark:
        """See ``Lanes.mark``."""
        event = torch.cuda.Event(enable_timing=lane is not Lane.COMPUTE)
        event.record(self.streams[lane])
        return event

    def follow(self, lane: Lane, after: Lane, mark: Mark) -> None:
        """See ``Lanes.follow``."""
        assert isinstance(mark, torch.cuda.Event)
        self.streams[lane].wait_event(mark)

    def prepare(self, pairs: Pairs) -> torch.Tensor:
        """See ``Lanes.prepare``: int32 [n, 2], pinned, so that kernels can read it where it is."""
        prepared = torch.empty(pairs.shape, dtype=torch.int32, pin_memory=True)
        prepared.numpy()[:] = pairs
        return prepared

    def copy_out(self, prepared: object, first: int, count: int) -> None:
        """See ``Lanes.copy_out``."""
        assert isinstance(prepared, torch.Tensor)
        with torch.cuda.stream(self.streams[Lane.OUT]):
            self._out(prepared, first=first, count=count, layers=range(self._pools.num_layers))
            if self._checksum is not None:
                self._checksum.keep(prepared, first, count)

    def copy_in(self, prepared: object) -> None:
        """See ``Lanes.copy_in``."""
        assert isinstance(prepared, torch.Tensor)
        with torch.cuda.stream(self.streams[Lane.IN]):
            for layers, groups in calls_for(self.groups, len(prepared) * self._run_bytes):
                self._in(prepared, first=0, count=len(prepared) * len(layers), layers=layers)
                if self._checksum is not None:
                    self._checksum.compare(prepared, layers)
                for group in groups:
                    self._arrived[group.start].record()

    def copy_on_device(self, pairs: Pairs) -> None:
        """See ``Lanes.copy_on_device``."""
        with torch.cuda.stream(self.streams[Lane.COMPUTE]):
            # torch may free pinned memory behind its own copies only: numbers go to the device before they are used.
            numbers = self.prepare(pairs).to(self._inside.device, non_blocking=True)
            if np.isin(pairs[:, 0], pairs[:, 1]).any():
                # Some page is both read and written: all reads of a layer first.
                source, target = numbers.long().unbind(1)
                for layer in self._inside:
                    layer.index_copy_(0, target, layer.index_select(0, source))
            else:
                self._on_device(numbers)

    def wait(self, layer: int) -> None:
        """Make the current stream wait for the last copy in of ``layer``. Can be captured: a replay waits for the copy
        that was queued last before the replay was."""
        event = self._arrived.get(layer)
        if event is not None:
            event.wait()

    def failed_pages(self) -> list[int]:
        """Host pages that came back other than they had left, as far as known. Does not wait."""
        return [int(page) for page in np.flatnonzero(self._failed.numpy())]

    def synchronize(self) -> None:
        """Wait for both copy streams."""
        self.streams[Lane.IN].synchronize()
        self.streams[Lane.OUT].synchronize()
