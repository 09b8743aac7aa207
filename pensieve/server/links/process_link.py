"""The link to an engine in a process of its own, and its supervision.

An engine that dies, breaks the protocol or makes no progress is replaced: its generations end with
ENGINE_RESTARTING and a new process is started, with growing pauses if it fails repeatedly. The new engine
needs no other state: every ``Submit`` carries its whole context.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Final

import msgspec

from pensieve.config import EngineOptions
from pensieve.debug import child_environment
from pensieve.engine.messages import Command, Report, Stop
from pensieve.engine.process.host import DEFAULT_BUILDER, FAILURE_PREFIX, REFUSED
from pensieve.errors import ContextLimitExceeded, Internal, InvalidArgument, PensieveError, ResourceExhausted
from pensieve.frames import HEADER, MAX_FRAME, FrameError, decode, decoder_for, encode_frame, frame_length
from pensieve.lifeline import LOOK_S, STOPPED_LOOKS
from pensieve.server.child import ChildProcess, RestartBackoff
from pensieve.server.failures import restarting
from pensieve.server.links.base import DEFAULT_STALL_LIMIT_S, BaseLink
from pensieve.server.links.engine_link import LinkState
from pensieve.server.links.generations import GenerationObserver
from pensieve.server.tasks import cancel_and_wait, wait_task

log = logging.getLogger(__name__)

_report_decoder: Final[msgspec.msgpack.Decoder[Report]] = decoder_for(Report)


class HostCommand(msgspec.Struct, frozen=True, kw_only=True):
    options: EngineOptions
    builder: str = DEFAULT_BUILDER
    """``package.module:name`` of the engine's factory; tests use others."""
    log_level: str = "INFO"
    log_json: bool = False

    def arguments(self, fd: int) -> list[str]:
        """Command line on the safe path (-P): an engine never imports from its working directory."""
        arguments = [sys.executable, "-P", "-m", "pensieve.engine.process.host", "--fd", str(fd)]
        arguments += ["--parent", str(os.getpid()), "--builder", self.builder, "--log-level", self.log_level]
        return arguments + (["--log-json"] if self.log_json else [])


def engine_environment(*, failpoints: bool) -> dict[str, str]:
    """The environment of an engine process. Its threads sleep while they wait for each other, unless the user
    sets it otherwise: with two model threads on two busy cores, a token took 56 to 68 ms with spinning, 5 to
    6 ms with sleeping (demo model, torch 2.13)."""
    return {"OMP_WAIT_POLICY": "PASSIVE", **child_environment(failpoints=failpoints)}


class EngineProcess(ChildProcess):
    """Create it with ``spawn``; always end with ``kill`` and ``wait``."""

    WITHHELD = FAILURE_PREFIX
    _stopped = False

    @classmethod
    async def spawn(cls, command: HostCommand, *, failpoints: bool) -> EngineProcess:
        """Raises OSError when the system cannot start a process."""
        engine = await cls.launch(command.arguments, engine_environment(failpoints=failpoints))
        engine._writer.write(encode_frame(command.options))
        return engine

    def send(self, command: Command) -> None:
        """Write a command without waiting. Raises PensieveError when it, or the backlog, is too large."""
        try:
            frame = encode_frame(command)
        except FrameError as error:
            raise ContextLimitExceeded(f"the context is too long to hand to the engine: {error}") from error
        if self._writer.transport.get_write_buffer_size() + len(frame) > 2 * MAX_FRAME:
            raise ResourceExhausted("too much work waits to be read by the engine", retry_after_s=1.0)
        self._writer.write(frame)

    async def first_report(self) -> Report | None:
        """Like ``receive``, during a start, which may take minutes. Kills a process stopped by a signal."""
        looking = asyncio.create_task(self._kill_if_stopped(), name="look at a starting engine")
        try:
            return await self.receive()
        finally:
            await cancel_and_wait(looking)

    async def _kill_if_stopped(self) -> None:
        looks = 0
        while looks < STOPPED_LOOKS:
            await asyncio.sleep(LOOK_S)
            looks = looks + 1 if self.is_stopped() else 0
        self._stopped = True
        self.kill()

    async def receive(self) -> Report | None:
        """The next report; None when the engine is gone. Raises FrameError on anything else."""
        try:
            length = frame_length(await self._reader.readexactly(HEADER.size))
            return decode(await self._reader.readexactly(length), _report_decoder)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def last_words(self, status: int) -> str:
        if self._stopped:
            return "the engine process was stopped while it started (SIGSTOP, a debugger)"
        line = self.last_line()
        if line.startswith(FAILURE_PREFIX):
            return line.removeprefix(FAILURE_PREFIX)
        return f"the engine process {self.describe_exit(status)}"


FIRST_RESTART_DELAY_S: Final = 0.2
LONGEST_RESTART_DELAY_S: Final = 30.0
HEALTHY_AFTER_S: Final = 60.0
"""After an engine has served this long, its next restart is prompt again."""
STOP_PATIENCE_S: Final = 5.0
DEATH_PATIENCE_S: Final = 0.5
"""How long to wait for the cause of an engine's death, which takes a dying process a moment."""


class EngineStartError(Exception):
    """An engine process ended before it was ready; the text is its last message."""

    def __init__(self, words: str, status: int = 1) -> None:
        super().__init__(words)
        self.refused = status == REFUSED
        """The options are invalid, or the model cannot be served."""


class ProcessLink(BaseLink):
    """``EngineLink`` to a supervised engine process."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        builder: str = DEFAULT_BUILDER,
        observer: GenerationObserver | None = None,
        stall_limit_s: float = DEFAULT_STALL_LIMIT_S,
        log_level: str = "INFO",
        log_json: bool = False,
    ) -> None:
        super().__init__(observer, stall_limit_s)
        self._command = HostCommand(options=options, builder=builder, log_level=log_level, log_json=log_json)
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        try:
            await self._bring_up(first=True)
        except EngineStartError as error:
            message = f"the engine did not start: {error}"
            if error.refused:
                raise InvalidArgument(message) from error
            raise Internal(message, reason="ENGINE_FAILED") from error
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def stop(self) -> None:
        await self._shut_down()
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        if self._process is None:
            supervisor.cancel()  # in a pause or a start-up, which cleans up after itself
        else:
            self._ask_to_stop(self._process)
            await asyncio.wait({supervisor}, timeout=STOP_PATIENCE_S)
            if not supervisor.done():
                log.error("the engine did not stop within %.0f s: killing it", STOP_PATIENCE_S)
                self._kill()
        await wait_task(supervisor)

    def _send(self, command: Command) -> None:
        if self._process is None:
            raise restarting()
        self._process.send(command)

    def _on_hang(self) -> None:
        log.error(
            "the engine makes no progress, last heard of %.0f s ago: killing it", self._watchdog.quiet_s
        )
        self._kill()

    def _is_frozen(self) -> bool:
        return self._process is not None and self._process.is_stopped()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    @staticmethod
    def _ask_to_stop(process: EngineProcess) -> None:
        try:
            process.send(Stop())
        except PensieveError:
            process.kill()  # its pipe is full: it has not read for a long time

    async def _bring_up(self, *, first: bool) -> None:
        """Start an engine and wait for its first report, without a limit: loading a large model takes
        minutes. Raises EngineStartError when the process ends or is stopped."""
        try:
            process = await EngineProcess.spawn(self._command, failpoints=first)
        except OSError as error:
            raise EngineStartError(f"cannot start a process: {error}") from error
        report, ends_by_itself = None, False
        try:
            report = await process.first_report()
            ends_by_itself = report is None
        except FrameError as error:
            log.error("the engine broke the protocol: %s", error)
        finally:
            if report is None:
                # Leave no process behind, also when this task is cancelled during a long start. A process that has
                # closed its pipe is about to end: its own exit status and last words say why.
                if not ends_by_itself:
                    process.kill()
                status = await process.wait(STOP_PATIENCE_S)
        if report is None:
            raise EngineStartError(process.last_words(status), status)
        # Only now, with ``info`` about to be set, may ``_send`` use this process.
        self._process = process
        self._receive(report)
        self._on_engine_up()

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        pauses = RestartBackoff(FIRST_RESTART_DELAY_S, LONGEST_RESTART_DELAY_S, HEALTHY_AFTER_S)
        while True:
            began = loop.time()
            await self._serve()
            if self._state is LinkState.STOPPED:
                return
            pauses.record_lifetime(loop.time() - began)
            while self._process is None:
                await asyncio.sleep(pauses.next_pause_s())
                try:
                    await self._bring_up(first=False)
                except EngineStartError as error:
                    log.error("the engine did not start again: %s", error)
            self.restarts_total += 1
            log.warning("the engine is back", extra={"restarts": self.restarts_total, "pid": self.pid})

    async def _serve(self) -> None:
        """Dispatch the reports of the present engine until its process is gone."""
        process = self._process
        assert process is not None
        try:
            while (report := await process.receive()) is not None:
                if self._state is LinkState.SERVING:  # after ``stop`` no sink is left
                    self._receive(report)
        except FrameError as error:
            log.error("the engine broke the protocol: %s", error)
            process.kill()
        except Exception:
            # A bug of ours in dispatching (errors of sinks are caught earlier). Which sinks got their events
            # is unknown, so treat it like an engine's death.
            log.exception("a report could not be dealt out")
            process.kill()
        finally:
            # Fail the generations first: the process may take a while to exit.
            self._process = None
            stopping = self._state is LinkState.STOPPED
            frozen = self._watchdog.frozen
            try:
                if not stopping:
                    self._set_state(LinkState.RESTARTING)
                    outside = frozen or await process.was_killed(DEATH_PATIENCE_S)
                    if self._state is LinkState.RESTARTING:  # not stopped meanwhile
                        self._on_engine_lost(killed_externally=outside)
            finally:
                status = await process.wait(STOP_PATIENCE_S)
        if not stopping:
            log.error("the engine is gone: %s", process.last_words(status), extra={"status": status})
