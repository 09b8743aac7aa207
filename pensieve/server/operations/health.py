"""Health by progress: the server is healthy when its store takes writes and its engine makes steps.

A long prefill is not a stall: the link knows how long a step of its size takes. The link calls ``wake`` when its
state changes, so an engine's death is reported at once; a stall is noticed within ``CHECK_INTERVAL_S``. A store that
hangs does not block the monitor: its ping stays in the background, and the store is healthy again when that ping or a
later one is answered. All ``grpc.health.v1`` services of this server share one status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from pensieve.errors import PensieveError
from pensieve.server.links.engine_link import EngineLink, LinkState
from pensieve.server.tasks import cancel_and_wait
from pensieve.store import HistoryStore

log = logging.getLogger(__name__)

SERVICES: Final = ("", "pensieve.v1.ConversationService", "pensieve.v1.AdminService")
CHECK_INTERVAL_S: Final = 0.5
STORE_INTERVAL_S: Final = 1.0
STORE_TIMEOUT_S: Final = 1.5
"""A ping that takes longer marks the store as down."""
STORE_GIVE_UP_S: Final = 10.0
"""A ping that takes longer is abandoned for a new one: its connection may be dead."""


class HealthMonitor:
    """Keeps a ``grpc.health.v1`` servicer up to date between ``start`` and ``stop``."""

    def __init__(
        self,
        engine: EngineLink,
        store: HistoryStore,
        *,
        on_store_error: Callable[[], None] = lambda: None,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.servicer = health_aio.HealthServicer()
        self._engine = engine
        self._store = store
        self._on_store_error = on_store_error
        self._draining = draining
        self._store_problem = ""
        self._shut_down = False
        self._published: str | None = None
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._ping: asyncio.Task[None] | None = None
        self._abandoned: set[asyncio.Task[None]] = set()

    @property
    def problem(self) -> str:
        """Why calls are not served; "" when they are."""
        if self._shut_down or self._draining():
            return "draining"
        if self._engine.state is not LinkState.SERVING:
            return f"engine {self._engine.state.value}"
        if self._engine.stalled:
            return "engine stalled"
        return self._store_problem

    async def start(self) -> None:
        await self._check_store()
        await self.refresh()
        self._tasks = [
            asyncio.create_task(self._watch_engine(), name="health"),
            asyncio.create_task(self._watch_store(), name="store health"),
        ]

    def wake(self) -> None:
        """Check now: something has changed."""
        self._wake.set()

    async def refresh(self) -> None:
        """Compute the present status. Publish and log it if it changed."""
        problem = self.problem
        if problem == self._published:
            return
        starts = self._published is None and self._engine.state is LinkState.STARTING
        if problem:
            log.log(logging.INFO if starts else logging.WARNING, "not serving: %s", problem)
        else:
            log.info("serving")
        self._published = problem
        response = health_pb2.HealthCheckResponse
        for service in SERVICES:
            await self.servicer.set(service, response.NOT_SERVING if problem else response.SERVING)

    async def shut_down(self) -> None:
        """Answer NOT_SERVING from now on."""
        self._shut_down = True
        await self.servicer.enter_graceful_shutdown()

    async def stop(self) -> None:
        pings = [*self._abandoned, *([self._ping] if self._ping is not None else [])]
        for ping in pings:
            ping.cancel()
        for task in self._tasks:
            await cancel_and_wait(task)
        if pings:
            await asyncio.wait(pings, timeout=STORE_TIMEOUT_S)
        self._tasks, self._ping = [], None

    async def _watch_engine(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._wake.wait()
            self._wake.clear()
            await self.refresh()

    async def _watch_store(self) -> None:
        while True:
            await asyncio.sleep(STORE_INTERVAL_S)
            await self._check_store()

    async def _check_store(self) -> None:
        """Run one ping. The status is updated after ``STORE_TIMEOUT_S`` without an answer, and again at the answer."""
        ping = self._ping = asyncio.create_task(self._store.ping(), name="store ping")
        done, _ = await asyncio.wait({ping}, timeout=STORE_TIMEOUT_S)
        if not done:
            self._record_store("store does not answer")
            if not self._tasks:  # at start: do not delay the first status
                self._abandon(ping)
                return
            done, _ = await asyncio.wait({ping}, timeout=STORE_GIVE_UP_S - STORE_TIMEOUT_S)
        if not done:
            self._abandon(ping)
            return
        self._ping = None
        try:
            ping.result()
        except PensieveError as error:
            self._record_store(f"store: {error.reason}")
        except Exception:
            log.exception("the store's ping raised an unexpected error")
            self._record_store("store fails")
        else:
            self._record_store("")

    def _record_store(self, problem: str) -> None:
        self._store_problem = problem
        if problem:
            self._on_store_error()
        self.wake()

    def _abandon(self, ping: asyncio.Task[None]) -> None:
        """Abandon a ping without waiting: a ping that hangs may not even end when cancelled."""
        self._ping = None
        self._abandoned.add(ping)
        ping.add_done_callback(self._on_abandoned_end)
        ping.cancel()

    def _on_abandoned_end(self, ping: asyncio.Task[None]) -> None:
        self._abandoned.discard(ping)
        if not ping.cancelled() and (error := ping.exception()) is not None:
            log.info("an abandoned ping ended with %s", type(error).__name__)
