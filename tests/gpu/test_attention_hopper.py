"""The attention kernel for Hopper by itself, with work lists made here: every cut, share and layout it promises."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from pensieve.kernels.attention.call import AttentionCall, Scratch
from pensieve.kernels.attention.hopper.launch import addressable, attend_wide, supports
from pensieve.kernels.attention.kinds import Geometry
from pensieve.kernels.attention.work_lists import HEADER, SHARE_AT, WIDE
from pensieve.kernels.reference import ragged_paged_attention as reference
from support.kernels.attention_cases import Case, Spans, make_case, relative_error

CUDA = torch.device("cuda")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper device")]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
MIX: Spans = [
    (0, 0, 128), (1, 1, 40), (2, 33, 3), (3, 0, 1), (4, 200, 150), (5, 511, 8), (6, 700, 300), (7, 1000, 129),
    (8, 127, 1), (9, 128, 128), (6, 900, 65),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    out: torch.Tensor
    lse: torch.Tensor


def items_of(case: Case, pieces: int, seed: int | None = None) -> tuple[np.ndarray, int]:
    """Items of all spans cut into at most ``pieces``, and the partial rows they take; longest first, or shuffled."""
    groups = case.q.shape[1] // case.pool.shape[2]
    items, used = [], 0
    for start, length, position, row in case.spans.tolist():
        for first in range(0, length * groups, 128):
            end = position + (min(first + 128, length * groups) - 1) // groups + 1
            hidden = 0 if case.window is None else max(0, position + first // groups + 1 - case.window)
            begin = hidden // 128 * 128
            steps = -(-(end - begin) // 128)
            parts = min(pieces, steps)
            for part in range(parts):
                low, high = (begin + index * steps // parts * 128 for index in (part, part + 1))
                high = min(high, end)
                scratch = used if parts > 1 else -1
                items.append([start, length * groups, position, row, first, low, high, scratch])
                used += 128 if parts > 1 else 0
    items.sort(key=lambda item: item[5] - item[6])
    if seed is not None:
        np.random.default_rng(seed).shuffle(items)
    return np.array(items, dtype=np.int64).reshape(-1, 8), used


def words_of(items: np.ndarray, share: int = 0) -> torch.Tensor:
    words = np.zeros(HEADER + items.size, np.int32)
    words[WIDE], words[SHARE_AT] = len(items), share
    words[HEADER:] = items.reshape(-1)
    return torch.from_numpy(words).to(CUDA)


def attend(case: Case, items: np.ndarray, used: int, programs: int = 132, share: int = 0) -> Result:
    """The kernel's results; those of cut items are merged here, in float64."""
    heads, kv_heads, dim = case.q.shape[1], case.pool.shape[2], case.q.shape[2]
    out = torch.full_like(case.q, torch.nan)
    call = AttentionCall.from_tensors(case.q, case.pool, case.page_tables, case.logits, out, with_lse=True)
    lse = call.lse.fill_(torch.nan)
    scratch = Scratch(used, Geometry(heads, kv_heads, dim, 2, 132), CUDA)
    partial, logs = scratch.partial.fill_(torch.nan), scratch.partial_lse.fill_(torch.nan)
    attend_wide(
        call, words_of(items, share), scratch, programs=programs, beside=share > 0, window=case.window or 0
    )
    torch.cuda.synchronize()
    groups = heads // kv_heads
    blocks: dict[tuple[int, int, int], list[int]] = {}
    for start, rows, _, _, first, _, _, scratch in items.tolist():
        if scratch >= 0:
            blocks.setdefault((start, rows, first), []).append(scratch)
    for (start, rows, first), at in blocks.items():
        row = torch.arange(min(128, rows - first), device=CUDA)
        index = torch.tensor(at, device=CUDA)[:, None] + row
        part_logs = logs.view(kv_heads, -1)[:, index].double() * math.log(2)  # [kv heads, pieces, rows]
        total = torch.logsumexp(part_logs, 1)
        if case.sinks is not None:
            total = torch.logaddexp(total, case.sinks.double().view(kv_heads, -1)[:, (first + row) % groups])
        values = partial.view(kv_heads, -1, dim)[:, index].double()
        merged = (values * (part_logs - total[:, None]).exp()[..., None]).sum(1)
        token, group = start + (first + row) // groups, (first + row) % groups
        for head in range(kv_heads):
            out[token, head * groups + group] = merged[head].to(out.dtype)
            lse[token, head * groups + group] = total[head].float()
    return Result(out, lse)


def on_gpu(case: Case) -> Case:
    moved = replace(case, q=case.q.to(CUDA), pool=case.pool.to(CUDA), page_tables=case.page_tables.to(CUDA))
    return moved if case.sinks is None else replace(moved, sinks=case.sinks.to(CUDA))


def expected(case: Case) -> Result:
    arguments = case.q.float(), case.pool.float(), case.spans, case.page_tables
    return Result(
        *reference(*arguments, scale=case.scale, window=case.window, sinks=case.sinks, return_lse=True)
    )


def check(case: Case) -> None:
    case = on_gpu(case)
    geometry = Geometry(case.q.shape[1], case.pool.shape[2], case.q.shape[2], 2, 132)
    assert supports(geometry, case.q.dtype, case.pool.shape[3], CUDA) and addressable(case.q, case.pool)
    want = expected(case)
    for pieces, programs, seed in ((1, 132, None), (1, 7, None), (1, 1, 3), (3, 132, None), (2, 40, 5)):
        items, used = items_of(case, pieces, seed)
        got, again = attend(case, items, used, programs), attend(case, items, used, programs)
        assert torch.equal(got.out, again.out) and torch.equal(got.lse, again.lse)
        assert relative_error(got.out, want.out) <= TOLERANCE[case.q.dtype]
        assert relative_error(got.lse, want.lse) <= 1e-4


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (16, 2), (32, 1), (64, 1)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_heads(dim: int, heads: tuple[int, int]) -> None:
    check(make_case(MIX, heads=heads[0], kv_heads=heads[1], dim=dim, page=32, dtype=torch.bfloat16))


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_pages(page: int) -> None:
    check(make_case(MIX, heads=4, kv_heads=2, dim=128, page=page, dtype=torch.float16))


def test_lengths_at_tile_and_page_edges() -> None:
    contexts = [
        1,
        2,
        31,
        32,
        33,
        63,
        64,
        65,
        95,
        96,
        97,
        127,
        128,
        129,
        159,
        160,
        161,
        255,
        256,
        257,
        383,
        385,
    ]
    for tokens in (1, 64, 65, 127, 128, 129):
        spans = [(row, max(0, context - tokens), tokens) for row, context in enumerate(contexts)]
        check(make_case(spans, heads=2, kv_heads=1, dim=128, page=32, dtype=torch.bfloat16))


def test_large_scores() -> None:
    case = on_gpu(
        make_case([(0, 400, 70), (1, 0, 190)], dim=128, page=32, dtype=torch.float16, magnitude=60.0)
    )
    got = attend(case, *items_of(case, 1))
    assert relative_error(got.out, expected(case).out) <= 5e-3


def test_a_share_of_the_programs_does_all_the_work() -> None:
    case = on_gpu(make_case(MIX, heads=8, kv_heads=2, dim=128, page=32, dtype=torch.bfloat16))
    items, used = items_of(case, 1)
    whole = attend(case, items, used)
    for share in (1, 5, 132):
        part = attend(case, items, used, share=share)
        assert torch.equal(part.out, whole.out) and torch.equal(part.lse, whole.lse)


def test_items_without_keys_and_rows_without_items() -> None:
    case = on_gpu(make_case([(0, 0, 100)], heads=8, kv_heads=2, dim=128, page=32, dtype=torch.bfloat16))
    case = replace(case, q=torch.cat([case.q, torch.randn(70, 8, 128, device=CUDA).to(case.q.dtype)]))
    items, _ = items_of(case, 1)
    padding = [[100, 240, 0, 0, first, 0, 0, -1] for first in (0, 128)]
    got = attend(case, np.concatenate([items, np.array(padding)]), 0)
    assert (got.out[100:160] == 0).all() and (got.lse[100:160] == -torch.inf).all()
    assert got.out[:100].isfinite().all() and got.out[160:].isnan().all() and got.lse[160:].isnan().all()
    assert attend(case, items[:0], 0).out.isnan().all()


def test_queries_and_pool_that_are_slices() -> None:
    case = on_gpu(make_case(MIX, heads=16, kv_heads=4, dim=128, page=32, dtype=torch.bfloat16))
    want = expected(case)
    q = torch.full((len(case.q), 24, 128), torch.nan, device=CUDA, dtype=case.q.dtype)
    pool = torch.full((len(case.pool), 3, 2, 4, 32, 128), torch.nan, device=CUDA, dtype=case.q.dtype)
    q[:, 4:20], pool[:, 1] = case.q, case.pool
    case = replace(case, q=q[:, 4:20], pool=pool[:, 1])
    assert addressable(case.q, case.pool) and not addressable(case.q, case.pool.mT)
    assert relative_error(attend(case, *items_of(case, 1)).out, want.out) <= 1e-2


def test_one_graph_serves_other_steps() -> None:
    case = on_gpu(make_case(MIX, heads=8, kv_heads=2, dim=128, page=32, dtype=torch.bfloat16))
    items, _ = items_of(case, 1)
    words = words_of(items)
    out = torch.empty_like(case.q)
    call = AttentionCall.from_tensors(case.q, case.pool, case.page_tables, case.logits, out)
    scratch = Scratch(0, Geometry(8, 2, 128, 2, 132), CUDA)

    def step() -> None:
        attend_wide(call, words, scratch, programs=132)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    want = expected(case).out
    for part in (items, items[::2], items[:1], items[:0]):
        words.copy_(torch.nn.functional.pad(words_of(part), (0, items.size - part.size)))
        out.fill_(torch.nan)
        graph.replay()
        written = ~out.isnan().any(-1)
        assert (
            int(written.sum())
            == sum(min(128, rows - first) for _, rows, _, _, first, *_ in part.tolist()) * 2
        )
        assert relative_error(out[written], want[written]) <= 1e-2 if len(part) else not written.any()


@pytest.mark.parametrize("window", [1, 64, 127, 129, 300])
@pytest.mark.parametrize(("heads", "dim", "page"), [((4, 2), 128, 32), ((16, 2), 64, 16), ((2, 2), 128, 256)])
def test_windows(heads: tuple[int, int], dim: int, page: int, window: int) -> None:
    """Windows that end anywhere in a page and in a tile; slots and pages below them are NaN."""
    check(
        make_case(
            MIX, heads=heads[0], kv_heads=heads[1], dim=dim, page=page, dtype=torch.bfloat16,
            window=window, sinks=window % 2 == 1,
        )
    )  # fmt: skip


def test_windows_that_begin_and_end_in_one_page() -> None:
    """Both groups clear both ends of the page: a late one must not bring back what the other has cleared."""
    spans: Spans = [(row, 33 + row % 20, 1 + row % 7) for row in range(60)]
    case = on_gpu(
        make_case(spans, heads=4, kv_heads=2, dim=128, page=32, dtype=torch.bfloat16, window=1, sinks=True)
    )
    want, (items, used) = expected(case), items_of(case, 1)
    for programs in (1, 7, 132) * 20:
        assert relative_error(attend(case, items, used, programs).out, want.out) <= 1e-2


def test_sinks() -> None:
    check(make_case(MIX, heads=16, kv_heads=2, dim=64, page=32, dtype=torch.float16, sinks=True))
