"""Start ``pensieve serve`` in a child process, talk to it, stop it.

Chat, demo, replay, benchmarks and tests start servers through this module. It imports neither torch nor grpc.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, NamedTuple, Self
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pensieve import extras
from pensieve.debug import child_environment

READY = re.compile(r"ready grpc=(?P<grpc>\S+) admin=(?P<admin>\S+)(?: http=(?P<http>\S+))?")
STOP_GRACE_S = 60.0


NOT_STARTED = "the server did not start: "
_COMPLAINT = "pensieve serve: "
"""Prefix of the command's own error message, which is its last output."""
_ENGINE = b"pensieve.engine.process.host"
"""The module that an engine's process runs."""


class SpawnError(RuntimeError):
    """The server did not start; the message includes its last output."""

    status: int | None = None
    """Exit status, if the server ended by itself."""
    log = ""

    @property
    def line(self) -> str:
        """The error in one line, with the server's own explanation if it gave one."""
        return (
            f"{NOT_STARTED}{complaint}"
            if (complaint := self._complaint())
            else str(self).partition("\n")[0].removesuffix(":")
        )

    @property
    def more(self) -> bool:
        return self.log not in ("", f"{_COMPLAINT}{self._complaint()}")

    def _complaint(self) -> str:
        for line in reversed(self.log.splitlines()):
            if line.startswith(_COMPLAINT):
                return line.removeprefix(_COMPLAINT)
            if line.startswith("Traceback "):
                break  # earlier output was a warning
        return ""


class ServerKilled(SpawnError):
    """The server was killed by a signal that we did not send."""


class ServerAddresses(NamedTuple):
    grpc: str
    admin: str
    http: str
    """"" without ``--http``."""


def wait_addresses(process: subprocess.Popen[str], timeout_s: float) -> ServerAddresses:
    """Read the ready line; return its addresses. Raises SpawnError; kills the server at the timeout."""
    assert process.stdout is not None
    late = threading.Event()

    def give_up() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout_s, give_up)
    timer.start()
    try:
        line = process.stdout.readline().strip()
    finally:
        timer.cancel()
    match = READY.fullmatch(line)
    if match is None:
        if late.is_set():
            raise SpawnError(f"{NOT_STARTED}it was not ready in {timeout_s:g} s")
        if line:
            raise SpawnError(f"{NOT_STARTED}it said {line!r}")
        raise _exit_error(process)
    return ServerAddresses(match["grpc"], match["admin"], match["http"] or "")


def _exit_error(process: subprocess.Popen[str]) -> SpawnError:
    """Return the error for a process that has closed its stdout."""
    try:
        status = process.wait(5)
    except subprocess.TimeoutExpired:
        return SpawnError(f"{NOT_STARTED}it closed its output")
    if status < 0:
        return ServerKilled(f"{NOT_STARTED}it ended with signal {-status}")
    error = SpawnError(f"{NOT_STARTED}it ended with status {status}")
    error.status = status
    return error


def read_metrics(admin: str) -> list[Sample]:
    """Return all samples of the admin port at HOST:PORT. Raises OSError."""
    with urlopen(f"http://{admin}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    return [sample for family in families for sample in family.samples]


def read_metric(admin: str, name: str, **labels: str) -> float:
    """Return the sum of the samples called ``name`` that carry these labels. Raises OSError."""
    found = (sample for sample in read_metrics(admin) if sample.name == name)
    return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


class ServerProcess:
    """A running ``pensieve serve``. Leaving the ``with`` block sends SIGTERM and waits for the drain.

    A server that is not ready yet is killed instead. If this process ends in any way, kill -9 included, the server
    ends by itself some seconds later.
    """

    program: ClassVar[Sequence[str]] = ("-P", "-m", "pensieve")

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        start_timeout_s: float = 120.0,
        listen: str = "127.0.0.1:0",
        wait: bool = True,
    ) -> None:
        """Start the server and, with ``wait``, return when it is ready. Raises SpawnError, and ModuleNotFoundError
        where only a client is installed."""
        extras.require("server")
        ports = ["--listen", listen, "--admin", "127.0.0.1:0"]  # any number of servers can run in parallel
        command = [sys.executable, *self.program, "serve", "--until-stdin-ends", *ports, *arguments]
        self._log: deque[str] = deque(maxlen=200)
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,  # closed when this process ends in any way; nothing is written to it
            text=True,
            env={**_environment(), **(environment or {})},
            start_new_session=True,  # Ctrl-C in the terminal is for this program only
        )
        self._drain = threading.Thread(target=self._read_log, daemon=True)
        self._drain.start()
        self._start_timeout_s = start_timeout_s
        self.ready = False
        self.target = self.admin = self.http = ""
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Return when the server accepts calls, with ``target``, ``admin`` and ``http`` set. Raises SpawnError."""
        try:
            self.target, self.admin, self.http = wait_addresses(self._process, self._start_timeout_s)
        except BaseException as error:
            self.kill()
            if isinstance(error, SpawnError):
                failure = type(error)(f"{error}:\n{self.log}")
                failure.status, failure.log = error.status, self.log
                raise failure from None
            raise
        self.ready = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def engine_pid(self) -> int | None:
        """Process id of the server's engine; None while it has none. Linux only."""
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        children = map(int, listed.read_text().split() if self.running else ())
        return next((child for child in children if _ENGINE in _command(child)), None)

    @property
    def log(self) -> str:
        return "\n".join(self._log)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def metric(self, name: str, **labels: str) -> float:
        return read_metric(self.admin, name, **labels)

    def stop(self) -> int:
        """Send SIGTERM, wait for the drain, return the exit status. Kills the server after ``STOP_GRACE_S``."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise SpawnError(f"the server did not stop within {STOP_GRACE_S:.0f} s:\n{self.log}") from None
        self._close_pipes()
        return status

    def kill(self) -> None:
        """Send SIGKILL: for the server it is like a power failure. Its engine dies with it."""
        if self.running:
            self._process.kill()
        self._process.wait()
        self._close_pipes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.ready:
            self.stop()
        else:
            self.kill()

    def _close_pipes(self) -> None:
        self._drain.join(5)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None and not self._drain.is_alive():
                pipe.close()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line.rstrip("\n"))


def _command(pid: int) -> bytes:
    """Return the command line of a process; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _environment() -> dict[str, str]:
    """Return this environment without the user's server options: the owner of this server passes all of them."""
    inherited = child_environment(failpoints=False)
    return {name: value for name, value in inherited.items() if not name.startswith("PENSIEVE_SERVE_")}


@contextlib.contextmanager
def serving(*commands: Sequence[str]) -> Iterator[list[ServerProcess]]:
    """Run one server per list of options, started in parallel; all end with the block. Raises SpawnError."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ServerProcess(*options, wait=False)) for options in commands]
        for server in servers:
            server.wait_ready()
        yield servers
