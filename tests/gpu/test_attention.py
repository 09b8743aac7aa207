"""The compiled attention kernel on a GPU against the float64 oracle, in graphs, and over pools beyond 2³¹ elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pensieve.kernels.arguments import Logits
from pensieve.kernels.attention.capacity import Capacity
from pensieve.kernels.attention.plan import AttentionPlan, geometry_of
from pensieve.kernels.ragged_paged_attention import attend, attend_with_lse, ragged_paged_attention
from pensieve.kernels.reference import ragged_paged_attention as reference
from pensieve.kernels.spans import make_spans, num_tokens
from support.kernels.attention_cases import Case, make_case, oracle, relative_error

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MIX = [(0, 40, 1), (1, 33, 1), (2, 3, 70), (3, 0, 1), (4, 200, 150), (5, 511, 8), (6, 700, 2)]
CUDA = torch.device("cuda")


def on_gpu(case: Case) -> Case:
    moved = replace(case, q=case.q.to(CUDA), pool=case.pool.to(CUDA), page_tables=case.page_tables.to(CUDA))
    return moved if case.sinks is None else replace(moved, sinks=case.sinks.to(CUDA))


def plan_of(case: Case, processors: int, capacity: Capacity | None = None) -> AttentionPlan:
    """A plan as for a device of another size: the more multiprocessors, the finer the cuts."""
    geometry = replace(geometry_of(case.q, case.pool), multiprocessors=processors, window=case.window)
    if case.softcap is not None:
        geometry = replace(geometry, hopper=False)
    return AttentionPlan.from_spans(case.spans, len(case.q), geometry, CUDA, capacity=capacity)


def check(case: Case, processors: tuple[int, ...] = (1, 132, 4000)) -> None:
    want, want_lse = oracle(case)
    case = on_gpu(case)
    for count in processors:
        plan = plan_of(case, count)
        plan.scratch.partial.fill_(torch.nan)
        plan.scratch.partial_lse.fill_(torch.nan)
        results = []
        for _ in range(2):
            out = torch.full_like(case.q, torch.nan)
            out, lse = attend_with_lse(case.q, case.pool, plan, case.page_tables, case.logits, out=out)
            results.append((out.cpu(), lse.cpu()))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
        assert relative_error(results[0][0], want) <= TOLERANCE[case.q.dtype]
        assert relative_error(results[0][1], want_lse) <= TOLERANCE[case.q.dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_sizes(dim: int, dtype: torch.dtype) -> None:
    check(make_case(MIX, dim=dim, page=32, dtype=dtype))


@pytest.mark.parametrize(
    "heads", [(1, 1), (8, 4), (16, 4), (10, 2), (14, 2), (16, 2), (32, 2), (40, 1), (40, 40)]
)
def test_grouped_heads(heads: tuple[int, int]) -> None:
    check(make_case(MIX, heads=heads[0], kv_heads=heads[1], dim=128, page=32, dtype=torch.bfloat16))


@pytest.mark.parametrize("window", [1, 100, 500])
@pytest.mark.parametrize("shape", [(16, 2, 64), (8, 4, 128), (10, 2, 80), (4, 2, 256)])
def test_windows(shape: tuple[int, int, int], window: int) -> None:
    """Windows that end anywhere in a page and in a tile; slots and pages below them are NaN."""
    heads, kv_heads, dim = shape
    check(
        make_case(MIX, heads=heads, kv_heads=kv_heads, dim=dim, page=32, dtype=torch.bfloat16, window=window)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(None, None, True), (70, 2.0, True), (128, None, True)],
)
@pytest.mark.parametrize("dim", [128, 256])
def test_softcap_and_sinks(
    dim: int, window: int | None, softcap: float | None, sinks: bool, dtype: torch.dtype
) -> None:
    check(
        make_case(
            MIX,
            heads=8,
            kv_heads=2,
            dim=dim,
            page=16,
            dtype=dtype,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
    )


def test_softcap_is_refused_by_a_plan_for_hopper() -> None:
    case = on_gpu(make_case(MIX, dim=128, page=32, dtype=torch.bfloat16))
    plan = plan_of(case, 132)
    if not plan.geometry.hopper:
        pytest.skip("needs a Hopper device")
    with pytest.raises(ValueError, match="no softcap"):
        attend(case.q, case.pool, plan, case.page_tables, Logits(case.scale, 1.0))


@pytest.mark.parametrize("page", [1, 8, 16, 32, 64, 256])
def test_page_sizes(page: int) -> None:
    check(make_case(MIX, dim=128, page=page, dtype=torch.bfloat16))


def test_contexts_at_page_and_tile_edges() -> None:
    contexts = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1025]
    check(make_case([(r, c - 1, 1) for r, c in enumerate(contexts)], dim=128, page=32, dtype=torch.bfloat16))


def test_lengths_at_block_edges() -> None:
    spans = [(r, 17 * r, n) for r, n in enumerate((7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129))]
    check(make_case([*spans, (0, 0, 0)], dim=128, page=32, dtype=torch.bfloat16))
    check(make_case([(0, 13, 5), (1, 334, 129), (2, 1327, 1), (3, 136, 192)], dim=128, dtype=torch.float16))


def test_spans_of_one_context_and_extremes() -> None:
    check(
        make_case([(0, 60, 7), (0, 0, 24), (1, 9, 1), (0, 40, 3), (0, 67, 1)], dim=128, dtype=torch.bfloat16)
    )
    case = make_case([(0, 400, 1), (1, 0, 90)], dim=128, dtype=torch.float16, magnitude=100.0)
    want, _ = oracle(case)
    case = on_gpu(case)
    out = ragged_paged_attention(case.q, case.pool, case.spans, case.page_tables, scale=case.scale)
    assert relative_error(out.cpu(), want) <= 5e-3


def big_case(spans: list[tuple[int, int]], heads: int, kv_heads: int, extra_pages: int = 0) -> Case:
    """Random bf16 spans (length, context) on the GPU, pages in random order, ``extra_pages`` unused before them."""
    torch.manual_seed(0)
    pages = [-(-context // 32) for _, context in spans]
    order = torch.randperm(sum(pages), device=CUDA).int() + extra_pages
    pool = torch.empty(extra_pages + sum(pages), 2, kv_heads, 32, 128, device=CUDA, dtype=torch.bfloat16)
    pool[:extra_pages] = torch.nan
    pool[extra_pages:].normal_()
    tables = torch.zeros(len(spans), max(pages), dtype=torch.int32, device=CUDA)
    for row, part in enumerate(order.split(pages)):
        tables[row, : len(part)] = part
    table = make_spans([n for n, _ in spans], [c - n for n, c in spans], list(range(len(spans))))
    q = torch.randn(num_tokens(table), heads, 128, device=CUDA).to(torch.bfloat16)
    return Case(q, pool, tables, table, 128**-0.5)


def agrees_with_reference(case: Case) -> None:
    first = int(case.page_tables.min())
    got = ragged_paged_attention(case.q, case.pool, case.spans, case.page_tables, scale=case.scale)
    tables = case.page_tables.clamp_min(first) - first
    want = reference(case.q.float(), case.pool[first:].float(), case.spans, tables, scale=case.scale)
    assert relative_error(got, want) <= 1e-2


@pytest.mark.parametrize("heads", [(40, 40), (40, 10), (32, 8)])
def test_large_steps(heads: tuple[int, int]) -> None:
    agrees_with_reference(big_case([(4097, 4097)], *heads))
    agrees_with_reference(big_case([(256, 4352)] * 3 + [(1, 1000 + 37 * n) for n in range(40)], *heads))
    agrees_with_reference(big_case([(1, 16384)], *heads))
    agrees_with_reference(big_case([(8, 100 + 300 * n) for n in range(32)], *heads))


def test_pool_beyond_2_to_the_31_elements() -> None:
    case = big_case([(1, 700), (40, 333)], 40, 40, extra_pages=7000)
    assert int(case.page_tables.max()) * case.pool.stride(0) > 2**31
    agrees_with_reference(case)


def test_strided_pool_and_queries() -> None:
    case = big_case([(1, 700), (300, 333)], 16, 4)
    q = torch.randn(len(case.q), 24, 128, device=CUDA).to(torch.bfloat16)[:, 4:20]
    pool = torch.randn(len(case.pool), 3, 2, 4, 32, 128, device=CUDA).to(torch.bfloat16)[:, 1]
    agrees_with_reference(replace(case, q=q, pool=pool))


def test_one_graph_serves_steps_of_other_lengths() -> None:
    case = big_case([(1, 4000), (1, 900), (100, 1500), (1, 2000)], 32, 8)
    tokens = len(case.q)
    plan = plan_of(case, 132, Capacity(narrow=200, wide=100, merges=2000, partial_rows=20000))
    out = torch.empty_like(case.q)

    def step() -> None:
        attend(case.q, case.pool, plan, case.page_tables, case.logits, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths, positions in (
        ([1, 1, 100, 1], [3999, 899, 1400, 1999]), ([1, 1, 1, 1], [0, 1, 2, 3]), ([3, 60, 0, 2], [3000, 5, 0, 1998]),
        ([1, 0, 101, 1], [3999, 0, 1399, 1999]),
    ):  # fmt: skip
        spans = make_spans(lengths, positions, range(4))
        used = num_tokens(spans)
        plan.refill(spans)
        case.page_tables.copy_(case.page_tables[:, torch.randperm(29).tolist() + list(range(29, 125))])
        out.fill_(torch.nan)
        graph.replay()
        want = reference(case.q[:used].float(), case.pool.float(), spans, case.page_tables, scale=case.scale)
        assert relative_error(out[:used], want) <= 1e-2
        assert (out[used:tokens] == 0).all()
    before = plan.words.clone()
    with pytest.raises(ValueError, match="the plan holds 100"):
        plan.refill(make_spans([8000], [0], [0]))
    assert torch.equal(before, plan.words)
