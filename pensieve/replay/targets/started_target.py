"""A target that the replay starts from a command line and stops after its measurement; reads its counters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from pensieve import lifeline
from pensieve.core import Usage
from pensieve.replay.targets.base import (
    Address,
    OnTokens,
    RemoteTarget,
    SupportsWarm,
    Target,
    TargetInfo,
    TurnFailed,
    TurnRequest,
    empty_cache,
)
from pensieve.spawn import READY, STOP_GRACE_S, read_metrics

Counters = dict[str, float]
"""Values by ``NAME``, or ``NAME.LABEL`` if labels distinguish the samples of a name."""
_PART = "pensieve_step_part_seconds_total."
_POLL_S = 0.5
_EXIT_POLL_S = 0.05
_LOG_LINES = 20
_MAX_LINE_BYTES = 1 << 20
"""Bytes. Some servers print their whole configuration in one line."""
_LAST_OUTPUT_S = 2.0
"""How long to read the last output of an ended server; a process that it left behind may keep the pipe open."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
T = TypeVar("T")
Connect = Callable[[str], Target]


def read_counters(admin: str) -> Counters:
    return {".".join((sample.name, *sample.labels.values())): sample.value for sample in read_metrics(admin)}


def counter_growth(before: Counters, after: Counters) -> dict[str, Any]:
    """Growth from ``before`` to ``after``, as ``swap`` and ``step_s`` of a report's ``targets`` entry."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    steps, busy = grown.get("pensieve_steps_total", 0.0), grown.get("pensieve_step_seconds_total", 0.0)
    parts = {name.removeprefix(_PART): value for name, value in grown.items() if name.startswith(_PART)}
    return {
        "swap": {f"{way}_bytes": grown.get(f"pensieve_swap_bytes_total.{way}", 0.0) for way in ("in", "out")},
        "step_s": {
            "count": int(steps),
            "mean": busy / steps if steps else None,
            "share": {part: spent / busy for part, spent in parts.items()} if busy else {},
        },
    }


class StartedTarget:
    """Owns one process, from ``open`` to ``close``; can be opened again.

    The command is split as by a shell, and may begin with assignments to the environment (``NAME=VALUE …``).
    With ``url`` the server is up when it answers there; without, when it prints Pensieve's ready line.
    """

    def __init__(
        self, command: str, url: str | None, connect: Connect, *, name: str | None, timeout_s: float
    ) -> None:
        self._command, self._url, self._connect = command, url, connect
        self._name, self._timeout_s = name or command, timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self._inner: Target | None = None
        self._admin = ""

    @property
    def name(self) -> str:
        return self._name

    def address(self) -> Address:
        assert isinstance(self._running, RemoteTarget)
        return self._running.address()

    @property
    def last_output(self) -> tuple[str, ...]:
        return tuple(self._log)

    async def open(self) -> TargetInfo:
        self._log.clear()
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *_arguments(self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=_MAX_LINE_BYTES,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise TurnFailed("NOT_STARTED", f"{self._command}: {error}") from error
        self._reader = asyncio.create_task(self._read(self._process, address))
        try:
            async with asyncio.timeout(self._timeout_s):
                info = await self.while_up(self._wait_until_up(address), "NOT_STARTED")
        except TimeoutError:
            await self.close()
            raise self._failed("NOT_STARTED", f"not up within {self._timeout_s:.0f} s") from None
        except BaseException:
            await self.close()
            raise
        return replace(info, details=info.details | {"started": self._command})

    async def while_up(self, work: Coroutine[Any, Any, T], code: str = "DIED") -> T:
        """Return the result of ``work``. Raises TurnFailed with the server's last output if the server ends first."""
        assert self._process is not None, "not open"
        working = asyncio.create_task(work)
        exiting = asyncio.create_task(_status(self._process))
        try:
            await asyncio.wait({working, exiting}, return_when=asyncio.FIRST_COMPLETED)
            if not exiting.done():
                return working.result()
        finally:
            for task in (working, exiting):
                task.cancel()
            await asyncio.gather(working, exiting, return_exceptions=True)
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=_LAST_OUTPUT_S)
        raise self._failed(code, f"ended with status {exiting.result()}")

    async def start_session(self) -> str:
        return await self._running.start_session()

    async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
        return await self._running.turn(session, spec, on_tokens)

    async def warm(self, session: str) -> str:
        assert isinstance(self._running, SupportsWarm)
        return await self._running.warm(session)

    async def end_session(self, session: str) -> None:
        await self._running.end_session(session)

    async def evict(self) -> str:
        return await empty_cache(self._running)

    async def counters(self) -> Counters | None:
        """Counters since the server started; None if its metrics cannot be read."""
        if not self._admin:
            return None
        try:
            return await asyncio.to_thread(read_counters, self._admin)
        except OSError:  # this must not lose the measurement; the report then lacks the counters
            return None

    async def close(self) -> None:
        """Send SIGTERM, later SIGKILL to the whole process group."""
        if self._inner is not None:
            await self._inner.close()
            self._inner = None
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await _status(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await _status(process)
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=_LAST_OUTPUT_S)
            self._reader.cancel()

    @property
    def _running(self) -> Target:
        assert self._inner is not None, "not open"
        return self._inner

    async def _wait_until_up(self, address: asyncio.Future[str]) -> TargetInfo:
        if self._url is None:
            self._inner = self._connect(f"pensieve://{await address}")
            return await self._inner.open()
        while True:
            inner = self._connect(self._url)
            try:
                info = await inner.open()
            except BaseException as error:
                await inner.close()
                if not isinstance(error, TurnFailed):
                    raise
                await asyncio.sleep(_POLL_S)
                continue
            self._inner = inner
            return info

    async def _read(self, process: asyncio.subprocess.Process, address: asyncio.Future[str]) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            text = line.decode("utf-8", "replace").rstrip("\n")
            self._log.append(text)
            match = READY.fullmatch(text.strip())
            if match and self._url is None and not address.done():
                self._admin = match["admin"]
                address.set_result(match["grpc"])

    def _failed(self, code: str, why: str) -> TurnFailed:
        return TurnFailed(code, "\n".join((f"{self._command}: {why}; last output:", *self._log)))


async def _status(process: asyncio.subprocess.Process) -> int:
    """Wait for the process to end; return its exit status.

    ``Process.wait`` would also wait for its pipe, in versions of Python without the fix of gh-119710.
    """
    while process.returncode is None:
        await asyncio.sleep(_EXIT_POLL_S)
    return process.returncode


def _arguments(command: str) -> list[str]:
    """The arguments to execute.

    ``env`` makes the assignments and then becomes the program, so that signals reach the latter. So does
    ``lifeline``, which ends the program with this process. It runs by path and isolated from all packages:
    the program may belong to another environment, and inherits the variables unchanged.
    """
    words = shlex.split(command)
    if words and _ASSIGNMENT.match(words[0]):
        words = ["env", *words]
    return [sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid()), *words]
