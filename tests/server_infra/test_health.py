"""The verdict of health, from its causes."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2

from pensieve.errors import Unavailable
from pensieve.server.links.engine_link import LinkState
from pensieve.server.operations import health
from pensieve.server.operations.health import SERVICES, HealthMonitor

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Engine:
    state = LinkState.SERVING
    stalled = False


class Store:
    error: Exception | None = None
    hangs = False
    deaf = False
    """Does not even end when it is told to."""
    pings = 0

    async def ping(self) -> None:
        self.pings += 1
        while self.hangs:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                if not self.deaf:
                    raise
        if self.error is not None:
            raise self.error


class Setup:
    def __init__(self) -> None:
        self.engine, self.store, self.errors, self.draining = Engine(), Store(), 0, False
        self.monitor = HealthMonitor(
            self.engine, self.store, on_store_error=self._count, draining=lambda: self.draining
        )

    def _count(self) -> None:
        self.errors += 1

    async def statuses(self) -> set[int]:
        request = health_pb2.HealthCheckRequest
        return {
            (await self.monitor.servicer.Check(request(service=service), None)).status for service in SERVICES
        }

    async def becomes(self, status: int) -> None:
        async with asyncio.timeout(10):
            while await self.statuses() != {status}:
                await asyncio.sleep(0.005)


@pytest.fixture
async def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(health, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(health, "STORE_INTERVAL_S", 0.01)
    monkeypatch.setattr(health, "STORE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(health, "STORE_GIVE_UP_S", 0.2)
    return Setup()


def test_the_intervals_keep_the_promise_of_five_seconds() -> None:
    assert health.CHECK_INTERVAL_S + health.STORE_INTERVAL_S + health.STORE_TIMEOUT_S < 5


async def test_not_serving_before_the_engine_is_up_then_serving(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """A start is nothing to warn of; what comes later is."""
    caplog.set_level("INFO")
    setup.engine.state = LinkState.STARTING
    await setup.monitor.start()
    assert await setup.statuses() == {NOT_SERVING}
    setup.engine.state = LinkState.SERVING
    await setup.monitor.refresh()
    assert await setup.statuses() == {SERVING}
    setup.engine.state = LinkState.RESTARTING
    await setup.monitor.refresh()
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
    await setup.monitor.stop()


async def test_each_cause_and_recovery(setup: Setup) -> None:
    await setup.monitor.start()
    await setup.becomes(SERVING)
    setup.engine.state = LinkState.RESTARTING
    await setup.becomes(NOT_SERVING)
    assert setup.monitor.problem == "engine restarting"
    setup.engine.state = LinkState.SERVING
    await setup.becomes(SERVING)
    setup.engine.stalled = True
    await setup.becomes(NOT_SERVING)
    setup.engine.stalled = False
    await setup.becomes(SERVING)
    setup.store.error = Unavailable("the file is gone", reason="STORE_FULL")
    await setup.becomes(NOT_SERVING)
    assert setup.monitor.problem == "store: STORE_FULL" and setup.errors > 0
    setup.store.error = None
    await setup.becomes(SERVING)
    setup.store.hangs = True
    await setup.becomes(NOT_SERVING)
    setup.store.hangs = False
    await setup.becomes(SERVING)
    setup.draining = True
    await setup.becomes(NOT_SERVING)
    await setup.monitor.stop()


async def test_a_store_that_hangs_and_does_not_let_go_is_not_waited_for(setup: Setup) -> None:
    setup.store.hangs = setup.store.deaf = True
    await setup.monitor.start()
    assert await setup.statuses() == {NOT_SERVING} and setup.monitor.problem == "store does not answer"
    await setup.becomes(NOT_SERVING)
    async with asyncio.timeout(10):
        while setup.store.pings < 3:  # one is given up, and the next one asks anew
            await asyncio.sleep(0.005)
    setup.store.hangs = False
    await setup.becomes(SERVING)
    await setup.monitor.stop()


async def test_a_slow_answer_counts_when_it_comes(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "STORE_GIVE_UP_S", 1000.0)
    await setup.monitor.start()
    setup.store.hangs = True
    await setup.becomes(NOT_SERVING)
    asked = setup.store.pings
    setup.store.hangs = False
    await setup.becomes(SERVING)
    assert setup.store.pings >= asked
    await setup.monitor.stop()


async def test_a_change_is_told_at_once_when_somebody_wakes_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "CHECK_INTERVAL_S", 1000.0)
    await setup.monitor.start()
    setup.engine.state = LinkState.RESTARTING
    setup.monitor.wake()
    await setup.becomes(NOT_SERVING)
    await setup.monitor.stop()


async def test_shutting_down_is_for_good(setup: Setup) -> None:
    await setup.monitor.start()
    await setup.monitor.shut_down()
    assert await setup.statuses() == {NOT_SERVING}
    await setup.monitor.refresh()
    assert await setup.statuses() == {NOT_SERVING} and setup.monitor.problem == "draining"
    await setup.monitor.stop()


async def test_told_to_stop_while_it_is_woken_it_stops(setup: Setup) -> None:
    # asyncio.wait_for of Python 3.11 forgets the one for the other, and whoever waits for the task waits for ever.
    await setup.monitor.start()
    await asyncio.sleep(0.001)
    setup.monitor.wake()
    await asyncio.sleep(0)  # the event's waiter has run, the task that waits for it has not
    stopping = asyncio.create_task(setup.monitor.stop())
    done, _ = await asyncio.wait({stopping}, timeout=5)
    assert done
