"""Spans that read a common beginning together: which are found, what work lists are made of them, and what fits.

What the kernel makes of such lists is in ``tests/support/kernels/interpreted_parties.py``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.kernels.attention.capacity import Capacity, capacity_for
from pensieve.kernels.attention.group_lists import PREFIX_GROUP_KIND, make_group_lists
from pensieve.kernels.attention.kinds import Geometry, StepKind, classify
from pensieve.kernels.attention.plan import AttentionPlan, DoesNotFit, make_words
from pensieve.kernels.attention.prefixes import PrefixGroupRule, PrefixGroups
from pensieve.kernels.attention.work_lists import WorkLists
from pensieve.kernels.spans import Ints, Spans, make_spans
from support.lengths import at_length

LLAMA = Geometry(40, 10, 128, 2, 132)
HOPPER = replace(LLAMA, hopper=True)
SHAPES = [(40, 40), (40, 10), (32, 8), (14, 2), (64, 8)]
UNIT = 128
"""Beginnings are whole key tiles of a Hopper device."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Spans over page tables that lie end to end."""

    host: Spans
    pages: npt.NDArray[np.int32]

    def in_order(self, parties: PrefixGroups) -> Spans:
        """The spans as a step has them: those of a party next to each other."""
        moved = self.host[parties.order]
        moved[:, 0] = np.cumsum(moved[:, 1]) - moved[:, 1]
        return moved


def tables_of(contexts: list[list[int]], lengths: list[int], unseen: int = 0, page: int = 1) -> Tables:
    """Spans at the ends of contexts that are lists of pages; so many tokens of the last page are not there yet."""
    starts = np.cumsum([0, *(len(context) for context in contexts)])[:-1]
    positions = [
        len(context) * page - unseen - length for context, length in zip(contexts, lengths, strict=True)
    ]
    host = make_spans(lengths, positions, starts)
    return Tables(host, np.array([entry for context in contexts for entry in context], np.int32))


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Contexts that branch off from each other anywhere, some of them equal; pages of one token."""
    new = itertools.count(1)
    contexts = [[next(new) for _ in range(draw(st.integers(1, 700)))]]
    for _ in range(draw(st.integers(0, 24))):
        parent = contexts[draw(st.integers(0, len(contexts) - 1))]
        kept = draw(st.sampled_from([0, len(parent), len(parent) // 2, len(parent) * 7 // 8]))
        own = draw(st.sampled_from([0, 1, 3, 64, 400]))
        contexts.append([*parent[:kept], *(next(new) for _ in range(max(own, 1 - kept)))])
    return draw(st.permutations(contexts))


class Willing(PrefixGroupRule):
    """Whatever is read more than once is worth a party."""

    def saved_us(self, rows: int, spans: int, tokens: int) -> float:
        return float(tokens * (spans - 1))


def walked(work: WorkLists, host: Spans, geometry: Geometry, num_rows: int) -> tuple[Ints, Ints]:
    """How often each query row has seen each of its keys, [rows, keys], and how often it has been written, [rows]:
    computed as the kernels do, by items, through the scratch, to merges."""
    groups, tiles = geometry.groups, geometry.tiles
    keys = int((host[:, 1] + host[:, 2]).max())
    scratch: dict[int, Ints] = {}
    seen, written = np.zeros((num_rows * groups, keys), np.int64), np.zeros(num_rows * groups, np.int64)
    for tile, items in ((PREFIX_GROUP_KIND.narrow_tile(tiles), work.narrow), (tiles.wide, work.wide)):
        for start, rows, position, _, first, low, high, partial in items.tolist():
            assert low % tile.keys == 0 and first % tile.rows == 0 and first < rows
            for index, row in enumerate(range(first, min(first + tile.rows, rows))):
                line = np.zeros(keys, np.int64)
                line[low : min(high, position + 1 + row // groups)] = 1
                if partial >= 0:
                    assert partial + index not in scratch, "two items write the same partial row"
                    scratch[partial + index] = line
                else:
                    seen[start * groups + row] += line
                    written[start * groups + row] += 1
    for start, first, end, partial, pieces, apart in work.merges.tolist():
        assert 0 < end - first <= PREFIX_GROUP_KIND.merged_rows
        for index in range(end - first):
            row = start * groups + first + index
            seen[row] += sum(scratch.pop(partial + index + piece * apart) for piece in range(pieces))
            written[row] += 1
    assert not scratch, "a partial row is never merged"
    return seen, written


def must_see(host: Spans, groups: int, shape: tuple[int, ...]) -> Ints:
    want = np.zeros(shape, np.int64)
    for start, length, position, _ in host.tolist():
        for token in range(length):
            want[(start + token) * groups : (start + token + 1) * groups, : position + token + 1] = 1
    return want


@settings(max_examples=at_length(50, 400), deadline=None)
@given(data=st.data())
def test_every_row_sees_every_key_once(data: st.DataObject) -> None:
    contexts = data.draw(trees())
    where = replace(
        LLAMA, heads=(shape := data.draw(st.sampled_from(SHAPES)))[0], kv_heads=shape[1],
        hopper=data.draw(st.booleans()), multiprocessors=data.draw(st.sampled_from([1, 4, 132])),
    )  # fmt: skip
    lengths = [min(len(context), data.draw(st.sampled_from([1, 1, 1, 1, 2, 20]))) for context in contexts]
    given_ = tables_of(contexts, lengths)
    found = Willing(where, 1, least_spans=2, least_saved_us=0.0).find(given_.host, given_.pages)
    if found is None:
        return
    host = given_.in_order(found)
    num_rows = int(host[:, 1].sum()) + data.draw(st.sampled_from([0, 5]))
    for begin, count, common in found.table.tolist():
        assert count >= 2 and common > 0
        first = given_.pages[host[begin, 3] : host[begin, 3] + common]
        for start in host[begin : begin + count, 3]:
            assert (given_.pages[start : start + common] == first).all()
    capacity = capacity_for(
        PREFIX_GROUP_KIND, num_rows, len(host), int((host[:, 1] + host[:, 2]).max()), where
    )
    for room in (Capacity(*[1 << 40] * 4), capacity):
        work = make_group_lists(host, found.table, num_rows, where, room)
        seen, written = walked(work, host, where, num_rows)
        assert (seen == must_see(host, where.groups, seen.shape)).all()
        assert (written == 1).all()
        assert work.partial_rows <= room.partial_rows or room is capacity


def begin_alike(count: int, common: int, own: int, page: int = 32) -> Tables:
    """Decodes of contexts that have ``common`` tokens of theirs in common."""
    shared, rest = list(range(common // page)), -(-own // page)
    contexts = [[*shared, *(10**6 + row * rest + index for index in range(rest))] for row in range(count)]
    return tables_of(contexts, [1] * count, page=page)


def parties_of(tables: Tables, rule: PrefixGroupRule) -> list[list[int]]:
    found = rule.find(tables.host, tables.pages)
    return [] if found is None else found.table.tolist()


def test_a_party_has_to_pay() -> None:
    rule = PrefixGroupRule(HOPPER, 32)
    assert parties_of(begin_alike(64, 2048, 256), rule) == [[0, 64, 2048]]
    assert parties_of(begin_alike(64, 2048 + 96, 256), rule) == [[0, 64, 2048]], "whole key tiles"
    assert parties_of(begin_alike(64, 0, 2048), rule) == []
    assert parties_of(begin_alike(3, 100_000, 256), rule) == [], "too few to fill a tile of queries"
    assert parties_of(begin_alike(64, 96, 256), rule) == [], "less than a key tile"
    assert parties_of(begin_alike(4, 2048, 256), rule) == []
    assert parties_of(begin_alike(4, 2048, 256), replace(rule, least_saved_us=0.0)) == [[0, 4, 2048]]


def test_many_small_parties_fit_into_their_graph() -> None:
    """As many as there can be, where nothing else would be cut."""
    for shape in SHAPES:
        where = Geometry(*shape, 128, 2, 1, hopper=True)
        contexts = [
            [*range(1000 * party, 1000 * party + 130), 10**6 + row]
            for party in range(32)
            for row in (0, 1, 2, 3)
        ]
        step = tables_of(contexts, [1] * 128)
        found = Willing(where, 1, least_saved_us=0.0).find(step.host, step.pages)
        assert found is not None and len(found.table) == 32
        capacity = capacity_for(PREFIX_GROUP_KIND, 128, 128, 131, where)
        plan = AttentionPlan(128, where, make_words(capacity), kind=PREFIX_GROUP_KIND, capacity=capacity)
        assert plan.pack(step.in_order(found), found.table)[1] == 32


def test_no_member_reads_beyond_what_it_sees() -> None:
    """The last page of a member is the others', too, but it has not come as far in it."""
    step = tables_of([list(range(10))] * 8, [1] * 8, page=128)
    step.host[3, 2] -= 30
    rule = replace(PrefixGroupRule(HOPPER, 128), least_saved_us=0.0)
    assert parties_of(step, rule) == [[0, 8, 1152]]


def test_wide_spans_keep_to_themselves() -> None:
    """A span with more rows than a narrow tile shares its own keys among its rows already."""
    contexts = [[*range(300), 1000 + row] for row in range(8)]
    lengths = [1, 5, 1, 4, 30, 1, 1, 1]
    step = tables_of(contexts, lengths, page=32)
    found = replace(PrefixGroupRule(LLAMA, 32), least_saved_us=0.0).find(step.host, step.pages)
    assert found is not None and found.table.tolist() == [[0, 6, 9600]]
    assert found.order.tolist() == [0, 2, 3, 5, 6, 7, 1, 4]


def test_the_largest_saving_is_chosen() -> None:
    """Each may read together with all or with its own branch: whichever saves more in all."""
    rule = replace(PrefixGroupRule(HOPPER, 128), least_saved_us=0.0)

    def branches(common: int, each: int, sizes: list[int]) -> list[list[int]]:
        contexts = []
        for branch, size in enumerate(sizes):
            own = [1000 * (branch + 1) + index for index in range(each)]
            contexts += [[*range(common), *own, 10**6 + 100 * branch + row] for row in range(size)]
        return parties_of(tables_of(contexts, [1] * len(contexts), page=128), rule)

    assert branches(10, 1, [10, 10]) == [[0, 20, 1280]]
    assert branches(10, 40, [10, 10]) == [[0, 10, 6400], [10, 10, 6400]]
    assert branches(10, 100, [20, 1, 1, 1, 1]) == [[0, 20, 14080]], "the others are no branch of four"


def test_a_step_that_shares_nothing_has_the_plan_it_had() -> None:
    step = begin_alike(256, 0, 900)
    assert PrefixGroupRule(HOPPER, 32).find(step.host, step.pages) is None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_found_fits_into_the_graph_of_its_bucket(data: st.DataObject) -> None:
    """With at least LEAST_SPANS in each party, as servers have it: no capacity of ``capacity_for`` is exceeded."""
    contexts = data.draw(trees()) * data.draw(st.sampled_from([1, 4, 9]))
    shape = data.draw(st.sampled_from(SHAPES))
    where = replace(
        LLAMA, heads=shape[0], kv_heads=shape[1], hopper=data.draw(st.booleans()),
        multiprocessors=data.draw(st.sampled_from([1, 4, 132])),
    )  # fmt: skip
    step = tables_of(contexts, [1] * len(contexts))
    found = Willing(where, 1, least_saved_us=0.0).find(step.host, step.pages)
    if found is None:
        return
    host = step.in_order(found)
    tokens = len(host) + data.draw(st.sampled_from([0, 3, 31]))
    limit = data.draw(st.sampled_from([int(host[:, 2].max()) + 1, 16384]))
    capacity = capacity_for(
        PREFIX_GROUP_KIND, tokens, data.draw(st.sampled_from([len(host), tokens])), limit, where
    )
    plan = AttentionPlan(tokens, where, make_words(capacity), kind=PREFIX_GROUP_KIND, capacity=capacity)
    assert plan.pack(host, found.table)[0] >= 0


def test_a_plan_without_launches_for_parties_refuses_them() -> None:
    step = begin_alike(64, 2048, 256)
    found = PrefixGroupRule(HOPPER, 32).find(step.host, step.pages)
    assert found is not None
    kind = classify(step.host, HOPPER)
    assert kind is StepKind.NARROW
    capacity = capacity_for(kind, 64, 64, 4096, HOPPER)
    plan = AttentionPlan(64, HOPPER, make_words(capacity), kind=kind, capacity=capacity)
    with pytest.raises(DoesNotFit, match="prefix groups"):
        plan.pack(step.in_order(found), found.table)
    capacity = replace(capacity_for(PREFIX_GROUP_KIND, 64, 64, 4096, HOPPER), partial_rows=2 * 64 * 4 - 1)
    small = AttentionPlan(64, HOPPER, make_words(capacity), kind=PREFIX_GROUP_KIND, capacity=capacity)
    with pytest.raises(DoesNotFit, match="partial_rows"):
        small.pack(step.in_order(found), found.table)
    assert small.pack(step.host)[0] >= 64, "apart, they fit"


def test_pieces_are_as_few_as_there_is_room_for() -> None:
    step = begin_alike(64, 8192, 256)
    found = PrefixGroupRule(HOPPER, 32).find(step.host, step.pages)
    assert found is not None
    host, table = step.in_order(found), found.table
    many = make_group_lists(host, table, 64, HOPPER)
    few = make_group_lists(host, table, 64, HOPPER, Capacity(64, 2, 300, 2 * 256))
    assert many.merges[0, 4] > few.merges[0, 4] == 2
    assert len(few.wide) == 2 and len(few.narrow) == 64 and few.partial_rows == 512
