"""One life of the door's process: start, words both ways, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio import FIRST_COMPLETED
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pensieve.debug import child_environment
from pensieve.server.child import ChildProcess, Silence

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
        self.silence = Silence(TICK_S)
        """Since something came from it; the keeper counts the time."""
        self._hearing = asyncio.create_task(self._hear(), name="http control")

    @classmethod
    async def spawn(cls, command: GatewayCommand, listener: socket.socket) -> GatewayProcess:
        """Start one that takes calls from ``listener``. Raises OSError when the system cannot start a process."""
        return await cls.started(
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
            self.tell("metrics")
        await asyncio.wait({self._asked, self._hearing}, timeout=timeout_s, return_when=FIRST_COMPLETED)
        return self._page

    def tell(self, word: str) -> None:
        """Send a command; one that comes too late is lost."""
        self._writer.write(word.encode() + b"\n")

    async def wait(self, patience_s: float | None = None) -> int:
        try:
            return await super().wait(patience_s)
        finally:
            self._hearing.cancel()

    def last_words(self, status: int) -> str:
        """Why it ended, as far as it could say."""
        return f"it {self.ending(status)}"

    async def _hear(self) -> None:
        """Take in what it says, until it has ended."""
        # ``wait`` says that it has ended.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while words := (await self._reader.readline()).split():
                self.silence.heard()
                match words:
                    case [b"away" | b"back" as word]:
                        self.away = word == b"away"
                    case [b"ready"]:
                        self._taking.set_result(None)
                    case [b"metrics", length]:
                        self._page = (await self._reader.readexactly(int(length))).decode()
                        if self._asked is not None and not self._asked.done():
                            self._asked.set_result(None)
