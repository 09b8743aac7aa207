"""The rule that says which positions of a returning context are computed again, as pure functions. No engine state.

Each KV group of a model needs other things to compute position x of a context:

======  =========================================================================================
kind    needs
======  =========================================================================================
full    keys and values of [0, x)
window  keys and values of [x - w + 1, x), for a window of w tokens that includes x itself
state   the state after position x - 1; at 0 none
empty   nothing: a group without layers, by which the cache still counts positions
======  =========================================================================================

The tokens of the first ``keep`` positions are known. The *missing set* M is the smallest set of these positions such
that everything needed by ``keep`` or by a position in M is held or in M. One of the clauses above forces each position
of M, so M is unique. All layers compute it in ascending order, but a group that already holds a position is not written
there.

Throughout, ``size`` is the number of tokens per chunk, ``needs`` has one entry per group and ``have`` one sequence per
group: ``have[group][chunk]`` is the ``filled`` of the chunk's slice, 0 to ``size``. The ``filled`` leading positions of
a full or window slice are held. The state after a chunk's last token is held if ``filled`` equals ``size``; a smaller
number means nothing, because states outlive their request at chunk boundaries only. A chunk that is not listed holds
nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from pensieve.engine.cache.chunk import NOWHERE, Chunk, Range, Restore

GroupKind = Literal["full", "window", "state", "empty"]


class Needs(NamedTuple):
    """The kind of a KV group, which says what a position needs of it."""

    kind: GroupKind
    window: int = 0
    """Tokens that the group's widest window sees, the token itself included; only for the kind ``window``."""


class SpanPart(NamedTuple):
    """Positions ``[start, end)``, which each group either stores or holds already."""

    start: int
    end: int
    stores: int
    """Bit g is set when group g stores these positions: see ``Span.stores``. The bit of an empty group never is."""


class Sources(NamedTuple):
    """Where the tokens of a context come from, as a receipt counts them."""

    gpu_cached: int
    swapped_in: int
    recomputed: int


# -- the missing set -------------------------------------------------------------------------------------------------


def missing_set(keep: int, size: int, needs: Sequence[Needs], have: Sequence[Sequence[int]]) -> list[Range]:
    """Return the missing set of a context whose first ``keep`` tokens are known: ascending, not adjacent ranges.

    If the caller needs the output of the last of ``keep`` tokens, it passes ``keep - 1`` and computes that one anyway.
    """
    if len(needs) == 1 and needs[0].kind == "full":
        return gaps(keep, size, have[0])
    # A full group is a window that is wider than the context.
    sliding = [
        (keep + 1 if kind == "full" else window, gaps(keep, size, filled))
        for (kind, window), filled in zip(needs, have, strict=True)
        if kind in ("full", "window")
    ]
    states = [filled for (kind, _), filled in zip(needs, have, strict=True) if kind == "state"]
    missing: list[Range] = []
    low = keep  # the lowest position that is computed; those above it are decided
    while True:
        runs = [_gap_in_window(unheld, window, low) for window, unheld in sliding]
        runs += [(restart(low, size, filled), low) for filled in states]
        end = max((end for start, end in runs if start < end), default=0)
        if end == 0:
            break
        # All of a gap is missing if its last position is, because each needs the one before it.
        low = min(start for start, run_end in runs if run_end == end)
        if missing and missing[-1][0] == end:
            end = missing.pop()[1]
        missing.append((low, end))
    missing.reverse()
    return missing


def gaps(keep: int, size: int, filled: Sequence[int]) -> list[Range]:
    """Return the positions below ``keep`` that slices do not hold: ascending, not adjacent ranges."""
    whole = keep // size
    if filled[:whole].count(size) == whole:  # the usual case, in a third of the time
        start = whole * size + (filled[whole] if whole < len(filled) else 0)
        return [(start, keep)] if start < keep else []
    ranges: list[Range] = []
    start = end = 0
    listed = filled[: -(-keep // size)]
    for index, valid in enumerate(listed):
        if valid < size:
            at = index * size
            if valid or at != end:
                if start < end:
                    ranges.append((start, end))
                start = at + valid
            end = at + size
    at = len(listed) * size
    if at < keep:
        if at != end:
            if start < end:
                ranges.append((start, end))
            start = at
        end = keep
    end = min(end, keep)
    if start < end:
        ranges.append((start, end))
    return ranges


def restart(end: int, size: int, filled: Sequence[int]) -> int:
    """Return where a state group can start to compute at or before ``end``: after its last held state, else at 0."""
    chunk = min(end // size, len(filled))
    while chunk and filled[chunk - 1] < size:
        chunk -= 1
    return chunk * size


def _gap_in_window(unheld: list[Range], window: int, low: int) -> Range:
    """Return the last gap below ``low`` if ``low`` sees its last position, else an empty range.

    Removes the gaps from ``low`` on: positions are decided from the right.
    """
    while unheld and unheld[-1][0] >= low:
        unheld.pop()
    if not unheld:
        return 0, 0
    start, end = unheld[-1]
    end = min(end, low)
    return (start, end) if end - 1 >= low - window + 1 else (0, 0)


# -- computing it ----------------------------------------------------------------------------------------------------


def pieces_of(run: Range, size: int, needs: Sequence[Needs], have: Sequence[Sequence[int]]) -> list[SpanPart]:
    """Cut a range of positions to be computed into pieces in which each group stores all positions or none.

    The range may lie in the missing set, after it, or in both. A full or window group stores a position that it does
    not hold. It must not write the others. Their page may belong to other sessions too, whose requests read it in the
    same plan or have read it before: a position computed in another batch can differ in its last bits, so an answer
    would depend on its neighbours. A host copy of the page would be stale, too. And it is never necessary: what the
    group holds equals what a stateless run computes, so later layers and positions read the same from it.

    ``have``: as it is when the range is planned, without tokens from ``keep`` on that a cut has made invalid.

    A state group always has its bit set, and nothing is cut for it. It keeps no positions: the plan's chains say
    which page receives the state at which boundary, and a boundary that is held is not one of them. A range of the
    missing set is one chain, from ``state_before`` its start. It may pass a held boundary with its live state.
    """
    start, end = run
    if len(needs) == 1 and needs[0].kind == "full":
        return [SpanPart(start, end, 1)]
    always = sum(1 << group for group, need in enumerate(needs) if need.kind == "state")
    keeping = [
        (1 << group, have[group]) for group, need in enumerate(needs) if need.kind in ("full", "window")
    ]
    pieces: list[SpanPart] = []
    for chunk in range(start // size, -(-end // size)):
        at = chunk * size
        first, last = max(start, at), min(end, at + size)
        held = [(bit, at + (filled[chunk] if chunk < len(filled) else 0)) for bit, filled in keeping]
        for left, right in pairwise(sorted({first, last, *(to for _, to in held if first < to < last)})):
            stores = always + sum(bit for bit, to in held if to <= left)
            if pieces and pieces[-1].stores == stores:
                left = pieces.pop().start
            pieces.append(SpanPart(left, right, stores))
    return pieces


def state_before(start: int, size: int) -> int:
    """Return the chunk whose state a range of the missing set goes on from; -1: the zero state.

    ``start``: first position of the range, which is a multiple of ``size`` in a model with states. A live state that
    other tokens have passed through must never stand in for the zero state.
    """
    if start % size:
        raise ValueError(f"no state is kept at position {start}: chunks have {size} tokens")
    return start // size - 1


def reads(keep: int, size: int, needs: Sequence[Needs], missing: Sequence[Range]) -> list[list[Range]]:
    """Return the slices that a request reads which computes ``missing`` and continues at ``keep``.

    ``missing``: the missing set, which may be followed by or merged with the range of new tokens from ``keep`` on.
    Returns for each group ranges of chunk indices: ascending, not adjacent. Those of them that hold anything must be
    on the device and pinned. Slices of positions that are computed first are included.
    """
    resumed = [(start, min(end, keep)) for start, end in missing]
    if not resumed or resumed[-1][1] < keep:
        resumed.append((keep, keep))
    chunks = -(-keep // size)
    found: list[list[Range]] = []
    for kind, window in needs:
        ranges: list[Range] = []
        if kind == "full":
            add_range(ranges, 0, chunks)
        elif kind == "window":
            for start, end in resumed:
                # The window of a slice that is partly held reads it inside the range, too.
                add_range(ranges, window_reach(start, window, size), -(-end // size))
        elif kind == "state":
            for start, _ in resumed:
                if start:
                    before = state_before(start, size)
                    add_range(ranges, before, before + 1)
        found.append(ranges)
    return found


def window_reach(position: int, window: int, size: int) -> int:
    """Return the first chunk whose window slice a position needs.

    A slice of an earlier chunk has *fallen behind* a request that computes this position next: no position from here
    on needs it, and the request need not pin it. The session may still do: see ``needed``.
    """
    return max(position - window + 1, 0) // size


# -- after the request -----------------------------------------------------------------------------------------------


def needed(
    end: int, size: int, needs: Sequence[Needs], have: Sequence[Sequence[int]] | None = None
) -> list[Range]:
    """Return for each group the chunks whose slices a holder that ends at position ``end`` needs.

    * full, empty: all.
    * window: those with a position that an x in [end - size, end] needs, so within w + ``size`` before the end. A cut
      of the last tokens then still finds its window.
    * state: that of the last state at or before the end. With ``have``, of the last one that is held.

    A range is empty if the group needs nothing.
    """
    chunks = -(-end // size)
    ranges: list[Range] = []
    for group, (kind, window) in enumerate(needs):
        first, last = 0, chunks
        if kind == "window":
            first = window_reach(end - size, window, size)
        elif kind == "state":
            last = (end if have is None else restart(end, size, have[group])) // size
            first = max(last - 1, 0)
        ranges.append((first, last))
    return ranges


# -- receipts --------------------------------------------------------------------------------------------------------


def sources(
    keep: int,
    history: int,
    size: int,
    needs: Sequence[Needs],
    missing: Sequence[Range],
    from_host: Sequence[Sequence[int]],
) -> Sources:
    """Count where the tokens of a context come from.

    ``missing``: as for ``reads``. ``from_host[group]``: the chunks whose slice of this group only the host holds,
    ascending. Slices that the request does not read may be listed, too.

    A missing position of the history is recomputed. Other positions below ``keep`` are swapped in if a slice that
    *serves* them comes from the host, else cached on the GPU. Input that is found in the cache counts as cached. A
    slice serves the positions of its own chunk if the request reads it (``reads``): the full slice always, the window
    slice in the window of a range that is computed, the state that such a range goes on from. In a model that keeps
    nothing but states, the state stands for all positions before it and serves them all. A position that no slice
    serves is behind the windows of a model that has nothing else. It counts as cached on the GPU: nothing is loaded.
    """
    recomputed, cached = 0, keep
    for start, end in missing:
        recomputed += max(min(end, history) - start, 0)
        cached -= max(min(end, keep) - start, 0)
    if not any(from_host):
        return Sources(cached, 0, recomputed)
    if len(needs) == 1 and needs[0].kind == "full":
        loaded = from_host[0]
    else:
        only_states = not any(need.kind in ("full", "window") for need in needs)
        serving: set[int] = set()
        for ranges, chunks in zip(reads(keep, size, needs, missing), from_host, strict=True):
            for first, last in ranges:
                found = chunks[bisect_left(chunks, first) : bisect_left(chunks, last)]
                serving.update(range(found[-1] + 1) if found and only_states else found)
        loaded = sorted(serving)
    below = [(start, min(end, keep)) for start, end in missing if start < keep]
    swapped_in = _tokens_in_chunks(loaded, keep, size, below)
    return Sources(cached - swapped_in, swapped_in, recomputed)


def _tokens_in_chunks(chunks: Sequence[int], keep: int, size: int, without: Sequence[Range]) -> int:
    """Return how many positions below ``keep`` lie in ``chunks``, ascending, and not in the ranges ``without``."""
    chunks = chunks[: bisect_left(chunks, -(-keep // size))]
    if not chunks:
        return 0
    count = len(chunks) * size - max((chunks[-1] + 1) * size - keep, 0)
    for start, end in without:
        for chunk in chunks[bisect_left(chunks, start // size) : bisect_left(chunks, -(-end // size))]:
            count -= min(end, (chunk + 1) * size) - max(start, chunk * size)
    return count


def restore_of(chunks: Sequence[Chunk], history: int, total: int, size: int) -> Restore:
    """Return the receipt of a request for ``total`` tokens, in a model with one group, that found these chunks."""
    on_device = on_host = 0
    missing: list[Range] = []
    for chunk in chunks:
        filled = chunk.filled
        if chunk.device != NOWHERE:
            on_device += filled
        else:
            on_host += filled
        if filled < size:
            add_range(missing, chunk.index * size + filled, min((chunk.index + 1) * size, total))
    add_range(missing, len(chunks) * size, total)
    recomputed = sum(max(min(end, history) - start, 0) for start, end in missing)
    return Restore(tuple(missing), on_device, on_host, recomputed)


def add_range(ranges: list[Range], start: int, end: int) -> None:
    """Append a range that begins at or after the last one's start. Merge ranges that touch or overlap."""
    if start >= end:
        return
    if ranges and start <= ranges[-1][1]:
        ranges[-1] = (ranges[-1][0], max(ranges[-1][1], end))
    else:
        ranges.append((start, end))
