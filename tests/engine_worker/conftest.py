"""One checkpoint per family and session."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.engine.checkpoints import FAMILIES, tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, checkpoints: Path) -> Path:
    """Each family in turn."""
    return tiny_checkpoint(request.param, checkpoints)


@pytest.fixture
def llama(checkpoints: Path) -> Path:
    return tiny_checkpoint("llama3", checkpoints)
