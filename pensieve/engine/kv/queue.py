"""The order of copies and steps: plans take effect one after the other while three streams run side by side.

No torch.

The compute stream runs the model, ``h2d`` brings pages in, ``d2h`` takes pages out; each does its work in order.
Plans are submitted in order. For each device page this module records the last compute work that *touched* it (read
or may have written), the last copy that read it out and the last that wrote it in. For each host page it records the
last copy that saved it and the last that loaded it. A page's waits follow from those five numbers alone:

==============================  =============================================  ===================================
work of plan n                  must come after                                or else
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

Copies out do not begin at once. They wait in a list and are submitted a little at a time, less while a copy
in is under way. So the list is part of the order: before any work is queued that must come after a copy out,
that copy and all before it in the list are begun. A delayed copy out cannot go wrong in any other way, since
all work that changes its source or target must come after it.

Waits cannot form a cycle: work only waits for work that was queued before it.

The five numbers are tickets. Each lane numbers its work. When ticket n of a lane is done, so is all its
earlier work. So a lane that has waited for ticket n need not wait again for any smaller one.
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
"""While a copy in is under way, copies out are submitted in pieces of this size, one at a time."""
AHEAD_QUANTA = 16
"""Otherwise this many quanta are queued in one submission: 1.2 ms of a 55 GB/s link."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the pools. ``chunk_bytes`` counts all layers of a chunk."""

    device_pages: int
    host_pages: int
    page_tokens: int
    num_layers: int
    chunk_bytes: int


class Lanes(Protocol):
    """The three streams and the work queued on them. No call here waits."""

    def mark(self, lane: Lane) -> Mark:
        """Return a mark after all work queued on the lane so far."""
        ...

    def follow(self, lane: Lane, after: Lane, mark: Mark) -> None:
        """Make later work on ``lane`` wait for ``mark`` of lane ``after``."""
        ...

    def prepare(self, pairs: Pairs) -> object:
        """Convert page pairs to the form that copies take. The caller keeps the result until the copies are done."""
        ...

    def copy_out(self, prepared: object, first: int, count: int) -> None:
        """Queue ``count`` runs from ``first`` on, device to host; run r is layer ``r % L`` of pair ``r // L``."""
        ...

    def copy_in(self, prepared: object) -> None:
        """Queue the copies of all layers, host to device, in order, so that a step can wait for each layer."""
        ...

    def copy_on_device(self, pairs: Pairs) -> None:
        """Queue copies of all layers on the compute lane; every page is read before any is written."""
        ...


@dataclass(slots=True)
class _CopyOut:
    """One plan's copies out that are not all queued yet; each pair has a ticket, from ``first_ticket`` on."""

    pairs: Pairs
    first_ticket: int
    after_compute: int
    """Ticket of compute work that must be done first; likewise ``after_in``."""
    after_in: int
    next_run: int = 0
    """First run not yet queued."""
    prepared: object = None


class SwapQueue:
    """Orders all copies and steps. One thread calls ``before_step``, queues the step and calls ``after_step``."""

    def __init__(self, lanes: Lanes, sizes: Sizes, *, pipelined: bool) -> None:
        self.lines = {lane: Timeline() for lane in Lane}
        self._lanes, self._sizes, self._pipelined = lanes, sizes, pipelined
        self._touched, self._read_out, self._brought_in = _clocks(3, sizes.device_pages)
        self._saved, self._loaded = _clocks(2, sizes.host_pages)
        self._pages_of_step: tuple[Plan, npt.NDArray[np.int32]] | None = None
        # (lane, after): the latest ticket of ``after`` that ``lane`` already waits for.
        self._followed = {(lane, after): 0 for lane in Lane for after in Lane}
        self._waiting: deque[_CopyOut] = deque()
        self._ticket_out = 0

    @property
    def backlog(self) -> int:
        """Chunks of launched plans not copied out when ``settle`` was last called."""
        return self._ticket_out - self.lines[Lane.OUT].done

    def before_step(self, plan: Plan) -> None:
        """Queue ``plan``'s copies, and make compute wait for the copies that its step must not overtake.

        Raises ValueError when a copy names a page that does not exist.
        """
        out = self._pairs(plan, "swap_out", plan.swap_out, self._sizes.device_pages, self._sizes.host_pages)
        on_device = self._pairs(
            plan, "copies", plan.copies, self._sizes.device_pages, self._sizes.device_pages
        )
        come_in = self._pairs(plan, "swap_in", plan.swap_in, self._sizes.host_pages, self._sizes.device_pages)
        # In the order in which a plan takes effect (``engine.plan``). The step is protected before this plan's
        # copies in are queued: it waits for those layer by layer, and as a whole only for those of earlier plans.
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
        """Record that the step's kernels have been queued."""
        if plan.spans:
            if plan.swap_in:
                # The step has waited for these layer by layer, and so for all earlier copies in.
                self._followed[Lane.COMPUTE, Lane.IN] = self.lines[Lane.IN].last
            self._mark_compute(self._pages_touched(plan))
        self.feed()

    def feed(self) -> None:
        """Begin as many copies out as may be under way now."""
        line = self.lines[Lane.OUT]
        if not self._waiting and not line.busy:
            return
        # Both directions share the link and the host's memory, and steps wait for copies in: those go first.
        line.settle()
        self.lines[Lane.IN].settle()
        limit = QUANTUM_BYTES if self.lines[Lane.IN].busy else QUANTUM_BYTES * AHEAD_QUANTA
        run_bytes = self._sizes.chunk_bytes // self._sizes.num_layers
        while self._waiting and line.queued_bytes < limit:
            self._submit(max(1, (limit - line.queued_bytes) // run_bytes))

    def flush(self) -> None:
        self._begin_out(self._ticket_out)

    def settle(self) -> None:
        for line in self.lines.values():
            line.settle()

    # -- a plan's copies ---------------------------------------------------------------------------------------------

    def _take_out(self, pairs: Pairs) -> None:
        source, target = pairs[:, 0], pairs[:, 1]
        # The waits are fixed now, by the tickets at launch; the copy begins later.
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
        """Make the step wait for earlier plans' copies. For this plan's own copies in, each layer waits by itself."""
        touched = self._pages_touched(plan)
        self._after(Lane.COMPUTE, Lane.IN, self._pending(Lane.IN, self._brought_in[touched]))
        if self._pending(Lane.OUT, self._read_out[touched]):
            # A step may read a page during a copy out of it, but not write it. Finding the pages that it
            # writes takes time, so it is done only when a copy out of any of its pages is pending.
            written = _pages_written(plan, self._sizes.page_tokens)
            self._after(Lane.COMPUTE, Lane.OUT, int(self._read_out[written].max(initial=0)))

    # -- common parts: waits, marks, submissions ---------------------------------------------------------------------

    def _after(self, lane: Lane, after: Lane, ticket: int) -> None:
        """Make ``lane`` wait for a ticket of ``after``. Lanes wait for each other nowhere else."""
        if ticket <= self._followed[lane, after]:
            return
        if after is Lane.OUT:
            self._begin_out(ticket)  # only a queued copy can be waited for
        work = self.lines[after].first_at(ticket)
        self._followed[lane, after] = ticket if work is None else work.ticket
        if work is not None:
            self._lanes.follow(lane, after, work.end)

    def _pending(self, after: Lane, tickets: Ints) -> int:
        """Return the latest of these tickets of a lane, or 0 if it is done already."""
        latest = int(tickets.max(initial=0))
        return latest if latest > self.lines[after].done else 0

    def _mark_compute(self, touched: npt.NDArray[np.int32]) -> None:
        """Give the compute work queued so far a ticket, and record that its newest part touched these pages."""
        line = self.lines[Lane.COMPUTE]
        line.settle()
        line.add(LaneWork(line.last + 1, self._lanes.mark(Lane.COMPUTE)))
        self._touched[touched] = line.last

    def _begin_out(self, ticket: int) -> None:
        """Begin all copies out up to ``ticket``, however much is queued already."""
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
        # A submission may end in the middle of a chunk. Its ticket is then that of the last complete chunk.
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
        """Return all pages that the step may read or write; computed once per plan."""
        if self._pages_of_step is None or self._pages_of_step[0] is not plan:
            self._pages_of_step = plan, np.concatenate(plan.page_tables)
        return self._pages_of_step[1]

    def _pairs(self, plan: Plan, name: str, copies: Sequence[Copy], sources: int, targets: int) -> Pairs:
        pairs = np.array([(copy.src, copy.dst) for copy in copies], dtype=np.int32).reshape(-1, 2)
        if len(pairs) and (pairs.min() < 0 or (pairs.max(axis=0) >= (sources, targets)).any()):
            raise ValueError(f"step {plan.step}: {name} names a page that does not exist")
        return pairs


def _clocks(count: int, pages: int) -> Ints:
    """Return the tickets of the last use of each page, one row for each of ``count`` uses; 0: never used."""
    return np.zeros((count, pages), dtype=np.int64)


def _pages_written(plan: Plan, page_tokens: int) -> npt.NDArray[np.int32]:
    """Return the pages to which the step writes KV."""
    parts = [
        plan.page_tables[span.page_table][span.start // page_tokens : -(-span.end // page_tokens)]
        for span in plan.spans
    ]
    return np.concatenate(parts)
