"""Plans in fixed memory, as captured graphs have them: kinds of steps, bounds that hold for all of a kind, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.kernels.attention.capacity import Capacity, capacity_for
from pensieve.kernels.attention.kinds import Geometry, StepKind, classify
from pensieve.kernels.attention.plan import HEADER, AttentionPlan, Scratch, make_words, words_of
from pensieve.kernels.attention.tiles import choose_tiles
from pensieve.kernels.attention.work_lists import ITEM, make_work_lists
from pensieve.kernels.spans import Spans, make_spans

SHAPES = [(40, 40), (40, 10), (32, 8), (14, 2), (1, 1), (40, 1), (64, 8)]
TILES = choose_tiles(128, 2)
LLAMA = Geometry(40, 10, 128, 2, 132)
CPU = torch.device("cpu")
FIELDS = ("narrow", "wide", "merges", "partial_rows")


def geometry(shape: tuple[int, int], processors: int = 132) -> Geometry:
    return Geometry(*shape, head_dim=128, element_bytes=2, multiprocessors=processors)


def spans_of(lengths: list[int], contexts: list[int]) -> Spans:
    """Spans of these lengths at the ends of contexts of at least that length."""
    positions = [max(0, context - length) for length, context in zip(lengths, contexts, strict=True)]
    return make_spans(lengths, positions, range(len(lengths)))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_step_of_a_kind_exceeds_its_capacity(data: st.DataObject) -> None:
    where = geometry(data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from([1, 4, 46, 132, 2000])))
    where = replace(where, hopper=data.draw(st.booleans()))
    limit = data.draw(st.sampled_from([1, 64, 700, 4096, 40_000]))
    lengths = data.draw(
        st.one_of(
            st.builds(lambda n: [1] * n, st.integers(0, 400)),
            st.lists(st.sampled_from([0, 1, 1, 2, 4, 8, 9, 16, 17, 33, 64, 70, 129, 600]), max_size=120),
        )
    )
    lengths = [min(length, limit) for length in lengths]
    same = data.draw(st.integers(1, limit))
    uniform = data.draw(st.booleans())
    dice = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    contexts = [same if uniform else int(dice.integers(1, limit + 1)) for _ in lengths]
    host = spans_of(lengths, contexts)
    used = int((host[:, 1] > 0).sum())
    tokens = int(host[:, 1].sum()) + data.draw(st.sampled_from([0, 0, 1, 7, 200]))
    where = replace(where, window=data.draw(st.sampled_from([None, 1, 100, 128, 1024, 9000])))
    kind = classify(host, where)
    most = int((host[:, 1] + host[:, 2]).max(initial=1))
    capacity = capacity_for(
        kind,
        tokens,
        used + data.draw(st.sampled_from([0, 3])),
        data.draw(st.sampled_from([most, limit])),
        where,
    )
    work = make_work_lists(host, tokens, where, kind)
    need = Capacity(len(work.narrow), len(work.wide), len(work.merges), work.partial_rows)
    for name in FIELDS:
        assert getattr(need, name) <= getattr(capacity, name), (name, kind, need, capacity)


def test_a_window_bounds_the_pieces_of_any_context() -> None:
    for kind in StepKind:
        short, long, full = (
            capacity_for(kind, 64, 64, context, replace(LLAMA, window=window))
            for context, window in ((4096, 1024), (131_072, 1024), (131_072, None))
        )
        assert short == long
        assert all(getattr(long, name) <= getattr(full, name) for name in FIELDS)


def test_capacities_are_tight_where_graphs_live() -> None:
    """Programs beyond a step's own items cost time."""
    for batch, context in ((1, 16384), (8, 4096), (32, 1024), (48, 1024), (256, 4096)):
        host = spans_of([1] * batch, [context] * batch)
        work = make_work_lists(host, batch, LLAMA, StepKind.NARROW)
        capacity = capacity_for(StepKind.NARROW, batch, batch, context, LLAMA)
        surplus = (capacity.narrow_programs - len(work.narrow)) * LLAMA.kv_heads
        assert surplus <= TILES.narrow.resident * LLAMA.multiprocessors
        assert capacity.wide == 0


@pytest.mark.parametrize(
    ("lengths", "context", "kind"),
    [
        ([], 50, StepKind.NARROW), ([0, 0], 50, StepKind.NARROW), ([1, 4, 0], 50, StepKind.NARROW),
        ([1, 5], 50, StepKind.FEW), ([16, 0], 50, StepKind.FEW), ([17], 50, StepKind.FEW),
        ([8] * 30, 1000, StepKind.SHORT), ([8] * 26, 1000, StepKind.FEW),
        ([8] * 40, 1000, StepKind.FEW), ([8] * 30, 2000, StepKind.FEW), ([1] * 20 + [8] * 10, 1000, StepKind.SHORT),
        ([1] * 29 + [8], 1000, StepKind.NARROW), ([1] * 29 + [64], 1000, StepKind.MIXED),
        ([1] * 99 + [64], 1000, StepKind.NARROW), ([1] * 99 + [65], 1000, StepKind.MIXED),
        ([8] * 29 + [9], 1000, StepKind.FEW), ([1024], 50, StepKind.WIDE), ([1024, 1], 50, StepKind.MIXED),
        ([16] * 2000, 50, StepKind.FEW), ([1, 17], 50, StepKind.MIXED),
    ],
)  # fmt: skip
def test_kinds(lengths: list[int], context: int, kind: StepKind) -> None:
    assert classify(spans_of(lengths, [context] * len(lengths)), LLAMA) is kind


def test_long_contexts_are_not_read_again_by_many_blocks() -> None:
    lengths, long, short = [1] * 19 + [17], [100] * 19 + [9000], [9000] * 19 + [100]
    assert classify(spans_of(lengths, short), LLAMA) is StepKind.NARROW
    assert classify(spans_of(lengths, long), LLAMA) is StepKind.MIXED


def test_all_wide_blocks_go_to_a_hopper_device() -> None:
    host = spans_of([17], [50])
    assert classify(host, replace(LLAMA, hopper=True)) is StepKind.WIDE
    assert classify(spans_of([16, 1], [50, 50]), replace(LLAMA, hopper=True)) is StepKind.FEW


@pytest.mark.parametrize("heads", SHAPES)
def test_wide_items_get_a_share_of_the_device(heads: tuple[int, int]) -> None:
    where = replace(geometry(heads), hopper=True)

    def share(lengths: list[int], contexts: list[int]) -> int:
        host = spans_of(lengths, contexts)
        return make_work_lists(host, int(host[:, 1].sum()), where, StepKind.MIXED).wide_programs

    little = share([1] * 100 + [200], [2000] * 100 + [300])
    much = share([1] * 100 + [2000] * 4, [2000] * 100 + [4000] * 4)
    assert 1 <= little <= much <= 132
    assert share([2000], [4000]) == 132


def test_words_lie_in_memory_of_the_caller() -> None:
    capacity = capacity_for(StepKind.NARROW, 8, 8, 4096, LLAMA)
    upload = torch.zeros(words_of(capacity) + 20, dtype=torch.int32)
    plan = AttentionPlan(
        8, LLAMA, upload[10 : 10 + words_of(capacity)], kind=StepKind.NARROW, capacity=capacity
    )
    host = spans_of([1] * 8, [4096] * 8)
    packed = plan.pack(host)
    assert not upload.any(), "packing alone changes nothing"
    work = make_work_lists(host, 8, LLAMA, StepKind.NARROW)
    assert packed.dtype == np.int32 and packed[:3].tolist() == [len(work.narrow), 0, len(work.merges)]
    assert len(packed) == HEADER + work.narrow.size + work.merges.size <= len(plan.words)
    assert (packed[HEADER : HEADER + work.narrow.size].reshape(-1, ITEM) == work.narrow).all()
    plan.refill(host)
    assert (upload[10 : 10 + len(packed)].numpy() == packed).all()
    assert not upload[:10].any() and not upload[10 + words_of(capacity) :].any()


def test_memory_that_does_not_fit_is_refused() -> None:
    capacity = Capacity(4, 0, 8, 64)

    def plan(words: torch.Tensor, scratch: Scratch | None = None) -> AttentionPlan:
        return AttentionPlan(4, LLAMA, words, kind=StepKind.NARROW, capacity=capacity, scratch=scratch)

    fits = make_words(capacity)
    needed = words_of(capacity)
    for words in (
        torch.zeros(needed - 1, dtype=torch.int32),
        torch.zeros(needed),
        torch.zeros(2, needed).int(),
    ):
        with pytest.raises(ValueError, match="words are"):
            plan(words)
    with pytest.raises(ValueError, match="contiguous"):
        plan(torch.zeros(2 * needed, dtype=torch.int32)[::2])
    with pytest.raises(ValueError, match="a scratch of 63 rows"):
        plan(fits, Scratch(63, LLAMA, CPU))
    assert plan(fits, Scratch(64, LLAMA, CPU)).scratch.partial.shape == (640, 128)


def test_a_plan_refuses_what_its_graph_has_no_room_for() -> None:
    for kind in (StepKind.NARROW, StepKind.WIDE):
        capacity = capacity_for(kind, 64, 64, 4096, LLAMA)
        plan = AttentionPlan(64, LLAMA, make_words(capacity), kind=kind, capacity=capacity)
        plan.pack(spans_of([1, 30], [9, 900]))
        with pytest.raises(ValueError, match=f"needs {kind.value}"):
            plan.pack(spans_of([1] * 200, [4096] * 200))
