"""Health, measured by progress: calls are served when the store takes writes and an engine serves and does not stall.

A long prefill is no stall: the link knows what a step of its size takes. The link calls ``wake`` when its state
changes, so an engine's death is told at once; a stall is noticed within ``CHECK_INTERVAL_S``. A store that hangs is not
waited for: its ping goes on in the background, and the store is well again when that ping, or one after it, is
answered. All ``grpc.health.v1`` services of this server share one verdict.
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
"""Between the answer to one ping of the store and the next ping."""
STORE_TIMEOUT_S: Final = 1.5
"""A ping that takes longer finds the store down."""
STORE_GIVE_UP_S: Final = 10.0
"""A ping that takes longer is given up for a new one: it may wait for a connection that is gone."""


class HealthMonitor:
    """Keeps a ``grpc.health.v1`` servicer truthful between ``start`` and ``stop``."""

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
        self._told: str | None = None
        self._look = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._ping: asyncio.Task[None] | None = None
        """The ping under way."""
        self._given_up: set[asyncio.Task[None]] = set()

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
        """Look now: something has changed."""
        self._look.set()

    async def refresh(self) -> None:
        """Find the present verdict, and tell it to watchers and the log if it is a new one."""
        problem = self.problem
        if problem == self._told:
            return
        starts = self._told is None and self._engine.state is LinkState.STARTING
        if problem:
            log.log(logging.INFO if starts else logging.WARNING, "not serving: %s", problem)
        else:
            log.info("serving")
        self._told = problem
        response = health_pb2.HealthCheckResponse
        for service in SERVICES:
            await self.servicer.set(service, response.NOT_SERVING if problem else response.SERVING)

    async def shut_down(self) -> None:
        """Answer NOT_SERVING from here on, whatever comes."""
        self._shut_down = True
        await self.servicer.enter_graceful_shutdown()

    async def stop(self) -> None:
        pings = [*self._given_up, *([self._ping] if self._ping is not None else [])]
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
                    await self._look.wait()
            self._look.clear()
            await self.refresh()

    async def _watch_store(self) -> None:
        while True:
            await asyncio.sleep(STORE_INTERVAL_S)
            await self._check_store()

    async def _check_store(self) -> None:
        """One ping from start to answer. The verdict falls after ``STORE_TIMEOUT_S``, and again at the answer."""
        ping = self._ping = asyncio.create_task(self._store.ping(), name="store ping")
        done, _ = await asyncio.wait({ping}, timeout=STORE_TIMEOUT_S)
        if not done:
            self._found("store does not answer")
            if not self._tasks:  # At start: whoever waits for the first verdict is not kept.
                self._give_up(ping)
                return
            done, _ = await asyncio.wait({ping}, timeout=STORE_GIVE_UP_S - STORE_TIMEOUT_S)
        if not done:
            self._give_up(ping)
            return
        self._ping = None
        try:
            ping.result()
        except PensieveError as error:
            self._found(f"store: {error.reason}")
        except Exception:
            log.exception("the store's ping failed in a way it should not")
            self._found("store fails")
        else:
            self._found("")

    def _found(self, problem: str) -> None:
        self._store_problem = problem
        if problem:
            self._on_store_error()
        self.wake()

    def _give_up(self, ping: asyncio.Task[None]) -> None:
        """Forget a ping without waiting for it: what hangs may not even end when it is cancelled."""
        self._ping = None
        self._given_up.add(ping)
        ping.add_done_callback(self._ended_late)
        ping.cancel()

    def _ended_late(self, ping: asyncio.Task[None]) -> None:
        self._given_up.discard(ping)
        if not ping.cancelled() and (error := ping.exception()) is not None:
            log.info("a ping that was given up ended with %s", type(error).__name__)
