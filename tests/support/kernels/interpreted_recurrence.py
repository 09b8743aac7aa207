"""The kernels of recurrent layers in Triton's interpreter, against the reference."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pensieve.kernels.recurrence import NO_PAGE
from pensieve.kernels.recurrent import recurrent
from pensieve.kernels.state_chunks import make_recurrent_plan
from pensieve.kernels.state_chunks import recurrent as planned
from pensieve.kernels.state_step import convolve, state_step
from support.kernels.recurrence_cases import KINDS, Case, Kind, make_case, make_layer, random_rows

CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def _device_chains(case: Case) -> torch.Tensor:
    return torch.from_numpy(case.chains.astype(np.int32))


def _check_pages(case: Case, wanted: Case) -> None:
    """Equal inputs of the convolution, equal states; NaN where nothing was written."""
    assert torch.equal(case.parts[0].nan_to_num(7.0), wanted.parts[0].nan_to_num(7.0))
    torch.testing.assert_close(case.parts[1], wanted.parts[1], equal_nan=True, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_random_steps(kind: Kind, seed: int) -> None:
    """Chains of a few tokens, padding among them, sizes that are no powers of two, groups of heads."""
    rows, tokens, pages = random_rows(random.Random(seed), most=2, longest=8)
    shape, key_heads = ((2, 8, 6), (4, 5, 16), (3, 16, 3))[seed % 3], (1, 2, 3)[seed % 3]
    layer = make_layer(
        kind,
        seed,
        heads=shape[0],
        key_heads=key_heads,
        key=shape[1],
        value=shape[2],
        width=(4, 2, 3)[seed % 3],
    )
    rows.append([0, 0, NO_PAGE, NO_PAGE, 0, NO_PAGE])
    case, wanted = (make_case(layer, shape, rows, tokens, pages, seed) for _ in range(2))
    want = recurrent(wanted.inputs, wanted.gates, wanted.parts, layer, wanted.chains)
    out = torch.zeros_like(want)
    assert state_step(case.inputs, case.gates, case.parts, layer, _device_chains(case), out) is out
    torch.testing.assert_close(out, want, **CLOSE)
    _check_pages(case, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_in_place(kind: Kind) -> None:
    """Fewer tokens than the convolution is wide, in the page that is read: the inputs move up, none is lost."""
    layer = make_layer(kind, heads=2, key_heads=1)
    for rows, boundary, live in ((1, NO_PAGE, 0), (1, 0, 1), (2, 2, 0), (4, 0, 1)):
        chains = [[0, rows, 0, boundary, min(rows, 2), live]]
        case, wanted = (make_case(layer, (2, 8, 6), chains, rows, 3) for _ in range(2))
        want = recurrent(wanted.inputs, wanted.gates, wanted.parts, layer, wanted.chains)
        got = state_step(case.inputs, case.gates, case.parts, layer, _device_chains(case))
        torch.testing.assert_close(got, want, **CLOSE)
        _check_pages(case, wanted)


def test_convolution_shared_out() -> None:
    """Programs of 16 tokens each give what one program gives."""
    layer = make_layer("ssd")
    chains = [[0, 40, 0, NO_PAGE, 0, 0], [41, 17, NO_PAGE, 1, 17, 2]]
    case, wanted = (make_case(layer, (4, 8, 6), chains, 60, 3) for _ in range(2))
    mixed = [
        convolve(each.inputs, each.parts[0], layer, _device_chains(each), most, torch.zeros_like(each.inputs))
        for each, most in ((case, 40), (wanted, None))
    ]
    assert torch.equal(*mixed)
    assert torch.equal(case.pages, wanted.pages)


def test_a_float32_step_needs_no_other_package() -> None:
    """A plan without fla-core: long runs of float32 go token by token."""
    chains = [[0, 66, NO_PAGE, 1, 64, 0], [68, 2, 2, NO_PAGE, 0, 2]]
    layer = make_layer("gated_delta", heads=1, key_heads=1)
    case, wanted = (make_case(layer, (1, 8, 6), chains, 71, 4) for _ in range(2))
    want = recurrent(wanted.inputs, wanted.gates, wanted.parts, layer, wanted.chains)
    plan = make_recurrent_plan(case.chains, 71, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(planned(case.inputs, case.gates, case.parts, layer, plan), want, **CLOSE)
    _check_pages(case, wanted)


def test_chains_that_share_a_page_are_refused() -> None:
    layer = make_layer("ssd")
    chains = [[0, 3, 0, NO_PAGE, 0, 1], [3, 3, 1, NO_PAGE, 0, 2]]
    case = make_case(layer, (4, 8, 6), chains, 6, 3)
    with pytest.raises(ValueError, match="reads state page 1"):
        make_recurrent_plan(case.chains, 6, torch.float32, torch.device("cpu"))
