"""Recurrent layers on a GPU, against the reference: real sizes, graphs, and long runs by blocks."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from pensieve.kernels.recurrence import NO_PAGE
from pensieve.kernels.recurrent import recurrent
from pensieve.kernels.state_chunks import LONG, make_recurrent_plan
from pensieve.kernels.state_chunks import recurrent as planned
from pensieve.kernels.state_step import state_step
from pensieve.model.folder import load_arch
from pensieve.model.ops import triton_ops
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights
from support.kernels.recurrence_cases import KINDS, Case, Kind, make_case, make_layer, random_rows
from support.model.recurrent_models import FAMILIES, Family, make_model, run_in_pieces

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::ImportWarning")]  # fla's
SIZES = {"ssd": ((8, 128, 64), 1), "gated_delta": ((8, 128, 128), 4)}
CUDA = torch.device("cuda")


def _cases(
    kind: Kind, rows: list[list[int]], tokens: int, pages: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Case, Case]:
    """The same step on the GPU and on the CPU, there in float32."""
    (heads, key, value), key_heads = SIZES[kind]
    layer = make_layer(kind, heads=heads, key_heads=key_heads, key=key, value=value, dtype=dtype)
    case = make_case(layer, (heads, key, value), rows, tokens, pages, seed)
    return case.on("cuda"), case


def _compare(case: Case, wanted: Case, out: torch.Tensor, tolerance: float) -> None:
    """Outputs and states differ by at most this share of their size, pages by nothing else."""
    want = recurrent(wanted.inputs, wanted.gates, wanted.parts, wanted.layer, wanted.chains)
    for first, rows, *_ in wanted.chains.tolist():
        own = slice(first, first + rows)
        assert _difference(out[own].cpu(), want[own]) < tolerance
        out[own] = 0
    assert not out.any()
    assert torch.equal(case.parts[0].cpu().nan_to_num(7.0), wanted.parts[0].nan_to_num(7.0))
    for got, state in zip(case.parts[1].cpu(), wanted.parts[1], strict=True):
        assert torch.equal(got.isnan(), state.isnan())
        assert _difference(got.nan_to_num(), state.nan_to_num()) < tolerance


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_float32_steps(kind: Kind, seed: int) -> None:
    rows, tokens, pages = random_rows(random.Random(seed), most=6, longest=150)
    case, wanted = _cases(kind, rows, tokens, pages, torch.float32, seed)
    plan = make_recurrent_plan(case.chains, tokens, torch.float32, CUDA)
    _compare(case, wanted, planned(case.inputs, case.gates, case.parts, case.layer, plan), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_steps(kind: Kind, seed: int) -> None:
    """Long runs go through fla-core; boundaries inside long chains, tails of both lengths."""
    rows, tokens, pages = random_rows(random.Random(100 + seed), most=6, longest=500)
    case, wanted = _cases(kind, rows, tokens, pages, torch.bfloat16, seed)
    plan = make_recurrent_plan(case.chains, tokens, torch.bfloat16, CUDA)
    _compare(case, wanted, planned(case.inputs, case.gates, case.parts, case.layer, plan), 1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_chain_that_ends_at_its_boundary(kind: Kind) -> None:
    rows = [
        [0, LONG, NO_PAGE, 0, LONG, 1],
        [LONG, LONG + 50, 2, 3, 10, 2],
        [2 * LONG + 50, LONG + 8, 4, 5, LONG, 4],
    ]
    tokens = 3 * LONG + 58
    case, wanted = _cases(kind, rows, tokens, 6, torch.bfloat16)
    plan = make_recurrent_plan(case.chains, tokens, torch.bfloat16, CUDA)
    assert len(plan.phases) == 2
    _compare(case, wanted, planned(case.inputs, case.gates, case.parts, case.layer, plan), 1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_replays_with_other_chains(kind: Kind) -> None:
    """Decodes captured once: pages and padding change between replays, addresses do not."""
    rows = [[index, 1, index, NO_PAGE, 0, index] for index in range(8)]
    case, _ = _cases(kind, rows, 8, 20, torch.bfloat16)
    chains = torch.from_numpy(case.chains.astype(np.int32)).cuda()
    state_step(case.inputs, case.gates, case.parts, case.layer, chains)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = state_step(case.inputs, case.gates, case.parts, case.layer, chains)
    for seed in range(3):
        pages = random.Random(seed).sample(range(20), 14)
        rows = [[index, 1, pages[index], pages[index + 7], 1, pages[index]] for index in range(7)]
        fresh, wanted = _cases(kind, rows, 8, 20, torch.bfloat16, seed)
        case.pages.copy_(fresh.pages)
        case.inputs.copy_(fresh.inputs)
        case.gates.copy_(fresh.gates)
        padded = np.concatenate((fresh.chains, [[0, 0, -1, -1, 0, -1]])).astype(np.int32)
        chains.copy_(torch.from_numpy(padded))
        out.zero_()
        graph.replay()
        _compare(case, wanted, out, 5e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_in_pieces_equal_transformers(family: Family, tmp_path: Path) -> None:
    """In float32, with fused norms and activations, and states that pass through pages."""
    theirs = make_model(family, tmp_path)
    arch = load_arch(tmp_path)
    weights = load_weights(tmp_path, arch, dtype=torch.float32, device="cuda")
    ours = Transformer(arch, weights, triton_ops())
    drawn = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, 120, (length,), generator=drawn) for length in (60, 37)]
    for got, text in zip(run_in_pieces(ours, texts, random.Random(7), "cuda"), texts, strict=True):
        with torch.inference_mode():
            want = theirs(text[None]).logits[0]
        assert float((got.cpu() - want).abs().max() / want.std()) < 1e-4
