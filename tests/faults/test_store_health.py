"""Health over a real Redis that hangs: seen while its commands still wait, and over without a restart."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from pensieve.server.links.engine_link import LinkState
from pensieve.server.operations.health import HealthMonitor
from support.store.redis_server import redis_server
from support.store.store_bench import opened_redis

pytestmark = pytest.mark.redis


class GoodEngine:
    state = LinkState.SERVING
    stalled = False


async def until(monitor: HealthMonitor, problem: str) -> None:
    async with asyncio.timeout(30):
        while monitor.problem != problem:
            await asyncio.sleep(0.01)


async def test_a_redis_that_hangs() -> None:
    with redis_server() as redis:
        async with opened_redis(redis.url) as store:
            monitor = HealthMonitor(GoodEngine(), store)
            await monitor.start()
            assert monitor.problem == ""
            assert redis._process is not None
            os.kill(redis._process.pid, signal.SIGSTOP)
            try:
                await until(monitor, "store does not answer")
            finally:
                os.kill(redis._process.pid, signal.SIGCONT)
            await until(monitor, "")
            await monitor.stop()
