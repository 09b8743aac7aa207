"""Keeps the door's process alive: starts it, starts it again after it died or got stuck, ends it with the server."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Final, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from pensieve.server.child import RestartPauses
from pensieve.server.gateway.process import GatewayCommand, GatewayEnded, GatewayProcess
from pensieve.server.tasks import end_task

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0
"""After a life of this length the next start comes after the first pause again."""
QUIET_S: Final = 3.0
"""The process says every half second that it lives; without a word for so long it counts as stuck."""
HUNG_S: Final = 10.0
"""Without a word for so long it is killed: what it had in hand is lost to its callers, who come again."""
METRICS_S: Final = 1.0
"""How long a scrape waits for the door's share."""
_BACKLOG: Final = 2048


GatewayState = Literal["starting", "serving", "hung", "restarting", "draining"]
"""``hung``: the process is silent, and is killed if it stays so. ``restarting``: it has ended and another one comes."""


class GatewayError(Exception):
    """The door cannot be opened; the text is for the operator."""


class Gateway(Collector):
    """The door of one server. ``open``, ``start`` and ``ready``; then ``drain``, ``finish`` and ``close``.

    The socket that listens stays here: while the process is started again, callers wait in its backlog.
    """

    def __init__(self, command: GatewayCommand) -> None:
        self._command = command
        self._listener: socket.socket | None = None
        self._process: GatewayProcess | None = None
        self._serving = False
        self._stuck = False
        self._ending = False
        self.state: GatewayState = "starting"
        self.since_s = time.time()
        """Unix time from which ``state`` holds."""
        self.restarts = 0
        self._keeping: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._page = ""

    @property
    def problem(self) -> str:
        """Why the door takes no calls; "" when it does."""
        if self._ending:
            return "draining"
        if self._stuck:
            return "the HTTP door does not answer"
        if not self._serving:
            return "the HTTP door is starting"
        away = self._process is not None and self._process.away
        return "the HTTP door does not reach the service" if away else ""

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._process.pid if self._process is not None else None

    def open(self, host: str, port: int) -> int:
        """Listen; the port, found by the system when it was 0. Raises GatewayError."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            # Python adds the address to ``strerror``; errors of names have numbers of their own.
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise GatewayError(f"cannot listen on {host}:{port}: {why}") from error
        bound: int = self._listener.getsockname()[1]
        return bound

    def start(self) -> None:
        """Start the process, and keep it alive from here on."""
        self._first = asyncio.get_running_loop().create_future()
        self._keeping = asyncio.create_task(self._keep(), name="http")

    async def ready(self) -> None:
        """Returns when calls are taken. Raises GatewayError when the first process did not come to that."""
        assert self._first is not None, "not started"
        await self._first

    async def drain(self) -> None:
        """Take no new calls; those that run go on."""
        self._become(ending=True)
        if self._listener is not None:
            self._listener.close()  # else whoever connects would wait in its backlog, for nothing
        if self._process is not None:
            self._process.tell("drain")

    async def finish(self, patience_s: float) -> None:
        """After ``drain``, when no turn runs any more: last answers have ``patience_s`` to get out.

        What has not ended then waits for what this server will not do, and ends with an error, in as much time again.
        """
        if self._keeping is None:
            return
        await asyncio.wait({self._keeping}, timeout=patience_s)
        if self._process is not None:
            self._process.tell("finish")
            await asyncio.wait({self._keeping}, timeout=patience_s)

    async def close(self) -> None:
        """End it at once, if it has not ended."""
        self._become(ending=True)
        if self._keeping is not None:
            await end_task(self._keeping)
        if self._first is not None and not self._first.cancel() and not self._first.cancelled():
            self._first.exception()  # seen now, if nobody has waited for it
        if self._listener is not None:
            self._listener.close()

    def watch_in(self, registry: CollectorRegistry) -> None:
        """Show its metrics there."""
        registry.register(self)

    async def refresh(self) -> None:
        """Ask the process for its metrics; ``collect`` tells the latest."""
        if self._process is not None and self._serving:
            self._page = await self._process.metrics(METRICS_S)

    def collect(self) -> Iterator[Metric]:
        up = self._serving and not self._stuck
        yield GaugeMetricFamily("pensieve_http_up", "Whether the HTTP door takes calls.", up)
        yield CounterMetricFamily(
            "pensieve_http_restarts", "Times the HTTP door's process was started again.", self.restarts
        )
        yield from text_string_to_metric_families(self._page)

    async def _keep(self) -> None:
        """One process after the other. What ends the first before it was ready ends this."""
        pauses = RestartPauses(FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S)
        while True:
            began = time.monotonic()
            why = await self._live()
            if self._ending:
                return
            assert self._first is not None
            if not self._first.done():
                self._first.set_exception(GatewayError(f"the HTTP door did not start: {why}"))
                return
            pauses.lived(time.monotonic() - began)
            pause = pauses.next()
            log.error("the HTTP door ended and is started again: %s", why, extra={"pause_s": pause})
            await asyncio.sleep(pause)
            self.restarts += 1

    async def _live(self) -> str:
        """Run a process to its end; why it ended."""
        assert self._listener is not None
        try:
            self._process = process = await GatewayProcess.spawn(self._command, self._listener)
        except OSError as error:
            return str(error)
        try:
            await process.ready()
            if self._first is not None and not self._first.done():
                self._first.set_result(None)
            self._become(serving=True)
            watching = asyncio.create_task(self._watch(process), name="http watch")
            try:
                return process.last_words(await process.wait())
            finally:
                watching.cancel()
        except GatewayEnded as error:
            return str(error)
        finally:
            self._become(serving=False, stuck=False)
            self._page = ""
            process.kill()
            await process.wait()
            self._process = None

    async def _watch(self, process: GatewayProcess) -> None:
        """Kill a process that is stopped, or whose event loop is."""
        silence = process.silence
        while silence.seconds < HUNG_S:
            began = time.monotonic()
            await asyncio.sleep(silence.tick_s)
            silence.passed(time.monotonic() - began)
            self._become(stuck=silence.seconds >= QUIET_S)
        log.error("the HTTP door has not answered for %.0f s: killing it", silence.seconds)
        process.kill()

    def _become(
        self, *, serving: bool | None = None, stuck: bool | None = None, ending: bool | None = None
    ) -> None:
        """Take in what is new, and when the state changed with it."""
        self._serving = self._serving if serving is None else serving
        self._stuck = self._stuck if stuck is None else stuck
        self._ending = self._ending if ending is None else ending
        state = self._find_state()
        if state != self.state:
            self.state, self.since_s = state, time.time()

    def _find_state(self) -> GatewayState:
        if self._ending:
            return "draining"
        if self._stuck:
            return "hung"
        if self._serving:
            return "serving"
        return "restarting" if self._first is not None and self._first.done() else "starting"
