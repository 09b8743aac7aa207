"""The reference attention against a float64 oracle: every shape of a step, with all unseen memory poisoned."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.kernels import reference
from pensieve.kernels.reference import attend, make_plan, ragged_paged_attention
from pensieve.kernels.spans import make_spans
from support.kernels.attention_cases import Case, Spans, make_case, oracle, relative_error

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check(case: Case) -> None:
    """Output and lse agree with the oracle, and the pool is untouched."""
    before = case.pool.clone()
    out, lse = ragged_paged_attention(
        case.q, case.pool, case.spans, case.page_tables, scale=case.scale, window=case.window,
        softcap=case.softcap, sinks=case.sinks, return_lse=True,
    )  # fmt: skip
    want, want_lse = oracle(case)
    assert torch.equal(out, _without_lse(case))
    assert out.dtype == case.q.dtype and lse.dtype == torch.float32
    assert relative_error(out, want) <= TOLERANCE[case.q.dtype]
    assert relative_error(lse, want_lse) <= TOLERANCE[case.q.dtype]
    assert torch.equal(before.nan_to_num(7.0), case.pool.nan_to_num(7.0))


def _without_lse(case: Case) -> torch.Tensor:
    return ragged_paged_attention(
        case.q, case.pool, case.spans, case.page_tables, scale=case.scale, window=case.window,
        softcap=case.softcap, sinks=case.sinks,
    )  # fmt: skip


@pytest.mark.parametrize("context", [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_single_query_at_page_edges(context: int) -> None:
    check(make_case([(0, context - 1, 1)]))


def test_single_queries_of_all_lengths_in_one_batch() -> None:
    check(make_case([(row, context - 1, 1) for row, context in enumerate(range(1, 70))]))


def test_empty_spans_between_others() -> None:
    check(make_case([(0, 5, 0), (0, 5, 3), (1, 0, 0), (1, 12, 1), (0, 0, 0)]))


@pytest.mark.parametrize("length", [2, 15, 16, 17, 255, 256, 257, 600])
def test_whole_prefill(length: int) -> None:
    check(make_case([(0, 0, length)], heads=2, kv_heads=1, dim=8))


@pytest.mark.parametrize(
    ("length", "context"), [(5, 18), (129, 463), (1, 1328), (192, 328), (128, 180), (64, 255), (300, 700)]
)
def test_chunked_prefill(length: int, context: int) -> None:
    check(make_case([(0, context - length, length)], heads=2, kv_heads=1, dim=8))


@pytest.mark.parametrize("groups", [1, 2, 4, 5, 7, 8, 16, 40])
def test_grouped_heads(groups: int) -> None:
    for kv_heads in (1, 2, 10) if groups <= 8 else (1,):
        check(make_case([(0, 11, 1), (1, 30, 1), (2, 4, 9)], heads=groups * kv_heads, kv_heads=kv_heads))


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128])
def test_head_sizes(dim: int) -> None:
    check(make_case([(0, 40, 1), (1, 3, 20)], dim=dim))


@pytest.mark.parametrize("page", [1, 3, 8, 16, 32, 64, 256])
def test_page_sizes(page: int) -> None:
    check(make_case([(0, 40, 1), (1, 33, 1), (2, 3, 70), (3, 0, 1)], page=page))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    check(make_case([(0, 40, 1), (1, 39, 1), (2, 3, 70)], dim=64, dtype=dtype))


def test_leading_and_trailing_span_of_one_context() -> None:
    check(make_case([(0, 60, 7), (0, 0, 24), (1, 9, 1), (0, 40, 3), (0, 67, 1)]))


def test_three_hundred_spans() -> None:
    dice = random.Random(1)
    check(make_case([(row, dice.randrange(40), 1 + (row % 9 == 0)) for row in range(300)], dim=8))


def test_batches_are_cut_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "GROUP_ELEMENTS", 20_000)
    case = make_case([(row, 50 + row % 3, 1) for row in range(40)])
    check(case)
    assert len(make_plan(case.q, case.pool, case.spans, case.page_tables).groups) > 5


def test_pages_shared_between_contexts() -> None:
    case = make_case([(0, 20, 4), (1, 21, 1)])
    case.page_tables[1, :3] = case.page_tables[0, :3]
    check(case)


@settings(max_examples=40)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 40))),
        min_size=1,
        max_size=20,
    ),
    shape=st.sampled_from([(1, 1, 1), (4, 2, 8), (6, 6, 5), (14, 2, 16), (5, 1, 32)]),
    seed=st.integers(0, 1000),
)
def test_any_mixture(spans: Spans, shape: tuple[int, int, int], seed: int) -> None:
    heads, kv_heads, page = shape
    check(make_case(spans, heads=heads, kv_heads=kv_heads, page=page, dim=8, seed=seed))


@pytest.mark.parametrize("magnitude", [0.0, 100.0])
def test_equal_and_extreme_scores(magnitude: float) -> None:
    case = make_case([(0, 40, 1), (1, 0, 30)], magnitude=magnitude)
    out = ragged_paged_attention(case.q, case.pool, case.spans, case.page_tables, scale=case.scale)
    want, _ = oracle(case)
    torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-3 * max(magnitude, 1e-6))


def test_rows_outside_spans_come_out_zero() -> None:
    case = make_case([(0, 8, 3)])
    q = torch.cat([case.q, torch.full_like(case.q, torch.nan)])
    out = torch.full_like(q, torch.nan)
    got, lse = ragged_paged_attention(
        q, case.pool, case.spans, case.page_tables, scale=case.scale, return_lse=True, out=out
    )
    assert got is out
    assert relative_error(out[:3], oracle(case)[0]) <= 1e-5
    assert (out[3:] == 0).all() and torch.isneginf(lse[3:]).all()


def test_parts_of_a_context_merge_by_lse() -> None:
    whole = make_case([(0, 47, 1)], page=8)
    want, want_lse = oracle(whole)
    parts = []
    for first, last in ((0, 2), (2, 6)):
        spans = make_spans([1], [(last - first) * 8 - 1], [0])
        tables = whole.page_tables[:, first:last].contiguous()
        parts.append(
            ragged_paged_attention(whole.q, whole.pool, spans, tables, scale=whole.scale, return_lse=True)
        )
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * (part - lse).exp()[..., None] for out, part in parts)
    assert isinstance(merged, torch.Tensor)
    assert relative_error(merged, want) <= 1e-5 and relative_error(lse, want_lse) <= 1e-5


def test_one_plan_serves_all_layers() -> None:
    case, other = make_case([(0, 20, 1), (1, 3, 5)]), make_case([(0, 20, 1), (1, 3, 5)], seed=0, magnitude=2)
    plan = make_plan(case.q, case.pool, case.spans, case.page_tables)
    assert relative_error(attend(case.q, case.pool, plan, case.logits), oracle(case)[0]) <= 1e-5
    assert relative_error(attend(other.q, other.pool, plan, case.logits), oracle(other)[0]) <= 1e-5


def test_heads_that_do_not_divide_are_refused() -> None:
    case = make_case([(0, 3, 1)], heads=4, kv_heads=2)
    with pytest.raises(ValueError, match="3 query heads"):
        ragged_paged_attention(case.q[:, :3], case.pool, case.spans, case.page_tables, scale=case.scale)


def test_negative_spans_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        make_spans([1], [-1], [0])


SHAPES = [(1, 1, 1), (4, 2, 8), (6, 6, 5), (14, 2, 16), (5, 1, 32)]
"""(query heads, KV heads, page)"""


@settings(max_examples=60)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 40))),
        min_size=1,
        max_size=12,
    ),
    shape=st.sampled_from(SHAPES),
    window=st.one_of(st.none(), st.sampled_from([1, 2, 7, 8, 9, 16, 31, 64, 500])),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_window_softcap_and_sinks(
    spans: Spans,
    shape: tuple[int, int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    heads, kv_heads, page = shape
    check(
        make_case(
            spans, heads=heads, kv_heads=kv_heads, page=page, dim=8, seed=seed,
            window=window, softcap=softcap, sinks=sinks,
        )
    )  # fmt: skip


@pytest.mark.parametrize("window", [1, 100, 255, 256, 257, 590])
def test_windows_across_blocks_of_queries(window: int) -> None:
    check(make_case([(0, 70, 600), (1, 0, 300)], heads=2, kv_heads=1, dim=8, window=window))


def test_only_pages_inside_the_window_are_gathered() -> None:
    long, short = (
        make_case([(0, 799, 1), (1, 700, 3)], window=20),
        make_case([(0, 27, 1), (1, 28, 3)], window=20),
    )
    check(long)
    sizes = [
        [
            len(group.page_rows)
            for group in make_plan(case.q, case.pool, case.spans, case.page_tables, window=20).groups
        ]
        for case in (long, short)
    ]
    assert sizes[0] == sizes[1]
    assert max(sizes[0]) <= 2 * 2 * (2 + 20 // 8), "keys and values of two heads"


def test_a_large_window_makes_the_plan_of_no_window() -> None:
    case = make_case([(0, 40, 1), (1, 39, 1), (2, 3, 300)], dim=8)
    plain, wide = (make_plan(case.q, case.pool, case.spans, case.page_tables, window=w) for w in (None, 303))
    assert torch.equal(
        attend(case.q, case.pool, plain, case.logits), attend(case.q, case.pool, wide, case.logits)
    )
    assert (plain.scratch_rows, len(plain.groups)) == (wide.scratch_rows, len(wide.groups))


@pytest.mark.parametrize("window", [None, 13])
def test_sinks_are_those_of_gpt_oss(window: int | None) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    check_transformers(eager_attention_forward, window, sinks=True)


@pytest.mark.parametrize("window", [None, 13])
def test_softcap_is_that_of_gemma2(window: int | None) -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    check_transformers(eager_attention_forward, window, softcap=2.0)


def check_transformers(
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    window: int | None,
    *,
    sinks: bool = False,
    softcap: float | None = None,
) -> None:
    """A whole prefill of 40 tokens agrees with an attention function of transformers, in float32."""
    tokens = 40
    case = make_case([(0, 0, tokens)], heads=6, kv_heads=2, window=window, sinks=sinks, softcap=softcap)
    keys, values = (
        case.pool[case.page_tables[0, : tokens // 8].long(), part]
        .transpose(0, 1)
        .reshape(2, tokens, 16)[None]
        for part in (0, 1)
    )
    at = torch.arange(tokens)
    visible = at[None, :] <= at[:, None]
    if window is not None:
        visible &= at[None, :] > at[:, None] - window
    mask = torch.zeros(1, 1, tokens, tokens).masked_fill(~visible, torch.finfo(torch.float32).min)
    module = SimpleNamespace(num_key_value_groups=3, sinks=case.sinks, training=False)
    want, _ = forward(
        module, case.q.transpose(0, 1)[None], keys, values, mask, scaling=case.scale, dropout=0.0,
        **({} if softcap is None else {"softcap": softcap}),
    )  # fmt: skip
    assert relative_error(_without_lse(case), want[0]) <= 1e-6


def test_softcap_and_sinks_that_do_not_fit_are_refused() -> None:
    case = make_case([(0, 3, 1)], heads=4, kv_heads=2)
    rest = (case.q, case.pool, case.spans, case.page_tables)
    with pytest.raises(ValueError, match="window of 0"):
        ragged_paged_attention(*rest, scale=1.0, window=0)
    with pytest.raises(ValueError, match="softcap must be positive"):
        ragged_paged_attention(*rest, scale=1.0, softcap=0.0)
    with pytest.raises(ValueError, match="one float per query head"):
        ragged_paged_attention(*rest, scale=1.0, sinks=torch.zeros(3))
