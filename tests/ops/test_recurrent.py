"""Recurrent layers over state pages: against a token-by-token recurrence in float64, and against transformers."""

from __future__ import annotations

import random

import pytest
import torch

from pensieve.kernels import recurrent as module
from pensieve.kernels.recurrence import NO_PAGE
from pensieve.kernels.recurrent import STEPPED, causal_conv, recurrent
from support.kernels.recurrence_cases import (
    KINDS,
    Case,
    Kind,
    make_case,
    make_chains,
    make_layer,
    page_bytes,
    page_parts,
    random_rows,
    start_of,
    token_by_token,
)
from support.model.torch_only import MODELS

SHAPE = (4, 8, 6)
"""Heads, values of a key, values of a value."""
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
"""float32 against float64 over at most 200 tokens."""


def _check(case: Case, out: torch.Tensor, before: torch.Tensor) -> None:
    """Outputs, boundary and live pages are the oracle's; every other page has its bytes."""
    wanted = torch.zeros(out.shape, dtype=torch.float64)
    written = set()
    old = Case(case.layer, case.inputs, case.gates, before, _views(case, before), case.chains)
    for first, rows, read, boundary, after, live in case.chains.tolist():
        wanted[first : first + rows], states = token_by_token(old, start_of(old, read), first, rows)
        for page, at in ((boundary, after), (live, rows)):
            if page != NO_PAGE:
                written.add(page)
                assert torch.equal(case.parts[0][page].double(), states[at].inputs)
                torch.testing.assert_close(case.parts[1][page].double(), states[at].state, **CLOSE)
    torch.testing.assert_close(out.double(), wanted, **CLOSE)
    others = [page for page in range(len(before)) if page not in written]
    assert torch.equal(case.pages[others], before[others])


def _views(case: Case, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    channels, width = case.layer.conv_weight.shape
    return page_parts(pages, channels, width, SHAPE, case.inputs.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_random_steps(kind: Kind, seed: int) -> None:
    """Short and long chains in one step, from pages and from zeros, with and without boundaries, in place or not; no
    unread page is touched, and their NaN spreads nowhere."""
    rows, tokens, pages = random_rows(random.Random(seed))
    layer = make_layer(kind, seed, key_heads=(1, 2, 4)[seed % 3], width=(4, 2, 3)[seed % 3])
    case = make_case(layer, SHAPE, rows, tokens, pages, seed)
    before = case.pages.clone()
    out = recurrent(case.inputs, case.gates, case.parts, layer, case.chains)
    _check(case, out, before)


@pytest.mark.parametrize("kind", KINDS)
def test_many_batches_and_pieces(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that fill several batches, runs that fill several pieces."""
    monkeypatch.setattr(module, "BATCH_ELEMENTS", 2 * 4 * 8 * 6)
    monkeypatch.setattr(module, "PIECE", 2 * module.BLOCK)
    rows = [[5 * index, 1 + index % 4, index, NO_PAGE, 0, index] for index in range(7)]
    rows += [[40, 300, NO_PAGE, 7, 150, 8], [340, 20, 9, 10, 3, 9], [360, 5, 11, 12, 2, 13]]
    layer = make_layer(kind)
    case = make_case(layer, SHAPE, rows, 365, 14)
    before = case.pages.clone()
    _check(case, recurrent(case.inputs, case.gates, case.parts, layer, case.chains), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_cuts_do_not_matter(kind: Kind, seed: int) -> None:
    """A context in pieces, through its live page, has the outputs and the last state of one run; and each boundary page
    holds the state of a run that stops there."""
    rng = random.Random(seed)
    layer, total = make_layer(kind, seed), 150
    whole = make_case(layer, SHAPE, [[0, total, NO_PAGE, NO_PAGE, 0, 0]], total, 2, seed)
    out = recurrent(whole.inputs, whole.gates, whole.parts, layer, whole.chains)
    pieces = make_case(layer, SHAPE, [], total, 3, seed)
    got, at, read = [], 0, NO_PAGE
    while at < total:
        rows = min(total - at, rng.choice((1, 2, STEPPED, rng.randrange(1, 100))))
        after = rng.randrange(1, rows + 1)
        chains = make_chains([[0, rows, read, 1, after, 0]], rows, 3)
        own = slice(at, at + rows)
        got.append(recurrent(pieces.inputs[own], pieces.gates[own], pieces.parts, layer, chains))
        stops = make_case(layer, SHAPE, [[0, at + after, NO_PAGE, NO_PAGE, 0, 2]], total, 3, seed)
        recurrent(stops.inputs, stops.gates, stops.parts, layer, stops.chains)
        for part, other in zip(pieces.parts, stops.parts, strict=True):
            torch.testing.assert_close(part[1], other[2], **CLOSE)
        at, read = at + rows, 0
    torch.testing.assert_close(torch.cat(got), out, **CLOSE)
    for part, other in zip(pieces.parts, whole.parts, strict=True):
        torch.testing.assert_close(part[0], other[0], **CLOSE)


def test_a_page_is_read_before_it_is_written() -> None:
    """One chain writes the page that another reads in the same step."""
    for kind in KINDS:
        layer = make_layer(kind)
        for rows in (3, 40):
            chains = [[0, rows, 0, NO_PAGE, 0, 1], [rows, rows, 1, 0, rows - 1, 2]]
            case = make_case(layer, SHAPE, chains, 2 * rows, 3)
            before = case.pages.clone()
            _check(case, recurrent(case.inputs, case.gates, case.parts, layer, case.chains), before)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_keeps_a_float32_state(kind: Kind) -> None:
    """A state that passed through pages in bfloat16 would be off by 2⁻⁹; outputs are rounded once."""
    layer = make_layer(kind, dtype=torch.bfloat16)
    case = make_case(layer, SHAPE, [[0, 90, NO_PAGE, NO_PAGE, 0, 0]], 90, 1)
    out = recurrent(case.inputs, case.gates, case.parts, layer, case.chains)
    wanted, states = token_by_token(case, start_of(case, NO_PAGE), 0, 90)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=1e-4)
    # The convolution rounds its sums differently now and then, by one unit.
    torch.testing.assert_close(case.parts[1][0].double(), states[-1].state, rtol=2e-3, atol=2e-3)


def test_ssd_equals_transformers() -> None:
    layer, total = make_layer("ssd", heads=4, key_heads=2, key=8, value=6), 100
    case = make_case(layer, SHAPE, [[0, total, NO_PAGE, NO_PAGE, 0, 0]], total, 1)
    out = recurrent(case.inputs, case.gates, case.parts, layer, case.chains)
    mixed = MODELS["mamba2"].causal_conv1d_fn(
        case.inputs.t()[None], layer.conv_weight, layer.conv_bias, activation="silu"
    )
    v, k, q = mixed.transpose(1, 2).split((24, 16, 16), dim=-1)
    wanted, state = MODELS["mamba2"].mamba2_chunk_scan(
        v.view(1, total, 4, 6), case.gates.view(1, total, 4), layer.decay, k.view(1, total, 2, 8),
        q.view(1, total, 2, 8), 32, D=layer.skip, dt_bias=layer.step_bias, dt_softplus=True,
        dt_limit=layer.step_limit, return_final_states=True,
    )  # fmt: skip
    torch.testing.assert_close(out, wanted[0], **CLOSE)
    torch.testing.assert_close(case.parts[1][0], state[0].transpose(1, 2), **CLOSE)


def test_gated_delta_equals_transformers() -> None:
    layer, total = make_layer("gated_delta"), 100
    case = make_case(layer, SHAPE, [[0, total, NO_PAGE, NO_PAGE, 0, 0]], total, 1)
    out = recurrent(case.inputs, case.gates, case.parts, layer, case.chains)
    mixed = causal_conv(case.inputs, layer.conv_weight, None, case.parts[0].clone(), case.chains)
    q, k, v = mixed.split((16, 16, 24), dim=-1)
    strength, step = case.gates.unbind(1)
    wanted, state = MODELS["qwen3_next"].torch_chunk_gated_delta_rule(
        q.view(1, total, 2, 8), k.view(1, total, 2, 8), v.view(1, total, 4, 6),
        (layer.decay * torch.nn.functional.softplus(step + layer.step_bias))[None], strength.sigmoid()[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert state is not None
    torch.testing.assert_close(out, wanted[0], **CLOSE)
    torch.testing.assert_close(case.parts[1][0], state[0], **CLOSE)


def test_strong_decay_overflows_nowhere() -> None:
    """exp of a block's whole decay underflows, its inverse would overflow."""
    for kind in KINDS:
        layer = make_layer(kind)
        layer.decay.fill_(-30.0)
        case = make_case(layer, SHAPE, [[0, 130, 0, NO_PAGE, 0, 1]], 130, 2)
        before = case.pages.clone()
        _check(case, recurrent(case.inputs, case.gates, case.parts, layer, case.chains), before)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 5, -1, -1, 0, 0], [4, 2, -1, -1, 0, 1]], "overlap"),
        ([[0, 11, -1, -1, 0, 0]], "outside the step"),
        ([[-1, 2, -1, -1, 0, 0]], "outside the step"),
        ([[0, 5, 3, -1, 0, 0]], "outside 0..2"),
        ([[0, 5, -1, -1, 0, 1], [5, 5, -1, 1, 5, -1]], "write one state page"),
        ([[0, 5, -1, 1, 6, 0]], "boundary"),
        ([[0, 5, -1, 1, 0, 0]], "boundary"),
        ([[0, 5, -1, 1, 4, -1]], "goes to no page"),
    ],
)
def test_bad_chains_are_refused(rows: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_chains(rows, 10, 3)


def test_padding_chains_do_nothing() -> None:
    layer = make_layer("ssd")
    case = make_case(layer, SHAPE, [[0, 0, -1, -1, 0, -1], [0, 3, -1, -1, 0, 0], [0, 0, -1, -1, 0, -1]], 4, 1)
    before = case.pages.clone()
    _check(case, recurrent(case.inputs, case.gates, case.parts, layer, case.chains), before)


def test_parts_of_a_page_are_aligned() -> None:
    """The state begins at a multiple of 16 bytes even where the inputs end elsewhere."""
    for dtype in (torch.float32, torch.bfloat16):
        size = page_bytes(7, 4, (1, 3, 5), dtype)
        pages = torch.zeros((2, size), dtype=torch.uint8)
        inputs, states = page_parts(pages, 7, 4, (1, 3, 5), dtype)
        assert size % 16 == 0
        assert (states.data_ptr() - pages.data_ptr()) % 16 == 0
        inputs.fill_(1)
        assert not states.any()
