"""Which copy waits for what: plans take effect one after the other, while three streams run side by side. No torch.

The compute stream runs the model, ``h2d`` brings pages in, ``d2h`` takes pages out; each does its work in order. Plans
are handed over in their order. Per device page this module remembers the last compute work that *touched* it (read or
may have written), the last copy that read it out and the last that wrote it in; per host page the last copy that saved
it and the last that loaded it. A page's waits follow from those five numbers and nothing else:

==============================  =============================================  ===================================
work of plan n                  must come after                                because (what was lost without it)
==============================  =============================================  ===================================
copy device page p → host h     the last compute work that touched p           h would get half a page
..                              the last copy that wrote p in                  h would get p's former content
..                              the last copy that loaded h                    a restored page would get p's
..                              the last copy that saved h                     (same stream: always so)
copy host page h → device p     the last compute work that touched p           an earlier step would read h's
..                              the last copy that read p out                  p's own copy would hold h's
..                              the last copy that saved h                     p would get h's former content
..                              the last copy that wrote p in                  (same stream: always so)
copy device page p → q          the last copy that wrote p or q in             q would get p's former content
..                              the last copy that read q out                  q's own copy would hold p's
the step, writing page p        the last copy that read p out                  that copy would hold later tokens
the step, touching page p       earlier plans' copies that wrote p in          attention over another's tokens
layer l of the step             this plan's copies into layer l (``wait``)     likewise
==============================  =============================================  ===================================

Copies out are not begun at once: they wait in a list and are fed to the device a little at a time, less while a copy in
is under way. So the list is part of the order: whatever must come after a copy out has it, and all before it, begun
first. Nothing else can make a delayed copy out wrong: all that changes its source or target must come after it.

No circle of waits can arise: work only ever waits for work that was queued on its stream before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pensieve.core import Ints
from pensieve.engine.kv.timeline import Lane, LaneWork, Mark, Timeline
from pensieve.engine.plan import Copy, Plan

Pairs = npt.NDArray[np.int32]
"""(source page, target page) per chunk, [n, 2]."""

QUANTUM_BYTES = 4 << 20
"""Most of one submission of copies out, and most that is queued of them while a copy in is under way."""
AHEAD_QUANTA = 16
"""Quanta queued otherwise, in one submission: 1.2 ms of a 55 GB/s link."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the pools hold. ``chunk_bytes`` over all layers."""

    device_pages: int
    host_pages: int
    page_tokens: int
    num_layers: int
    chunk_bytes: int


class Lanes(Protocol):
    """The three streams and what is queued on them. Nothing here waits."""

    def mark(self, lane: Lane) -> Mark:
        """A point after everything queued on the lane so far."""
        ...

    def follow(self, lane: Lane, after: Lane, mark: Mark) -> None:
        """What is queued on ``lane`` from now on begins only when ``mark`` of lane ``after`` is reached."""
        ...

    def prepare(self, pairs: Pairs) -> object:
        """Page pairs in the form that copies take; to be kept until they are done."""
        ...

    def copy_out(self, prepared: object, first: int, count: int) -> None:
        """Queue ``count`` runs from ``first`` on, device to host; run r is layer ``r % L`` of pair ``r // L``."""
        ...

    def copy_in(self, prepared: object) -> None:
        """Queue all layers, host to device, in their order, and let ``wait`` of each layer wait for it."""
        ...

    def copy_on_device(self, pairs: Pairs) -> None:
        """Queue all layers, device to device, on the compute lane; every page is read before any is written."""
        ...


@dataclass(slots=True)
class _CopyOut:
    """One plan's copies out, as far as they have not been queued."""

    pairs: Pairs
    first_ticket: int
    after_compute: int
    after_in: int
    next_run: int = 0
    prepared: object = None


class SwapQueue:
    """The order of all copies and steps. Used by one thread: ``before_step``, the step's kernels, ``after_step``."""

    def __init__(self, lanes: Lanes, sizes: Sizes, *, pipelined: bool) -> None:
        self.lines = {lane: Timeline() for lane in Lane}
        self._lanes, self._sizes, self._pipelined = lanes, sizes, pipelined
        self._touched, self._read_out, self._brought_in = _clocks(3, sizes.device_pages)
        self._saved, self._loaded = _clocks(2, sizes.host_pages)
        self._pages_of_step: tuple[Plan, npt.NDArray[np.int32]] | None = None
        self._followed = {(lane, after): 0 for lane in Lane for after in Lane}
        self._waiting: deque[_CopyOut] = deque()
        self._ticket_out = 0

    @property
    def backlog(self) -> int:
        """Chunks of launched plans that were not copied out when ``settle`` last looked."""
        return self._ticket_out - self.lines[Lane.OUT].done

    def before_step(self, plan: Plan) -> None:
        """Queue ``plan``'s copies, and make compute wait for what its step must not overtake.

        Raises ValueError when a copy names a page that does not exist.
        """
        out = self._pairs(plan, "swap_out", plan.swap_out, self._sizes.device_pages, self._sizes.host_pages)
        on_device = self._pairs(
            plan, "copies", plan.copies, self._sizes.device_pages, self._sizes.device_pages
        )
        come_in = self._pairs(plan, "swap_in", plan.swap_in, self._sizes.host_pages, self._sizes.device_pages)
        if len(out):
            self._take_out(out)
        if len(on_device):
            self._copy_on_device(on_device)
        if plan.spans:
            self._protect_step(plan)
        if len(come_in):
            self._bring_in(come_in)
        self.feed()

    def after_step(self, plan: Plan) -> None:
        """The step's kernels have been queued."""
        if plan.spans:
            if plan.swap_in:
                # Layer by layer, the step has waited for these, and so for all that came in before them.
                self._followed[Lane.COMPUTE, Lane.IN] = self.lines[Lane.IN].last
            self._mark_compute(self._pages_touched(plan))
        self.feed()

    def feed(self) -> None:
        """Begin copies out, as many as may be under way now."""
        line = self.lines[Lane.OUT]
        if not self._waiting and not line.busy:
            return
        line.settle()
        self.lines[Lane.IN].settle()
        limit = QUANTUM_BYTES if self.lines[Lane.IN].busy else QUANTUM_BYTES * AHEAD_QUANTA
        run_bytes = self._sizes.chunk_bytes // self._sizes.num_layers
        while self._waiting and line.queued_bytes < limit:
            self._submit(max(1, (limit - line.queued_bytes) // run_bytes))

    def flush(self) -> None:
        """Begin all copies out."""
        self._begin_out(self._ticket_out)

    def settle(self) -> None:
        """Strike off what is done."""
        for line in self.lines.values():
            line.settle()

    # -- a plan's copies ---------------------------------------------------------------------------------------------

    def _take_out(self, pairs: Pairs) -> None:
        source, target = pairs[:, 0], pairs[:, 1]
        after_compute = int(self._touched[source].max())
        after_in = int(max(self._brought_in[source].max(), self._loaded[target].max()))
        tickets = self._ticket_out + 1 + np.arange(len(pairs))
        self._waiting.append(_CopyOut(pairs, self._ticket_out + 1, after_compute, after_in))
        self._ticket_out += len(pairs)
        self._read_out[source] = tickets
        self._saved[target] = tickets

    def _copy_on_device(self, pairs: Pairs) -> None:
        self._after(Lane.COMPUTE, Lane.IN, int(self._brought_in[pairs].max()))
        self._after(Lane.COMPUTE, Lane.OUT, int(self._read_out[pairs[:, 1]].max()))
        self._lanes.copy_on_device(pairs)
        self._mark_compute(pairs)

    def _bring_in(self, pairs: Pairs) -> None:
        source, target = pairs[:, 0], pairs[:, 1]
        self._after(Lane.IN, Lane.COMPUTE, int(self._touched[target].max()))
        self._after(Lane.IN, Lane.OUT, int(max(self._read_out[target].max(), self._saved[source].max())))
        prepared = self._lanes.prepare(pairs)
        begin = self._lanes.mark(Lane.IN)
        self._lanes.copy_in(prepared)
        line = self.lines[Lane.IN]
        end = self._lanes.mark(Lane.IN)
        line.add(LaneWork(line.last + 1, end, begin, len(pairs) * self._sizes.chunk_bytes, prepared))
        self._brought_in[target] = line.last
        self._loaded[source] = line.last
        if not self._pipelined:
            self._after(Lane.COMPUTE, Lane.IN, line.last)

    def _protect_step(self, plan: Plan) -> None:
        """Before this plan's own copies in: for those each layer waits by itself."""
        touched = self._pages_touched(plan)
        self._after(Lane.COMPUTE, Lane.IN, self._pending(Lane.IN, self._brought_in[touched]))
        if self._pending(Lane.OUT, self._read_out[touched]):
            # To read beside a copy out is no harm, to write is: worth finding out only now.
            written = _pages_written(plan, self._sizes.page_tokens)
            self._after(Lane.COMPUTE, Lane.OUT, int(self._read_out[written].max(initial=0)))

    # -- what all of them are made of --------------------------------------------------------------------------------

    def _after(self, lane: Lane, after: Lane, ticket: int) -> None:
        """The one place where a lane is made to wait for another."""
        if ticket <= self._followed[lane, after]:
            return
        if after is Lane.OUT:
            self._begin_out(ticket)
        work = self.lines[after].first_at(ticket)
        self._followed[lane, after] = ticket if work is None else work.ticket
        if work is not None:
            self._lanes.follow(lane, after, work.end)

    def _pending(self, after: Lane, tickets: Ints) -> int:
        """The latest of these tickets of a lane, 0 if that is done."""
        latest = int(tickets.max(initial=0))
        return latest if latest > self.lines[after].done else 0

    def _mark_compute(self, touched: npt.NDArray[np.int32]) -> None:
        """All compute work queued so far; the newest of it touched these pages."""
        line = self.lines[Lane.COMPUTE]
        line.settle()
        line.add(LaneWork(line.last + 1, self._lanes.mark(Lane.COMPUTE)))
        self._touched[touched] = line.last

    def _begin_out(self, ticket: int) -> None:
        """Begin all copies out up to ``ticket``."""
        while self.lines[Lane.OUT].last < ticket:
            head = self._waiting[0]
            chunks = min(ticket - head.first_ticket + 1, len(head.pairs))
            self._submit(chunks * self._sizes.num_layers - head.next_run)

    def _submit(self, most_runs: int) -> None:
        """Queue up to ``most_runs`` of the oldest waiting copies out."""
        head, layers = self._waiting[0], self._sizes.num_layers
        self._after(Lane.OUT, Lane.COMPUTE, head.after_compute)
        self._after(Lane.OUT, Lane.IN, head.after_in)
        if head.prepared is None:
            head.prepared = self._lanes.prepare(head.pairs)
        runs = min(most_runs, len(head.pairs) * layers - head.next_run)
        begin = self._lanes.mark(Lane.OUT)
        self._lanes.copy_out(head.prepared, head.next_run, runs)
        head.next_run += runs
        ticket = head.first_ticket - 1 + head.next_run // layers
        num_bytes = runs * (self._sizes.chunk_bytes // layers)
        end = self._lanes.mark(Lane.OUT)
        self.lines[Lane.OUT].add(LaneWork(ticket, end, begin, num_bytes, head.prepared))
        if head.next_run == len(head.pairs) * layers:
            self._waiting.popleft()

    def _pages_touched(self, plan: Plan) -> npt.NDArray[np.int32]:
        """Everything that the step may read or write; put together once per plan."""
        if self._pages_of_step is None or self._pages_of_step[0] is not plan:
            self._pages_of_step = plan, np.concatenate(plan.page_tables)
        return self._pages_of_step[1]

    def _pairs(self, plan: Plan, name: str, copies: Sequence[Copy], sources: int, targets: int) -> Pairs:
        pairs = np.array([(copy.src, copy.dst) for copy in copies], dtype=np.int32).reshape(-1, 2)
        if len(pairs) and (pairs.min() < 0 or (pairs.max(axis=0) >= (sources, targets)).any()):
            raise ValueError(f"step {plan.step}: {name} names a page that does not exist")
        return pairs


def _clocks(count: int, pages: int) -> Ints:
    """Tickets of page-wise last uses; 0: never."""
    return np.zeros((count, pages), dtype=np.int64)


def _pages_written(plan: Plan, page_tokens: int) -> npt.NDArray[np.int32]:
    """Where the step puts its tokens' keys and values."""
    parts = [
        plan.page_tables[span.page_table][span.start // page_tokens : -(-span.end // page_tokens)]
        for span in plan.spans
    ]
    return np.concatenate(parts)
