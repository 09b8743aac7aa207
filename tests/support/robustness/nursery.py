"""Servers that are up again at once: real processes, forked from one that has imported everything (``zygote``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pensieve.debug import child_environment
from pensieve.options.serve import ServeOptions
from pensieve.spawn import READY
from support.processes import children
from support.robustness.wires import Wires
from support.robustness.zygote import Birth

ZYGOTE_LIMIT_S = 60.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
START_LIMIT_S = 60.0


class StillBorn(RuntimeError):
    """A server ended before it was ready."""


@dataclass
class Life:
    """One life of a server."""

    pid: int
    handle: int
    """A pidfd: a signal can never reach another process that got the same number."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    grpc: str = ""
    admin: str = ""
    over: bool = False

    async def end(self) -> None:
        """Returns when the process is gone. Cancelled: it is killed."""
        try:
            while await self.reader.read(1 << 12):
                pass
        finally:
            self.send(signal.SIGKILL)
            self.over = True
            os.close(self.handle)
            self.writer.close()
            with contextlib.suppress(ConnectionError):
                await self.writer.wait_closed()

    def send(self, number: signal.Signals) -> bool:
        """Whether the process was there to get the signal."""
        if self.over:
            return False
        try:
            signal.pidfd_send_signal(self.handle, number)
        except ProcessLookupError:
            return False
        return True

    def engine(self) -> int | None:
        """Process id of its engine; None while it has none."""
        return next(iter(children(self.pid)), None)


class Nursery:
    """The zygote, seen from outside."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def birth(self, order: Birth) -> Life:
        """A server that accepts calls. Raises StillBorn."""
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        writer.write(msgspec.json.encode(order) + b"\n")
        pid = (await reader.readline()).strip()
        if not pid:
            writer.close()
            raise StillBorn("no process")
        try:
            handle = os.pidfd_open(int(pid))
        except ProcessLookupError:
            writer.close()
            raise StillBorn("gone at once") from None
        life = Life(int(pid), handle, reader, writer)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                line = (await reader.readline()).decode().strip()
        except TimeoutError:
            line = ""
        match = READY.fullmatch(line)
        if match is None:
            life.send(signal.SIGKILL)
            await life.end()
            raise StillBorn(f"not ready: {line!r}")
        life.grpc, life.admin = match["grpc"], match["admin"]
        return life


@contextlib.contextmanager
def nursery(folder: Path, environment: dict[str, str] | None = None) -> Iterator[Nursery]:
    """A running one; all its servers end with it."""
    path = folder / "zygote"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "support.robustness.zygote", str(path), str(os.getpid())],
        env={**child_environment(failpoints=False), **ONE_THREAD, **(environment or {})},
        stdout=subprocess.PIPE,
    )
    timer = threading.Timer(ZYGOTE_LIMIT_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        timer.cancel()
        yield Nursery(path)
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


@dataclass
class Replica:
    """A server that is started again whenever it ends, behind wires that can be cut."""

    nursery: Nursery
    options: ServeOptions
    errors: Path
    wires: Wires
    bug: str = ""
    failpoints: list[str] = field(default_factory=list)
    """What the next lives are armed with, one each."""
    life: Life | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    working: int = 0
    """Calls of clients under way here."""
    lives: int = 0
    engine_deaths: int = 0
    """Of the present life: an engine that dies again and again is started ever later."""
    stillborn: int = 0

    async def wait_up(self) -> None:
        """Returns when it accepts calls. Raises AssertionError, with the end of its log, when it does not."""
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await self.up.wait()
        except TimeoutError:
            raise AssertionError(f"the server does not come up:\n{self.log()[-3000:]}") from None

    async def keep(self) -> None:
        """Runs for ever."""
        while True:
            armed = self.failpoints.pop(0) if self.failpoints else ""
            order = Birth(options=self.options, errors=str(self.errors), failpoints=armed, bug=self.bug)
            try:
                self.life = await self.nursery.birth(order)
            except StillBorn:
                self.stillborn += 1
                await asyncio.sleep(0.1)
                continue
            self.lives, self.engine_deaths = self.lives + 1, 0
            self.wires.target = int(self.life.grpc.rpartition(":")[2])
            self.up.set()
            await self.life.end()
            self.up.clear()
            self.wires.target = 0

    def kill(self) -> bool:
        """SIGKILL; whether it hit a server with work."""
        return self.life is not None and self.working > 0 and self.life.send(signal.SIGKILL)

    def kill_engine(self) -> bool:
        """SIGKILL to its engine; whether it hit one with work."""
        engine = self.engine()
        if engine is None or not self.working:
            return False
        try:
            os.kill(engine, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.engine_deaths += 1
        return True

    async def pause(self, seconds: float, *, engine: bool = False) -> bool:
        """SIGSTOP and, later, SIGCONT; whether it hit a process with work."""
        life, pid = self.life, self.engine()
        if life is None or life.over or not self.working or (engine and pid is None):
            return False
        try:
            number = os.pidfd_open(pid) if engine and pid is not None else os.dup(life.handle)
        except ProcessLookupError:
            return False
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(number, signal.SIGSTOP)
                await asyncio.sleep(seconds)
                signal.pidfd_send_signal(number, signal.SIGCONT)
                return True
        finally:
            os.close(number)
        return False

    def engine(self) -> int | None:
        """Process id of its engine, if it is up and has one."""
        return self.life.engine() if self.life is not None and self.up.is_set() else None

    def log(self) -> str:
        return self.errors.read_text(errors="replace") if self.errors.exists() else ""
