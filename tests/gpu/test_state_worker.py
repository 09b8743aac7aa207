"""Recurrent layers on a GPU: states pass from page to page, with and without CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pensieve.engine.plan import NO_PAGE
from support.engine import state_driver
from support.engine.state_cases import CASES, random_tokens
from support.engine.state_driver import StateContext
from support.model.recurrent_models import Family, make_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "plain"])
@pytest.mark.parametrize("family", ["mamba2", "falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_states(
    case: Callable[[Path, str], None],
    family: Family,
    cuda_graphs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(state_driver.OPTIONS, "cuda_graphs", cuda_graphs)
    make_model(family, tmp_path)
    case(tmp_path, "cuda")


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_long_chains_in_half_precision(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long chains are computed by blocks and without a graph, short ones token by token: the same up to rounding."""
    monkeypatch.setitem(state_driver.OPTIONS, "dtype", "bfloat16")
    make_model(family, tmp_path)
    tokens = random_tokens(220)
    context = StateContext(tmp_path, tokens, "cuda")
    live, boundary = context.state_page(), context.state_page()
    context.run([(0, 120)], NO_PAGE, live, (boundary, 100))
    by_blocks = context.run([(120, 220)], live, live)
    from_boundary = context.run([(100, 220)], boundary, live)
    read = NO_PAGE
    for start in range(0, 220, 20):
        by_tokens = context.run([(start, start + 20)], read, live)
        read = live
    context.close()
    scale = by_tokens.std()
    for got in (by_blocks, from_boundary):
        assert (got - by_tokens).abs().max() < 0.1 * scale, f"{(got - by_tokens).abs().max() / scale}"
