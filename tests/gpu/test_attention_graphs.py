"""Attention in captured graphs as a server uses it: made without an example step, filled anew for each, and with
launches that begin before the one before them has ended."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from pensieve.kernels.arguments import Logits
from pensieve.kernels.attention.call import Scratch
from pensieve.kernels.attention.capacity import capacity_for
from pensieve.kernels.attention.kinds import StepKind, classify
from pensieve.kernels.attention.plan import AttentionPlan, geometry_for, words_of
from pensieve.kernels.ragged_paged_attention import attend
from pensieve.kernels.reference import ragged_paged_attention as reference
from pensieve.kernels.spans import Spans, make_spans, num_tokens
from support.kernels.attention_cases import relative_error

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PAGE, DIM, TOKENS, SPANS, CONTEXT = 32, 128, 640, 40, 3000
HEADS = [(40, 40), (40, 10), (32, 8), (12, 2)]
SCALE = DIM**-0.5


def lengths_of(kind: StepKind, groups: int, dice: random.Random) -> list[int]:
    """Lengths of a step's spans; ``classify`` may have another opinion of the kind, and the plan takes it anyway."""
    narrow, few = 16 // groups, 64 // groups
    if kind is StepKind.NARROW:
        longer = [dice.randint(narrow + 1, 70) for _ in range(dice.randint(0, 2))]
        most = min(SPANS - 2, (TOKENS - 140) // narrow)
        return longer + [dice.randint(1, narrow) for _ in range(dice.randint(1, most))]
    if kind is StepKind.SHORT:
        return [dice.randint(1, 2 * narrow) for _ in range(dice.randint(1, min(SPANS, TOKENS // 40)))]
    if kind is StepKind.FEW:
        return [dice.randint(1, few) for _ in range(dice.randint(1, min(SPANS, TOKENS // few)))]
    wide = [dice.randint(few + 1, 180) for _ in range(dice.randint(1, 3))]
    decodes = [dice.randint(1, min(3, narrow)) for _ in range(dice.randint(1, 30))]
    return wide + decodes if kind is StepKind.MIXED else wide


@dataclass(frozen=True, slots=True)
class Bench:
    """Pools that take turns, one query for each, a flat page table, and a plan in memory of its own."""

    q: list[torch.Tensor]
    pools: list[torch.Tensor]
    flat: torch.Tensor
    plan: AttentionPlan
    sinks: torch.Tensor | None

    def call(self, index: int) -> torch.Tensor:
        out = torch.full_like(self.q[index], torch.nan)
        logits = Logits(SCALE, sinks=self.sinks)
        return attend(self.q[index], self.pools[index], self.plan, self.flat, logits, out=out)

    def want(self, index: int, host: Spans) -> torch.Tensor:
        pages = -(-CONTEXT // PAGE)
        rows = self.flat.view(-1, pages)
        spans = make_spans(host[:, 1], host[:, 2], host[:, 3] // pages)
        used = self.q[index][: num_tokens(spans)].float()
        found = reference(
            used, self.pools[index].float(), spans, rows,
            scale=SCALE, window=self.plan.geometry.window, sinks=self.sinks,
        )  # fmt: skip
        assert isinstance(found, torch.Tensor)
        return found


def make_bench(
    kind: StepKind,
    heads: int,
    kv_heads: int,
    copies: int,
    *,
    window: int | None = None,
    sinks: bool = False,
    dim: int = DIM,
) -> Bench:
    torch.manual_seed(0)
    pages = -(-CONTEXT // PAGE)
    shape = (SPANS * pages // 4, 2, kv_heads, PAGE, dim)
    pools = [torch.randn(shape, device=CUDA).to(torch.bfloat16) for _ in range(copies)]
    q = [torch.randn(TOKENS, heads, dim, device=CUDA).to(torch.bfloat16) for _ in range(copies)]
    flat = torch.randint(len(pools[0]), (SPANS * pages,), device=CUDA, dtype=torch.int32)
    geometry = replace(geometry_for(heads, pools[0]), window=window)
    capacity = capacity_for(kind, TOKENS, SPANS, CONTEXT, geometry)
    words = torch.zeros(words_of(capacity) + 64, dtype=torch.int32, device=CUDA)[64:]
    scratch = Scratch(capacity.partial_rows + 7, geometry, CUDA)
    scratch.partial.fill_(torch.nan)
    plan = AttentionPlan(TOKENS, geometry, words, kind=kind, capacity=capacity, scratch=scratch)
    return Bench(q, pools, flat, plan, torch.randn(heads, device=CUDA) * 2 if sinks else None)


def step(kind: StepKind, groups: int, seed: int) -> Spans:
    """Spans of a random step whose page tables lie end to end."""
    dice = random.Random(seed)
    lengths = lengths_of(kind, groups, dice)
    positions = [dice.randint(0, CONTEXT - length) for length in lengths]
    if seed % 2:
        positions = [CONTEXT // 2] * len(lengths)
    tables = dice.sample(range(SPANS), len(lengths))
    return make_spans(lengths, positions, [row * -(-CONTEXT // PAGE) for row in tables])


def captured(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", list(StepKind))
def test_a_graph_made_without_a_step_serves_all_of_its_kind(kind: StepKind, heads: tuple[int, int]) -> None:
    serves_all(make_bench(kind, *heads, copies=1), kind)


@pytest.mark.parametrize("window", [100, 1024])
@pytest.mark.parametrize("shape", [(64, 8, 64), (12, 2, 128), (16, 8, 256)])
@pytest.mark.parametrize("kind", list(StepKind))
def test_a_windowed_graph_serves_all_of_its_kind(
    kind: StepKind, shape: tuple[int, int, int], window: int
) -> None:
    """The capacity bounds every step, whatever its contexts; sinks count once in cut items and in others."""
    heads, kv_heads, dim = shape
    serves_all(make_bench(kind, heads, kv_heads, 1, window=window, sinks=True, dim=dim), kind)


def serves_all(bench: Bench, kind: StepKind) -> None:
    """One captured graph gives the right results for random steps of its kind, the same in every replay."""
    groups = bench.plan.geometry.groups
    outs: list[torch.Tensor] = []

    def run() -> None:
        outs[:] = [bench.call(0)]

    graph = captured(run)
    pinned = torch.zeros(len(bench.plan.words), dtype=torch.int32, pin_memory=True)
    for seed in range(5):
        host = step(kind, groups, seed)
        if kind is StepKind.MIXED:
            assert classify(host, bench.plan.geometry) is kind
        packed = bench.plan.pack(host)
        pinned[: len(packed)] = torch.from_numpy(packed)
        bench.plan.words[: len(packed)].copy_(pinned[: len(packed)], non_blocking=True)
        results = []
        for _ in range(3):
            graph.replay()
            results.append(outs[0].clone())
        torch.cuda.synchronize()
        used = int(host[:, 1].sum())
        assert relative_error(results[0][:used], bench.want(0, host)) <= 1e-2
        assert (results[0][used:] == 0).all()
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", list(StepKind))
def test_layers_that_follow_each_other_at_once(kind: StepKind, heads: tuple[int, int]) -> None:
    """Calls share words and scratch; each must see its own pieces only, and leave nothing for the next to miss."""
    bench = make_bench(kind, *heads, copies=6)
    host = step(kind, heads[0] // heads[1], seed=3)
    bench.plan.refill(host)
    alone = []
    for index in range(6):
        alone.append(bench.call(index))
        torch.cuda.synchronize()
    together: list[torch.Tensor] = []

    def run() -> None:
        # The sums depend on each call's result, as the layers of a model do.
        together[:] = [bench.call(index) for index in range(6)]
        together.append(torch.stack(together).float().sum(0))

    graph = captured(run)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for index in range(6):
        assert torch.equal(alone[index], together[index])
    assert torch.equal(torch.stack(alone).float().sum(0), together[6])


def test_wide_items_stay_on_their_share_of_the_device() -> None:
    bench = make_bench(StepKind.MIXED, 40, 10, copies=1)
    host = step(StepKind.MIXED, 4, seed=3)
    bench.plan.refill(host)
    want = bench.call(0)
    if not bench.plan.wide.hopper:
        pytest.skip("the plain kernel leaves room on every multiprocessor")
    for share in (1, 7, 131, 132):
        bench.plan.words[6] = share
        assert torch.equal(bench.call(0), want)


def test_a_plan_for_bulk_copies_refuses_other_tensors() -> None:
    bench = make_bench(StepKind.WIDE, 8, 2, copies=1)
    if not bench.plan.wide.hopper:
        pytest.skip("only the kernel for Hopper addresses memory by bulk copies")
    odd = torch.zeros(TOKENS, 8, DIM + 1, device=CUDA, dtype=torch.bfloat16)[:, :, :DIM]
    with pytest.raises(ValueError, match="bulk copies"):
        replace(bench, q=[odd]).call(0)
