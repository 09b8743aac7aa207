"""One life of an engine process, as the front end sees it: start, frames both ways, last words, death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec

from pensieve.config import EngineOptions
from pensieve.debug import child_environment
from pensieve.engine.messages import Command, Report
from pensieve.engine.process.host import DEFAULT_BUILDER, LAST_WORDS
from pensieve.errors import ContextLimitExceeded, ResourceExhausted
from pensieve.frames import HEADER, MAX_FRAME, FrameError, decode, decoder_for, encode_frame, frame_length

_LAST_LINE_BYTES: Final = 4096
_STDERR_PATIENCE_S: Final = 1.0
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


class EngineProcess:
    """A running engine process. Use ``spawn``; ``kill`` and then ``wait`` it in the end, always."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._stderr_tail = b""
        self._killed_here = False
        self._stderr_task = asyncio.create_task(self._forward_stderr(), name="engine stderr")

    @classmethod
    async def spawn(cls, command: HostCommand, *, failpoints: bool) -> EngineProcess:
        """Start one and give it its options. Raises OSError when the system cannot start a process."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command.arguments(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    env=engine_environment(failpoints=failpoints),
                )
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        engine = cls(process, reader, writer)
        writer.write(encode_frame(command.options))
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Write a command without waiting. Raises PensieveError when it is too large, or too much waits to be read."""
        try:
            frame = encode_frame(command)
        except FrameError as error:
            raise ContextLimitExceeded(f"the context is too long to hand to the engine: {error}") from error
        if self._writer.transport.get_write_buffer_size() + len(frame) > 2 * MAX_FRAME:
            raise ResourceExhausted("too much work waits to be taken by the engine", retry_after_s=1.0)
        self._writer.write(frame)

    async def receive(self) -> Report | None:
        """The next report; None when the engine is gone. Raises FrameError on what is not a report."""
        try:
            length = frame_length(await self._reader.readexactly(HEADER.size))
            return decode(await self._reader.readexactly(length), _report_decoder)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def kill(self) -> None:
        self._killed_here = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def is_stopped(self) -> bool:
        """Whether somebody has stopped the process, as SIGSTOP and debuggers do."""
        try:
            # The name in parentheses may hold anything; the state follows it.
            status = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2]
        except OSError:
            return False
        return status.split()[0] in ("T", "t")

    async def was_killed(self, patience_s: float) -> bool:
        """Whether somebody else killed the process. Waits up to ``patience_s`` for its status; False without one."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), patience_s)
        return self._process.returncode == -signal.SIGKILL and not self._killed_here

    async def wait(self, patience_s: float) -> int:
        """The exit status; what has not ended after ``patience_s`` is killed."""
        try:
            try:
                await asyncio.wait_for(self._process.wait(), patience_s)
            except TimeoutError:
                self.kill()
            status = await self._process.wait()
            # A grandchild may keep the pipe open; what the engine itself wrote has been read by then.
            await asyncio.wait({self._stderr_task}, timeout=_STDERR_PATIENCE_S)
        finally:
            # Also when whoever waits is cancelled: nobody else closes these.
            self._stderr_task.cancel()
            self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        return status

    def last_words(self, status: int) -> str:
        """Why the process ended, as far as it could say."""
        lines = self._stderr_tail.decode(errors="replace").strip().splitlines()
        line = lines[-1] if lines else ""
        if line.startswith(LAST_WORDS):
            return line.removeprefix(LAST_WORDS)
        ending = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the engine process ended with {ending}" + (f" after: {line}" if line and status != 0 else "")

    async def _forward_stderr(self) -> None:
        """Pass on what the engine writes, and remember the end. Never stops early: a full pipe would block it."""
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(1 << 16):
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
            self._stderr_tail = (self._stderr_tail + data)[-_LAST_LINE_BYTES:]
