"""Pieces merged by whoever finishes the last one, on a GPU: as a launch of its own merges them, whatever overlaps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pensieve.kernels.attention.kinds import StepKind, capacity_for
from pensieve.kernels.attention.plan import AttentionPlan, DoesNotFit, geometry_for, plan_key
from pensieve.kernels.ragged_paged_attention import ragged_paged_attention
from pensieve.kernels.span_table import SpanTable

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PAGE, DIM, CONTEXT = 32, 128, 4096
LAYERS, REPLAYS = 8, 30
MOST = {StepKind.NARROW: 1, StepKind.SHORT: 8, StepKind.FEW: 16}


def step(kind: StepKind, tokens: int, dice: random.Random) -> SpanTable:
    """Spans of a step that fills a plan of a kind as far as it goes, and of any contexts."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) and len(lengths) < tokens // dice.choice([1, 2, 5]):
        lengths.append(min(left, dice.randint(1, MOST[kind])))
    same = dice.randrange(CONTEXT - 20)
    positions = [same if dice.random() < 0.5 else dice.randrange(CONTEXT - 20) for _ in lengths]
    return SpanTable.build(lengths, positions, [n * (CONTEXT // PAGE) for n in range(len(lengths))])


@pytest.mark.parametrize("tokens", [1, 8, 64, 256])
@pytest.mark.parametrize("heads", [(40, 10), (32, 8), (40, 40)])
@pytest.mark.parametrize("kind", list(MOST))
def test_the_same_bits_in_every_replay(kind: StepKind, heads: tuple[int, int], tokens: int) -> None:
    torch.manual_seed(0)
    pool = torch.randn(2000, 2, heads[1], PAGE, DIM, device=CUDA).to(torch.bfloat16)
    q = [torch.randn(tokens, heads[0], DIM, device=CUDA).to(torch.bfloat16) for _ in range(LAYERS)]
    flat = torch.randint(2000, (tokens * CONTEXT // PAGE,), device=CUDA, dtype=torch.int32)
    geometry = geometry_for(heads[0], pool)
    plans, graphs, outs = [], [], []
    for joining in (0, 1):
        where = replace(geometry, joining=joining)
        capacity = capacity_for(kind, tokens, tokens, CONTEXT, where)
        assert (capacity.joins > 0) == (joining > 0)
        plan = AttentionPlan(tokens, where, CUDA, kind=kind, capacity=capacity)
        plan.scratch.partial.fill_(torch.nan)
        plan.scratch.partial_lse.fill_(torch.nan)
        table = SpanTable.build([tokens], [0], [0])
        table.plans[plan_key(q[0], pool)] = plan
        made = [torch.full_like(each, torch.nan) for each in q]

        def run(table: SpanTable = table, made: list[torch.Tensor] = made) -> None:
            for each, out in zip(q, made, strict=True):
                ragged_paged_attention(
                    each, pool, table, flat.as_strided((len(flat), 1), (1, 1)), scale=DIM**-0.5, out=out
                )

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        plans.append(plan)
        graphs.append(graph)
        outs.append(made)
    cut = 0
    for seed in range(6):
        host = step(kind, tokens, random.Random(seed)).host
        try:
            for plan in plans:
                plan.refill(host)
        except DoesNotFit:
            continue  # more of short spans than graphs of the kind are made for
        cut += int(plans[1].words[2])
        graphs[0].replay()
        want = [out.clone() for out in outs[0]]
        for _ in range(REPLAYS):
            graphs[1].replay()
        torch.cuda.synchronize()
        assert not plans[1].scratch.finished.any()
        for got, expected in zip(outs[1], want, strict=True):
            assert torch.equal(got, expected)
    assert cut, "no step had anything to merge"
