"""The Triton attention kernel on a CPU, with tiny tiles, against the float64 oracle.

A pytest file that is not collected by itself: Triton's interpreter is chosen when triton is imported, so
``tests/ops/test_interpreted.py`` runs it in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pensieve.kernels.attention.capacity import Capacity
from pensieve.kernels.attention.kinds import StepKind
from pensieve.kernels.attention.plan import AttentionPlan, geometry_of
from pensieve.kernels.attention.tiles import Tile, TileSet
from pensieve.kernels.ragged_paged_attention import attend, attend_with_lse
from pensieve.kernels.spans import make_spans, num_tokens
from support.kernels.attention_cases import Case, make_case, oracle, relative_error
from support.lengths import at_length, some

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
NARROW = Tile(4, 16, 4, 2, None, 1, 16)
TINY = TileSet(
    NARROW,
    NARROW,
    replace(NARROW, rows=8, resident=3),
    Tile(8, 16, 4, 2, None, 1, 32, True),
    Tile(16, 16, 4, 2, None, 1, 32, True),
)
MIX = [(0, 40, 1), (1, 33, 1), (2, 3, 30), (3, 0, 1), (4, 60, 3)]


def planned(case: Case, processors: int = 4, capacity: Capacity | None = None) -> AttentionPlan:
    """The plan with tiny tiles for a device of ``processors``."""
    geometry = replace(geometry_of(case.q, case.pool), multiprocessors=processors, own_tiles=TINY)
    geometry = replace(geometry, window=case.window)
    plan = AttentionPlan.from_spans(case.spans, len(case.q), geometry, case.q.device, capacity=capacity)
    plan.scratch.partial.fill_(torch.nan)
    plan.scratch.partial_lse.fill_(torch.nan)
    return plan


def check(case: Case, processors: int = 4) -> AttentionPlan:
    plan = planned(case, processors)
    before = case.pool.clone()
    out = torch.full_like(case.q, torch.nan)
    got, lse = attend_with_lse(case.q, case.pool, plan, case.page_tables, case.logits, out=out)
    want, want_lse = oracle(case)
    assert got is out
    assert relative_error(out, want) <= TOLERANCE[case.q.dtype]
    assert relative_error(lse, want_lse) <= TOLERANCE[case.q.dtype]
    assert torch.equal(before.nan_to_num(7.0), case.pool.nan_to_num(7.0))
    return plan


def test_contexts_at_page_and_tile_edges() -> None:
    check(make_case([(row, c - 1, 1) for row, c in enumerate([1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64])]))


@pytest.mark.parametrize("length", some([1, 2, 3, 4, 5, 7, 8, 9, 33], 4))
def test_lengths_at_block_edges(length: int) -> None:
    check(make_case([(0, 0, length), (1, 21, length)]))


@pytest.mark.parametrize(
    "heads", some([(1, 1), (2, 1), (4, 4), (8, 2), (10, 2), (7, 1), (16, 2), (40, 1)], 4)
)
def test_grouped_heads(heads: tuple[int, int]) -> None:
    check(make_case([(0, 11, 1), (1, 30, 1), (2, 4, 9)], heads=heads[0], kv_heads=heads[1]))


@pytest.mark.parametrize("dim", some([16, 24, 64, 80, 96, 128, 256], 3))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_head_sizes(dim: int, dtype: torch.dtype) -> None:
    check(make_case([(0, 40, 1), (1, 3, 20)], heads=2, kv_heads=1, dim=dim, dtype=dtype), processors=9)


@pytest.mark.parametrize("page", some([1, 3, 8, 16, 32, 64, 256], 3))
def test_page_sizes(page: int) -> None:
    check(make_case(MIX, heads=2, kv_heads=1, page=page))


@pytest.mark.parametrize("window", [None, 21])
def test_longer_spans_among_decodes(window: int | None) -> None:
    """They are split in blocks of the narrow tile."""
    spans = [(row, 60 + row, 1) for row in range(9)] + [(9, 3, 12), (10, 8, 5)]
    case = make_case(spans, heads=4, kv_heads=2, window=window)
    for processors in (4, 400):
        assert check(case, processors).kind is StepKind.NARROW


@pytest.mark.parametrize("processors", some([1, 2, 3, 7, 16, 400], 3))
def test_cuts_of_any_number(processors: int) -> None:
    plan = check(
        make_case([(0, 99, 1), (1, 150, 1), (2, 120, 2), (3, 0, 1)], heads=2, kv_heads=1), processors
    )
    assert processors < 16 or plan.capacity.merges > 0


def test_spans_of_one_context_and_empty_ones() -> None:
    check(make_case([(0, 60, 7), (0, 0, 24), (1, 9, 1), (0, 40, 3), (0, 67, 1), (1, 0, 0)]))


def test_pages_shared_between_contexts() -> None:
    case = make_case([(0, 20, 4), (1, 21, 1)])
    case.page_tables[1, :3] = case.page_tables[0, :3]
    check(case)


@pytest.mark.parametrize("seed", range(at_length(2, 20)))
def test_any_mixture(seed: int) -> None:
    dice = random.Random(seed)
    spans = [
        (dice.randrange(5), dice.randrange(70), dice.choice([0, 1, 1, 1, 5, dice.randrange(1, 30)]))
        for _ in range(dice.randrange(1, 9))
    ]
    heads, kv_heads = dice.choice([(1, 1), (4, 2), (6, 6), (10, 2)])
    page = dice.choice([1, 5, 8, 32])
    check(make_case([*spans, (0, 3, 1)], heads=heads, kv_heads=kv_heads, page=page), dice.choice([1, 4, 60]))


@pytest.mark.parametrize("magnitude", [0.0, 100.0])
def test_equal_and_extreme_scores(magnitude: float) -> None:
    case = make_case([(0, 40, 1), (1, 0, 30)], magnitude=magnitude)
    out = attend(case.q, case.pool, planned(case, 60), case.page_tables, case.logits)
    want, _ = oracle(case)
    torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-3 * max(magnitude, 1e-6))


def test_rows_outside_spans_come_out_zero() -> None:
    case = make_case([(0, 8, 3)])
    padded = replace(case, q=torch.cat([case.q, torch.full_like(case.q, torch.nan)]))
    out, lse = attend_with_lse(padded.q, case.pool, planned(padded), case.page_tables, case.logits)
    assert relative_error(out[:3], oracle(case)[0]) <= 1e-5
    assert (out[3:] == 0).all() and torch.isneginf(lse[3:]).all()


def test_strided_tensors() -> None:
    case = make_case(MIX, heads=6, kv_heads=3)
    q = torch.full((len(case.q), 11, 16), torch.nan)
    pool = torch.full((len(case.pool), 2, 2, 3, 8, 16), torch.nan)
    q[:, 2:8], pool[:, 1] = case.q, case.pool
    check(replace(case, q=q[:, 2:8], pool=pool[:, 1]))


@pytest.mark.parametrize("programs", some([1, 2, 5], 2))
def test_programs_that_are_fewer_than_items(programs: int) -> None:
    case = make_case([(row, 20 + 13 * row, 1) for row in range(9)], heads=4, kv_heads=2)
    plan = planned(case, 12, replace(planned(case, 12).capacity, narrow_programs=programs))
    out = torch.full_like(case.q, torch.nan)
    attend(case.q, case.pool, plan, case.page_tables, case.logits, out=out)
    assert relative_error(out, oracle(case)[0]) <= 1e-5


def test_page_tables_end_to_end() -> None:
    case = make_case(MIX, heads=4, kv_heads=2)
    lengths = [int((case.spans[row, 1:3]).sum()) for row in range(5)]
    pages = [-(-length // 8) for length in lengths]
    starts = [sum(pages[:row]) for row in range(5)]
    # The last entry ends the memory: behind it lies a page that does not exist.
    flat = torch.cat([case.page_tables[row, :count] for row, count in enumerate(pages)])
    memory = torch.cat([flat, torch.full((9,), 2**30, dtype=torch.int32)])[: len(flat)]
    _, lengths_, positions, _ = case.spans.T
    ragged = replace(case, page_tables=memory, spans=make_spans(lengths_, positions, starts))
    out = attend(ragged.q, ragged.pool, planned(ragged, 60), ragged.page_tables, ragged.logits)
    assert relative_error(out, oracle(case)[0]) <= 1e-5


def test_a_plan_serves_other_steps_in_the_same_memory() -> None:
    case = make_case([(0, 99, 1), (1, 20, 9), (2, 80, 1)], heads=2, kv_heads=1)
    plan = planned(case, 30, Capacity(narrow=60, wide=60, merges=60, partial_rows=800))
    words = plan.words.data_ptr()
    for lengths, positions in (([1, 9, 1], [99, 20, 80]), ([1, 1, 1], [3, 28, 79]), ([0, 7, 2], [0, 1, 50])):
        spans = make_spans(lengths, positions, [0, 1, 2])
        plan.refill(spans)
        out = torch.full_like(case.q, torch.nan)
        attend(case.q, case.pool, plan, case.page_tables, case.logits, out=out)
        used = num_tokens(spans)
        want, _ = oracle(replace(case, q=case.q[:used], spans=spans))
        assert relative_error(out[:used], want) <= 1e-5
        assert (out[used:] == 0).all()
    assert plan.words.data_ptr() == words


@pytest.mark.parametrize("window", some([1, 5, 13, 16, 17, 29, 32, 40, 64, 1000], 4))
def test_windows(window: int) -> None:
    """Decodes, short spans, and spans of several blocks, cut or not, with windows of whole tiles and others."""
    spans = [(0, 99, 1), (1, 33, 1), (2, 3, 30), (3, 0, 1), (4, 60, 3), (5, 75, 5), (6, 47, 17)]
    check(make_case(spans, heads=4, kv_heads=2, window=window), processors=60 if window % 2 else 4)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "processors"),
    [(None, 0.7, True, 1), (None, 0.7, True, 60), (77, None, True, 60), (90, 2.0, False, 60)],
)
def test_softcap_and_sinks(window: int | None, softcap: float | None, sinks: bool, processors: int) -> None:
    """A sink counts once, in whole items and in cut ones."""
    spans = [(0, 120, 1), (1, 33, 1), (2, 3, 30), (4, 60, 3)]
    case = make_case(spans, heads=6, kv_heads=2, page=5, window=window, softcap=softcap, sinks=sinks)
    plan = check(case, processors)
    assert (plan.capacity.merges > 0) == (processors == 60)


def test_rows_that_see_nothing_have_no_sink() -> None:
    case = make_case([(0, 8, 3)], sinks=True, window=4)
    padded = replace(case, q=torch.cat([case.q, torch.full_like(case.q, torch.nan)]))
    out, lse = attend_with_lse(padded.q, case.pool, planned(padded), case.page_tables, case.logits)
    assert relative_error(out[:3], oracle(case)[0]) <= 1e-5
    assert (out[3:] == 0).all() and torch.isneginf(lse[3:]).all()


@pytest.mark.parametrize("softcap", [3.0, 1e-3])
def test_softcap_of_extreme_scores(softcap: float) -> None:
    check(make_case([(0, 40, 1), (1, 0, 30)], magnitude=100.0, softcap=softcap), processors=60)


def test_windowed_plan_forms_no_prefix_groups() -> None:
    case = make_case(MIX, window=9)
    with pytest.raises(ValueError, match="no prefix groups"):
        planned(case).pack(case.spans, torch.tensor([[0, 2, 16]]).numpy())
