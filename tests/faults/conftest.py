"""Stores that outlive the servers under test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.store.redis_server import redis_server


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of each durable kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'history.sqlite3'}"
        return
    with redis_server() as server:
        yield server.url
