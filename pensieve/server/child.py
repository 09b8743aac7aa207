"""A child process of this server with a socket to it, from its start to its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from typing import ClassVar, Final, Self

from pensieve.lifeline import describe_exit, is_stopped
from pensieve.logs import stderr_writer

CHILDREN: Final[set[int]] = set()
"""Ids of the child processes that code here waits for; no other code may reap them."""
_LAST_LINE_BYTES: Final = 4096
_STDERR_PATIENCE_S: Final = 1.0


class RestartBackoff:
    """Backoff before a child that ended is started again.

    Each pause doubles the previous one, up to the longest. A long enough life resets the backoff. Failed starts count
    as short lives: a child that always dies on its first request must not be restarted in a tight loop.
    """

    def __init__(self, first_s: float, longest_s: float, steady_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s
        self._steady_s = steady_s

    def record_lifetime(self, seconds: float) -> None:
        if seconds > self._steady_s:
            self._next_s = self._first_s

    def next_pause_s(self) -> float:
        pause, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause


class SilenceTimer:
    """Time since a child last sent something, summed in capped ticks. The cap keeps a server that was itself stopped
    for minutes from blaming its child."""

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.seconds = 0.0

    def reset(self) -> None:
        self.seconds = 0.0

    def advance(self, elapsed_s: float) -> float:
        """Add elapsed time. Return the part that counts."""
        counted = min(elapsed_s, 2 * self.tick_s)
        self.seconds += counted
        return counted


class ChildProcess:
    """Base of the engine's and the HTTP door's process. ``kill`` and then ``wait`` at the end, always."""

    WITHHELD: ClassVar[str | None] = None
    """Lines on stderr with this prefix are remembered but not forwarded: this process reports them itself."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        CHILDREN.add(process.pid)  # until its status has been taken
        self._process = process
        self._handle = _handle(process.pid)
        self._reader = reader
        self._writer = writer
        self._stderr_tail = b""
        self._killed_here = False
        self._stderr_task = asyncio.create_task(self._forward_stderr(), name="stderr of a child")

    @classmethod
    async def launch(
        cls, arguments: Callable[[int], list[str]], environment: Mapping[str, str], *inherited: int
    ) -> Self:
        """Start a process. ``arguments``: makes its command from its end of the socket. ``inherited``: its other
        files.

        It runs in the root folder: ours may have been removed, and Python does not start in a removed folder. Raises
        OSError.
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
        """Send SIGKILL, unless the process has ended.

        asyncio's own ``kill`` first asks for the exit status, and so can take it from the code that waits for it,
        which then reports 255 instead.
        """
        self._killed_here = True
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    async def was_killed(self, patience_s: float) -> bool:
        """Return whether the process was killed from outside. Waits up to ``patience_s`` for its status."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        return self._process.returncode == -signal.SIGKILL and not self._killed_here

    async def wait(self, patience_s: float | None = None) -> int:
        """Return the exit status. Kills the process after ``patience_s`` (None: never)."""
        try:
            try:
                async with asyncio.timeout(patience_s):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
            status = await self._process.wait()
            CHILDREN.discard(self.pid)
            # A grandchild may keep the pipe open; the process's own output has been read by then.
            await asyncio.wait({self._stderr_task}, timeout=_STDERR_PATIENCE_S)
        finally:
            # Also after a cancellation: no other code closes these.
            self._stderr_task.cancel()
            self._writer.close()
            if self._handle is not None and self._process.returncode is not None:
                os.close(self._handle)
                self._handle = None
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        return status

    def last_line(self) -> str:
        lines = self._stderr_tail.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def describe_exit(self, status: int) -> str:
        """Describe how it ended and, unless successfully, its last line."""
        how = "signal 9 from here" if self._killed_here and status < 0 else describe_exit(status)
        line = self.last_line()
        return f"ended with {how}" + (f" after: {line}" if line and status != 0 else "")

    async def _forward_stderr(self) -> None:
        """Forward its stderr and remember the end. Never stops early: a full pipe would block the child."""
        assert self._process.stderr is not None
        partial = b""
        while data := await self._process.stderr.read(1 << 16):
            self._stderr_tail = (self._stderr_tail + data)[-_LAST_LINE_BYTES:]
            if self.WITHHELD is not None:
                *lines, partial = (partial + data).split(b"\n")
                data = b"".join(line + b"\n" for line in lines if not line.startswith(self.WITHHELD.encode()))
                if len(partial) > _LAST_LINE_BYTES:
                    data, partial = data + partial, b""
            stderr_writer().write(data)
        stderr_writer().write(partial)


def _handle(pid: int) -> int | None:
    """Return a file that stands for this process alone, also when its number is used again. None: it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
