"""Layers with windows keep what the window needs: the logits are those of a stateless run, whatever else is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engine.checkpoints import Family, tiny_checkpoint
from support.engine.window_cases import CASES


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "phi3"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_windows(case: Callable[[Path, str], None], family: Family, checkpoints: Path) -> None:
    """Windows beside full layers, the same with other frequencies, and windows alone."""
    case(tiny_checkpoint(family, checkpoints), "cpu")
