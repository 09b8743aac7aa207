"""The HTTP door's process: started, kept alive, and drained by this server.

It is a separate process because streaming keeps Python busy, which would slow this process down. It calls the service
over a private socket, with the credentials of its callers. ``Gateway`` starts it, restarts it after a crash or a
hang, and ends it with the server. ``GatewayProcess`` is one process: start, commands and messages, end.

States of ``Gateway``, which alone changes them::

    starting ── ready ──> serving ── silent for QUIET_S ──> hung ── a message ──> serving
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

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from pensieve.config import DoorSettings
from pensieve.debug import child_environment
from pensieve.server.child import ChildProcess, RestartBackoff, SilenceTimer
from pensieve.server.tasks import cancel_and_wait

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0
"""A process that lived this long resets the backoff."""
QUIET_S: Final = 3.0
"""The process sends a heartbeat every half second; after this much silence it counts as hung."""
HUNG_S: Final = 10.0
"""After this much silence it is killed. Its calls fail, and callers retry them."""
METRICS_S: Final = 1.0
_BACKLOG: Final = 2048


GatewayState = Literal["starting", "serving", "hung", "restarting", "draining"]
"""``hung``: the process is silent, and is killed if it stays so. ``restarting``: it ended and is started again."""


class GatewayError(Exception):
    """The door cannot be opened; the message is for the operator."""


class Gateway(Collector):
    """The HTTP door of one server. ``open``, ``start`` and ``ready``; then ``drain``, ``finish`` and ``close``. The
    listening socket stays in this process: callers wait in its backlog during a restart."""

    def __init__(self, command: GatewayCommand) -> None:
        self._command = command
        self._listener: socket.socket | None = None
        self._process: GatewayProcess | None = None
        self._serving = False
        self._stuck = False
        self._ending = False
        self.state: GatewayState = "starting"
        self.since_s = time.time()
        self.restarts = 0
        self._runner: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
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
        return self._process.pid if self._process is not None else None

    def open(self, host: str, port: int) -> int:
        """Listen and return the port; port 0 lets the system choose. Raises GatewayError."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            # Python adds the address to ``strerror``; name resolution has its own error numbers.
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise GatewayError(f"cannot listen on {host}:{port}: {why}") from error
        bound: int = self._listener.getsockname()[1]
        return bound

    def start(self) -> None:
        """Start the process and keep it alive from now on."""
        self._started = asyncio.get_running_loop().create_future()
        self._runner = asyncio.create_task(self._run_processes(), name="http")

    async def ready(self) -> None:
        """Return when calls are taken. Raises GatewayError if the first process fails to start."""
        assert self._started is not None, "not started"
        await self._started

    async def drain(self) -> None:
        """Refuse new calls; running ones go on."""
        self._update(ending=True)
        if self._listener is not None:
            self._listener.close()  # otherwise new callers would wait in its backlog in vain
        if self._process is not None:
            self._process.send("drain")

    async def finish(self, patience_s: float) -> None:
        """After ``drain`` and the last turn: wait ``patience_s`` for the last answers to be sent. Calls that still
        run then wait for something this server will not do. They end with an error, within as much time again."""
        if self._runner is None:
            return
        await asyncio.wait({self._runner}, timeout=patience_s)
        if self._process is not None:
            self._process.send("finish")
            await asyncio.wait({self._runner}, timeout=patience_s)

    async def close(self) -> None:
        self._update(ending=True)
        if self._runner is not None:
            await cancel_and_wait(self._runner)
        if self._started is not None and not self._started.cancel() and not self._started.cancelled():
            self._started.exception()  # retrieved, so that asyncio does not log it
        if self._listener is not None:
            self._listener.close()

    def watch_in(self, registry: CollectorRegistry) -> None:
        registry.register(self)

    async def refresh(self) -> None:
        if self._process is not None and self._serving:
            self._page = await self._process.metrics(METRICS_S)

    def collect(self) -> Iterator[Metric]:
        up = self._serving and not self._stuck
        yield GaugeMetricFamily("pensieve_http_up", "Whether the HTTP door takes calls.", up)
        yield CounterMetricFamily(
            "pensieve_http_restarts", "Times the HTTP door's process was started again.", self.restarts
        )
        yield from text_string_to_metric_families(self._page)

    async def _run_processes(self) -> None:
        """Run one process after another. Ends if the first fails before it is ready."""
        pauses = RestartBackoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S)
        while True:
            began = time.monotonic()
            why = await self._run_process()
            if self._ending:
                return
            assert self._started is not None
            if not self._started.done():
                self._started.set_exception(GatewayError(f"the HTTP door did not start: {why}"))
                return
            pauses.record_lifetime(time.monotonic() - began)
            pause = pauses.next_pause_s()
            log.error("the HTTP door ended and is started again: %s", why, extra={"pause_s": pause})
            await asyncio.sleep(pause)
            self.restarts += 1

    async def _run_process(self) -> str:
        """Run a process to its end. Return why it ended."""
        assert self._listener is not None
        try:
            self._process = process = await GatewayProcess.spawn(self._command, self._listener)
        except OSError as error:
            return str(error)
        try:
            await process.ready()
            if self._started is not None and not self._started.done():
                self._started.set_result(None)
            self._update(serving=True)
            watching = asyncio.create_task(self._watch(process), name="http watch")
            try:
                return process.last_words(await process.wait())
            finally:
                watching.cancel()
        except GatewayEnded as error:
            return str(error)
        finally:
            self._update(serving=False, stuck=False)
            self._page = ""
            process.kill()
            await process.wait()
            self._process = None

    async def _watch(self, process: GatewayProcess) -> None:
        """Kill a process that is stopped or whose event loop hangs."""
        silence = process.silence
        while silence.seconds < HUNG_S:
            began = time.monotonic()
            await asyncio.sleep(silence.tick_s)
            silence.advance(time.monotonic() - began)
            self._update(stuck=silence.seconds >= QUIET_S)
        log.error("the HTTP door has not answered for %.0f s: killing it", silence.seconds)
        process.kill()

    def _update(
        self, *, serving: bool | None = None, stuck: bool | None = None, ending: bool | None = None
    ) -> None:
        self._serving = self._serving if serving is None else serving
        self._stuck = self._stuck if stuck is None else stuck
        self._ending = self._ending if ending is None else ending
        state = self._compute_state()
        if state != self.state:
            self.state, self.since_s = state, time.time()

    def _compute_state(self) -> GatewayState:
        if self._ending:
            return "draining"
        if self._stuck:
            return "hung"
        if self._serving:
            return "serving"
        return "restarting" if self._started is not None and self._started.done() else "starting"


READY_S: Final = 60.0
"""Timeout for the start; a second is usual on an idle machine."""
TICK_S: Final = 0.25


class GatewayEnded(Exception):
    """The process has ended or does not answer; the message says why, if known."""


@dataclass(frozen=True, slots=True)
class GatewayCommand:
    settings: DoorSettings
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    log_level: str = "info"
    log_json: bool = False

    def arguments(self, listener: int, control: int) -> list[str]:
        """Build the command. ``-P``: never import from the working directory."""
        command = [sys.executable, "-P", "-m", "pensieve.http.child", "--parent", str(os.getpid())]
        command += ["--listener", str(listener), "--control", str(control)]
        command += ["--settings", msgspec.json.encode(self.settings).decode()]
        if self.tls_cert is not None and self.tls_key is not None:
            command += ["--tls", str(self.tls_cert), str(self.tls_key)]
        if self.tls_client_ca is not None:
            command += ["--tls-client-ca", str(self.tls_client_ca)]
        return [*command, "--log-level", self.log_level, *(["--log-json"] if self.log_json else [])]


class GatewayProcess(ChildProcess):
    """One process of the door. Use ``spawn``; ``kill`` and then ``wait`` at the end, always."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(process, reader, writer)
        self._page = ""
        self._metrics_reply: asyncio.Future[None] | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.away = False
        """The process cannot reach the service."""
        self.silence = SilenceTimer(TICK_S)
        """Time since its last message; ``Gateway`` advances it."""
        self._reader_task = asyncio.create_task(self._read_messages(), name="http control")

    @classmethod
    async def spawn(cls, command: GatewayCommand, listener: socket.socket) -> GatewayProcess:
        """Start a process that takes calls from ``listener``. Raises OSError."""
        return await cls.launch(
            lambda control: command.arguments(listener.fileno(), control),
            child_environment(failpoints=False),
            listener.fileno(),
        )

    async def ready(self) -> None:
        """Return when it takes calls. Raises GatewayEnded."""
        done, _ = await asyncio.wait(
            {self._ready, self._reader_task}, timeout=READY_S, return_when=FIRST_COMPLETED
        )
        if not done:
            raise GatewayEnded(f"it was not ready within {READY_S:g} s")
        if self._ready not in done:
            raise GatewayEnded(self.last_words(await self.wait(5.0)))

    async def metrics(self, timeout_s: float) -> str:
        """Return its metrics as Prometheus text; the previous ones if none come in time, "" if none ever did."""
        if self._metrics_reply is None or self._metrics_reply.done():
            self._metrics_reply = asyncio.get_running_loop().create_future()
            self.send("metrics")
        await asyncio.wait(
            {self._metrics_reply, self._reader_task}, timeout=timeout_s, return_when=FIRST_COMPLETED
        )
        return self._page

    def send(self, word: str) -> None:
        """Send a command. Commands to an ended process are lost."""
        self._writer.write(word.encode() + b"\n")

    async def wait(self, patience_s: float | None = None) -> int:
        try:
            return await super().wait(patience_s)
        finally:
            self._reader_task.cancel()

    def last_words(self, status: int) -> str:
        return f"it {self.describe_exit(status)}"

    async def _read_messages(self) -> None:
        # ``wait`` reports the end.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while words := (await self._reader.readline()).split():
                self.silence.reset()
                match words:
                    case [b"away" | b"back" as word]:
                        self.away = word == b"away"
                    case [b"ready"]:
                        self._ready.set_result(None)
                    case [b"metrics", length]:
                        self._page = (await self._reader.readexactly(int(length))).decode()
                        if self._metrics_reply is not None and not self._metrics_reply.done():
                            self._metrics_reply.set_result(None)
