"""One life of an engine process, as the front end sees it: start, frames both ways, last words, death."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

import msgspec

from pensieve.config import EngineOptions
from pensieve.debug import child_environment
from pensieve.engine.messages import Command, Report
from pensieve.engine.process.host import DEFAULT_BUILDER, LAST_WORDS
from pensieve.errors import ContextLimitExceeded, ResourceExhausted
from pensieve.frames import HEADER, MAX_FRAME, FrameError, decode, decoder_for, encode_frame, frame_length
from pensieve.lifeline import LOOK_S, STOPPED_LOOKS
from pensieve.server.child import ChildProcess
from pensieve.server.tasks import end_task

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

    WITHHELD = LAST_WORDS
    _stopped = False

    @classmethod
    async def spawn(cls, command: HostCommand, *, failpoints: bool) -> EngineProcess:
        """Start one and give it its options. Raises OSError when the system cannot start a process."""
        engine = await cls.started(command.arguments, engine_environment(failpoints=failpoints))
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
            await end_task(looking)

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
        if line.startswith(LAST_WORDS):
            return line.removeprefix(LAST_WORDS)
        return f"the engine process {self.ending(status)}"
