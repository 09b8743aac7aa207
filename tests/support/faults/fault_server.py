"""A server in a process of its own that tests kill, freeze and start again on the same store."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pensieve.debug import child_environment
from pensieve.spawn import SpawnError, read_metric, wait_addresses
from support.processes import children
from support.service.server_process import model_folder

START_LIMIT_S = 40.0
STOP_LIMIT_S = 40.0


class FaultServer:
    """One server over one folder and one store; ``start`` may be called again after it ended."""

    def __init__(self, folder: Path, store: str, *, pace_s: float = 0.0, **options: object) -> None:
        self.model = model_folder(folder / "model")
        (self.model / "pace").write_text(str(pace_s))
        self._errors = folder / "stderr.txt"
        self._options: dict[str, object] = {
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "store": store,
            "model": str(self.model),
            "device_cache": "512tokens",
            "host_cache": "256tokens",
            "chunk_tokens": 8,
            "lease_s": 2.0,
            "disconnect_grace_s": 5.0,
            "drain_grace_s": 30.0,
            **options,
        }
        self._process: subprocess.Popen[str] | None = None
        self.grpc = self.admin = self.http = ""

    def start(self, failpoints: str = "", *, stderr: int | None = None) -> None:
        """Returns when calls are accepted. ``stderr``: a file descriptor, in place of the file behind ``log``."""
        assert self._process is None or self._process.poll() is not None
        self.release()
        environment = child_environment(failpoints=False)
        if failpoints:
            environment["PENSIEVE_FAILPOINTS"] = failpoints
        with self._errors.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "support.faults.fault_main", json.dumps(self._options)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors if stderr is None else stderr,
                text=True,
            )
        try:
            self.grpc, self.admin, self.http = wait_addresses(self._process, START_LIMIT_S)
        except SpawnError as error:
            raise AssertionError(f"{error}\n{self.log}") from error

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def log(self) -> str:
        return self._errors.read_text()

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None while there is none."""
        return next((pid for pid in children(self.process.pid) if not _is_door(pid)), None)

    @property
    def door_pid(self) -> int | None:
        """Process id of the HTTP door; None while there is none."""
        return next((pid for pid in children(self.process.pid) if _is_door(pid)), None)

    def hold(self) -> None:
        """No engine step ends until ``release``."""
        (self.model / "hold").touch()

    def release(self) -> None:
        (self.model / "hold").unlink(missing_ok=True)

    def send(self, number: signal.Signals) -> None:
        """Signal the front end, not its engine."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit status of a server that is about to end."""
        status = self.process.wait(STOP_LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def kill(self) -> None:
        """SIGKILL to the front end, as in a crash; the engine goes with it."""
        self.send(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.release()
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        return read_metric(self.admin, name)


def _is_door(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may have ended by now
        return b"pensieve.http.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@contextlib.contextmanager
def fault_server(
    folder: Path, store: str, *, pace_s: float = 0.0, **options: object
) -> Iterator[FaultServer]:
    """A server that is not started yet; gone at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    server = FaultServer(folder, store, pace_s=pace_s, **options)
    try:
        yield server
    finally:
        server.close()
