"""What the batches of both workers say of a second KV group: its slots and tables, and the chains of states."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import NO_PAGE, PENDING, Chain, Plan, SampleSpec, Span
from pensieve.engine.worker.program import make_cuda_batch
from pensieve.engine.worker.spans import NO_SLOT
from pensieve.engine.worker.torch_worker import TorchBatch, make_torch_batch
from pensieve.kernels.attention.kinds import Geometry
from pensieve.kernels.attention.prefixes import PrefixGroupRule

SAMPLE = SampleSpec(Sampling(), 0)
SIZE = 4


def torch_batch(plan: Plan) -> TorchBatch:
    plan = plan.decided({RequestKey(0): [7]})
    return make_torch_batch(plan, page_tokens=SIZE, padding_page=0, device=torch.device("cpu"))


@st.composite
def window_plans(draw: st.DrawFn) -> Plan:
    """Spans that store in some of the groups, over tables with entries that no page has."""
    spans, tables, windows = [], [], []
    pages = st.integers(0, 99)
    for request in range(draw(st.integers(1, 4))):
        start, length = draw(st.integers(0, 20)), draw(st.integers(1, 9))
        chunks = -(-(start + length) // SIZE) + draw(st.integers(0, 2))
        tables.append(np.array([draw(pages) for _ in range(chunks)], np.int32))
        windows.append(np.array([draw(st.integers(-1, 99)) for _ in range(chunks)], np.int32))
        windows[-1][start // SIZE :] = np.maximum(windows[-1][start // SIZE :], 0)
        tokens = np.arange(length, dtype=np.int32)
        spans.append(Span(RequestKey(request), start, tokens, request, SAMPLE, draw(st.integers(0, 3))))
    return Plan(1, tuple(spans), tuple(tables), window_tables=tuple(windows))


@given(window_plans())
def test_each_group_has_its_own_slots(plan: Plan) -> None:
    batch, on_gpu = torch_batch(plan), make_cuda_batch(plan, SIZE, {})
    for group, tables in enumerate((plan.page_tables, plan.window_tables)):
        want = [
            int(tables[span.page_table][position // SIZE]) * SIZE + position % SIZE
            if span.stores >> group & 1
            else NO_SLOT
            for span in plan.spans
            for position in range(span.start, span.end)
        ]
        mine, theirs = ((batch.slots, on_gpu.slots), (batch.window_slots, on_gpu.window_slots))[group]
        assert mine is not None and theirs is not None
        assert mine.tolist() == theirs.tolist() == want
    assert batch.window_tables is not None and on_gpu.window_spans is not None
    assert on_gpu.window_spans[:, :3].tolist() == on_gpu.spans[:, :3].tolist()
    rows = zip(plan.window_tables, on_gpu.window_spans[:, 3].tolist(), strict=True)
    for row, (table, first) in enumerate(rows):
        named = np.maximum(table, 0).tolist()
        assert batch.window_tables[row, : len(table)].tolist() == named
        assert on_gpu.pages[first : first + len(table)].tolist() == named


def test_window_tables_are_as_long_as_page_tables() -> None:
    plan = Plan(3, (span(0, 0, 3),), (np.zeros(2, np.int32),), window_tables=(np.zeros(1, np.int32),))
    with pytest.raises(ValueError, match="step 3: window tables and page tables differ in length"):
        torch_batch(plan)


def test_models_with_one_group_have_no_second() -> None:
    plan = Plan(3, (span(0, 0, 3),), (np.zeros(2, np.int32),))
    batch, on_gpu = torch_batch(plan), make_cuda_batch(plan, SIZE, {})
    assert batch.window_slots is batch.window_tables is on_gpu.window_slots is on_gpu.chains is None
    assert batch.chains.shape == (0, 6)


# -- chains ----------------------------------------------------------------------------------------------------------


def span(row: int, start: int, length: int) -> Span:
    return Span(RequestKey(row), start, np.arange(length, dtype=np.int32), row)


def state_plan(*chains: Chain) -> Plan:
    """Positions 2 to 12 of one context in two spans, and one token of another."""
    tables = (np.arange(4, dtype=np.int32), np.arange(4, 12, dtype=np.int32))
    return Plan(2, (span(0, 2, 6), span(0, 8, 5), span(1, 31, 1)), tables, chains=chains)


GOOD = (Chain(0, 1, 5, 6, 12, 7), Chain(2, 2, 9, 8, 32, NO_PAGE))


def test_chains_are_rows_of_the_batch() -> None:
    plan = state_plan(*GOOD)
    want = [[0, 11, 5, 6, 10, 7], [11, 1, 9, 8, 1, NO_PAGE]]
    on_gpu = make_cuda_batch(plan, SIZE, {}).chains
    assert on_gpu is not None and torch_batch(plan).chains.tolist() == on_gpu.tolist() == want
    zero = state_plan(
        msgspec.structs.replace(GOOD[0], read=NO_PAGE, boundary=NO_PAGE, boundary_at=-1), GOOD[1]
    )
    assert torch_batch(zero).chains[0].tolist() == [0, 11, NO_PAGE, NO_PAGE, 0, 7]


@pytest.mark.parametrize(
    "chain",
    [
        msgspec.structs.replace(GOOD[0], last=2),
        msgspec.structs.replace(GOOD[0], first=1, last=0),
        msgspec.structs.replace(GOOD[0], boundary_at=11),
        msgspec.structs.replace(GOOD[0], boundary_at=0),
        msgspec.structs.replace(GOOD[0], boundary_at=16),
    ],
    ids=["two requests", "no span", "inside a chunk", "before", "after"],
)
def test_chains_that_do_not_follow_their_spans(chain: Chain) -> None:
    with pytest.raises(ValueError, match=r"step 2: Chain.* does not fit its spans"):
        torch_batch(state_plan(chain))


def test_chains_follow_spans_that_read_together() -> None:
    """Spans of prefix groups come first; each chain still has the rows of its own span."""
    common, count = np.arange(64, dtype=np.int32), 40
    tables = [np.append(common, np.int32(1000 + row)) for row in range(count)]
    tables[2] = np.arange(5000, 5065, dtype=np.int32)
    pending = np.array([PENDING], np.int32)
    spans = tuple(Span(RequestKey(row), 32 * 64 + row % 32, pending, row, SAMPLE) for row in range(count))
    chains = tuple(Chain(row, row, 2 * row, NO_PAGE, 0, 2 * row) for row in range(count))
    plan = Plan(1, spans, tuple(tables), chains=chains)
    rows = {RequestKey(row): row for row in range(count)}
    rule = PrefixGroupRule(Geometry(40, 10, 128, 2, 132, hopper=True), 32)
    batch = make_cuda_batch(plan, 32, rows, rule)
    assert batch.prefix_groups is not None and batch.chains is not None
    assert batch.spans[-1, 0] == count - 1 and batch.source[-1] == 2, "the span apart comes last"
    for first, length, read, *_ in batch.chains.tolist():
        assert length == 1 and batch.source[first] == read // 2
    joined = replace(plan, chains=(Chain(0, 0, 0, NO_PAGE, 0, 0), *chains[1:]))
    assert make_cuda_batch(joined, 32, rows, rule).prefix_groups is not None
