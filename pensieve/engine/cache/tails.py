"""The second KV group: what a running request holds of it, and what an idle session keeps.

Layers with a window read the last tokens only, recurrent layers one state. So a request holds few slices of this
group, and the same few decide whether a session's next turn finds its context. Three words:

* *held*: pinned by a running request, because a position that it has yet to compute needs the slice. When the request
  has passed it by, the slice has *fallen behind* and is let go at the launch of that plan.
* *needed*: the next turn of a holder (a session or a shared run) reads it. These slices are the holder's *tail*.
* *leftover*: only a turn that begins earlier would read it, at one of the session's resume points: where its latest
  turn began, or where that turn's prompt ended. It is evicted first and never saved.

A slice that is none of these is freed at once.

Room for a request's slices is *promised* at admission, for its window and ``LEAST_SPAN`` tokens, because it takes
their pages step by step. A longer span takes only pages that are free (``reach``). So a request that was admitted can
always go on. In an elastic tier, which may give up all other pages, the promise is kept besides the slices that wait
for positions far ahead (``claim``). A running request that will branch off is promised what that takes before any
branch of the plan is made (``promise_branch``).

==============  ==========================  ========================================================
event           state of a slice after it   called by ``CacheManager`` when
==============  ==========================  ========================================================
``begin``       held, or not touched        a request is admitted
``branch``      held, or not touched        a request branches off
``computed``    held, with a page           a plan computes positions
``complete``    needed, leftover or freed   that plan is launched, and the slice has fallen behind
``let_go``      not pinned                  the request ends
``truncate``    as before, or freed         the session goes on with other tokens
``sort``        needed, leftover or freed   the request has ended
==============  ==========================  ========================================================
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pensieve.config import CacheGroup
from pensieve.engine.cache.chunk import (
    NOWHERE,
    CachedSession,
    Chunk,
    OtherSlice,
    Place,
    Range,
    Restore,
    SharedRun,
    take_front,
    tokens_in,
)
from pensieve.engine.cache.restore import (
    Needs,
    SpanPart,
    add_range,
    missing_set,
    needed,
    pieces_of,
    reads,
    sources,
    window_reach,
)
from pensieve.engine.cache.tiers import Pages, Tiers
from pensieve.engine.plan import Chain, PageTable

UNBOUNDED: Final = 1 << 40
"""Stands for the longest context of a model whose memory does not grow with it."""
LEAST_SPAN: Final = 256
"""Tokens of one request that a step can always compute, however full the device is."""

Reserve = Callable[[Pages, float, int], None]


@dataclass(slots=True)
class _StateRun:
    """Consecutive positions that a plan computes, and the slices through which the state passes."""

    start: int
    end: int
    read: OtherSlice | None
    boundary: OtherSlice | None
    live: OtherSlice | None


class Tails:
    """The slices of the second group. Only it decides which of them are pinned, leftover or freed."""

    def __init__(self, groups: Sequence[CacheGroup], tiers: Tiers, reserve: Reserve) -> None:
        first, second = groups
        self._needs = (Needs("full" if first.layers else "empty"), Needs(second.kind, second.window))
        self._tiers = tiers
        self._reserve = reserve
        self._size = tiers.chunk_tokens
        self._window = second.window
        self.has_states = second.kind == "state"
        self._touched: dict[CachedSession, None] = {}
        """Running sessions that the plan being made computes positions of."""
        self._runs: dict[CachedSession, list[_StateRun]] = {}
        """The ranges that the plan being made computes of them, for a group of states."""
        self._pieces: dict[CachedSession, list[SpanPart]] = {}
        self._written: set[OtherSlice] = set()
        """States that the plan being made writes: no other request can read them before its launch."""

    # -- questions: change nothing -----------------------------------------------------------------------------------

    def find(self, chunks: Sequence[Chunk], keep: int, total: int) -> tuple[list[Range], list[OtherSlice]]:
        """Return the positions below ``keep`` that a request for ``total`` tokens must compute again, and the slices
        with contents that it reads before it computes any.

        It computes all positions instead if it read more slices at once than it is promised pages, or if an empty tier
        could not hold these slices beside its next window.
        """
        missing = missing_set(keep, self._size, self._needs, self._have(chunks))
        found = []
        for first, last in reads(keep, self._size, self._needs, missing)[1]:
            found += [_other(chunk) for chunk in chunks[first:last]]
        parts = [part for part in found if part.filled]
        most, needed = 2 if self.has_states else self.promise(total), self.cost(missing, parts, keep, total)
        if len(parts) > most or (
            needed > self.promise(total) and not self._tiers.holds_empty((self._chunks(total), needed))
        ):
            return [(0, keep)], []
        return missing, parts

    def cost(self, missing: Sequence[Range], parts: Sequence[OtherSlice], keep: int, total: int) -> int:
        """Return the pages to be pinned or promised for a request that computes ``missing`` and the positions from
        ``keep`` on, and begins with these slices. Also those that are pinned count: see ``Tiers.repeated``."""
        promise = self.promise(total)
        if self.has_states:
            return max(len(parts), promise)
        return len(parts) + self._lacking(parts, missing[0][0] if missing else keep, promise, total)

    def _lacking(self, parts: Collection[OtherSlice], start: int, promise: int, tokens: int) -> int:
        """Return the pages that a request with windows needs besides slices that it holds. ``promise``: pages for its
        window and what it computes from ``start`` on.

        Only the slices of that window count towards them: one plan may compute positions before and after slices that
        lie ahead, and lets go of nothing in between.
        """
        near = sum(self._reach(start) <= part.index <= start // self._size for part in parts)
        return max(min(promise - near, self._chunks(tokens) - len(parts)), 0)

    def can_read(self, parts: Iterable[OtherSlice]) -> bool:
        """Whether no plan that is not launched yet copies these slices out, or writes a state among them."""
        return not any(part.saving or part in self._written for part in parts)

    def can_hold(self, pages: int, requests: int, tokens: int) -> bool:
        """See ``CacheManager.can_hold``."""
        one = self.promise(tokens) if requests == 1 else self.claim(tokens)  # ``find`` bounds a single one
        return self._tiers.holds_empty((pages, requests * one))

    def capacity_tokens(self) -> int:
        """Return the longest context that an empty device tier always holds, in tokens; ``UNBOUNDED``: none is too
        long."""
        device, size = self._tiers.device, self._size
        one, other = (group.page_bytes for group in device.groups)
        if not one and self.can_hold(0, 1, UNBOUNDED):
            return UNBOUNDED
        lengths = range(1, device.ceiling_bytes // (one or other) + 1)
        return size * bisect_left(lengths, True, key=lambda pages: not self.can_hold(pages, 1, pages * size))

    def promise(self, tokens: int, *, decoding: bool = False) -> int:
        """Return the most pages of this group that a request of ``tokens`` tokens needs at once."""
        if self.has_states:
            # Decoding: the live state and the last boundary. Before: where two ranges begin, and both of these.
            return 2 if decoding else 4
        # A request that begins to decode needs no more than it was admitted for.
        span = self._size if decoding else max(LEAST_SPAN, self._size)
        most = -(-(self._window - 1 + span) // self._size) + 1
        return min(most, self._chunks(tokens))

    def claim(self, tokens: int) -> int:
        """Return the most pages of this group that are pinned or promised for a request of ``tokens`` tokens."""
        promise = self.promise(tokens)
        # With windows: one of them, and what ``find`` has found elsewhere.
        return promise if self.has_states else min(2 * promise, self._chunks(tokens))

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def restore(
        self, chunks: Sequence[Chunk], keep: int, history: int, total: int, missing: list[Range]
    ) -> Restore:
        """Return the receipt of an admission, and all ranges that it computes."""
        from_host = [
            [chunk.index for chunk in chunks if chunk.place is Place.HOST],
            [chunk.index for chunk in chunks if _other(chunk).place is Place.HOST],
        ]
        found = sources(keep, history, self._size, self._needs, missing, from_host)
        ranges = list(missing)
        if keep < total:
            if ranges and ranges[-1][1] == keep:
                keep = ranges.pop()[0]
            ranges.append((keep, total))
        recomputed = sum(max(min(end, history) - start, 0) for start, end in ranges)
        return Restore(tuple(ranges), found.gpu_cached, found.swapped_in, recomputed)

    def _have(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        return [[chunk.filled for chunk in chunks], [_other(chunk).filled for chunk in chunks]]

    def lay_out(self, session: CachedSession, held: int, keep: int, history: int, most: int) -> Restore:
        """Find the gaps of a context whose first ``held`` chunks stand for ``keep`` tokens, and hold the slices that
        its request reads.

        ``most``: the pages for which it was admitted. If they do not suffice, it computes all positions: its session
        has taken over other chunks than those that it was admitted for, with slices elsewhere.
        """
        chunks, total = session.chunks[:held], len(session.tokens)
        keep = min(keep, held * self._size)
        missing, parts = self.find(chunks, keep, total)
        if self.cost(missing, parts, keep, total) > most:
            missing, parts = [(0, keep)], []
        restore = self.restore(chunks, keep, history, total, missing)
        self.begin(session, restore.missing, parts)
        return restore

    # -- a running request -------------------------------------------------------------------------------------------

    def begin(self, session: CachedSession, ranges: Sequence[Range], parts: Iterable[OtherSlice]) -> None:
        """Hold what a request needs which computes ``ranges``; the pages come later."""
        session.runs = deque(ranges)
        session.held, session.held_from, session.window_table = {}, 0, None
        if ranges:
            session.held_from = max(self._reach(ranges[0][0]), 0)
        self._hold(session, parts)
        self.keep_promise(session)

    def absent(self, session: CachedSession) -> list[OtherSlice]:
        """Return the held slices that lie on the host and must be loaded; not those that will be computed again."""
        held = session.held
        return [part for part in held if part.device == NOWHERE and part.host != NOWHERE and part.filled]

    def begin_branch(self, session: CachedSession, origin: CachedSession, tail: Chunk) -> None:
        """Hold what a request needs that goes on from the context of ``origin``, with ``tail`` as its last chunk. Call
        it before room is made for the tail: a slice that is saved for that could not be loaded by the same plan."""
        chunks, start = session.chunks[: tail.index], tail.index * self._size
        for part in map(_other, chunks):
            if part.saving and part.device == NOWHERE:
                self._tiers.discard(part)  # this plan has already made room with it
        if self.has_states:
            missing, parts = self.find(chunks, start, session.length)
            add_range(missing, start, session.length)
            self.begin(session, missing, parts)
        else:
            missing, parts = self._branch_reads(chunks, origin, session.length)
            self.begin(session, [*missing, (start, session.length)], [*parts, _other(tail)])

    def _branch_reads(
        self, chunks: Sequence[Chunk], origin: CachedSession, total: int
    ) -> tuple[list[Range], list[OtherSlice]]:
        """Like ``find``, for windows of a request that goes on from these chunks of ``origin``.

        The source computes what it lacks first, so its slices are pinned whether they have contents or not.
        """
        size, keep = self._size, len(chunks) * self._size
        have = self._have(chunks)
        for group in have:
            for low, high in origin.runs:
                for index in range(low // size, min(high // size, len(chunks))):
                    if low <= index * size + group[index]:
                        group[index] = size
        missing, found = missing_set(keep, size, self._needs, have), list[OtherSlice]()
        for first, last in reads(keep, size, self._needs, missing)[1]:
            found += [_other(chunk) for chunk in chunks[first:last] if have[1][chunk.index]]
        # Not more than is promised, with the tail: see ``find``.
        return (missing, found) if len(found) < self.promise(total) else ([(0, keep)], [])

    def promise_branch(self, session: CachedSession, origin: CachedSession, full: int, total: int) -> bool:
        """Promise a running request all that ``begin_branch`` will hold and promise, for ``full`` chunks of ``origin``
        and ``total`` tokens in all; False: the device has no room."""
        claim = self.claim(total)
        if not self.has_states:
            missing, parts = self._branch_reads(origin.chunks[:full], origin, total)
            if not missing and all(part in origin.held for part in parts):  # else some may be gone by then
                claim = max(len(parts) + 1, self.promise(total, decoding=True))
        more = max(claim - len(session.held) - session.promised, 0)
        if more and self._tiers.unpinned_bytes((0, more)) < 0:
            return False
        self._set_promise(session, session.promised + more)
        return True

    def on_device(self, session: CachedSession) -> list[OtherSlice]:
        """Return the slices of a session on the device that an eviction may save."""
        parts = map(_other, session.chunks)
        return [part for part in parts if part.device != NOWHERE and not part.leftover]

    def branch(
        self, session: CachedSession, origin: CachedSession, tail: Chunk, start: int, now: float
    ) -> list[Range]:
        """Bring what ``begin_branch`` holds to the device; return what the request has to compute. The first group has
        the context up to ``start``. The partly filled slice of the source is copied."""
        size, at, part = self._size, tail.index, _other(tail)
        if self.has_states:
            self._load(session, now, 0)
            return list(session.runs)
        source = _other(origin.chunks[at]) if at < len(origin.chunks) else None
        filled = start - at * size
        self._load(session, now, 1)
        filled = min(filled, source.filled) if source is not None and self._tiers.can_copy(source) else 0
        if filled and source is not None:
            self._tiers.copy(source, part, filled)
        else:
            self._tiers.place(part)
        session.runs[-1] = at * size + filled, session.length
        return list(session.runs)

    def _load(self, session: CachedSession, now: float, more: int) -> None:
        """Bring held slices to the device, and make room for ``more``."""
        absent = self.absent(session)
        session.window_table = None
        self._reserve((0, len(absent) + more), now, session.tenant)
        for part in absent:
            self._tiers.load(part)

    def take_over(self, session: CachedSession, leaver: CachedSession) -> None:
        """Let a request compute what another, whose last chunk stays its own, still had to compute before."""
        start = session.runs[0][0] if session.runs else session.length
        owed = [(low, min(high, start)) for low, high in leaver.runs if low < start]
        session.runs.extendleft(reversed(owed))
        session.held_from = min(session.held_from, leaver.held_from)
        self._hold(session, [part for part in leaver.held if _other(session.chunks[part.index]) is part])
        self.keep_promise(session)

    def reach(self, session: CachedSession, tokens: int) -> int:
        """Return how many of ``tokens`` missing tokens a step can compute.

        With windows: more than ``LEAST_SPAN`` only in free pages. With states: a step ends at the end of the shared
        chunks, if their last state is not held; the next request that shares them goes on from it. And it does not
        end inside a chunk that others share or may come to share, so that all owners can use the state there.
        """
        if self.has_states:
            taken = 0
            common = session.shared * self._size
            stops = common and _other(session.chunks[session.shared - 1]).filled < self._size
            for start, end in session.runs:
                stop = min(end, start + tokens - taken)
                if stops and start < common < stop:
                    return taken + common - start
                at = stop // self._size
                if stop < end and stop % self._size and (at < session.shared or session.chunks[at].digest):
                    return taken + max(at * self._size - start, 0)
                taken += stop - start
            return tokens
        free = max(self._tiers.device.free(1) - self._tiers.promised, 0) * self._size
        return min(tokens, LEAST_SPAN + free)

    def computed(self, session: CachedSession, start: int, end: int, now: float) -> None:
        """Give the slices pages that the plan being made writes, and record what they will hold."""
        chunks = session.chunks[start // self._size : -(-end // self._size)]
        pieces = self._cut(session, start, end)
        self._touched[session] = None
        self._pieces.setdefault(session, []).extend(pieces)
        if session.runs and session.runs[0][0] == start:
            take_front(session.runs, end - start)
        self._fill_first(session, pieces, chunks)
        if self.has_states:
            self._pass_state(session, start, end, now)
            return
        # Another request may have computed some of these positions since this one was admitted: they are read.
        self._place(session, [_other(chunk) for chunk in chunks], now)
        for piece in pieces:
            if piece.stores & 2:
                parts = [_other(chunk) for chunk in _parts_of(session.chunks, piece, self._size)]
                self._tiers.fill(parts, piece.start, piece.end)

    def _fill_first(
        self, session: CachedSession, pieces: Sequence[SpanPart], chunks: Sequence[Chunk]
    ) -> None:
        """Record what the slices of the first group will hold."""
        if self._needs[0].kind == "full":
            for piece in pieces:
                if piece.stores & 1:
                    self._tiers.fill(_parts_of(session.chunks, piece, self._size), piece.start, piece.end)
            return
        # Without full layers nothing is stored, but the cache counts positions by these slices.
        for chunk in chunks:
            low = chunk.index * self._size + chunk.filled
            high = min(pieces[-1].end, (chunk.index + 1) * self._size)
            if low < high:
                self._tiers.fill((chunk,), low, high)

    def _cut(self, session: CachedSession, start: int, end: int) -> list[SpanPart]:
        """Return pieces in which each group stores all positions or none."""
        first, last = start // self._size, -(-end // self._size)
        for part in map(_other, session.chunks[first:last]):
            if part.saving and part.device == NOWHERE:
                self._tiers.discard(part)
        have = self._have(session.chunks[first:last])
        offset = first * self._size
        return [
            SpanPart(piece.start + offset, piece.end + offset, piece.stores)
            for piece in pieces_of((start - offset, end - offset), self._size, self._needs, have)
        ]

    def _pass_state(self, session: CachedSession, start: int, end: int, now: float) -> None:
        """Let a state pass through ``[start, end)``, and store it at the end and at the last chunk boundary between."""
        size, chunks = self._size, session.chunks
        others_follow = bool(session.runs) and (session.runs[0][0] != end or len(session.runs) > 1)
        goes_on = not session.runs or session.runs[0][0] == end
        read = None
        if start:
            read = _other(chunks[(start - 1) // size])
            assert read.filled == start - read.index * size, f"chunk {read.index}: no state at {start}"
        last = (end - 1) // size
        live = _other(chunks[last]) if goes_on else None
        if live is not None and live.filled == size and end == (last + 1) * size:
            self._place(session, [live], now)  # another request has stored this state: the next step reads it
            live = None
        boundary = _other(chunks[last - 1]) if last * size > start and not others_follow else None
        if boundary is not None and boundary.filled == size:
            boundary = None
        written = [part for part in (boundary, live) if part is not None]
        self._place(session, written, now)
        if boundary is not None:
            self._tiers.store_state(boundary, size)
        if live is not None:
            self._tiers.truncate(live, 0)
            self._tiers.store_state(live, end - last * size)
        self._written.update(written)
        self._runs.setdefault(session, []).append(_StateRun(start, end, read, boundary, live))

    def _hold(self, session: CachedSession, parts: Iterable[OtherSlice]) -> int:
        """Hold slices; return how many were not held before."""
        new = [part for part in dict.fromkeys(parts) if part not in session.held]
        if new:
            session.held.update(dict.fromkeys(new))
            session.window_table = None
            self._tiers.pin(new)
        return len(new)

    def _place(self, session: CachedSession, parts: Sequence[OtherSlice], now: float) -> None:
        """Hold slices that the plan being made writes or reads, in pages that were promised, and bring them."""
        self._set_promise(session, max(session.promised - self._hold(session, parts), 0))
        absent = [part for part in parts if part.device == NOWHERE]
        if absent:
            session.window_table = None
            self._reserve((0, len(absent)), now, session.tenant)
            for part in absent:
                self._tiers.bring(part)

    def growth(self, session: CachedSession, tokens: int) -> int:
        """Return how many pages more than now must be promised to a running request that grows to ``tokens`` tokens."""
        return max(self._due(session, tokens) - session.promised, 0)

    def keep_promise(self, session: CachedSession) -> None:
        """Keep the promise of pages to a request up to date: those that it holds count as kept.

        Not while a plan takes its pages: the request lets go of nothing before the launch.
        """
        self._set_promise(session, self._due(session, max(session.length, 1)) if session.running else 0)

    def _set_promise(self, session: CachedSession, pages: int) -> None:
        self._tiers.promised += pages - session.promised
        session.promised = pages

    def _due(self, session: CachedSession, tokens: int) -> int:
        if self.has_states:
            return max(self.promise(tokens, decoding=not session.runs) - len(session.held), 0)
        start = session.runs[0][0] if session.runs else tokens - 1
        promise = self.promise(tokens, decoding=tokens_in(session.runs) <= self._size)
        return self._lacking(session.held, start, promise, tokens)

    # -- the plan being made -----------------------------------------------------------------------------------------

    def pieces(self, session: CachedSession) -> list[SpanPart]:
        """Return what the plan being made computes of a session, cut where a group begins or ceases to store."""
        return self._pieces.get(session, [])

    def chains(self, session: CachedSession, first_span: int) -> Iterator[Chain]:
        """Yield the chains of the plan being made. ``first_span``: number of the session's first piece as a span."""
        spans = self._pieces.get(session, [])
        for run in self._runs.get(session, ()):
            inside = [at for at, piece in enumerate(spans) if run.start <= piece.start < run.end]
            yield Chain(
                first_span + inside[0],
                first_span + inside[-1],
                NOWHERE if run.read is None else run.read.device,
                NOWHERE if run.boundary is None else run.boundary.device,
                0 if run.boundary is None else (run.boundary.index + 1) * self._size,
                NOWHERE if run.live is None else run.live.device,
            )

    def table(self, session: CachedSession, tokens: int) -> PageTable:
        """Return the device pages of the held slices, int32 [chunks]; 0 where the request reads and writes nothing."""
        chunks, moves = -(-tokens // self._size), self._tiers.moves
        made = session.window_table
        if made is None or made[0] != moves or len(made[1]) != chunks:
            made = moves, np.zeros(chunks, np.int32)
            for part in session.held:
                if part.index < chunks:
                    made[1][part.index] = part.device
            session.window_table = made
        return made[1]

    def complete(self) -> None:
        """Let go of the slices that have fallen behind, now that the plan that read them is launched."""
        self._written.clear()
        self._runs.clear()
        self._pieces.clear()
        touched, self._touched = self._touched, {}
        for session in touched:
            if session.running:
                first = self._reach(session.runs[0][0] if session.runs else session.length)
                if first > session.held_from:
                    session.held_from = first
                    self._let_go(session, [part for part in session.held if part.index < first])
                self.keep_promise(session)

    def _reach(self, position: int) -> int:
        """Return the first chunk whose slice any position from ``position`` on needs."""
        if self.has_states:
            return position // self._size - 1
        return window_reach(position, self._window, self._size)

    def _let_go(self, session: CachedSession, parts: Sequence[OtherSlice]) -> None:
        if parts:
            for part in parts:
                del session.held[part]
            session.window_table = None
            self._tiers.unpin(parts)
            # With a state, the one before it: it was kept as the boundary before the newest.
            before = [part.index - 1 for part in parts if part.index] if self.has_states else []
            self._sort([*parts, *(_other(session.chunks[index]) for index in before)])

    # -- after it ----------------------------------------------------------------------------------------------------

    def let_go(self, session: CachedSession) -> None:
        """Let go of all slices of a request that has ended, or goes on from another's context."""
        self._touched.pop(session, None)
        self._pieces.pop(session, None)
        self._runs.pop(session, None)
        session.runs.clear()
        parts = list(session.held)
        session.held.clear()
        self._tiers.unpin(parts)
        self.keep_promise(session)

    def truncate(self, chunk: Chunk, valid: int) -> None:
        """Limit the slice of an unpinned chunk to its first ``valid`` tokens, because other tokens will follow."""
        part = _other(chunk)
        if not self.has_states:
            self._tiers.truncate(part, valid)
        elif part.filled > valid:
            self._tiers.free(part)  # a state cannot be cut

    def sort(self, session: CachedSession) -> None:
        """Decide again about all slices of a session: its end or its runs have changed."""
        self._sort([_other(chunk) for chunk in session.chunks])

    def _sort(self, parts: Iterable[OtherSlice]) -> None:
        wanted: dict[CachedSession | SharedRun, tuple[Range, list[Range]]] = {}
        for part in parts:
            if part.pins or not part.cached or part.loading:
                continue
            holder = part.holder
            if holder not in wanted:
                wanted[holder] = self._wanted(holder)
            tail, earlier = wanted[holder]
            # A state outlives its request at chunk boundaries only.
            whole = part.filled == self._size if self.has_states else part.filled > 0
            if whole and tail[0] <= part.index < tail[1]:
                self._tiers.set_leftover(part, False)
            elif whole and any(first <= part.index < last for first, last in earlier):
                self._tiers.set_leftover(part, True)
            elif part.saving:
                self._tiers.set_leftover(part, True)  # its pages are in use until the plan is launched
            else:
                self._tiers.free(part)

    def _wanted(self, holder: CachedSession | SharedRun) -> tuple[Range, list[Range]]:
        """Return the chunks whose slices a holder needs, and those that its earlier resume points need."""
        if isinstance(holder, SharedRun):
            owners, end = list(holder.owners), (holder.own_chunks[-1].index + 1) * self._size
        else:
            owners, end = [holder], holder.length
        earlier = [self._wanted_at(point) for owner in owners for point in owner.resume_points]
        if self.has_states:
            # After a stop string or an edit of its last tokens, a session goes on from the boundary before the newest.
            earlier.append(self._wanted_at(max(end - self._size, 0)))
        return needed(end, self._size, self._needs)[1], earlier

    def _wanted_at(self, position: int) -> Range:
        """Return the chunks whose slices a turn reads that goes on at ``position``."""
        if self.has_states:
            last = position // self._size
            return max(last - 1, 0), last
        return window_reach(position, self._window, self._size), -(-position // self._size)


def _other(chunk: Chunk) -> OtherSlice:
    assert chunk.other is not None
    return chunk.other


def _parts_of(chunks: Sequence[Chunk], piece: SpanPart, size: int) -> Sequence[Chunk]:
    return chunks[piece.start // size : -(-piece.end // size)]
