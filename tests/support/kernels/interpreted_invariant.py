"""Fixed pieces of the Triton attention kernel: a token's bits do not depend on the rest of the step.

A pytest file that is not collected by itself: Triton's interpreter is chosen when triton is imported, so
``tests/ops/test_invariant.py`` runs it in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter

from pensieve.kernels.attention import work_lists
from pensieve.kernels.attention.kinds import Geometry
from pensieve.kernels.attention.plan import AttentionPlan, geometry_of
from pensieve.kernels.ragged_paged_attention import attend_with_lse
from pensieve.kernels.spans import make_spans
from support.kernels.attention_cases import Case, make_case, oracle, relative_error
from support.kernels.interpreted_attention import TINY, TOLERANCE
from support.kernels.interpreted_parties import Eager
from support.lengths import LONG, at_length, some

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # in rows that belong to no token
PIECE = 32
MIX = [(0, 90, 1), (1, 33, 1), (2, 3, 40), (3, 0, 1), (4, 60, 3), (5, 95, 2)]
FEW = at_length({"heads": 2, "kv_heads": 1}, {})
"""Heads of the cases that are computed many times over."""
Rows = list[tuple[int, int, int, int]]
"""(first row of q in the case, tokens, position, page table) of each span."""


@pytest.fixture(autouse=True)
def products_add_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's products add in an order that depends on the number of rows. A tensor core's do not, as the test at the
    start of a server checks."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        dtype = d.data.dtype
        total = d.data.astype(dtype)
        for index in range(a.data.shape[1]):
            total = total + a.data[:, index, None].astype(dtype) * b.data[None, index, :].astype(dtype)
        return triton.runtime.interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(triton.runtime.interpreter.InterpreterBuilder, "create_dot", create_dot)


def planned(case: Case, processors: int) -> Geometry:
    geometry = replace(
        geometry_of(case.q, case.pool), multiprocessors=processors, own_tiles=TINY, piece=PIECE
    )
    return replace(geometry, window=case.window)


def run(case: Case, rows: Rows, processors: int = 4, *, together: bool = False) -> dict[int, bytes]:
    """Attend the spans in this order; return the bits of each token's output and softmax sum, by row of the case's q.
    ``together``: spans that begin with the same pages read them once."""
    geometry, tables = planned(case, processors), case.page_tables
    order = np.concatenate([np.arange(start, start + count) for start, count, _, _ in rows])
    spans = make_spans(
        [count for _, count, _, _ in rows], [position for _, _, position, _ in rows],
        [table * tables.shape[1] for *_, table in rows],
    )  # fmt: skip
    flat, groups = tables.reshape(-1), None
    if together:
        found = Eager(geometry, case.pool.shape[3], 2, 0.0).find(spans, flat.numpy())
        assert found is not None
        groups, host = found.table, spans[found.order]
        starts = [np.arange(start, start + count) for start, count, _, _ in spans.tolist()]
        order = order[np.concatenate([starts[index] for index in found.order])]
        spans = make_spans(host[:, 1], host[:, 2], host[:, 3])
    q = case.q[torch.from_numpy(order)].contiguous()
    plan = AttentionPlan.from_spans(spans, len(q), geometry, q.device, prefix_groups=groups)
    plan.scratch.partial.fill_(torch.nan)
    plan.scratch.partial_lse.fill_(torch.nan)
    out, lse = attend_with_lse(q, case.pool, plan, flat, case.logits)
    return {
        int(row): out[at].numpy().tobytes() + lse[at].numpy().tobytes()
        for at, row in enumerate(order.tolist())
    }


def chunked(rng: random.Random, rows: Rows) -> Rows:
    """The same tokens in spans that are cut at random, in random order."""
    cut: Rows = []
    for start, count, position, table in rows:
        done = 0
        while done < count:
            step = rng.choice((1, 1, 2, 3, 7, 30, count))
            step = min(step, count - done)
            cut.append((start + done, step, position + done, table))
            done += step
    rng.shuffle(cut)
    return cut


def rows_of(case: Case) -> Rows:
    return [(start, count, position, table) for start, count, position, table in case.spans.tolist()]


def compare(case: Case, seed: int = 0) -> None:
    rng, rows = random.Random(seed), rows_of(case)
    want = run(case, rows)
    for processors in at_length((400,), (1, 400)):
        assert run(case, rows, processors) == want
    for row in some(rows, 2):
        assert run(case, [row]).items() <= want.items(), f"alone: {row}"
    for _ in range(at_length(1, 20)):
        assert run(case, chunked(rng, rows), rng.choice((1, 4, 40))) == want


@pytest.mark.parametrize("dtype", some([torch.float16, torch.float32], 1), ids=str)
def test_bits_do_not_depend_on_the_step(dtype: torch.dtype) -> None:
    compare(make_case(MIX, dtype=dtype, **FEW))


@pytest.mark.parametrize("window", some([31, 1, 16, 40, 100], 1))
def test_windows(window: int) -> None:
    compare(make_case(MIX, window=window, dtype=torch.float16, **FEW))


def test_softcap_and_sinks() -> None:
    compare(make_case(MIX, softcap=5.0, sinks=True, dtype=torch.float16, **FEW))
    if LONG:
        compare(make_case(MIX, window=40, sinks=True, heads=6, kv_heads=1))


@pytest.mark.parametrize("more", [{}, {"window": 40}, {"softcap": 5.0, "sinks": True}], ids=str)
def test_results_are_right(more: dict[str, Any]) -> None:
    case = make_case(MIX, dtype=torch.float16, **more)
    plan = AttentionPlan.from_spans(case.spans, len(case.q), planned(case, 4), case.q.device)
    out, lse = attend_with_lse(case.q, case.pool, plan, case.page_tables, case.logits)
    want, want_lse = oracle(case)
    assert relative_error(out, want) <= TOLERANCE[torch.float16]
    assert relative_error(lse, want_lse) <= TOLERANCE[torch.float16]


def test_spans_that_read_a_beginning_once() -> None:
    case = make_case([(row, 70 + 9 * row, 1 + row % 3) for row in range(6)], dtype=torch.float16, **FEW)
    case.page_tables[1:, :8] = case.page_tables[0, :8]
    want = run(case, rows_of(case))
    assert run(case, rows_of(case), together=True) == want
    assert run(case, rows_of(case)[2:], 1, together=True).items() <= want.items()


def _cut_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of the items' own lengths."""
    original = work_lists.make_pieces
    monkeypatch.setattr(
        work_lists, "make_pieces", lambda items, pieces, tile, fixed=0: original(items, pieces, tile, 0)
    )


def _merge_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    original = work_lists.split_items

    def backwards(*given: Any) -> Any:
        parts, merges, used = original(*given)
        count, stride = merges[:, work_lists.MERGE_PIECES], merges[:, work_lists.MERGE_STRIDE]
        merges[:, work_lists.MERGE_PARTIAL] += (count - 1) * stride
        merges[:, work_lists.MERGE_STRIDE] = -stride
        return parts, merges, used

    monkeypatch.setattr(work_lists, "split_items", backwards)


def _windows_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item begins with the first key that its first query sees."""
    original = work_lists.make_blocks

    def anywhere(spans: Any, tile: Any, geometry: Geometry) -> Any:
        return original(spans, tile, replace(geometry, piece=0))

    monkeypatch.setattr(work_lists, "make_blocks", anywhere)


@pytest.mark.parametrize("mutant", [_cut_by_load, _merge_backwards, _windows_anywhere])
def test_mutants_are_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    window = 40 if mutant is _windows_anywhere else None
    with pytest.raises(AssertionError):
        for seed in range(10):
            compare(make_case(MIX, dtype=torch.float16, window=window, seed=seed, **FEW), seed)
