"""A process of this server with a socket to it, from its start to its last words."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Mapping
from typing import ClassVar, Final, Self

from pensieve.lifeline import describe_exit, is_stopped
from pensieve.logs import stderr_writer

CHILDREN: Final[set[int]] = set()
"""The ids of the processes that this one started and for which somebody here waits: nobody else takes their status."""
_LAST_LINE_BYTES: Final = 4096
_STDERR_PATIENCE_S: Final = 1.0


class RestartBackoff:
    """How long to wait before a child that ended is started again.

    Each pause is twice the one before, up to the longest. After a steady life the first one comes again. Failed starts
    count like short lives: a child that dies on its first request each time must not be started in a tight loop.
    """

    def __init__(self, first_s: float, longest_s: float, steady_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s
        self._steady_s = steady_s

    def record_lifetime(self, seconds: float) -> None:
        """A child served for this long, and has ended."""
        if seconds > self._steady_s:
            self._next_s = self._first_s

    def next_pause_s(self) -> float:
        """Seconds until the next start."""
        pause, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause


class SilenceTimer:
    """How long a child has said nothing, summed tick by tick, each capped.

    So a server that was itself stopped for minutes does not blame its child.
    """

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.seconds = 0.0

    def reset(self) -> None:
        """The child said something."""
        self.seconds = 0.0

    def advance(self, elapsed_s: float) -> float:
        """Time has passed. Returns the part of it that counts."""
        counted = min(elapsed_s, 2 * self.tick_s)
        self.seconds += counted
        return counted


class ChildProcess:
    """What an engine and an HTTP door have in common. ``kill`` and then ``wait`` for it in the end, always."""

    WITHHELD: ClassVar[str | None] = None
    """How lines on stderr begin that are remembered, but not passed on: this process tells them itself."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        CHILDREN.add(process.pid)  # as long as nobody has got its status
        self._process = process
        self._reader = reader
        self._writer = writer
        self._stderr_tail = b""
        self._killed_here = False
        self._stderr_task = asyncio.create_task(self._forward_stderr(), name="stderr of a child")

    @classmethod
    async def launch(
        cls, arguments: Callable[[int], list[str]], environment: Mapping[str, str], *inherited: int
    ) -> Self:
        """Start one. ``arguments``: its command, given its end of the socket. ``inherited``: its other files.

        Its working folder is the root folder: ours may be gone by now, and Python does not start in such a one.
        Raises OSError when the system cannot start a process.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *arguments(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(theirs.fileno(), *inherited),
                    env=environment,
                    cwd="/",
                )
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._killed_here = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def is_stopped(self) -> bool:
        """Whether somebody has stopped the process, as SIGSTOP and debuggers do."""
        return is_stopped(self.pid)

    async def was_killed(self, patience_s: float) -> bool:
        """Whether somebody else killed the process. Waits up to ``patience_s`` for its status; False without one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        return self._process.returncode == -signal.SIGKILL and not self._killed_here

    async def wait(self, patience_s: float | None = None) -> int:
        """The exit status; what has not ended after ``patience_s`` (None: any time) is killed."""
        try:
            try:
                async with asyncio.timeout(patience_s):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
            status = await self._process.wait()
            CHILDREN.discard(self.pid)
            # A grandchild may keep the pipe open; what the process itself wrote has been read by then.
            await asyncio.wait({self._stderr_task}, timeout=_STDERR_PATIENCE_S)
        finally:
            # Also when whoever waits is cancelled: nobody else closes these.
            self._stderr_task.cancel()
            self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        return status

    def last_line(self) -> str:
        """The last that it wrote to stderr."""
        lines = self._stderr_tail.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def describe_exit(self, status: int) -> str:
        """How it ended, and, where that was no success, what it wrote last."""
        how = "signal 9 from here" if self._killed_here and status < 0 else describe_exit(status)
        line = self.last_line()
        return f"ended with {how}" + (f" after: {line}" if line and status != 0 else "")

    async def _forward_stderr(self) -> None:
        """Pass on what it writes, and remember the end. Never stops early: a full pipe would block it."""
        assert self._process.stderr is not None
        begun = b""
        while data := await self._process.stderr.read(1 << 16):
            self._stderr_tail = (self._stderr_tail + data)[-_LAST_LINE_BYTES:]
            if self.WITHHELD is not None:
                *lines, begun = (begun + data).split(b"\n")
                data = b"".join(line + b"\n" for line in lines if not line.startswith(self.WITHHELD.encode()))
                if len(begun) > _LAST_LINE_BYTES:
                    data, begun = data + begun, b""
            stderr_writer().write(data)
        stderr_writer().write(begun)
