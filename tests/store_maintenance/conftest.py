"""Fixtures: a Redis of one's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import redis

from support.store.redis_server import RedisServer, redis_server_fixture

shared_redis = redis_server_fixture("session")


@pytest.fixture
def client(shared_redis: RedisServer) -> Iterator[redis.Redis]:
    """A look behind a Redis store's back, on an empty server."""
    with contextlib.closing(shared_redis.client()) as plain:
        plain.flushall()
        yield plain
