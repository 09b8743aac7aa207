"""Fixtures: a Redis of one's own, and a patient of each kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support.store.patient import MADE, OTHER, Patient
from support.store.population import populate
from support.store.redis_server import RedisServer, redis_server_fixture
from support.store.store_bench import Bench, RedisBench, SqliteBench

shared_redis = redis_server_fixture("session")


@pytest.fixture
def client(shared_redis: RedisServer) -> Iterator[redis.Redis]:
    """A look behind a Redis store's back, on an empty server."""
    with contextlib.closing(shared_redis.client()) as plain:
        plain.flushall()
        yield plain


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
async def patient(request: pytest.FixtureRequest, tmp_path: Path) -> Patient:
    bench: Bench
    if request.param == "sqlite":
        url, bench = f"sqlite:///{tmp_path}/h.db", SqliteBench(tmp_path / "h.db")
    else:
        server: RedisServer = request.getfixturevalue("shared_redis")
        url, bench = server.url, RedisBench(server.url, request.getfixturevalue("client"))
    made = Patient(url, bench)
    async with made.served() as store:
        await populate(store, [MADE, OTHER])
    assert await made.problems() == set()
    return made
