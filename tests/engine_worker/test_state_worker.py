"""Recurrent layers read and write the state pages that the plan names: the logits are those of a stateless run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engine.state_cases import CASES
from support.model.recurrent_models import Family, make_model


@pytest.fixture(scope="module", params=["mamba2", "falcon_h1", "qwen3_next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States alone, states and attention in one layer, and in different layers."""
    family: Family = request.param
    made = tmp_path_factory.mktemp(family)
    make_model(family, made)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_states(case: Callable[[Path, str], None], folder: Path) -> None:
    case(folder, "cpu")
