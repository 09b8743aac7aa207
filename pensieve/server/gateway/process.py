"""One life of the door's process: start, words both ways, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pensieve.debug import child_environment

READY_S: Final = 60.0
"""How long it may take to start; a second is usual, on an idle machine."""
_LAST_LINE_BYTES: Final = 4096


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

    def arguments(self, listener: int, control: int) -> list[str]:
        """Run on the safe path (-P): it never imports from the directory it was started in."""
        found = [sys.executable, "-P", "-m", "pensieve.http.child", "--parent", str(os.getpid())]
        found += ["--listener", str(listener), "--control", str(control), "--target", self.target]
        if self.tls_cert is not None and self.tls_key is not None:
            found += ["--tls", str(self.tls_cert), str(self.tls_key)]
        if self.tls_client_ca is not None:
            found += ["--tls-client-ca", str(self.tls_client_ca)]
        return [*found, "--log-level", self.log_level, *(["--log-json"] if self.log_json else [])]


class GatewayProcess:
    """A running one. Use ``spawn``; ``kill`` and then ``wait`` for it in the end, always."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._asked: asyncio.Task[None] | None = None
        self._page = ""
        self._last_line = b""
        self._stderr = asyncio.create_task(self._forward_stderr(), name="http stderr")

    @classmethod
    async def spawn(cls, command: GatewayCommand, listener: socket.socket) -> GatewayProcess:
        """Start one that takes calls from ``listener``. Raises OSError when the system cannot start a process."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                inherited = listener.fileno(), theirs.fileno()
                process = await asyncio.create_subprocess_exec(
                    *command.arguments(*inherited),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=inherited,
                    env=child_environment(failpoints=False),
                )
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> None:
        """Returns when it takes calls. Raises GatewayEnded."""
        try:
            async with asyncio.timeout(READY_S):
                line = await self._reader.readline()
        except (TimeoutError, ConnectionError) as error:
            raise GatewayEnded(f"it was not ready within {READY_S:g} s") from error
        if line != b"ready\n":
            raise GatewayEnded(self.last_words(await self.wait(5.0)))

    async def metrics(self, timeout_s: float) -> str:
        """Its metrics, as Prometheus text: as they were, when they do not come in time; "" before they ever did."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._ask(), name="http metrics")
        await asyncio.wait({self._asked}, timeout=timeout_s)
        return self._page

    def tell(self, word: str) -> None:
        """Send a command; one that comes too late is lost."""
        self._writer.write(word.encode() + b"\n")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self, patience_s: float | None = None) -> int:
        """The exit status; what has not ended after ``patience_s`` is killed."""
        try:
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
        status = await self._process.wait()
        await asyncio.wait({self._stderr}, timeout=1.0)
        self._stderr.cancel()
        self._writer.close()
        if self._asked is not None:
            self._asked.cancel()
        return status

    def last_words(self, status: int) -> str:
        """Why it ended, as far as it could say."""
        lines = self._last_line.decode(errors="replace").strip().splitlines()
        ending = f"signal {-status}" if status < 0 else f"status {status}"
        return f"it ended with {ending}" + (f" after: {lines[-1]}" if lines and status > 0 else "")

    async def _ask(self) -> None:
        self.tell("metrics")
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError
        ):  # it has ended: ``wait`` says so
            length = await self._reader.readline()
            if length:
                self._page = (await self._reader.readexactly(int(length))).decode()

    async def _forward_stderr(self) -> None:
        """Pass on what it logs, and remember the end. Never stops early: a full pipe would block it."""
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(1 << 16):
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
            self._last_line = (self._last_line + data)[-_LAST_LINE_BYTES:]
