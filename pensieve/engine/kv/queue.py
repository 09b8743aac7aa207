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

With two KV groups each page of either has the five numbers, at its *index*: first all pages of the first group, then
those of the second. A byte can belong to pages of both, one after the other. ``grid.UnitOwners`` hands the numbers
over when a unit changes its group. The plan does not say when; it follows from the pages that are used. So all
indices are claimed before their numbers are read or written, and anew after anything else was claimed in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pensieve.core import Ints
from pensieve.engine.kv.grid import Grid, Indices, UnitOwners
from pensieve.engine.kv.timeline import Lane, LaneWork, Mark, Timeline
from pensieve.engine.plan import NO_PAGE, Copy, PageTable, Plan, Span

Pairs = npt.NDArray[np.int32]
"""(source page, target page) per slice, [n, 2]."""

QUANTUM_BYTES = 4 << 20
"""While a copy in is under way, copies out are submitted in pieces of this size, one at a time."""
AHEAD_QUANTA = 16
"""Otherwise this many quanta are queued in one submission: 1.2 ms of a 55 GB/s link."""


@dataclass(frozen=True, slots=True)
class SecondGroup:
    """The second KV group of a model, and where both groups' pages lie."""

    num_layers: int
    page_bytes: int
    window: int | None
    """Tokens of the window of a window group; None for a state group."""
    device: tuple[Grid, Grid]
    host: tuple[Grid, Grid]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the pools: of the first or only group. ``chunk_bytes`` counts all its layers of a page. Page numbers
    are less than ``device_pages`` and ``host_pages``."""

    device_pages: int
    host_pages: int
    page_tokens: int
    num_layers: int
    chunk_bytes: int
    second: SecondGroup | None = None
    device_grid: Grid | None = None
    """Where the pages of a single group lie in a device tier that has units; None: its pages have all numbers."""

    def layers_of(self, group: int) -> int:
        return self.second.num_layers if group and self.second else self.num_layers

    def page_bytes_of(self, group: int) -> int:
        return self.second.page_bytes if group and self.second else self.chunk_bytes


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

    def copy_out(self, group: int, prepared: object, first: int, count: int) -> None:
        """Queue ``count`` runs from ``first`` on, device to host; run r is layer ``r % L`` of pair ``r // L``, for
        the L layers of the KV group."""
        ...

    def copy_in(self, prepared: dict[int, object]) -> None:
        """Queue the copies of all layers, host to device, in the order of the model's layers, so that a step can wait
        for each layer. ``prepared``: pairs by KV group."""
        ...

    def copy_on_device(self, pairs: dict[int, Pairs]) -> None:
        """Queue copies of all layers on the compute lane, by KV group; every page is read before any is written."""
        ...


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies of one list of a plan, all of one group."""

    group: int
    pairs: Pairs
    source: Indices
    """Indices of the source pages in the clocks of their tier."""
    target: Indices


@dataclass(slots=True)
class _CopyOut:
    """One plan's copies out that are not all queued yet; each pair has a ticket, from ``first_ticket`` on."""

    group: int
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
        second = sizes.second
        self._device_owners = UnitOwners(second.device) if second else None
        self._host_owners = UnitOwners(second.host) if second else None
        self._touched, self._read_out, self._brought_in = _clocks(
            3, self._device_owners.length if self._device_owners else sizes.device_pages
        )
        self._saved, self._loaded = _clocks(
            2, self._host_owners.length if self._host_owners else sizes.host_pages
        )
        self._pages_of_step: tuple[Plan, Indices] | None = None
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
        out = self._copies(plan, "swap_out")
        on_device = self._copies(plan, "copies")
        come_in = self._copies(plan, "swap_in")
        # In the order in which a plan takes effect (``engine.plan``). The step is protected before this plan's
        # copies in are queued: it waits for those layer by layer, and as a whole only for those of earlier plans.
        for copies in out:
            self._take_out(copies)
        if on_device:
            self._copy_on_device(on_device)
        if plan.spans:
            self._protect_step(plan)
        if come_in:
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
        while self._waiting and line.queued_bytes < limit:
            run_bytes = self._run_bytes(self._waiting[0].group)
            self._submit(max(1, (limit - line.queued_bytes) // run_bytes))

    def flush(self) -> None:
        self._begin_out(self._ticket_out)

    def marks_of(self, start: int, stop: int) -> list[Mark]:
        """Return marks after all work of the plans so far that touches bytes ``[start, stop)`` of the device tier.

        The tier must have units. Begins those copies out that still wait. All steps so far count: a kernel may read
        pages that it then masks, and that no clock knows.
        """
        second, single = self._sizes.second, self._sizes.device_grid
        grids: tuple[Grid, ...] = () if second is None else second.device
        if single is not None:
            grids = (single,)
        assert grids, "the device tier has no units"
        tickets, base = {Lane.COMPUTE: self.lines[Lane.COMPUTE].last, Lane.IN: 0, Lane.OUT: 0}, 0
        for grid in grids:
            # Of both groups: a unit's clocks tell of uses of its bytes by the other group only once it is claimed.
            units = grid.units_in(start, stop)
            if units:
                pages = grid.pages_of(units)
                for lane, clock in ((Lane.IN, self._brought_in), (Lane.OUT, self._read_out)):
                    newest = int(clock[base + pages.start : base + pages.stop].max())
                    tickets[lane] = max(tickets[lane], newest)
            base += grid.end
        self._begin_out(tickets[Lane.OUT])
        works = [self.lines[lane].first_at(ticket) for lane, ticket in tickets.items()]
        return [work.end for work in works if work is not None]

    def settle(self) -> None:
        for line in self.lines.values():
            line.settle()

    # -- a plan's copies ---------------------------------------------------------------------------------------------

    def _take_out(self, copies: _Copies) -> None:
        source, target, count = copies.source, copies.target, len(copies.pairs)
        self._claim(source)
        self._claim_host(target)
        # The waits are fixed now, by the tickets at launch; the copy begins later.
        after_compute = int(self._touched[source].max())
        after_in = int(max(self._brought_in[source].max(), self._loaded[target].max()))
        tickets = self._ticket_out + 1 + np.arange(count)
        self._waiting.append(
            _CopyOut(copies.group, copies.pairs, self._ticket_out + 1, after_compute, after_in)
        )
        self._ticket_out += count
        self._read_out[source] = tickets
        self._saved[target] = tickets

    def _copy_on_device(self, groups: list[_Copies]) -> None:
        # The bytes of a target may be those of another group's source: these two claim their units in turn.
        sources = _joined([copies.source for copies in groups])
        targets = _joined([copies.target for copies in groups])
        after_in = after_out = 0
        for indices in (sources, targets):
            self._claim(indices)
            after_in = max(after_in, int(self._brought_in[indices].max()))
        after_out = int(self._read_out[targets].max())
        self._after(Lane.COMPUTE, Lane.IN, after_in)
        self._after(Lane.COMPUTE, Lane.OUT, after_out)
        self._lanes.copy_on_device({copies.group: copies.pairs for copies in groups})
        self._mark_compute(sources, targets)

    def _bring_in(self, groups: list[_Copies]) -> None:
        source = _joined([copies.source for copies in groups])
        target = _joined([copies.target for copies in groups])
        self._claim(target)
        self._claim_host(source)
        self._after(Lane.IN, Lane.COMPUTE, int(self._touched[target].max()))
        self._after(Lane.IN, Lane.OUT, int(max(self._read_out[target].max(), self._saved[source].max())))
        prepared = {copies.group: self._lanes.prepare(copies.pairs) for copies in groups}
        begin = self._lanes.mark(Lane.IN)
        self._lanes.copy_in(prepared)
        line = self.lines[Lane.IN]
        end = self._lanes.mark(Lane.IN)
        num_bytes = sum(len(copies.pairs) * self._sizes.page_bytes_of(copies.group) for copies in groups)
        line.add(LaneWork(line.last + 1, end, begin, num_bytes, prepared))
        self._brought_in[target] = line.last
        self._loaded[source] = line.last
        if not self._pipelined:
            self._after(Lane.COMPUTE, Lane.IN, line.last)

    def _protect_step(self, plan: Plan) -> None:
        """Make the step wait for earlier plans' copies. For this plan's own copies in, each layer waits by itself."""
        touched = self._pages_touched(plan)
        self._claim(touched)
        self._after(Lane.COMPUTE, Lane.IN, self._pending(Lane.IN, self._brought_in[touched]))
        if self._pending(Lane.OUT, self._read_out[touched]):
            # A step may read a page during a copy out of it, but not write it. Finding the pages that it
            # writes takes time, so it is done only when a copy out of any of its pages is pending.
            written = self._pages_written(plan)
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

    def _mark_compute(self, *touched: Indices) -> None:
        """Give the compute work queued so far a ticket, and record that its newest part touched these pages. Those of
        one array lie apart; those of two may have bytes in common."""
        line = self.lines[Lane.COMPUTE]
        line.settle()
        line.add(LaneWork(line.last + 1, self._lanes.mark(Lane.COMPUTE)))
        for indices in touched:
            self._claim(indices)
            self._touched[indices] = line.last

    def _claim(self, indices: Indices) -> None:
        """Let the clocks of these device pages tell of all earlier uses of their bytes."""
        if self._device_owners is not None:
            self._device_owners.claim(indices, (self._touched, self._read_out, self._brought_in))

    def _claim_host(self, indices: Indices) -> None:
        if self._host_owners is not None:
            self._host_owners.claim(indices, (self._saved, self._loaded))

    def _run_bytes(self, group: int) -> int:
        return self._sizes.page_bytes_of(group) // self._sizes.layers_of(group)

    def _begin_out(self, ticket: int) -> None:
        """Begin all copies out up to ``ticket``, however much is queued already."""
        while self.lines[Lane.OUT].last < ticket:
            head = self._waiting[0]
            slices = min(ticket - head.first_ticket + 1, len(head.pairs))
            self._submit(slices * self._sizes.layers_of(head.group) - head.next_run)

    def _submit(self, most_runs: int) -> None:
        """Queue up to ``most_runs`` of the oldest waiting copies out."""
        head = self._waiting[0]
        layers = self._sizes.layers_of(head.group)
        self._after(Lane.OUT, Lane.COMPUTE, head.after_compute)
        self._after(Lane.OUT, Lane.IN, head.after_in)
        if head.prepared is None:
            head.prepared = self._lanes.prepare(head.pairs)
        # A submission may end in the middle of a slice. Its ticket is then that of the last complete slice.
        runs = min(most_runs, len(head.pairs) * layers - head.next_run)
        begin = self._lanes.mark(Lane.OUT)
        self._lanes.copy_out(head.group, head.prepared, head.next_run, runs)
        head.next_run += runs
        ticket = head.first_ticket - 1 + head.next_run // layers
        num_bytes = runs * self._run_bytes(head.group)
        end = self._lanes.mark(Lane.OUT)
        self.lines[Lane.OUT].add(LaneWork(ticket, end, begin, num_bytes, head.prepared))
        if head.next_run == len(head.pairs) * layers:
            self._waiting.popleft()

    # -- the pages of a plan -----------------------------------------------------------------------------------------

    def _pages_touched(self, plan: Plan) -> Indices:
        """Return the indices of all pages that the step may read or write; computed once per plan."""
        if self._pages_of_step is None or self._pages_of_step[0] is not plan:
            parts: list[Indices] = [*plan.page_tables] if self._sizes.num_layers else []
            if self._sizes.second is not None:
                parts += [pages + self._sizes.device_pages for pages in self._second_touched(plan)]
            self._pages_of_step = plan, np.concatenate(parts)
        return self._pages_of_step[1]

    def _second_touched(self, plan: Plan) -> Iterator[Indices]:
        """Yield the second group's pages that the step may read or write."""
        assert self._sizes.second is not None
        window = self._sizes.second.window
        if window is None:
            yield np.array(
                [
                    page
                    for chain in plan.chains
                    for page in (chain.read, chain.boundary, chain.live)
                    if page != NO_PAGE
                ],
                dtype=np.int64,
            )
            return
        size = self._sizes.page_tokens
        for span in plan.spans:
            first = max(0, span.start - window + 1) // size
            yield plan.window_tables[span.page_table][first : -(-span.end // size)]

    def _pages_written(self, plan: Plan) -> Indices:
        """Return the indices of the pages to which the step writes."""
        size, second = self._sizes.page_tokens, self._sizes.second

        def pages(span: Span, tables: Sequence[PageTable]) -> PageTable:
            return tables[span.page_table][span.start // size : -(-span.latest_end // size)]

        parts: list[Indices] = []
        if self._sizes.num_layers:
            parts += [pages(span, plan.page_tables) for span in plan.spans if span.stores & 1]
        if second is not None and second.window is not None:
            base = self._sizes.device_pages
            parts += [pages(span, plan.window_tables) + base for span in plan.spans if span.stores & 2]
        elif second is not None:
            written = [
                page for chain in plan.chains for page in (chain.boundary, chain.live) if page != NO_PAGE
            ]
            parts.append(np.array(written, dtype=np.int64) + self._sizes.device_pages)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def _copies(self, plan: Plan, name: str) -> list[_Copies]:
        """Return one list of the plan's copies by group. Raises ValueError when a page does not exist."""
        copies: tuple[Copy, ...] = getattr(plan, name)
        found = []
        for group in sorted({copy.group for copy in copies}):
            pairs = np.array([(copy.src, copy.dst) for copy in copies if copy.group == group], dtype=np.int32)
            on_host = name == "swap_in", name == "swap_out"
            if not self._exist(group, pairs, on_host=on_host):
                raise ValueError(f"step {plan.step}: {name} names a page that does not exist")
            if self._sizes.layers_of(group):  # a page of a group without layers has no bytes
                source, target = pairs[:, 0], pairs[:, 1]
                if group:
                    # Indices into the clocks, as ``UnitOwners`` counts them.
                    source, target = source + self._base(on_host[0]), target + self._base(on_host[1])
                found.append(_Copies(group, pairs, source, target))
        return found

    def _base(self, on_host: bool) -> int:
        """Return the index of the second group's page 0 in the clocks of a tier."""
        return self._sizes.host_pages if on_host else self._sizes.device_pages

    def _exist(self, group: int, pairs: Pairs, *, on_host: tuple[bool, bool]) -> bool:
        """Whether these source and target pages of a group exist. ``on_host``: the tier of each of the two."""
        second = self._sizes.second
        if group == 0 and second is None:
            limits = self._base(on_host[0]), self._base(on_host[1])
            if not (pairs.min() >= 0 and (pairs.max(axis=0) < limits).all()):
                return False
            grid = self._sizes.device_grid
            return grid is None or all(on_host[end] or grid.is_page(pairs[:, end]) for end in (0, 1))
        if second is None or group not in (0, 1):
            return False
        if not self._sizes.layers_of(group):
            return True
        grids = [(second.host if host else second.device)[group] for host in on_host]
        return all(grid.is_page(pages) for grid, pages in zip(grids, pairs.T, strict=True))


def _joined(parts: Sequence[Indices]) -> Indices:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _clocks(count: int, pages: int) -> Ints:
    """Return the tickets of the last use of each page, one row for each of ``count`` uses; 0: never used."""
    return np.zeros((count, pages), dtype=np.int64)
