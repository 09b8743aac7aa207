"""Fixtures: ``bench`` is each of the three stores in turn, opened and empty."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from pensieve.store.redis_store import RedisStore
from support.store.redis_server import RedisServer, redis_server_fixture
from support.store.store_bench import Bench, MemoryBench, RedisBench, SqliteBench, opened, opened_redis

shared_redis = redis_server_fixture("session")

BACKENDS = ["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)]
"""The three stores, for tests that all of them have to pass."""


@pytest.fixture(params=BACKENDS)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with contextlib.AsyncExitStack() as stack:
        made: Bench
        if request.param == "memory":
            made = MemoryBench()
        elif request.param == "sqlite":
            made = SqliteBench(tmp_path / "history.db")
        else:
            server: RedisServer = request.getfixturevalue("shared_redis")
            client = stack.enter_context(contextlib.closing(server.client()))
            client.flushall()
            made = RedisBench(server.url, client)
        yield await stack.enter_async_context(opened(made))


@pytest.fixture
def client(shared_redis: RedisServer) -> Iterator[redis.Redis]:
    """A look behind a Redis store's back, on an empty server."""
    with contextlib.closing(shared_redis.client()) as plain:
        plain.flushall()
        yield plain


@pytest.fixture
async def store(shared_redis: RedisServer, client: redis.Redis) -> AsyncIterator[RedisStore]:
    """A Redis store, opened and empty."""
    async with opened_redis(shared_redis.url) as one:
        yield one
