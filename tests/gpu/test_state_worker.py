"""Recurrent layers on a GPU: states pass from page to page, with and without CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engine import state_driver
from support.engine.state_cases import CASES
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
