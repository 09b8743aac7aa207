"""Which program takes a step, and which there are, without a GPU: nothing is run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import Plan, SampleSpec, Span
from pensieve.engine.worker import graphs
from pensieve.engine.worker.buckets import MEASURED_TOKENS
from pensieve.engine.worker.cuda_batch import CudaBatch, make_cuda_batch
from pensieve.engine.worker.graphs import Programs
from pensieve.engine.worker.program import Shared, Size
from pensieve.engine.worker.sizing import WorkerInfo
from pensieve.kernels.attention.kinds import Capacity, Geometry, StepKind
from pensieve.kernels.attention.plan import Scratch
from pensieve.kernels.attention.prefixes import PartyRule

GEOMETRY = Geometry(8, 2, 16, 2, 132)
INFO = WorkerInfo("cuda", "bfloat16", 700, 0, 32, 16_384, 512, 64)
RULE = PartyRule(GEOMETRY, 32, least_saved_us=0.0)


def programs(info: WorkerInfo, scratch_rows: int | None = None, *, graphs: bool = False) -> Programs:
    rows = Programs.scratch_rows(info, GEOMETRY) if scratch_rows is None else scratch_rows
    cpu = torch.device("cpu")
    model = cast(Any, SimpleNamespace(together=SimpleNamespace(least=list)))
    shared = Shared(
        model=model, pool=torch.empty(1, 4, 2, 2, 32, 16), wait=cast(Any, None),
        sampled=torch.zeros(64), logits=torch.zeros(1), finite=torch.ones(1),
        scratch=Scratch(rows, GEOMETRY, cpu), geometry=GEOMETRY,
    )  # fmt: skip
    return Programs(shared, info, cast(Any, None), graphs=graphs)


def batch(count: int, common: int = 500) -> CudaBatch:
    """Decodes whose contexts begin with the same ``common`` pages."""
    spec = SampleSpec(Sampling(), 0)
    token = np.array([7], np.int32)
    tables = tuple(
        np.concatenate([np.arange(common), [600 + row, 0]]).astype(np.int32) for row in range(count)
    )
    spans = tuple(Span(RequestKey(row), 32 * common + row % 32, token, row, spec) for row in range(count))
    return make_cuda_batch(Plan(1, spans, tables), 32, {}, RULE)


def test_spans_that_read_together_get_a_program_for_that() -> None:
    step = batch(40)
    assert step.parties is not None
    made = programs(INFO)
    staging = np.zeros(made.words, np.int32)
    program, words = made.pack(step, staging)
    assert program.size.kind is StepKind.MIXED and 0 < words <= made.words
    alone, _ = made.pack(replace(step, parties=None), staging)
    assert alone.size.kind is StepKind.NARROW


def test_what_does_not_fit_together_is_done_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    step = batch(40)
    made = programs(INFO)
    whole = graphs.capacity_for

    def little(kind: StepKind, *sizes: Any) -> Capacity:
        capacity = whole(kind, *sizes)
        return replace(capacity, partial_rows=100) if kind is StepKind.MIXED else capacity

    monkeypatch.setattr(graphs, "capacity_for", little)
    program, _ = made.pack(step, np.zeros(made.words, np.int32))
    assert program.size.kind is StepKind.NARROW


def test_tables_of_more_entries_than_there_are_pages_are_packed() -> None:
    """A page that is shared is in the table of each request that shares it."""
    step = batch(64)
    assert len(step.pages) > 40 * INFO.device_chunks
    made = programs(INFO)
    staging = np.zeros(made.words, np.int32)
    program, words = made.pack(step, staging)
    assert staging[words - len(step.pages) : words].tolist() == step.pages.tolist()
    assert program.size.pages == len(step.pages)


class TimedProgram:
    """Stands in for a graph: its time is that of products which are slow between 64 and 128 tokens."""

    made: ClassVar[list[tuple[StepKind, int]]] = []

    def __init__(self, shared: Shared, size: Size) -> None:
        self.size = size

    def capture(self, pool: object, stream: object) -> None:
        self.made.append((self.size.kind, self.size.tokens))

    def microseconds(self, stream: object) -> int:
        tokens = self.size.tokens
        return 7000 + 10 * tokens + (2300 if tokens % 64 and tokens > 64 else 0)

    def pack(self, batch: CudaBatch, staging: object) -> int:
        return 0


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Programs:
    TimedProgram.made.clear()
    monkeypatch.setattr(graphs, "StepProgram", TimedProgram)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    return programs(replace(INFO, max_batch_tokens=2048, max_running=128), graphs=True)


def test_sizes_that_are_no_faster_than_a_larger_one_have_no_graph(timed: Programs) -> None:
    timed.capture_all()
    left = sorted(timed._made, key=lambda key: key[1])
    assert set(left) == set(timed._wanted()), (
        "what was only captured to be timed is kept, or not all is captured"
    )
    narrow = [size for kind, size in left if kind is StepKind.NARROW]
    assert narrow == [4, *range(8, 65, 8), 128], "1 and 2 are no faster than 4, 72 to 120 slower than 128"
    mixed = [size for kind, size in left if kind is StepKind.MIXED]
    assert mixed[:4] == [32, 64, 128, 192] and set(range(512, 1025, 64)) <= set(mixed) and mixed[-1] == 2048
    few = [size for kind, size in left if kind is StepKind.FEW]
    assert few[-1] == 512, "the last of a kind stays"
    for count, size in ((60, 64), (65, 128), (72, 128), (127, 128)):
        program, _ = timed.pack(replace(batch(count), parties=None), np.zeros(timed.words, np.int32))
        assert program.size.tokens == size
    large = [tokens for _, tokens in TimedProgram.made if tokens > MEASURED_TOKENS]
    first = [tokens for _, tokens in TimedProgram.made][: len(large)]
    assert first == sorted(large, reverse=True), "the smaller ones are to fit into the memory of these"


def test_ranks_keep_the_same_sizes(timed: Programs) -> None:
    """Another rank saw no slow sizes: the least of what any saw counts."""
    seen: list[list[int]] = []

    def least(numbers: list[int]) -> list[int]:
        seen.append(numbers)
        return [min(mine, 7000 + 10 * size) for mine, size in zip(numbers, sizes, strict=True)]

    sizes = sorted({size for _, size in timed._wanted() if size <= MEASURED_TOKENS}, reverse=True)
    cast(Any, timed.shared).model.together.least = least
    timed.capture_all()
    assert len(seen) == 1 and len(seen[0]) == len(sizes)
    assert (StepKind.NARROW, 72) in timed._made
