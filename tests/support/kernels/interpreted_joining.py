"""Pieces merged by whoever finishes the last one, on a CPU, against pieces merged by a launch of its own: to the bit.

A pytest file that is not collected by itself: ``tests/ops/test_joining.py`` runs it under Triton's interpreter. That
runs one program after the other, in their order; so it is the order of the items that varies here. What programs at
the same time see of each other, only a GPU shows (``tests/gpu/test_joining.py``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pensieve.kernels.attention.kinds import Capacity, StepKind
from pensieve.kernels.attention.plan import AttentionPlan, geometry_of, plan_key
from pensieve.kernels.attention.work_lists import ITEM, JOIN
from pensieve.kernels.ragged_paged_attention import ragged_paged_attention
from pensieve.kernels.span_table import SpanTable
from support.kernels.attention_cases import Case, Spans, make_case
from support.kernels.interpreted_attention import TINY

DECODES = [(0, 60, 1), (1, 95, 1), (2, 75, 2), (3, 0, 1)]
STEPS: dict[StepKind, tuple[Spans, int]] = {
    StepKind.NARROW: (DECODES, 30),
    StepKind.SHORT: ([(0, 160, 4), (1, 100, 3), (2, 30, 1)], 2),
    StepKind.FEW: ([(0, 160, 4), (1, 90, 3), (2, 30, 1)], 12),
    StepKind.WIDE: ([(row, 145, 6) for row in range(5)], 4),
}


def planned(case: Case, processors: int, *, joining: int, capacity: Capacity | None = None) -> AttentionPlan:
    geometry = replace(geometry_of(case.q, case.pool), multiprocessors=processors, joining=joining)
    plan = AttentionPlan.of(
        case.spans.host, len(case.q), geometry, case.q.device, tiles=TINY, capacity=capacity
    )
    plan.scratch.partial.fill_(torch.nan)
    plan.scratch.partial_lse.fill_(torch.nan)
    return plan


def run(case: Case, plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor]:
    case.spans.plans[plan_key(case.q, case.pool)] = plan
    out = torch.full_like(case.q, torch.nan)
    got = ragged_paged_attention(
        case.q, case.pool, case.spans, case.page_tables, scale=case.scale, return_lse=True, out=out
    )
    assert isinstance(got, tuple)
    assert not plan.scratch.finished.any(), "counts are left behind, which the next launch would go on from"
    return got


def check(case: Case, plan: AttentionPlan, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    got = run(case, plan)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def reordered(plan: AttentionPlan, order: torch.Tensor) -> None:
    """The same items in another order."""
    wide = bool(plan.capacity.wide)
    for at, size in ((int(plan.words[4 if wide else 3]), ITEM), (int(plan.words[7]), JOIN)):
        rows = plan.words[at : at + len(order) * size].view(len(order), size)
        rows.copy_(rows[order].clone())


@pytest.mark.parametrize("kind", list(STEPS))
def test_every_kind_with_one_launch(kind: StepKind) -> None:
    spans, processors = STEPS[kind]
    case = make_case(spans, heads=2, kv_heads=1)
    apart, joined, by_four = (planned(case, processors, joining=joining) for joining in (0, 1, 4))
    assert joined.kind is kind and joined.capacity.merges and joined.capacity.joins
    assert not apart.capacity.joins
    assert (by_four.capacity.merges < joined.capacity.merges) == (kind is StepKind.NARROW)
    want = run(case, apart)
    for plan in (joined, joined, by_four):  # twice, as a graph is replayed
        check(case, plan, want)


def test_whoever_comes_last() -> None:
    case = make_case(DECODES, heads=4, kv_heads=2, seed=1)
    want = run(case, planned(case, 30, joining=0))
    for seed in range(2):
        plan = planned(case, 30, joining=1)
        items = int(plan.words[0])
        order = torch.randperm(items, generator=torch.Generator().manual_seed(seed))
        reordered(plan, order if seed else torch.arange(items).flip(0))
        check(case, plan, want)


def test_fewer_programs_than_items() -> None:
    case = make_case(DECODES, heads=2, kv_heads=1)
    want = run(case, planned(case, 30, joining=0))
    capacity = planned(case, 30, joining=1).capacity
    assert capacity.joins and capacity.merges
    few = replace(capacity, narrow_programs=2)
    check(case, planned(case, 30, joining=1, capacity=few), want)


def test_one_plan_serves_other_steps() -> None:
    case = make_case([(0, 90, 1), (1, 20, 2), (2, 60, 1)], heads=2, kv_heads=1)
    room = Capacity(narrow=60, wide=0, merges=60, partial_rows=800)
    apart, joined = planned(case, 30, joining=0, capacity=room), planned(
        case, 30, joining=1, capacity=replace(room, joins=60)
    )  # fmt: skip
    for lengths, positions in (([1, 2, 1], [90, 20, 60]), ([1, 0, 2], [77, 0, 50])):
        host = SpanTable.build(lengths, positions, [0, 1, 2]).host
        for plan in (apart, joined):
            plan.refill(host)
        check(case, joined, run(case, apart))


def test_steps_of_two_launches_merge_as_before() -> None:
    case = make_case([(0, 130, 7), (1, 90, 1), (2, 140, 1)], heads=2, kv_heads=1)
    plan = planned(case, 30, joining=1)
    assert plan.kind is StepKind.MIXED and plan.capacity.merges and not plan.capacity.joins
    check(case, plan, run(case, planned(case, 30, joining=0)))
