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
from pensieve.engine.worker.graphs import buckets
from pensieve.engine.worker.program import NO_SLOT, make_cuda_batch
from pensieve.engine.worker.torch_worker import make_torch_batch
from pensieve.kernels.attention.kinds import Geometry, StepKind
from pensieve.kernels.attention.prefixes import PrefixGroupRule

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
                sample = SAMPLE if last and draw(st.booleans()) else None
                drafts = draw(st.integers(0, end - start - 1)) if sample is not None else 0
                if last and draw(st.booleans()):
                    tokens[-1 - drafts] = PENDING
                spans.append(Span(RequestKey(request), start, tokens, request, sample, drafts=drafts))
    return Plan(1, tuple(spans), tuple(tables)), size, rows


@given(plans())
def test_both_batches_say_what_the_plan_says(case: tuple[Plan, int, dict[RequestKey, int]]) -> None:
    plan, size, rows = case
    decided = plan.decided({request: [5000 + row] for request, row in rows.items()})
    want = make_torch_batch(decided, page_tokens=size, padding_page=999, device=torch.device("cpu"))
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
    assert got.spans[:, :3].tolist() == want.spans[:, :3].tolist()
    for (_, length, start, begin), row in zip(got.spans, want.spans[:, 3], strict=True):
        seen = -(-(start + length) // size)
        assert got.pages[begin : begin + seen].tolist() == want.page_tables[row, :seen].tolist()
    assert got.max_context == int((want.spans[:, 1] + want.spans[:, 2]).max())
    assert len(plan.chosen_for) == len(plan.specs) == len(got.sample_rows)


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
        most = min(tokens, running)
        assert sizes[0] == 1 and most in sizes and sizes[-1] == min(tokens, most + most // 2)


def decodes(count: int, common: int, own: int) -> Plan:
    """Decodes and one prefill between them; the decodes' page tables begin with the same pages."""
    shared = np.arange(common, dtype=np.int32)
    tables = [
        np.concatenate([shared, np.arange(1000 + own * row, 1000 + own * (row + 1), dtype=np.int32)])
        for row in range(count)
    ]
    tables[2] = np.arange(5000, 5000 + common + own, dtype=np.int32)
    spans = [
        Span(RequestKey(row), 32 * (common + own) - 1 - row, np.array([PENDING], np.int32), row, SAMPLE)
        for row in range(count)
    ]
    spans[4] = Span(RequestKey(4), 32 * common, np.arange(32 * own, dtype=np.int32), 4, SAMPLE)
    return Plan(1, tuple(spans), tuple(tables))


RULE = PrefixGroupRule(Geometry(40, 10, 128, 2, 132, hopper=True), 32)


def test_spans_that_read_together_stand_together() -> None:
    plan = decodes(40, 64, 8)
    rows = {RequestKey(row): 39 - row for row in range(40)}
    apart, together = make_cuda_batch(plan, 32, rows), make_cuda_batch(plan, 32, rows, RULE)
    assert apart.prefix_groups is None and together.prefix_groups is not None
    assert together.prefix_groups.tolist() == [[0, 38, 2048]]
    for name in ("tokens", "source", "positions", "slots"):
        one, other = getattr(apart, name), getattr(together, name)
        assert one[apart.sample_rows].tolist() == other[together.sample_rows].tolist()
        assert sorted(one.tolist()) == sorted(other.tolist())
    members = together.spans[:38]
    assert members[:, 0].tolist() == list(range(38)) and (members[:, 1] == 1).all()
    for start in members[:, 3]:
        assert together.pages[start : start + 64].tolist() == list(range(64))
    assert sorted(map(tuple, apart.spans[:, 1:3].tolist())) == sorted(
        map(tuple, together.spans[:, 1:3].tolist())
    )
    assert together.max_context == apart.max_context


def test_a_step_without_parties_is_as_it_was() -> None:
    plan = decodes(40, 64, 8)
    own = [table + 10_000 * row for row, table in enumerate(plan.page_tables)]
    plan = Plan(1, plan.spans, tuple(own))
    rows = {RequestKey(row): row for row in range(40)}
    one, other = make_cuda_batch(plan, 32, rows), make_cuda_batch(plan, 32, rows, RULE)
    assert other.prefix_groups is None
    assert one.spans.tolist() == other.spans.tolist() and one.tokens.tolist() == other.tokens.tolist()
