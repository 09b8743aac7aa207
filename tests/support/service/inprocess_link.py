"""The link to an engine in a thread of this process, without the isolation that a process gives.

Tests hold the engine in their hands this way, and are quick. A failed engine is replaced as in ``process_link``. A
stalled one is only reported: a thread cannot be killed.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable

from pensieve.engine.messages import Command, Report, Stop
from pensieve.engine.process.loop import HostedEngine, run_engine
from pensieve.errors import Internal, PensieveError
from pensieve.frames import PeerClosed
from pensieve.server.links.base import DEFAULT_STALL_LIMIT_S, BaseLink
from pensieve.server.links.generations import GenerationObserver

log = logging.getLogger(__name__)


class _ThreadChannel:
    """``engine.process.loop.CommandChannel`` between the thread and the event loop. One per life of an engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Report], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        self._commands.put(command)

    def receive(self, timeout: float) -> list[Command]:
        commands: list[Command] = []
        try:
            commands.append(self._commands.get(timeout=timeout) if timeout else self._commands.get_nowait())
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def send(self, report: Report) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, report)
        except RuntimeError as error:
            raise PeerClosed("the event loop is closed") from error


class InProcessLink(BaseLink):
    """``EngineLink`` to an engine that ``build`` makes, in a thread."""

    def __init__(
        self,
        build: Callable[[], HostedEngine],
        *,
        observer: GenerationObserver | None = None,
        stall_limit_s: float = DEFAULT_STALL_LIMIT_S,
        restart_delay_s: float = 0.1,
    ) -> None:
        super().__init__(observer, stall_limit_s)
        self._build = build
        self._restart_delay_s = restart_delay_s
        self._channel: _ThreadChannel | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._first_ready: asyncio.Future[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._first_ready = loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True)
        self._thread.start()
        await self._first_ready

    async def stop(self) -> None:
        self._stopping.set()
        await self._shut_down()
        if self._channel is not None:
            self._channel.put(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _send(self, command: Command) -> None:
        assert self._channel is not None
        self._channel.put(command)

    def _on_hang(self) -> None:
        log.error("the engine has made no progress for %.0f s", self._watchdog.quiet_s)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread: one engine after another until ``stop``."""
        while not self._stopping.is_set():
            channel = _ThreadChannel(loop, self._deliver)
            try:
                self._run_one(loop, channel)
            except PeerClosed:
                return
            except Exception as error:
                log.exception("engine failed")
                try:
                    loop.call_soon_threadsafe(self._failed, error)
                except RuntimeError:
                    return  # The event loop is closed: nobody is left to restart for.
                time.sleep(self._restart_delay_s)

    def _run_one(self, loop: asyncio.AbstractEventLoop, channel: _ThreadChannel) -> None:
        engine = self._build()
        try:
            loop.call_soon_threadsafe(self._attach, channel)
            run_engine(engine, channel)
        finally:
            engine.close()

    def _attach(self, channel: _ThreadChannel) -> None:
        self._channel = channel
        if self._stopping.is_set():
            channel.put(Stop())

    def _deliver(self, report: Report) -> None:
        if self._stopping.is_set():
            return
        self._receive(report)
        if self._first_ready is not None and not self._first_ready.done():
            self._on_engine_up()
            self._first_ready.set_result(None)
        elif self._state is not self._state.SERVING:
            self.restarts_total += 1
            self._on_engine_up()

    def _failed(self, error: Exception) -> None:
        if self._stopping.is_set():
            return
        if self._first_ready is not None and not self._first_ready.done():
            self._stopping.set()
            words = error.message if isinstance(error, PensieveError) else f"{type(error).__name__}: {error}"
            self._first_ready.set_exception(Internal(words, reason="ENGINE_FAILED"))
            return
        self._on_engine_lost()
