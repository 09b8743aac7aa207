"""Fixtures: ``store`` is each of the three stores in turn, opened and empty; ``place`` is where it keeps its bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from pensieve.store import HistoryStore, open_store
from support.store.places import Place
from support.store.redis_server import redis_server_fixture

redis_server = redis_server_fixture("module")


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    folder = tmp_path / "store"
    folder.mkdir()
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        return Place(server.url, folder)
    return Place({"memory": "memory:", "sqlite": f"sqlite:///{folder}/h.db"}[request.param], folder)


@pytest.fixture
async def store(place: Place) -> AsyncIterator[HistoryStore]:
    made = open_store(place.url)
    await made.open()
    try:
        yield made
    finally:
        await made.close()
