"""The link to an engine in a process of its own, and its supervision.

An engine that dies, breaks the protocol or makes no progress is replaced: its generations end with ENGINE_RESTARTING,
the state is RESTARTING at once, and a new process is started, after a growing pause when it fails again and again.
Nothing needs to be told to the new engine: every ``Submit`` carries its whole context.
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
from pensieve.server.links.base import DEFAULT_STALL_LIMIT_S, BaseLink
from pensieve.server.links.engine_link import LinkState
from pensieve.server.links.generations import GenerationObserver
from pensieve.server.tasks import cancel_and_wait, wait_task
from pensieve.server.unavailable import restarting

_report_decoder: Final[msgspec.msgpack.Decoder[Report]] = decoder_for(Report)


class HostCommand(msgspec.Struct, frozen=True, kw_only=True):
    """How engine processes are started."""

    options: EngineOptions
    builder: str = DEFAULT_BUILDER
    """``package.module:name`` of what makes the engine; another one only in tests."""
    log_level: str = "INFO"
    log_json: bool = False

    def arguments(self, fd: int) -> list[str]:
        """Run on the safe path (-P): an engine never imports from the directory it was started in."""
        arguments = [sys.executable, "-P", "-m", "pensieve.engine.process.host", "--fd", str(fd)]
        arguments += ["--parent", str(os.getpid()), "--builder", self.builder, "--log-level", self.log_level]
        return arguments + (["--log-json"] if self.log_json else [])


def engine_environment(*, failpoints: bool) -> dict[str, str]:
    """What an engine process finds in its environment.

    Its threads sleep while they wait for each other instead of spinning, unless the user has said otherwise: with two
    model threads on two busy cores, spinning made a token cost 56 to 68 ms, sleeping 5 to 6 (demo model, torch 2.13).
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", **child_environment(failpoints=failpoints)}


class EngineProcess(ChildProcess):
    """A running engine process. Use ``spawn``; ``kill`` and then ``wait`` it in the end, always."""

    WITHHELD = FAILURE_PREFIX
    _stopped = False

    @classmethod
    async def spawn(cls, command: HostCommand, *, failpoints: bool) -> EngineProcess:
        """Start one and give it its options. Raises OSError when the system cannot start a process."""
        engine = await cls.launch(command.arguments, engine_environment(failpoints=failpoints))
        engine._writer.write(encode_frame(command.options))
        return engine

    def send(self, command: Command) -> None:
        """Write a command without waiting. Raises PensieveError when it is too large, or too much waits to be read."""
        try:
            frame = encode_frame(command)
        except FrameError as error:
            raise ContextLimitExceeded(f"the context is too long to hand to the engine: {error}") from error
        if self._writer.transport.get_write_buffer_size() + len(frame) > 2 * MAX_FRAME:
            raise ResourceExhausted("too much work waits to be taken by the engine", retry_after_s=1.0)
        self._writer.write(frame)

    async def first_report(self) -> Report | None:
        """As ``receive``, from one that starts, which may take minutes; one that somebody has stopped is killed."""
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
        """The next report; None when the engine is gone. Raises FrameError on what is not a report."""
        try:
            length = frame_length(await self._reader.readexactly(HEADER.size))
            return decode(await self._reader.readexactly(length), _report_decoder)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def last_words(self, status: int) -> str:
        """Why the process ended, as far as it could say."""
        if self._stopped:
            return "the engine process was stopped while it started (SIGSTOP, a debugger)"
        line = self.last_line()
        if line.startswith(FAILURE_PREFIX):
            return line.removeprefix(FAILURE_PREFIX)
        return f"the engine process {self.describe_exit(status)}"


log = logging.getLogger(__name__)

FIRST_RESTART_DELAY_S: Final = 0.2
LONGEST_RESTART_DELAY_S: Final = 30.0
HEALTHY_AFTER_S: Final = 60.0
"""An engine that served this long was fine: the next restart is prompt again."""
STOP_PATIENCE_S: Final = 5.0
DEATH_PATIENCE_S: Final = 0.5
"""How long the callers of an engine that is gone wait for what it died of, which takes a dying process a moment."""


class EngineStartError(Exception):
    """An engine process ended before it was ready; the text is its last words."""

    def __init__(self, words: str, status: int = 1) -> None:
        super().__init__(words)
        self.refused = status == REFUSED
        """The options cannot be followed, or the model not served."""


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
        """The engine's process id; None while there is no engine."""
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
            supervisor.cancel()  # In a pause or a start-up, which cleans up after itself.
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
            process.kill()  # So much waits to be taken that it has not read for a long time.

    async def _bring_up(self, *, first: bool) -> None:
        """Spawn an engine and wait, as long as it lives, for its first report. Raises EngineStartError.

        Nothing but the end of the process ends the wait, or that somebody has stopped it: loading a large model takes
        minutes.
        """
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
                # Also when this task is cancelled in the middle of a long start: leave no process behind. One that has
                # closed its end is left alone: a signal first asks whether the process is there, and that question
                # can take the exit status from the one who waits for it.
                if not ends_by_itself:
                    process.kill()
                status = await process.wait(STOP_PATIENCE_S)
        if report is None:
            raise EngineStartError(process.last_words(status), status)
        # Only now, with ``info`` about to be known, may commands go to this process: ``_send`` looks at ``_process``.
        self._process = process
        self._receive(report)
        self._on_engine_up()

    async def _supervise(self) -> None:
        """Serve with one engine after another, until ``stop``."""
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
        """Deal out the reports of the present engine until it is gone, and its process with it."""
        process = self._process
        assert process is not None
        try:
            while (report := await process.receive()) is not None:
                if self._state is LinkState.SERVING:  # after ``stop`` nobody is left to tell
                    self._receive(report)
        except FrameError as error:
            log.error("the engine broke the protocol: %s", error)
            process.kill()
        except Exception:
            # A bug of ours in dealing a report (one in a sink is caught before): who got what is unknown now, so it
            # ends like an engine's death.
            log.exception("a report could not be dealt out")
            process.kill()
        finally:
            # Callers are told first: the process may take a while to be gone.
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
