"""Layers with windows on a GPU: slots, page tables and slices of their own, with and without CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engine import window_driver
from support.engine.checkpoints import Family, tiny_checkpoint
from support.engine.window_cases import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "plain"])
@pytest.mark.parametrize("family", ["gemma2", "phi3"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_windows(
    case: Callable[[Path, str], None],
    family: Family,
    cuda_graphs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(window_driver.OPTIONS, "cuda_graphs", cuda_graphs)
    case(tiny_checkpoint(family, tmp_path), "cuda")
