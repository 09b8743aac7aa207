"""Which program takes a step, without a GPU: nothing is run, and graphs are off."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import Plan, SampleSpec, Span
from pensieve.engine.worker import graphs
from pensieve.engine.worker import program as program_module
from pensieve.engine.worker.graphs import Programs
from pensieve.engine.worker.program import (
    CudaBatch,
    SharedState,
    StepProgram,
    make_cuda_batch,
    preferred_blas,
)
from pensieve.engine.worker.sizing import WorkerInfo
from pensieve.kernels.arguments import HeadPrep
from pensieve.kernels.attention import capacity
from pensieve.kernels.attention.capacity import Capacity, most_copies
from pensieve.kernels.attention.kinds import Geometry, StepKind
from pensieve.kernels.attention.plan import Scratch
from pensieve.kernels.attention.prefixes import PrefixGroupRule
from pensieve.kernels.attention.work_lists import END_KEY, FIRST_KEY, ITEM, LISTS_AT, NARROW, WIDE

GEOMETRY = Geometry(8, 2, 16, 2, 132)
INFO = WorkerInfo("cuda", "bfloat16", 700, 0, 32, 16_384, 512, 64)
RULE = PrefixGroupRule(GEOMETRY, 32, least_saved_us=0.0)


def programs(
    info: WorkerInfo, windows: tuple[int | None, ...] = (None,), geometry: Geometry = GEOMETRY
) -> Programs:
    rows = Programs.scratch_rows(info, geometry, windows)
    cpu = torch.device("cpu")
    shared = SharedState(
        model=cast(Any, None), pool=torch.empty(1, 4, 2, 2, 32, 16), wait=cast(Any, None),
        sampled=torch.zeros(64), logits=torch.zeros(1), finite=torch.ones(1),
        scratch=Scratch(rows, geometry, cpu, most_copies(geometry)), geometry=geometry,
        page_tokens=32, windows=windows,
    )  # fmt: skip
    return Programs(shared, info, cast(Any, None), graphs=False)


def batch(count: int, common: int = 500) -> CudaBatch:
    """Decodes whose contexts begin with the same ``common`` pages."""
    spec = SampleSpec(Sampling(), 0)
    token = np.array([7], np.int32)
    tables = tuple(
        np.concatenate([np.arange(common), [600 + row, 0]]).astype(np.int32) for row in range(count)
    )
    spans = tuple(Span(RequestKey(row), 32 * common + row % 32, token, row, spec) for row in range(count))
    return make_cuda_batch(Plan(1, spans, tables), 32, {}, RULE)


@pytest.mark.parametrize("piece", [0, 64])
def test_a_head_norm_has_one_size_with_fixed_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[bool] = []

    def kv_write(*given: Any, one_size: bool) -> torch.Tensor:
        sizes.append(one_size)
        return torch.zeros(1)

    monkeypatch.setattr(program_module, "kv_write", kv_write)
    monkeypatch.setattr(program_module, "attend", lambda *given, **more: torch.zeros(1))
    layer = SimpleNamespace(window=None)
    arch = SimpleNamespace(layers=[layer], attention_scale=1.0, softcap=None)
    shared = SimpleNamespace(
        wait=lambda layer: None, pool=[None], model=SimpleNamespace(arch=arch), geometry=SimpleNamespace(piece=piece)
    )  # fmt: skip
    step = SimpleNamespace(
        _shared=shared, _view={"slots": None, "pages": None}, _slot_names=lambda: ["slots"], _plans={None: None}
    )  # fmt: skip
    StepProgram._attend(cast(Any, step), 0, torch.zeros(1, 1, 1), HeadPrep())
    assert sizes == [piece > 0]


def test_spans_that_read_together_get_a_program_for_that() -> None:
    step = batch(40)
    assert step.prefix_groups is not None
    made = programs(INFO)
    staging = np.zeros(made.words, np.int32)
    program, words = made.pack(step, staging)
    assert program.size.kind is StepKind.MIXED and 0 < words <= made.words
    alone, _ = made.pack(replace(step, prefix_groups=None), staging)
    assert alone.size.kind is StepKind.NARROW


@pytest.mark.parametrize(("drafts", "kind", "tokens"), [(2, StepKind.NARROW, 96), (3, StepKind.FEW, 128)])
def test_more_drafts_than_narrow_graphs_hold_take_another_graph(
    drafts: int, kind: StepKind, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of narrow steps hold half as many tokens again as requests run."""
    made = programs(INFO)
    monkeypatch.setattr(made, "_program", lambda *key: key)
    tables = tuple(np.array([row, 100 + row], np.int32) for row in range(32))
    spans = tuple(Span(RequestKey(row), 20, np.zeros(1 + drafts, np.int32), row) for row in range(32))
    monkeypatch.setattr(made, "_graphs", True)
    assert made._graph_for(make_cuda_batch(Plan(1, spans, tables), 32, {})) == (kind, tokens)


def test_without_room_for_copies_wide_items_read_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    coded = replace(GEOMETRY, coded=True, copied_page=32, hopper=True)
    monkeypatch.setattr(capacity, "COPIED_BYTES", 4 * 2 * 2 * 32 * 16 * 2)
    made = programs(INFO, geometry=coded)
    staging = np.zeros(made.words, np.int32)
    for tokens, copied in ((128, 32), (129, 0)):
        table = np.arange(5, dtype=np.int32)
        step = make_cuda_batch(
            Plan(1, (Span(RequestKey(1), 0, np.zeros(tokens, np.int32), 0),), (table,)), 32, {}
        )
        program, words = made.pack(step, staging)
        assert words <= program.words <= made.words
        assert [plan.geometry.copied_page for plan in program._plans.values()] == [copied]


def test_each_window_has_a_plan_in_the_block() -> None:
    """Layers that see everything read the common prefix together. Windowed layers read their windows."""
    step = batch(40)
    made = programs(INFO, (100, None, 30))
    staging = np.zeros(made.words, np.int32)
    program, words = made.pack(step, staging)
    assert words <= program.words <= made.words and len(program.size.attention) == 3
    assert staging[words - len(step.pages) : words].tolist() == step.pages.tolist()
    program._block[:words].copy_(torch.from_numpy(staging[:words]))
    for window, plan in program._plans.items():
        assert plan.geometry.window == window
        assert plan.words[
            : len(packed := plan.pack(step.spans, None if window else step.prefix_groups))
        ].equal(torch.from_numpy(packed))
        assert (int(plan.words[WIDE]) > 0) == (window is None)
        at, count = int(plan.words[LISTS_AT + NARROW]), int(plan.words[NARROW])
        items = plan.words[at : at + ITEM * count].view(-1, ITEM)
        if window is not None:
            assert int((items[:, END_KEY] - items[:, FIRST_KEY]).sum()) == 40 * window


def test_plans_of_one_window_have_the_block_of_a_dense_model() -> None:
    step = replace(batch(40), prefix_groups=None)
    staging, windowed = (np.zeros(programs(INFO).words, np.int32) for _ in range(2))
    program, words = programs(INFO).pack(step, staging)
    other, other_words = programs(INFO, (10**6,)).pack(step, windowed)
    assert (words, program.words) == (other_words, other.words)
    assert (staging == windowed).all()


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


@pytest.mark.parametrize(
    ("tokens", "device", "library"),
    [(1, "cuda", "cublaslt"), (128, "cuda", "cublaslt"), (129, "cuda", "cublas"), (1, "cpu", "cublas")],
)
def test_who_makes_the_products(
    tokens: int, device: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preferred = ["cublas"]

    def prefer(name: str | None = None) -> str:
        preferred.append(name or preferred[-1])
        return preferred[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    with pytest.raises(ZeroDivisionError), preferred_blas(tokens, torch.device(device)):
        assert preferred[-1] == library
        1 / 0  # noqa: B018
    assert preferred[-1] == "cublas", "what others ask for is made by another library after that"
