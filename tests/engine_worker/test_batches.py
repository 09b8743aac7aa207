"""The batches of both workers say the same, and what the plan says; and every step finds a graph that holds it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import PENDING, Plan, SampleSpec, Span
from pensieve.engine.worker.cuda_batch import NO_SLOT, make_cuda_batch
from pensieve.engine.worker.graphs import buckets
from pensieve.engine.worker.torch_batch import make_torch_batch
from pensieve.kernels.attention.kinds import StepKind

SAMPLE = SampleSpec(Sampling(), 0)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int, dict[RequestKey, int]]:
    """A plan, tokens per page, and the samples of the step before: request → row."""
    size = draw(st.sampled_from([1, 4, 32]))
    count = draw(st.integers(1, 5))
    order = draw(st.permutations(range(400)))
    rows = {RequestKey(request): row for row, request in enumerate(draw(st.permutations(range(count))))}
    spans, tables, used = [], [], 0
    for request in range(count):
        length = draw(st.integers(1, 40))
        pages = -(-length // size)
        tables.append(np.array(order[used : used + pages], dtype=np.int32))
        used += pages
        cut = draw(st.integers(0, length - 1))
        for start, end in ((0, cut), (cut, length)):
            if end > start:
                tokens = np.arange(start, end, dtype=np.int32) + 100 * request
                last = end == length
                if last and draw(st.booleans()):
                    tokens[-1] = PENDING
                sample = SAMPLE if last and draw(st.booleans()) else None
                spans.append(Span(RequestKey(request), start, tokens, request, sample))
    return Plan(1, tuple(spans), tuple(tables)), size, rows


@given(plans())
def test_both_batches_say_what_the_plan_says(case: tuple[Plan, int, dict[RequestKey, int]]) -> None:
    plan, size, rows = case
    sampled = {request: 5000 + row for request, row in rows.items()}
    want = make_torch_batch(
        plan, page_tokens=size, padding_page=999, device=torch.device("cpu"), sampled=sampled
    )
    got = make_cuda_batch(plan, size, rows)
    taken = np.where(got.source >= 0, 5000 + got.source, got.tokens)
    assert taken.tolist() == want.tokens.tolist()
    places = [
        (position, int(plan.page_tables[span.page_table][position // size]) * size + position % size)
        for span in plan.spans
        for position in range(span.start, span.end)
    ]
    assert got.positions.tolist() == want.positions.tolist() == [position for position, _ in places]
    assert got.slots.tolist() == want.slots.tolist() == [slot for _, slot in places]
    assert NO_SLOT not in got.slots
    assert got.sample_rows.tolist() == want.sample_rows.tolist()
    assert got.spans[:, :3].tolist() == want.spans.host[:, :3].tolist()
    for (_, length, start, begin), row in zip(got.spans, want.spans.host[:, 3], strict=True):
        seen = -(-(start + length) // size)
        assert got.pages[begin : begin + seen].tolist() == want.page_tables[row, :seen].tolist()
    assert got.longest == want.spans.max_context
    assert len(got.requests) == len(got.specs) == len(got.sample_rows)


def test_a_span_past_its_page_table_is_refused() -> None:
    plan = Plan(
        3, (Span(RequestKey(1), 6, np.arange(3, dtype=np.int32), 0),), (np.arange(2, dtype=np.int32),)
    )
    with pytest.raises(ValueError, match="step 3"):
        make_cuda_batch(plan, 4, {})


def test_a_pending_token_that_nobody_sampled_is_an_error() -> None:
    plan = Plan(
        3, (Span(RequestKey(1), 6, np.array([PENDING], np.int32), 0),), (np.arange(2, dtype=np.int32),)
    )
    with pytest.raises(KeyError):
        make_cuda_batch(plan, 4, {})


@given(kind=st.sampled_from(list(StepKind)), tokens=st.integers(1, 9000), running=st.integers(1, 600))
def test_buckets_rise_and_waste_little(kind: StepKind, tokens: int, running: int) -> None:
    sizes = buckets(kind, tokens, running)
    assert sizes == sorted(set(sizes)) and sizes[-1] <= tokens
    for small, large in itertools.pairwise(sizes):
        assert large <= small + max(32, small // 4) or large - small <= small
    if kind is StepKind.NARROW:
        assert sizes[0] == 1 and sizes[-1] == min(tokens, running)
