"""The connection under ``redis_store``: how Redis is called, what its errors mean, whether it is still our store."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.commands.core import AsyncScript

from pensieve.errors import FailedPrecondition, PensieveError
from pensieve.store import _refusals

log = logging.getLogger(__name__)

SCHEMA = 1
MARKER = "pv1:store"
"""HASH store_id, schema: written once, never expires; its absence later means that the data were lost."""

SOCKET_TIMEOUT_S = 2.0
HEALTH_CHECK_S = 30
RETRIES = 3
"""Commands are sent again after a lost reply, which every script is made for."""
MAX_CONNECTIONS = 32
POOL_WAIT_S = 5.0

_REFUSES_WRITES = ("MISCONF", "OOM")


class RedisLink:
    """One client with its pool. Every call raises the store's own errors."""

    def __init__(
        self, url: str, *, retries: int = RETRIES, socket_timeout_s: float = SOCKET_TIMEOUT_S
    ) -> None:
        """Connects to nothing yet. Raises ValueError on a bad URL."""
        parts = urlsplit(url)
        self.place = f"{parts.hostname}:{parts.port or 6379}"
        """For messages: without the credentials that the URL may hold."""
        self.store_id = ""
        self.durability = "unknown"
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=POOL_WAIT_S,
            protocol=3,
            decode_responses=False,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=socket_timeout_s,
            health_check_interval=HEALTH_CHECK_S,
            retry=Retry(ExponentialWithJitterBackoff(cap=0.5, base=0.02), retries),
        )
        self._client = Redis.from_pool(pool)

    def script(self, source: str) -> AsyncScript:
        """Registered: called by its hash, loaded again when the server has forgotten it."""
        return self._client.register_script(source)

    async def call(self, script: AsyncScript, keys: list[str], args: list[Any]) -> list[Any]:
        """The script's reply: an outcome name (bytes), then its values."""
        async with self._translating():
            reply: list[Any] = await script(keys=keys, args=args)
            return reply

    async def command(self, *words: Any) -> Any:
        """One command."""
        async with self._translating():
            return await self._client.execute_command(*words)  # type: ignore[no-untyped-call]

    async def commands(self, batch: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Several commands in one round trip, in order; others' commands may run between them.

        Never MULTI: a Redis whose memory is full refuses even reads inside of it.
        """
        async with self._translating(), self._client.pipeline(transaction=False) as pipeline:
            return await _run(pipeline, batch)

    async def open(self) -> None:
        """Check the server's settings and the marker, and write the marker into an empty store."""
        await self._check_settings()
        found = await self.command("HMGET", MARKER, "store_id", "schema")
        if None in found:  # two servers may be here at once: the first value written stays
            await self.command("HSETNX", MARKER, "schema", SCHEMA)
            await self.command("HSETNX", MARKER, "store_id", uuid.uuid4().hex)
            found = await self.command("HMGET", MARKER, "store_id", "schema")
        store_id, schema = (value.decode() for value in found)
        if not schema.isdecimal() or int(schema) > SCHEMA:
            raise _refusals.newer_schema(schema, SCHEMA)
        if self.store_id and store_id != self.store_id:
            raise _refusals.replaced(f"the Redis at {self.place} holds another store than before")
        self.store_id = store_id

    async def check_marker(self) -> None:
        """Raises Unavailable (STORE_REPLACED) when this is not the store that was opened.

        Asked wherever "there is nothing" would be the answer: a wiped Redis must not look like one without sessions.
        """
        found = await self.command("HGET", MARKER, "store_id")
        if not self.store_id:
            raise _refusals.unavailable("the store is not open")
        if found is None or found.decode() != self.store_id:
            raise _refusals.replaced(f"the Redis at {self.place} was emptied or replaced")

    async def close(self) -> None:
        await self._client.aclose()

    async def _check_settings(self) -> None:
        """Refuse a Redis that may evict; learn how durable an acknowledged write is."""
        try:
            raw = await self.command("CONFIG", "GET", "maxmemory-policy", "appendonly", "appendfsync")
        except FailedPrecondition as error:
            log.warning(
                "Redis at %s: CONFIG GET is not allowed, durability is unknown: %s", self.place, error
            )
            self.durability = "unknown"
            return
        found = {name.decode(): value.decode() for name, value in _pairs(raw)}
        policy = found.get("maxmemory-policy", "noeviction")
        if policy != "noeviction":
            raise FailedPrecondition(
                f"the Redis at {self.place} has maxmemory-policy {policy} and may evict conversations: "
                "set maxmemory-policy noeviction",
                reason="STORE_UNSAFE",
            )
        levels = {"always": "fsync", "everysec": "local"}
        appends = found.get("appendonly") == "yes"
        self.durability = levels.get(found.get("appendfsync", ""), "none") if appends else "none"

    @asynccontextmanager
    async def _translating(self) -> AsyncIterator[None]:
        try:
            yield
        except exceptions.RedisError as error:
            translated = self._translated(error)
            if translated is None:
                raise
            raise translated from error

    def _translated(self, error: exceptions.RedisError) -> PensieveError | None:
        """The store's error for Redis'; None for what can only be a bug of ours."""
        problem = f"Redis at {self.place}: {error}"
        if isinstance(error, exceptions.OutOfMemoryError) or str(error).startswith(_REFUSES_WRITES):
            return _refusals.full(problem)
        if isinstance(error, exceptions.NoPermissionError) or "unknown command" in str(error):
            return FailedPrecondition(f"history store: {problem}", reason="STORE_FORBIDDEN")
        passing = (
            exceptions.ConnectionError,
            exceptions.TimeoutError,
            exceptions.ReadOnlyError,
            exceptions.ClusterError,
        )
        if isinstance(error, passing) or str(error).startswith(
            ("BUSY", "NOREPLICAS", "LOADING", "MASTERDOWN")
        ):
            return _refusals.unavailable(problem)
        return None


async def _run(pipeline: Pipeline, batch: Iterable[tuple[Any, ...]]) -> list[Any]:
    for words in batch:
        pipeline.execute_command(*words)
    replies: list[Any] = await pipeline.execute()
    return replies


def _pairs(reply: Any) -> Iterable[tuple[bytes, bytes]]:
    """A map reply, in the form that this connection's protocol gives it."""
    if isinstance(reply, dict):
        items: Iterable[tuple[bytes, bytes]] = reply.items()
        return items
    return zip(reply[::2], reply[1::2], strict=True)
