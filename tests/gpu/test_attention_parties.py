"""Decodes that read a common beginning together, on a GPU: in captured graphs whose parties change from step to step,
and in a whole worker, beside the same steps with every decode for itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from pensieve.config import EngineTuning
from pensieve.core import RequestKey, Sampling, TokenArray, TokenLogprob
from pensieve.engine.plan import Plan, SampleSpec, Span
from pensieve.engine.worker import cuda_worker
from pensieve.engine.worker.cuda_worker import CudaWorker
from pensieve.engine.worker.sizing import WorkerInfo
from pensieve.kernels.arguments import Logits
from pensieve.kernels.attention.call import Scratch
from pensieve.kernels.attention.capacity import capacity_for
from pensieve.kernels.attention.group_lists import PREFIX_GROUP_KIND
from pensieve.kernels.attention.plan import AttentionPlan, geometry_for, make_words
from pensieve.kernels.attention.prefixes import PrefixGroupRule, PrefixGroups
from pensieve.kernels.ragged_paged_attention import attend
from pensieve.kernels.reference import ragged_paged_attention as reference
from pensieve.kernels.spans import Ints, Spans, make_spans, num_tokens
from support.engine.exactness import Bench
from support.kernels.attention_cases import relative_error

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPE = torch.bfloat16
PAGE, DIM, TOKENS, ROWS, PAGES, COPIES = 32, 128, 320, 48, 96, 3
"""Every context has a row of PAGES entries in the flat page table."""
HEADS = [(40, 40), (40, 10), (32, 8), (12, 2)]
AGREEMENT = 1e-2
Lengths = list[tuple[int, int]]
"""(query tokens, tokens of context including them) of each row."""
Alike = dict[int, tuple[int, int]]
"""Row → (the row that it begins like, in so many pages)."""


def decodes(dice: random.Random, count: int, least: int) -> Lengths:
    return [(1, dice.randint(least, PAGE * PAGES)) for _ in range(count)]


def steps(dice: random.Random) -> dict[str, tuple[Lengths, Alike]]:
    """What follows each other in one graph."""
    one = (decodes(dice, 40, 2049), {row: (0, 64) for row in range(1, 40)})
    nested: Alike = {row: (0, 8) for row in range(1, 36)} | {row: (9, 60) for row in range(10, 30)}
    two = {row: (0, 20) for row in range(4, 24, 2)} | {row: (1, 33) for row in range(3, 24, 2)}
    mixed = [*decodes(dice, 12, 1300), (150, 1400), (1, 9), (30, 30), *decodes(dice, 12, 1300)]
    same: Lengths = [(1, 1024 + 7)] * 20 + [(1, 1024)] * 3
    return {
        "one party": one,
        "nothing in common": (decodes(dice, 30, 1), {}),
        "beginnings of beginnings": (decodes(dice, 36, 1921), nested),
        "two parties and others": (decodes(dice, 30, 1100), two),
        "beside turns": (mixed, {row: (0, 40) for row in (2, 3, 5, 7, 16, 20, 21, 22, 26)}),
        "the same to the end": (same, {row: (0, 33) for row in range(1, 23)}),
        "few, and long behind it": ([(1, PAGE * PAGES)] * 5, {row: (0, 24) for row in range(1, 5)}),
        "nothing again": (decodes(dice, ROWS, 1), {}),
    }


@dataclass(frozen=True, slots=True)
class Replayed:
    """A captured graph of several layers: what it reads is filled anew for each step."""

    q: list[torch.Tensor]
    pools: list[torch.Tensor]
    flat: torch.Tensor
    plan: AttentionPlan

    def call(self, layer: int) -> torch.Tensor:
        out = torch.full_like(self.q[layer], torch.nan)
        attend(self.q[layer], self.pools[layer], self.plan, self.flat, Logits(DIM**-0.5), out=out)
        return out

    def want(self, layer: int, host: Spans) -> torch.Tensor:
        spans = make_spans(host[:, 1], host[:, 2], host[:, 3] // PAGES)
        used = self.q[layer][: num_tokens(spans)].float()
        found = reference(
            used, self.pools[layer].float(), spans, self.flat.view(ROWS, PAGES), scale=DIM**-0.5
        )
        assert isinstance(found, torch.Tensor)
        return found


def make_replayed(heads: int, kv_heads: int) -> Replayed:
    torch.manual_seed(0)
    shape = (ROWS * PAGES // 4, 2, kv_heads, PAGE, DIM)
    pools = [torch.randn(shape, device=CUDA).to(DTYPE) for _ in range(COPIES)]
    q = [torch.randn(TOKENS, heads, DIM, device=CUDA).to(DTYPE) for _ in range(COPIES)]
    flat = torch.zeros(ROWS * PAGES, device=CUDA, dtype=torch.int32)
    geometry = geometry_for(heads, pools[0])
    capacity = capacity_for(PREFIX_GROUP_KIND, TOKENS, ROWS, PAGE * PAGES, geometry)
    words = make_words(capacity, CUDA)
    scratch = Scratch(capacity.partial_rows, geometry, CUDA)
    scratch.partial.fill_(torch.nan)
    plan = AttentionPlan(TOKENS, geometry, words, kind=PREFIX_GROUP_KIND, capacity=capacity, scratch=scratch)
    return Replayed(q, pools, flat, plan)


def captured(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def laid_out(
    lengths: Lengths, alike: Alike, pages: int, rule: PrefixGroupRule
) -> tuple[Spans, Ints, Ints | None]:
    """Spans in the order of a step, the flat page table, and the parties that the rule finds."""
    dice = np.random.default_rng(len(lengths))
    flat = dice.integers(pages, size=(ROWS, PAGES), dtype=np.int32)
    flat[:, 0] = np.arange(ROWS)  # only those begin alike that shall
    for row, (other, count) in alike.items():
        flat[row, :count] = flat[other, :count]
    new, contexts = np.array(lengths).T
    host = make_spans(new, contexts - new, PAGES * np.arange(len(new)))
    found = rule.find(host, flat.reshape(-1))
    if found is None:
        return host, flat, None
    host = host[found.order]
    host[:, 0] = np.cumsum(host[:, 1]) - host[:, 1]
    return host, flat, found.table


@pytest.mark.parametrize("heads", HEADS)
def test_parties_change_from_step_to_step(heads: tuple[int, int]) -> None:
    bench = make_replayed(*heads)
    outs: list[torch.Tensor] = []

    def run() -> None:
        outs[:] = [bench.call(layer) for layer in range(COPIES)]

    graph = captured(run)
    rule = PrefixGroupRule(bench.plan.geometry, PAGE, least_saved_us=0.0)
    for name, (lengths, alike) in steps(random.Random(heads[0])).items():
        host, flat, parties = laid_out(lengths, alike, len(bench.pools[0]), rule)
        assert (parties is None) == (not alike), name
        bench.flat.copy_(torch.from_numpy(flat.reshape(-1)))
        used = int(host[:, 1].sum())
        for table in (parties, None):
            bench.plan.refill(host, table)
            graph.replay()
            first = [out.clone() for out in outs]
            for _ in range(10):
                graph.replay()
            torch.cuda.synchronize()
            for layer, out in enumerate(outs):
                error = relative_error(out[:used], bench.want(layer, host))
                assert error <= AGREEMENT, (name, table, layer, error)
                assert (out[used:] == 0).all()
                assert torch.equal(out, first[layer]), "a replay differs from another"


class Finding(PrefixGroupRule):
    """For contexts far too short to gain anything; says what it found."""

    found: list[int] = []  # noqa: RUF012 - for all of a test

    def saved_us(self, rows: int, spans: int, tokens: int) -> float:
        return float(tokens * (spans - 1))

    def find(self, host: Spans, pages: np.ndarray) -> PrefixGroups | None:  # type: ignore[type-arg]
        parties = super().find(host, pages)
        Finding.found.append(0 if parties is None else int(parties.table[:, 1].sum()))
        return parties


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_gives_the_same_answers(
    dtype: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions that began with one prompt: some join, some leave, one has nothing in common with the others."""
    monkeypatch.setattr(
        cuda_worker, "PrefixGroupRule", lambda geometry, page: Finding(geometry, page, least_saved_us=0.0)
    )
    bench = Bench("llama3", tmp_path, "cuda", dtype=dtype)
    chunk, begin = 8, 128
    prompt = np.arange(begin, dtype=np.int32) % 50 + 3
    first, own = begin // chunk, 4

    def answers(together: bool) -> list[tuple[list[int], torch.Tensor]]:
        info = WorkerInfo("cuda", dtype, 200, 0, chunk, 160, max_batch_tokens=160, max_running=12)
        worker = CudaWorker(
            bench.model, info, EngineTuning(cuda_graphs=graphs, shared_prefix_attention=together)
        )
        beginning = np.arange(first, dtype=np.int32)
        tables = [
            np.concatenate([beginning, 20 + own * row + np.arange(own)]).astype(np.int32) for row in range(10)
        ]
        tables[9] = np.arange(100, 100 + first + own, dtype=np.int32)
        worker.run(Plan(0, (Span(RequestKey(0), 0, prompt, 0),), (tables[0],)))
        worker.run(Plan(1, (Span(RequestKey(9), 0, prompt[::-1].copy(), 0),), (tables[9],)))
        sampling = Sampling(top_logprobs=1_000_000)
        at, newest = [begin] * 10, [np.array([5 + row], np.int32) for row in range(10)]
        results = []
        for step, rows in enumerate(
            ([0, 9, 3, 4, 5, 6], [9, 0, 1, 3, 4, 5, 6, 7], [1, 2], [*range(10)], [8, 7, 9])
        ):
            spans = tuple(
                Span(RequestKey(row), at[row], newest[row], index, SampleSpec(sampling, step))
                for index, row in enumerate(rows)
            )
            result = worker.run(Plan(2 + step, spans, tuple(tables[row] for row in rows)))
            logprobs = torch.stack([_logprobs(one.logprob, bench.vocabulary) for one in result.sampled])
            assert [one.request for one in result.sampled] == [RequestKey(row) for row in rows]
            results.append(([one.token_id for one in result.sampled], logprobs))
            for row in rows:
                at[row] += 1
                newest[row] = _next(row, step)
        worker.close()
        return results

    Finding.found.clear()
    apart = answers(False)
    assert not Finding.found, "switched off"
    together = answers(True)
    assert Finding.found[2:] == [5, 7, 0, 9, 0]
    for (tokens, logprobs), (want_tokens, want) in zip(together, apart, strict=True):
        if dtype == "float32":
            assert tokens == want_tokens
        assert (logprobs - want).abs().max() <= (1e-4 if dtype == "float32" else 0.3)


def _next(row: int, step: int) -> TokenArray:
    """What a session is told next, whatever it has answered."""
    return np.array([3 + (7 * row + step) % 40], np.int32)


def _logprobs(found: TokenLogprob | None, vocabulary: int) -> torch.Tensor:
    """The log-probabilities from which a token was sampled, float32 [vocab]."""
    assert found is not None and len(found.top) == vocabulary
    values = torch.empty(vocabulary)
    for token, value in found.top:
        values[token] = value
    return values


def test_a_server_reads_alone_when_nothing_is_gained() -> None:
    """The rule as it is: tiny contexts have the plan that they had."""
    bench = make_replayed(40, 10)
    rule = PrefixGroupRule(bench.plan.geometry, PAGE)
    lengths: Lengths = [(1, 300)] * 8
    assert laid_out(lengths, {row: (0, 8) for row in range(1, 8)}, 50, rule)[2] is None
