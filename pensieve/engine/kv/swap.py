"""Swapping beside the model: copies of coming and leaving chunks run while steps run.

``queue`` says which work waits for which, and why; ``lanes`` queues it on CUDA streams; ``mechanisms`` chooses how the
bytes move. A worker calls, from one thread and for each plan in its order::

    swap.before_step(plan)
    ... queue the step's kernels on the compute stream; in each, before layer l's KV is written: swap.wait(l) ...
    swap.after_step(plan)

Only ``drain`` and ``close`` wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pensieve.engine.kv.lanes import CudaLanes
from pensieve.engine.kv.pools import KvPools
from pensieve.engine.kv.queue import Sizes, SwapQueue
from pensieve.engine.kv.timeline import Lane
from pensieve.engine.plan import Plan


class RestoreMismatch(RuntimeError):
    """A chunk came back from the host other than it had left. The KV of its session is wrong."""


@dataclass(frozen=True, slots=True)
class SwapCounters:
    """Copies that ended since the counters were last read. Seconds count time on the wire, not waiting for a turn."""

    in_bytes: int
    out_bytes: int
    in_seconds: float
    out_seconds: float
    backlog: int
    """Chunks of launched plans that have not been copied out yet."""


class SwapEngine:
    """All copies between the pools of one worker, in the right order beside its steps."""

    lanes_type: ClassVar[type[CudaLanes]] = CudaLanes

    def __init__(
        self,
        pools: KvPools,
        compute: torch.cuda.Stream,
        *,
        pipelined: bool,
        mechanism: str = "auto",
        verify: bool = False,
    ) -> None:
        """``pipelined``: a step may begin before all that it swaps in is there. ``mechanism``: one of
        ``mechanisms.MECHANISMS``. ``verify``: chunks are checked when they are back. Steps run on ``compute``.

        Raises ValueError for a mechanism that is unknown or impossible here.
        """
        self._lanes = self.lanes_type(pools, compute, mechanism=mechanism, verify=verify)
        sizes = Sizes(
            device_pages=pools.padding_page,
            host_pages=len(pools.host),
            page_tokens=pools.device.shape[4],
            num_layers=pools.num_layers,
            chunk_bytes=pools.chunk_bytes,
        )
        self._queue = SwapQueue(self._lanes, sizes, pipelined=pipelined)
        self._before = SwapCounters(0, 0, 0.0, 0.0, 0)

    @property
    def lanes(self) -> CudaLanes:
        """For tests and tools."""
        return self._lanes

    def before_step(self, plan: Plan) -> None:
        """Queue the plan's copies, and make compute wait for what the step must not overtake.

        Raises ValueError when a copy names a page that does not exist.
        """
        self._queue.before_step(plan)

    def wait(self, layer: int) -> None:
        """Make the current stream wait until ``layer`` has been swapped in.

        This may be captured in a CUDA graph: each replay then waits for what was last swapped in before it was
        launched. A step with spans whose plan swaps in must call it for every layer.
        """
        self._lanes.wait(layer)

    def after_step(self, plan: Plan) -> None:
        """Take note that the step's kernels have been queued, or that there were none."""
        self._queue.after_step(plan)

    def counters(self) -> SwapCounters:
        """What has ended since the last call. This does not wait.

        Raises RestoreMismatch when a restored chunk was found to differ.
        """
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
        """Copy out everything that launched plans swap out, and wait for all copies."""
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
            raise RestoreMismatch(f"host chunks {failed} came back other than they had left")
