"""Operations of ``--invariant`` on a CPU: near those of ``kernels/reference.py``, and the same bits in any step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.kernels import expert_reference, invariant, reference
from pensieve.kernels.reference import ACTIVATIONS
from pensieve.kernels.spans import make_spans
from support.kernels.attention_cases import Case, make_case, oracle, relative_error
from support.lengths import at_length

DTYPES = (torch.float32, torch.bfloat16)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    tolerance = 1e-5 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@settings(max_examples=at_length(30, 1000))
@given(st.integers(0, 70), st.integers(1, 90), st.integers(1, 90), dtypes, st.booleans(), seeds)
def test_products(rows: int, inner: int, out: int, dtype: torch.dtype, biased: bool, seed: int) -> None:
    x, weight = values(rows, inner, seed=seed, dtype=dtype), values(out, inner, seed=seed + 1, dtype=dtype)
    weight = weight / inner**0.5
    bias = values(out, seed=seed + 2, dtype=dtype) if biased else None
    near(invariant.linear(x, weight, bias), F.linear(x, weight, bias))


@settings(max_examples=at_length(30, 1000))
@given(
    st.integers(0, 9), st.integers(1, 700), dtypes, st.booleans(), st.sampled_from(list(ACTIVATIONS)), seeds
)
def test_activations(rows: int, inner: int, dtype: torch.dtype, gated: bool, kind: Any, seed: int) -> None:
    up = values(rows, 2 * inner if gated else inner, seed=seed, dtype=dtype)
    near(invariant.activate(up, gated, kind), reference.activate(up, gated, kind))


@settings(max_examples=at_length(30, 1000))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), dtypes, st.booleans(), seeds)
def test_grouped_products(counts: list[int], dtype: torch.dtype, biased: bool, seed: int) -> None:
    rows, ends = sum(counts), torch.tensor(counts, dtype=torch.int32).cumsum(0).int()
    x, weight = (
        values(rows, 24, seed=seed, dtype=dtype),
        values(len(counts), 24, 33, seed=seed, dtype=dtype) / 5,
    )
    bias = values(len(counts), 33, seed=seed, dtype=dtype) if biased else None
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).int()
    for given_rows in ({}, {"read": order}, {"write": order}, {"read": order, "write": order.flip(0)}):
        wanted = expert_reference.grouped_product(x, weight, bias, ends, **given_rows)
        near(invariant.grouped_product(x, weight, bias, ends, **given_rows), wanted)


@settings(max_examples=at_length(30, 1000))
@given(st.integers(0, 9), st.integers(1, 60), st.integers(1, 6), dtypes, seeds)
def test_rows_of_experts(tokens: int, width: int, picked: int, dtype: torch.dtype, seed: int) -> None:
    up = values(tokens, 2 * width, seed=seed, dtype=dtype) * 4
    near(invariant.clamped_glu(up, 1.7, 7.0), expert_reference.clamped_glu(up, 1.7, 7.0))
    x, weights = (
        values(tokens * picked, width, seed=seed, dtype=dtype),
        values(tokens, picked, seed=seed).abs(),
    )
    for one in (weights, weights.to(dtype)):
        near(invariant.combine_rows(x, one), expert_reference.combine_rows(x, one))


Step = list[tuple[int, int, int]]


def attend(case: Case) -> torch.Tensor:
    plan = invariant.make_plan(case.q, case.pool, case.spans, case.page_tables, window=case.window)
    return invariant.attend(case.q, case.pool, plan, case.logits)


def attend_by_reference(case: Case) -> torch.Tensor:
    plan = reference.make_plan(case.q, case.pool, case.spans, case.page_tables, window=case.window)
    return reference.attend(case.q, case.pool, plan, case.logits)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spans = st.tuples(st.integers(0, 150), st.integers(0, 9))
    step = [(row, *span) for row, span in enumerate(draw(st.lists(spans, min_size=1, max_size=4)))]
    return make_case(
        step, page=draw(st.sampled_from([1, 8, 32])), dtype=draw(dtypes), seed=draw(seeds),
        window=draw(st.sampled_from([None, 1, 7, 70])), softcap=draw(st.sampled_from([None, 5.0])),
        sinks=draw(st.booleans()), heads=draw(st.sampled_from([2, 6])),
    )  # fmt: skip


@settings(max_examples=at_length(30, 1000))
@given(cases())
def test_attention(case: Case) -> None:
    wanted, _ = oracle(case)
    assert relative_error(attend(case), wanted) < (1e-5 if case.q.dtype == torch.float32 else 1e-2)


# ---- the same bits, and operations that do not keep them

Operation = Callable[[torch.Tensor], torch.Tensor]
ROWS = 45
PARTS = ((0, 1), (0, 5), (7, 8), (3, 20), (16, 32), (12, 45), (44, 45))


def rows_keep_bits(operation: Operation, x: torch.Tensor) -> bool:
    """Whether each row of ``operation(x)`` has the same bits among fewer others, in any place."""
    whole = operation(x)
    return all(torch.equal(operation(x[start:end]), whole[start:end]) for start, end in PARTS)


def experts(product: Any, dtype: torch.dtype) -> Operation:
    """All rows go to one of three experts by their first value, in order."""
    weight = values(3, 257, 96, seed=1, dtype=dtype)

    def operation(x: torch.Tensor) -> torch.Tensor:
        picked = (x[:, 0].float() * 7).long() % 3
        order = picked.argsort(stable=True)
        ends = torch.bincount(picked, minlength=3).cumsum(0).int()
        result: torch.Tensor = product(x, weight, None, ends, read=order.int(), write=order.int())
        return result

    return operation


def combine_by_product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """All tokens' rows in one product with a matrix of weights."""
    return torch.block_diag(*weights[:, None]).to(x.dtype) @ x


def operations(module: Any, dtype: torch.dtype) -> dict[str, Operation]:
    """The operations of a decoder, from ``invariant`` or from what it replaces."""
    ours, weight = module is invariant, values(96, 257, seed=1, dtype=dtype)
    grouped = invariant.grouped_product if ours else expert_reference.grouped_product
    one = invariant.pointwise if ours else (lambda function, x: function(x))
    # torch's own sum keeps the bits as well; a product does not.
    combine = invariant.combine_rows if ours else combine_by_product
    return {
        "product": lambda x: (invariant.linear if ours else F.linear)(x, weight, None),
        "function": lambda x: one(torch.sigmoid, x),
        "activation": lambda x: (invariant.activate if ours else reference.activate)(x, False, "silu"),
        "experts": experts(grouped, dtype),
        "combination": lambda x: combine(x[:, :255].reshape(-1, 51), x[:, -5:].float().abs()),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", operations(invariant, torch.float32))
def test_rows_have_the_same_bits_in_any_step(name: str, dtype: torch.dtype) -> None:
    for seed in range(5):
        assert rows_keep_bits(operations(invariant, dtype)[name], values(ROWS, 257, seed=seed, dtype=dtype))


@pytest.mark.parametrize("name", operations(reference, torch.float32))
def test_what_the_libraries_do_by_themselves_is_noticed(name: str) -> None:
    assert not all(
        rows_keep_bits(operations(reference, dtype)[name], values(ROWS, 257, seed=seed, dtype=dtype))
        for dtype in DTYPES
        for seed in range(5)
    )


def spans_keep_bits(attention: Callable[[Case], torch.Tensor], step: Step, **more: Any) -> bool:
    """Whether each token of a step has the same bits when the step is cut in others at random."""
    case = make_case(step, **more)
    whole, rng = attention(case), random.Random(1)
    for _ in range(6):
        pieces: Step = []
        at: list[torch.Tensor] = []
        for (table, position, count), start in zip(step, case.spans[:, 0].tolist(), strict=True):
            cuts = sorted({0, count, *(rng.randrange(count + 1) for _ in range(2))})
            for first, last in pairwise(cuts):
                if rng.random() < 0.6:
                    pieces.append((table, position + first, last - first))
                    at.append(torch.arange(start + first, start + last))
        if not pieces:
            continue
        rows = torch.cat(at)
        tables, positions, counts = zip(*pieces, strict=True)
        part = replace(case, q=case.q[rows], spans=make_spans(counts, positions, tables))
        if not torch.equal(attention(part), whole[rows]):
            return False
    return True


STEP: Step = [(0, 200, 1), (1, 17, 1), (2, 0, 70), (3, 90, 12), (4, 63, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", [{}, {"window": 40}, {"softcap": 4.0}, {"sinks": True}], ids=str)
def test_tokens_have_the_same_bits_in_any_step(dtype: torch.dtype, more: dict[str, Any]) -> None:
    assert spans_keep_bits(attend, STEP, dtype=dtype, heads=6, **more)


def test_attention_over_the_steps_own_contexts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not spans_keep_bits(attend_by_reference, STEP, heads=6)
    # All tokens of a span at once, over the keys of the last.
    monkeypatch.setattr(invariant, "KEYS", 1)
    monkeypatch.setattr(invariant, "_run_end", lambda position, end, window: end)
    assert not spans_keep_bits(attend, STEP, heads=6)
