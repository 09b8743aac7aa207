"""A real redis-server for tests: own folder, free loopback port, append-only file on, ended by its process id."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import redis
from redis.asyncio.connection import AbstractConnection

Scope = Literal["session", "package", "module", "class", "function"]

MEMORY, ROOM = Path("/dev/shm"), 1 << 30
START_LIMIT_S = 20.0
STOP_LIMIT_S = 5.0
IN_USE, READY = "Address already in use", "Ready to accept connections"
"""What a server's log says."""


def require_redis_server() -> str:
    """Path of the binary. Fails the test when there is none, or skips it when PENSIEVE_TEST_WITHOUT_REDIS=1."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    problem = "redis-server is not installed: apt-get install redis-server"
    if os.environ.get("PENSIEVE_TEST_WITHOUT_REDIS") == "1":
        pytest.skip(f"{problem} (skipped: PENSIEVE_TEST_WITHOUT_REDIS=1)")
    pytest.fail(f"{problem}, or set PENSIEVE_TEST_WITHOUT_REDIS=1 to skip the tests that need it")


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One server process over ``folder``; may be killed and started again on the same port and data."""

    def __init__(
        self,
        folder: Path,
        *,
        appendfsync: str = "everysec",
        options: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``environment``: what the server has in it beside this process' own."""
        self._binary = require_redis_server()
        self._folder = folder
        self._appendfsync = appendfsync
        self._options = options
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def append_only_folder(self) -> Path:
        return self._folder / "appendonlydir"

    def client(self) -> redis.Redis:
        """A plain client for looking behind the store's back."""
        return redis.Redis(host="127.0.0.1", port=self.port)

    def start(self) -> None:
        """Returns when the server answers; raises when it does not within START_LIMIT_S.

        Where somebody else has taken the port meanwhile, a server that is started for the first time takes another.
        """
        log_path = self._folder / "redis.log"
        limit = time.monotonic() + START_LIMIT_S
        self._launch(log_path)
        while not self._answers():
            said = log_path.read_text()
            if self.has_ended() and IN_USE in said and READY not in said:
                self.port = free_port()
                self._launch(log_path)
            elif self.has_ended() or time.monotonic() > limit:
                raise RuntimeError(f"redis-server did not start:\n{said[-2000:]}")
            time.sleep(0.02)

    def _launch(self, log_path: Path) -> None:
        command = [
            *(self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)),
            *("--appendonly", "yes", "--appendfsync", self._appendfsync, "--save", "", "--daemonize", "no"),
            *self._options,
        ]
        with log_path.open("ab") as log:
            # Python ignores SIGXFSZ; the server inherits that, so that ``fill_disk`` is an error and not its end.
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                restore_signals=False,
            )

    def kill(self) -> None:
        """SIGKILL: as a crash."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for a server that refuses (it does when it cannot save). Nothing if it does not run."""
        self._end(signal.SIGTERM)

    def fill_disk(self) -> None:
        """From now on no file of the server grows: a write to its end fails, as on a full disk."""
        self._limit_files(1)

    def free_disk(self) -> None:
        self._limit_files(resource.RLIM_INFINITY)

    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process is None or self._process.poll() is not None

    def _limit_files(self, size: int) -> None:
        assert self._process is not None
        _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size, hard))

    def pause(self) -> None:
        """SIGSTOP: connections stay, nobody answers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(how)
        try:
            process.wait(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        """Whether this server answers, and not another one that has its port."""
        assert self._process is not None
        try:
            with contextlib.closing(self.client()) as client:
                return bool(client.ping()) and client.info("server")["process_id"] == self._process.pid
        except redis.ConnectionError:
            return False


def before_scan(
    monkeypatch: pytest.MonkeyPatch, number: int, happens: Callable[[], Awaitable[object]]
) -> Callable[[], bool]:
    """Have something happen once, before the SCAN of that number is sent; returns whether it has happened."""
    left, send = number, AbstractConnection.send_packed_command

    async def sending(self: AbstractConnection, command: Any, check_health: bool = True) -> None:
        nonlocal left
        is_scan = b"\r\nSCAN\r\n" in b"".join(command)
        left -= is_scan
        if is_scan and left == 0:
            await happens()
        await send(self, command, check_health)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", sending)
    return lambda: left <= 0


@contextlib.contextmanager
def server_folder() -> Iterator[Path]:
    """An empty folder for servers, gone at the end; in memory if there is room.

    On a disk, what other processes write can hold up a flush for seconds, and Redis answers nothing meanwhile. Tests
    end processes, not machines.
    """
    in_memory = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM
    with tempfile.TemporaryDirectory(prefix="pensieve-redis-", dir=MEMORY if in_memory else None) as folder:
        yield Path(folder)


@contextlib.contextmanager
def redis_server(*, appendfsync: str = "everysec", options: tuple[str, ...] = ()) -> Iterator[RedisServer]:
    """A running server with an empty folder of its own, both gone at the end."""
    with server_folder() as folder:
        server = RedisServer(folder, appendfsync=appendfsync, options=options)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def redis_server_fixture(scope: Scope = "session", *, appendfsync: str = "everysec") -> object:
    """A pytest fixture that yields one running server; assign it to a name in a conftest or test file."""

    @pytest.fixture(scope=scope)
    def running_redis() -> Iterator[RedisServer]:
        with redis_server(appendfsync=appendfsync) as server:
            yield server

    return running_redis
