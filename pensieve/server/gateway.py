"""The HTTP door of this server: a process of its own, kept alive here and told when to drain.

A process, because one that streams is busy with Python at all times, and would slow this one down. It speaks to the
service over a private socket, with the credentials that its callers send. ``Gateway`` starts it, starts it again after
it died or got stuck, and ends it with the server; ``GatewayProcess`` is one life of it: start, words both ways, end.

States of ``Gateway``, which alone changes them::

    starting ── ready ──> serving ── silent for QUIET_S ──> hung ── heard again ──> serving
    serving ── it ended ──> restarting ── the next one is ready ──> serving
    hung ── silent for HUNG_S, killed ──> restarting
    any ── drain or close ──> draining
    starting ── it ended ──> GatewayError from ``ready``
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from pensieve.debug import child_environment
from pensieve.server.child import ChildProcess, RestartBackoff, SilenceTimer
from pensieve.server.tasks import cancel_and_wait

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
            self._process.send("drain")

    async def finish(self, patience_s: float) -> None:
        """After ``drain``, when no turn runs any more: last answers have ``patience_s`` to get out.

        What has not ended then waits for what this server will not do, and ends with an error, in as much time again.
        """
        if self._keeping is None:
            return
        await asyncio.wait({self._keeping}, timeout=patience_s)
        if self._process is not None:
            self._process.send("finish")
            await asyncio.wait({self._keeping}, timeout=patience_s)

    async def close(self) -> None:
        """End it at once, if it has not ended."""
        self._become(ending=True)
        if self._keeping is not None:
            await cancel_and_wait(self._keeping)
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
        pauses = RestartBackoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S)
        while True:
            began = time.monotonic()
            why = await self._live()
            if self._ending:
                return
            assert self._first is not None
            if not self._first.done():
                self._first.set_exception(GatewayError(f"the HTTP door did not start: {why}"))
                return
            pauses.record_lifetime(time.monotonic() - began)
            pause = pauses.next_pause_s()
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
            silence.advance(time.monotonic() - began)
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


READY_S: Final = 60.0
"""How long it may take to start; a second is usual, on an idle machine."""
TICK_S: Final = 0.25
"""How often the keeper looks whether the process is silent."""


class GatewayEnded(Exception):
    """The process has ended, or does not answer; the text says why, as far as it is known."""


@dataclass(frozen=True, slots=True)
class GatewayCommand:
    """How the process is started."""

    target: str
    """The private socket, as a gRPC target."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    log_level: str = "info"
    log_json: bool = False
    max_body_bytes: int | None = None
    """The door's own default if None, as for what follows."""
    patience_s: float | None = None
    cors_origins: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    """Addresses and networks of those that may say for whom they call."""
    hosts: tuple[str, ...] = ()
    on_loopback: bool = False
    heartbeat_s: float | None = None

    def arguments(self, listener: int, control: int) -> list[str]:
        """Run on the safe path (-P): it never imports from the directory it was started in."""
        found = [sys.executable, "-P", "-m", "pensieve.http.child", "--parent", str(os.getpid())]
        found += ["--listener", str(listener), "--control", str(control), "--target", self.target]
        if self.tls_cert is not None and self.tls_key is not None:
            found += ["--tls", str(self.tls_cert), str(self.tls_key)]
        if self.tls_client_ca is not None:
            found += ["--tls-client-ca", str(self.tls_client_ca)]
        if self.max_body_bytes is not None:
            found += ["--max-body-bytes", str(self.max_body_bytes)]
        if self.patience_s is not None:
            found += ["--patience", str(self.patience_s)]
        found += [word for origin in self.cors_origins for word in ("--cors-origin", origin)]
        found += [word for proxy in self.proxies for word in ("--proxy", proxy)]
        found += [word for name in self.hosts for word in ("--host", name)]
        found += ["--on-loopback"] if self.on_loopback else []
        if self.heartbeat_s is not None:
            found += ["--heartbeat", str(self.heartbeat_s)]
        return [*found, "--log-level", self.log_level, *(["--log-json"] if self.log_json else [])]


class GatewayProcess(ChildProcess):
    """A running one. Use ``spawn``; ``kill`` and then ``wait`` for it in the end, always."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(process, reader, writer)
        self._page = ""
        self._asked: asyncio.Future[None] | None = None
        self._taking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.away = False
        """It cannot reach the service."""
        self.silence = SilenceTimer(TICK_S)
        """Since something came from it; the keeper counts the time."""
        self._hearing = asyncio.create_task(self._hear(), name="http control")

    @classmethod
    async def spawn(cls, command: GatewayCommand, listener: socket.socket) -> GatewayProcess:
        """Start one that takes calls from ``listener``. Raises OSError when the system cannot start a process."""
        return await cls.launch(
            lambda control: command.arguments(listener.fileno(), control),
            child_environment(failpoints=False),
            listener.fileno(),
        )

    async def ready(self) -> None:
        """Returns when it takes calls. Raises GatewayEnded."""
        done, _ = await asyncio.wait(
            {self._taking, self._hearing}, timeout=READY_S, return_when=FIRST_COMPLETED
        )
        if not done:
            raise GatewayEnded(f"it was not ready within {READY_S:g} s")
        if self._taking not in done:
            raise GatewayEnded(self.last_words(await self.wait(5.0)))

    async def metrics(self, timeout_s: float) -> str:
        """Its metrics, as Prometheus text: as they were, when they do not come in time; "" before they ever did."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_future()
            self.send("metrics")
        await asyncio.wait({self._asked, self._hearing}, timeout=timeout_s, return_when=FIRST_COMPLETED)
        return self._page

    def send(self, word: str) -> None:
        """Send a command; one that comes too late is lost."""
        self._writer.write(word.encode() + b"\n")

    async def wait(self, patience_s: float | None = None) -> int:
        try:
            return await super().wait(patience_s)
        finally:
            self._hearing.cancel()

    def last_words(self, status: int) -> str:
        """Why it ended, as far as it could say."""
        return f"it {self.describe_exit(status)}"

    async def _hear(self) -> None:
        """Take in what it says, until it has ended."""
        # ``wait`` says that it has ended.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while words := (await self._reader.readline()).split():
                self.silence.reset()
                match words:
                    case [b"away" | b"back" as word]:
                        self.away = word == b"away"
                    case [b"ready"]:
                        self._taking.set_result(None)
                    case [b"metrics", length]:
                        self._page = (await self._reader.readexactly(int(length))).decode()
                        if self._asked is not None and not self._asked.done():
                            self._asked.set_result(None)
