"""The rule of what is computed again: against brute force, and on a decoder that computes exactly what it says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from pensieve.core import Floats
from pensieve.engine.cache import restore
from pensieve.engine.cache.chunk import Range, tokens_in
from pensieve.engine.cache.restore import GroupKind, Needs, SpanPart
from support.cache.numeric_decoder import VOCABULARY, Decoder, Pages, Run, close, stateless
from support.lengths import at_length, seeds

KINDS: tuple[tuple[GroupKind, ...], ...] = (
    ("full",),
    ("window",),
    ("state",),
    ("full", "window"),
    ("full", "state"),
    ("empty", "window"),
    ("empty", "state"),
    ("full", "window", "state"),
)
Have = list[list[int]]


def random_needs(rng: random.Random, widest: int = 14, narrowest: int = 1) -> tuple[Needs, ...]:
    kinds = rng.choice(KINDS)
    return tuple(
        Needs(kind, rng.randint(narrowest, widest)) if kind == "window" else Needs(kind) for kind in kinds
    )


def random_filled(rng: random.Random, chunks: int, size: int) -> list[int]:
    """What slices hold: dropped from the front, at the end or anywhere; some partly filled."""
    front, back = rng.choice((0, 0, rng.randint(0, chunks))), rng.choice((0, 0, rng.randint(0, chunks)))
    losses = rng.choice((0.0, 0.1, 0.5))
    filled = [
        0
        if index < front or index >= chunks - back
        else rng.randint(0, size)
        if rng.random() < losses
        else size
        for index in range(chunks)
    ]
    return filled if rng.random() < 0.9 else filled[: rng.randint(0, chunks)]


# -- an oracle that knows the definition and nothing else ------------------------------------------------------------


def holds(filled: Sequence[int], size: int, position: int) -> bool:
    chunk, offset = divmod(position, size)
    return chunk < len(filled) and offset < filled[chunk]


def read_by(position: int, need: Needs, size: int, filled: Sequence[int]) -> list[int]:
    """Positions that must be held or computed before ``position`` is; the last one stands for the state at it."""
    if need.kind == "full":
        return list(range(position))
    if need.kind == "window":
        return list(range(max(position - need.window + 1, 0), position))
    if need.kind == "empty" or position == 0:
        return []
    has_state = position % size == 0 and holds(filled, size, position - 1)
    return [] if has_state else [position - 1]


def lacking(position: int, size: int, needs: Sequence[Needs], have: Have) -> set[int]:
    return {
        read
        for need, filled in zip(needs, have, strict=True)
        for read in read_by(position, need, size, filled)
        if need.kind == "state" or not holds(filled, size, read)
    }


def fixpoint(keep: int, size: int, needs: Sequence[Needs], have: Have) -> set[int]:
    missing, fresh = set[int](), {keep}
    while fresh:
        fresh = set().union(*(lacking(position, size, needs, have) for position in fresh)) - missing
        missing |= fresh
    return missing


def positions(ranges: Sequence[Range]) -> set[int]:
    return {position for start, end in ranges for position in range(start, end)}


def assert_canonical(ranges: Sequence[Range]) -> None:
    """Ascending, not empty, not adjacent."""
    assert all(start < end for start, end in ranges), ranges
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(ranges)), ranges


@dataclass
class Cache:
    """A random cache of one context."""

    rng: random.Random
    keep: int
    size: int
    needs: tuple[Needs, ...]
    have: Have

    @property
    def missing(self) -> list[Range]:
        return restore.missing_set(self.keep, self.size, self.needs, self.have)


def random_caches(count: int, longest: int = 60, narrowest: int = 1) -> Iterator[Cache]:
    for seed in range(count):
        rng = random.Random(seed)
        size, keep = rng.randint(1, 9), rng.randint(0, longest)
        needs = random_needs(rng, narrowest=narrowest)
        chunks = -(-keep // size) + rng.choice((0, 0, 0, 2))
        yield Cache(rng, keep, size, needs, [random_filled(rng, chunks, size) for _ in needs])


# -- the missing set -------------------------------------------------------------------------------------------------


def test_the_missing_set_is_the_fixpoint_of_what_positions_need() -> None:
    partial = 0
    for cache in random_caches(at_length(2_000, 20_000)):
        missing = cache.missing
        assert_canonical(missing)
        expected = fixpoint(cache.keep, cache.size, cache.needs, cache.have)
        assert positions(missing) == expected, cache
        partial += 0 < len(expected) < cache.keep
    assert partial > at_length(200, 2_000)


def test_each_valid_set_contains_the_missing_set() -> None:
    for cache in random_caches(at_length(60, 400), longest=8):
        missing = positions(cache.missing)
        lacks = [lacking(x, cache.size, cache.needs, cache.have) for x in range(cache.keep + 1)]
        for chosen in itertools.product((False, True), repeat=cache.keep):
            computed = {x for x in range(cache.keep) if chosen[x]}
            if all(lacks[x] <= computed for x in (*computed, cache.keep)):
                assert missing <= computed, cache


def test_a_full_group_alone_misses_what_it_does_not_hold() -> None:
    """The ranges are those of the loop that served models without other groups."""
    for cache in random_caches(at_length(300, 3_000)):
        ranges: list[Range] = []
        for chunk in range(-(-cache.keep // cache.size)):
            valid = cache.have[0][chunk] if chunk < len(cache.have[0]) else 0
            end = min((chunk + 1) * cache.size, cache.keep)
            restore.add_range(ranges, chunk * cache.size + valid, end)
        assert restore.missing_set(cache.keep, cache.size, (Needs("full"),), cache.have[:1]) == ranges


def test_pieces_say_which_groups_hold_their_positions() -> None:
    for cache in random_caches(at_length(500, 5_000)):
        size, end = cache.size, cache.keep + cache.rng.randint(0, 12)
        have = [
            [min(valid, max(cache.keep - chunk * size, 0)) for chunk, valid in enumerate(filled)]
            for filled in cache.have
        ]
        start = cache.rng.randint(0, end)
        runs = [(start, end)] if start < end else []
        if cache.needs == (Needs("full"),):  # nothing else is computed then
            runs = cache.missing
        for run in runs:
            pieces = restore.pieces_of(run, size, cache.needs, have)
            assert [piece.start for piece in pieces] == [run[0], *(piece.end for piece in pieces[:-1])]
            assert pieces[-1].end == run[1]
            for piece, after in itertools.pairwise(pieces):
                assert piece.stores != after.stores, "pieces that need no cut are one"
            for first, last, stores in pieces:
                for group, (need, filled) in enumerate(zip(cache.needs, have, strict=True)):
                    for position in range(first, last):
                        held = need.kind == "empty" or (
                            need.kind != "state" and holds(filled, size, position)
                        )
                        assert bool(stores >> group & 1) is not held, cache


def test_reads_lists_the_slices_that_missing_positions_and_the_next_one_need() -> None:
    for cache in random_caches(at_length(500, 5_000), narrowest=2):
        size, missing = cache.size, cache.missing
        computed = positions(missing)
        new = cache.rng.randint(0, 5)
        merged = list(missing)
        restore.add_range(merged, cache.keep, cache.keep + new)
        listed = restore.reads(cache.keep, size, cache.needs, merged)
        for need, filled, ranges in zip(cache.needs, cache.have, listed, strict=True):
            assert_canonical(ranges)
            if need.kind == "state":
                expected = {
                    x // size - 1
                    for x in {*computed, cache.keep} - {0}
                    if x - 1 not in computed and not read_by(x, need, size, filled)
                }
            elif need.kind == "empty":
                expected = set()
            else:
                read = {y for x in {*computed, cache.keep} for y in read_by(x, need, size, filled)}
                expected = {x // size for x in read | computed}
            assert positions(ranges) == expected, (cache, need)


def test_needed_slices_serve_each_position_near_the_end() -> None:
    for seed in seeds(500, 5_000):
        rng = random.Random(seed)
        size, end, needs = rng.randint(1, 9), rng.randint(0, 80), random_needs(rng, narrowest=2)
        have = [random_filled(rng, -(-end // size), size) for _ in needs]
        every = set(range(-(-end // size)))
        for (kind, window), filled, found, held in zip(
            needs,
            have,
            restore.needed(end, size, needs),
            restore.needed(end, size, needs, have),
            strict=True,
        ):
            if kind == "state":
                boundaries = [chunk for chunk in every if (chunk + 1) * size <= end]
                assert positions([found]) == set(boundaries[-1:])
                kept = [chunk for chunk in boundaries if filled[chunk : chunk + 1] == [size]]
                assert positions([held]) == set(kept[-1:])
                continue
            assert found == held
            if kind == "window":
                resumed = range(max(end - size, 0), end + 1)
                seen = {y // size for x in resumed for y in read_by(x, Needs(kind, window), size, ())}
                assert positions([found]) == seen
            else:
                assert positions([found]) == every


def test_a_slice_has_fallen_behind_when_no_later_position_reads_it() -> None:
    for size, window, position in itertools.product(range(1, 6), range(1, 14), range(40)):
        need, reach = Needs("window", window), restore.window_reach(position, window, size)
        reads = {y // size for x in range(position, 60) for y in {x, *read_by(x, need, size, ())}}
        assert min(reads) == reach


# -- receipts --------------------------------------------------------------------------------------------------------


def serves(chunk: int, group: int, cache: Cache) -> set[int]:
    """Positions that a slice serves, by the definition in ``restore.sources``."""
    size, missing = cache.size, fixpoint(cache.keep, cache.size, cache.needs, cache.have)
    need, filled = cache.needs[group], cache.have[group]
    own = set(range(chunk * size, (chunk + 1) * size))
    readers = {*missing, cache.keep}
    if need.kind == "full":
        return own
    if need.kind == "window":
        read = {y for x in readers for y in read_by(x, need, size, filled)} | missing
        return own if own & read else set()
    at = (chunk + 1) * size
    if need.kind == "empty" or at not in readers or at - 1 in missing:
        return set()
    return own if {"full", "window"} & {kind for kind, _ in cache.needs} else set(range(at))


def test_a_receipt_counts_each_position_by_the_slices_that_serve_it() -> None:
    mixed = 0
    for cache in random_caches(at_length(500, 5_000), narrowest=2):
        missing, history = cache.missing, cache.rng.randint(0, cache.keep + 5)
        restore.add_range(missing, cache.keep, cache.keep + cache.rng.randint(0, 5))
        share = cache.rng.choice((0.0, 0.3, 1.0))
        from_host = [
            [chunk for chunk, valid in enumerate(filled) if valid and cache.rng.random() < share]
            if need.kind != "empty"
            else []
            for need, filled in zip(cache.needs, cache.have, strict=True)
        ]
        served = {
            x
            for group, chunks in enumerate(from_host)
            for chunk in chunks
            for x in serves(chunk, group, cache)
        }
        cached = set(range(cache.keep)) - positions(missing)
        gpu_cached, swapped_in, recomputed = restore.sources(
            cache.keep, history, cache.size, cache.needs, missing, from_host
        )
        assert recomputed == sum(x < history for x in positions(missing))
        assert (gpu_cached, swapped_in) == (len(cached - served), len(cached & served)), cache
        mixed += 0 < swapped_in < gpu_cached
    assert mixed > at_length(20, 200)


def test_a_receipt_of_a_full_group_is_the_sum_over_its_chunks() -> None:
    for cache in random_caches(at_length(300, 3_000)):
        filled = [
            min(valid, max(cache.keep - chunk * cache.size, 0)) for chunk, valid in enumerate(cache.have[0])
        ]
        on_host = [chunk for chunk in range(len(filled)) if cache.rng.random() < 0.5]
        needs = (Needs("full"),)
        missing = restore.missing_set(cache.keep, cache.size, needs, [filled])
        found = restore.sources(cache.keep, cache.keep, cache.size, needs, missing, [on_host])
        swapped_in = sum(filled[chunk] for chunk in on_host)
        assert found == (sum(filled) - swapped_in, swapped_in, tokens_in(missing))
        assert sum(found) == cache.keep


# -- a decoder that computes exactly the missing set -----------------------------------------------------------------


@dataclass
class Context:
    tokens: list[int]
    pages: Pages
    """What a stateless run leaves."""
    outputs: Floats


@dataclass
class Family:
    """A model and two contexts whose first ``shared`` chunks are the same."""

    rng: random.Random
    decoder: Decoder
    size: int
    shared: int
    contexts: tuple[Context, Context]

    @classmethod
    def random(cls, seed: int) -> Family:
        rng = random.Random(seed)
        size, shared = rng.randint(1, 7), rng.choice((0, 1, 2, 3))
        decoder = Decoder.random(rng, random_needs(rng))
        prefix = [rng.randrange(VOCABULARY) for _ in range(shared * size)]
        contexts: list[Context] = []
        for _ in range(2):
            tokens = [*prefix, *(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30)))]
            contexts.append(Context(tokens, *stateless(decoder, size, tokens)))
        return cls(rng, decoder, size, shared, (contexts[0], contexts[1]))

    def verify_random_cache(self) -> int:
        """Return to both contexts, one after the other, with parts of them cached; return the missing positions."""
        first, second = self.contexts
        size, lengths = self.size, [-(-len(context.tokens) // self.size) for context in self.contexts]
        pages = Pages(self.decoder, size, sum(lengths) - self.shared)
        tables = [
            list(range(lengths[0])),
            [*range(self.shared), *range(lengths[0], sum(lengths) - self.shared)],
        ]
        keeps: list[int] = []
        for context, table in zip((first, second), tables, strict=True):
            keep = self.rng.randint(self.shared * size, len(context.tokens) - 1)
            keeps.append(keep)
            filled = [random_filled(self.rng, len(table), size) for _ in self.decoder.needs]
            for chunk in range(self.shared if context is second else 0, len(table)):
                held = [groups[chunk] if chunk < len(groups) else 0 for groups in filled]
                room = max(keep - chunk * size, 0)  # other tokens follow after ``keep``
                pages.take(context.pages, chunk, table[chunk], [min(valid, room) for valid in held])
        missed = 0
        for context, table, keep in zip((first, second), tables, keeps, strict=True):
            missed += self._return_to(context, pages, table, keep)
        for context, table in zip((first, second), tables, strict=True):
            pages.assert_equal(context.pages, table)
        return missed

    def _return_to(self, context: Context, pages: Pages, table: list[int], keep: int) -> int:
        total = len(context.tokens)
        missing = restore.missing_set(keep, self.size, self.decoder.needs, pages.have(table))
        missed = tokens_in(missing)
        restore.add_range(missing, keep, total)
        run = Run(pages, table, context.tokens)
        run.compute(missing, self.rng)
        for start, end in missing:
            assert close(run.outputs[start:end], context.outputs[start:end]), "a stateless run says otherwise"
        return missed


def test_computing_the_missing_set_gives_what_a_stateless_run_gives() -> None:
    missed = 0
    for seed in seeds(30, 150):
        family = Family.random(seed)
        missed += sum(family.verify_random_cache() > 0 for _ in range(10))
    assert missed > at_length(100, 500)


def needs_of_keep_alone(keep: int, size: int, needs: Sequence[Needs], have: Have) -> list[Range]:
    ranges: list[Range] = []
    for position in sorted(lacking(keep, size, needs, have)):
        restore.add_range(ranges, position, position + 1)
    return ranges


RULE = SimpleNamespace(
    gap_in_window=restore._gap_in_window, restart=restore.restart, missing_set=restore.missing_set
)
MUTANTS: dict[str, tuple[object, str, object]] = {
    "window one token short": (
        restore,
        "_gap_in_window",
        lambda unheld, window, low: RULE.gap_in_window(unheld, window - 1, low),
    ),
    "checkpoint one chunk late": (restore, "state_before", lambda start, size: start // size),
    "checkpoint one chunk early": (restore, "state_before", lambda start, size: max(start // size - 2, -1)),
    "live state instead of the zero state": (Run, "keeps_live_state", True),
    "stores ignored": (restore, "pieces_of", lambda run, size, needs, have: [SpanPart(*run, 7)]),
    "nothing stored": (restore, "pieces_of", lambda run, size, needs, have: [SpanPart(*run, 0)]),
    "state of a chunk that is partly filled": (
        restore,
        "restart",
        lambda end, size, filled: RULE.restart(end, size, [size if valid else 0 for valid in filled]),
    ),
    "positions to be computed need nothing": (restore, "missing_set", needs_of_keep_alone),
    "one position too few": (
        restore,
        "missing_set",
        lambda *cache: [(start + 1, end) for start, end in RULE.missing_set(*cache) if end > start + 1],
    ),
}
"""Faults of the rule and of its callers: what is replaced, and by what."""


@pytest.fixture(scope="module")
def families() -> list[Family]:
    return [Family.random(seed) for seed in range(24)]


def caught(families: list[Family]) -> bool:
    try:
        for family in families:
            family.rng.seed(0)
            for _ in range(5):
                family.verify_random_cache()
    except (AssertionError, ValueError):
        return True
    return False


def test_without_a_fault_nothing_is_caught(families: list[Family]) -> None:
    assert not caught(families)


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_are_caught(name: str, families: list[Family], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, broken = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, broken)
    assert caught(families)
