"""A server of one's own: start ``pensieve serve`` in a child process, talk to it, stop it.

Chat, demo, replay, benchmarks and tests start servers through it. It imports neither torch nor grpc.
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
"""Before what the command itself says is wrong, which is the last that it says."""


class SpawnError(RuntimeError):
    """The server did not come up; the message has its last words."""

    status: int | None = None
    """What it ended with, if it has ended by itself."""
    log = ""
    """The end of what it wrote to stderr."""

    @property
    def line(self) -> str:
        """The same in one line: what the server says is wrong, if it says so."""
        return (
            f"{NOT_STARTED}{told}"
            if (told := self._told())
            else str(self).partition("\n")[0].removesuffix(":")
        )

    @property
    def more(self) -> bool:
        """Whether the log has more than ``line`` has."""
        return self.log not in ("", f"{_COMPLAINT}{self._told()}")

    def _told(self) -> str:
        for line in reversed(self.log.splitlines()):
            if line.startswith(_COMPLAINT):
                return line.removeprefix(_COMPLAINT)
            if line.startswith("Traceback "):
                break  # what it has said before was a warning
        return ""


class ServerKilled(SpawnError):
    """A signal ended it, which was not ours."""


class ServerAddresses(NamedTuple):
    """Where a server is, each as HOST:PORT."""

    grpc: str
    admin: str
    http: str
    """"" without ``--http``."""


def wait_ready(process: subprocess.Popen[str], timeout_s: float) -> tuple[str, str]:
    """Read a server's first line: its gRPC address and its admin address. Raises SpawnError; kills it at the limit."""
    found = wait_addresses(process, timeout_s)
    return found.grpc, found.admin


def wait_addresses(process: subprocess.Popen[str], timeout_s: float) -> ServerAddresses:
    """As ``wait_ready``, with all addresses."""
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
        raise _ending(process)
    return ServerAddresses(match["grpc"], match["admin"], match["http"] or "")


def _ending(process: subprocess.Popen[str]) -> SpawnError:
    """Of a process that has closed its stdout."""
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
    """Read all samples that the admin port at HOST:PORT has. Raises OSError."""
    with urlopen(f"http://{admin}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    return [sample for family in families for sample in family.samples]


def read_metric(admin: str, name: str, **labels: str) -> float:
    """Sum of the samples called ``name`` that carry these labels. Raises OSError."""
    found = (sample for sample in read_metrics(admin) if sample.name == name)
    return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


class ServerProcess:
    """A running ``pensieve serve``. Leaving the ``with`` block sends SIGTERM and waits for the drain.

    A server that is not ready yet is killed there: it has nothing to drain. Should this process end in any other way,
    kill -9 included, the server ends by itself some seconds later.
    """

    program: ClassVar[Sequence[str]] = ("-P", "-m", "pensieve")
    """What Python runs."""

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        start_timeout_s: float = 120.0,
        listen: str = "127.0.0.1:0",
        wait: bool = True,
    ) -> None:
        """Start the server and, unless told not to ``wait``, return when it is ready.

        Raises SpawnError, and ModuleNotFoundError where only a client is installed.
        """
        extras.require("server")
        ports = ["--listen", listen, "--admin", "127.0.0.1:0"]  # any number of servers beside each other
        command = [sys.executable, *self.program, "serve", "--until-stdin-ends", *ports, *arguments]
        self._log: deque[str] = deque(maxlen=200)
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,  # ends with this process, however that comes; nothing is ever written
            text=True,
            env={**_environment(), **(environment or {})},
            start_new_session=True,  # Ctrl-C in the terminal is for the program that owns this server
        )
        self._drain = threading.Thread(target=self._read_log, daemon=True)
        self._drain.start()
        self._start_timeout_s = start_timeout_s
        self.ready = False
        self.target = self.admin = self.http = ""
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Return when the server accepts calls, with ``target``, ``admin`` and ``http`` known. Raises SpawnError."""
        try:
            self.target, self.admin, self.http = wait_addresses(self._process, self._start_timeout_s)
        except BaseException as error:
            self.kill()
            if isinstance(error, SpawnError):
                told = type(error)(f"{error}:\n{self.log}")
                told.status, told.log = error.status, self.log
                raise told from None
            raise
        self.ready = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """The end of what the server wrote to stderr."""
        return "\n".join(self._log)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels; 0 when there are none."""
        return read_metric(self.admin, name, **labels)

    def stop(self) -> int:
        """Send SIGTERM, wait for the drain, return the exit status. Kills a server that outstays ``STOP_GRACE_S``."""
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
        """Send SIGKILL: to the server it is as a power cut. Its engine goes with it."""
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


def _environment() -> dict[str, str]:
    """Without options of a server: those of the user's own one are not for this one, whose owner says all of them."""
    inherited = child_environment(failpoints=False)
    return {name: value for name, value in inherited.items() if not name.startswith("PENSIEVE_SERVE_")}


@contextlib.contextmanager
def serving(*commands: Sequence[str]) -> Iterator[list[ServerProcess]]:
    """Servers with these options each, started side by side; all of them end with the block. Raises SpawnError."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ServerProcess(*options, wait=False)) for options in commands]
        for server in servers:
            server.wait_ready()
        yield servers
