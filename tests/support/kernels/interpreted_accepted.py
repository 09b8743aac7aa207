"""Steps whose spans follow drafts, completed on a CPU, against the steps that are planned when all tokens are known.

Run by ``tests/ops/test_interpreted.py`` in a process of its own; see ``interpreted_attention.py``.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any, cast

import numpy as np
import pytest
import torch

from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import PENDING, Plan, SampleSpec, Span
from pensieve.engine.worker.graphs import Programs
from pensieve.engine.worker.program import CudaBatch, SharedState, make_cuda_batch
from pensieve.engine.worker.sizing import WorkerInfo
from pensieve.kernels.accepted import complete_rows
from pensieve.kernels.arguments import Logits
from pensieve.kernels.attention.call import Scratch
from pensieve.kernels.attention.kinds import Geometry
from pensieve.kernels.attention.plan import AttentionPlan, geometry_of
from pensieve.kernels.attention.prefixes import PrefixGroupRule
from pensieve.kernels.attention.work_lists import (
    END_KEY,
    FIRST_KEY,
    FIRST_ROW,
    ITEM,
    LISTS_AT,
    NARROW,
    WIDE,
)
from pensieve.kernels.ragged_paged_attention import attend
from pensieve.kernels.spans import POSITION, Q_START, TABLE
from support.kernels.attention_cases import relative_error
from support.lengths import some

PAGE, HEADS, KV_HEADS, DIM = 8, 4, 2, 16
SAMPLE = SampleSpec(Sampling(), 0)


def random_step(rng: random.Random, shared: int) -> tuple[Plan, dict[RequestKey, list[int]]]:
    """A plan and what the step before chose: some spans are undecided, others decode, prefill, or wait for one token.
    The tables of all begin with the same ``shared`` pages."""
    spans, tables, chosen, page = [], [], dict[RequestKey, list[int]](), shared
    for number in range(rng.randint(5 if shared else 1, 9)):
        request = RequestKey(number)
        start, drafts = shared * PAGE + rng.randint(1, 70), rng.choice((0, 0, 1, 3, 15))
        undecided = rng.choice((0, 1, 2, 7, 40))
        first = rng.choice((PENDING, 11)) if not undecided else PENDING
        kind = rng.random()
        tokens = [*range(100, 100 + rng.randint(1, 30))] if kind < 0.2 and not undecided else [first]
        tokens += [rng.randrange(5) for _ in range(drafts)]
        guessed = [rng.randrange(5) for _ in range(undecided)]
        right = rng.choice((0, undecided, rng.randint(0, undecided)))
        chosen[request] = guessed[:right]
        if right < undecided:
            chosen[request].append(guessed[right] + 1)
        while len(chosen[request]) <= undecided:
            chosen[request].append(rng.randrange(5))
        pages = -(-(start + undecided + len(tokens)) // PAGE) - shared
        tables.append(np.array([*range(shared), *range(page, page + pages)], np.int32))
        page += pages
        spans.append(
            Span(
                request, start, np.array(tokens, np.int32), number, SAMPLE, drafts=drafts,
                undecided=np.array(guessed, np.int32) if undecided else None,
            )
        )  # fmt: skip
    return Plan(1, tuple(spans), tuple(tables)), chosen


def programs(geometry: Geometry) -> Programs:
    info = WorkerInfo("cuda", "bfloat16", 700, 0, PAGE, 4096, 512, 16, max_drafts=64)
    cpu = torch.device("cpu")
    shared = SharedState(
        model=cast(Any, None), pool=torch.empty(1, 2, KV_HEADS, PAGE, DIM), wait=cast(Any, None),
        sampled=torch.zeros(1000, dtype=torch.int64), logits=torch.zeros(1), finite=torch.ones(1),
        scratch=Scratch(Programs.scratch_rows(info, geometry), geometry, cpu), geometry=geometry, page_tokens=PAGE,
    )  # fmt: skip
    return Programs(shared, info, cast(Any, None), graphs=False)


def rows_by_table(batch: CudaBatch) -> list[int]:
    """The rows of a batch's spans in the order of their page tables, which is that of the plan's spans."""
    spans = batch.spans[np.argsort(batch.spans[:, TABLE])].tolist()
    return [row for first, length, *_ in spans for row in range(first, first + length)]


def keys_of(words: np.ndarray[Any, Any]) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """The ranges of keys of each block of rows that are not empty, by list, span, position and row."""
    found = defaultdict[tuple[int, ...], list[tuple[int, int]]](list)
    for which in (NARROW, WIDE):
        at = int(words[LISTS_AT + which])
        items = words[at : at + ITEM * int(words[which])].reshape(-1, ITEM)
        for item in items.tolist():
            if item[FIRST_KEY] < item[END_KEY]:
                key = which, item[Q_START], item[POSITION], item[FIRST_ROW]
                found[key].append((item[FIRST_KEY], item[END_KEY]))
    return {key: _joined(sorted(ranges)) for key, ranges in found.items()}


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined = ranges[:1]
    for first, end in ranges[1:]:
        if first == joined[-1][1]:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((first, end))
    return joined


@pytest.mark.parametrize("seed", some(range(24), 8))  # each fourth seed has groups
def test_a_completed_step_is_the_one_that_is_planned_when_all_is_known(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    grouped = seed % 4 == 3
    plan, chosen = random_step(rng, 16 if grouped else 0)
    q = torch.empty(1, HEADS, DIM)
    pool = torch.full(
        (1 + max(int(table.max()) for table in plan.page_tables), 2, KV_HEADS, PAGE, DIM), torch.nan
    )
    geometry = geometry_of(q, pool)
    rule = PrefixGroupRule(geometry, PAGE, least_saved_us=-1e9) if grouped else None
    made = programs(geometry)
    # What the step before chose stands somewhere among the tokens of others.
    rows, sampled = dict[RequestKey, int](), [9] * rng.randrange(3)
    for request in rng.sample(sorted(chosen), len(chosen)):
        rows[request] = len(sampled)
        sampled += chosen[request]
    made.shared.sampled[: len(sampled)] = torch.tensor(sampled)

    batch = make_cuda_batch(plan, PAGE, rows, rule)
    assert (batch.prefix_groups is not None) == grouped
    known = make_cuda_batch(plan.decided(chosen), PAGE, {}, None)
    staging = np.zeros(made.words, np.int32)
    program, words = made.pack(batch, staging)
    program._block[:words] = torch.from_numpy(staging[:words])
    view = program._view
    complete_rows(program._rows, made.shared.sampled, program._undecided, view["pages"], PAGE)
    if program._undecided is not None:
        program._shorten_items(program._undecided)
    count, order = len(known.tokens), rows_by_table(batch)
    assert rows_by_table(known) == list(range(count))
    for name in ("tokens", "positions", "slots"):
        assert view[name][order].tolist() == getattr(known, name).tolist(), name
    assert batch.sample_rows.tolist() == np.array(order)[known.sample_rows].tolist()

    (attention,) = program._plans.values()
    if batch.prefix_groups is None:
        assert keys_of(attention.words.numpy()) == keys_of(attention.pack(known.spans))
    # Keys and values exist where a token was computed, and nowhere after that.
    for span, table in zip(plan.decided(chosen).spans, plan.page_tables, strict=True):
        for position in range(span.end):
            torch.manual_seed(1000 * int(table[position // PAGE]) + position)
            pool[int(table[position // PAGE]), :, :, position % PAGE] = torch.randn(2, KV_HEADS, DIM)
    queries = torch.randn(len(view["tokens"]), HEADS, DIM)
    got = attend(queries, pool, attention, view["pages"], Logits(0.3))
    exact = AttentionPlan.from_spans(known.spans, count, geometry, torch.device("cpu"))
    want = attend(queries[order], pool, exact, torch.from_numpy(known.pages), Logits(0.3))
    assert relative_error(got[order], want) <= 1e-5
