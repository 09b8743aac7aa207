"""The HAProxy that ``deploy/haproxy.cfg`` describes, before servers of a test."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.store.redis_server import free_port

CONFIGURATION = Path(__file__).parents[3] / "deploy" / "haproxy.cfg"
START_LIMIT_S = 20.0


def require_haproxy() -> str:
    """Path of the binary. Fails the test when there is none, or skips it when PENSIEVE_TEST_WITHOUT_HAPROXY=1."""
    found = shutil.which("haproxy")
    if found is not None:
        return found
    problem = "haproxy is not installed: apt-get install haproxy"
    if os.environ.get("PENSIEVE_TEST_WITHOUT_HAPROXY") == "1":
        pytest.skip(f"{problem} (skipped: PENSIEVE_TEST_WITHOUT_HAPROXY=1)")
    pytest.fail(f"{problem}, or set PENSIEVE_TEST_WITHOUT_HAPROXY=1 to skip the tests that need it")


def configured(bind: str, servers: Sequence[tuple[str, str]], control: Path) -> str:
    """The deployed configuration with other addresses: of the proxy, and (gRPC, admin) of each server."""
    text = CONFIGURATION.read_text()
    text, binds = re.subn(r"^    bind \S+", f"    bind {bind}", text, flags=re.MULTILINE)
    assert binds == 1
    head, _, tail = text.partition("    server a ")
    assert all(line.startswith(("server ", "    server ")) for line in tail.splitlines()[1:])
    lines = [
        f"    server {name} {grpc} port {admin.rpartition(':')[2]}\n"
        for name, (grpc, admin) in zip("abcdefgh", servers, strict=False)
    ]
    control_line = f"global\n    stats socket {control} mode 600 level admin\n"
    return head.replace("global\n", control_line, 1) + "".join(lines)


class HaproxyProcess:
    """One running proxy."""

    def __init__(self, folder: Path, servers: Sequence[tuple[str, str]]) -> None:
        binary = require_haproxy()
        self.address = f"127.0.0.1:{free_port()}"
        self._control = folder / "haproxy.sock"
        self._log = folder / "haproxy.log"
        (folder / "haproxy.cfg").write_text(configured(self.address, servers, self._control))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [binary, "-db", "-f", str(folder / "haproxy.cfg")], stdout=log, stderr=log
            )

    def states(self) -> dict[str, str]:
        """What the proxy thinks of each server, by name: ``UP`` or ``DOWN``, and the result of the last check."""
        rows = [row.split(",") for row in self._ask("show stat").splitlines()]
        return {
            row[1]: f"{row[17]} {row[36]}"
            for row in rows
            if len(row) > 36 and row[0] == "servers" and row[1] in "abcdefgh"
        }

    def wait_for(self, **states: str) -> None:
        """Returns when it thinks so of these servers."""
        limit = time.monotonic() + START_LIMIT_S
        while True:
            with contextlib.suppress(OSError):
                known = self.states()
                if all(known.get(name, "").startswith(state) for name, state in states.items()):
                    return
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < limit, f"{self.states()}\n{self._log.read_text()}"
            time.sleep(0.02)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(self._control))
            connection.sendall(command.encode() + b"\n")
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
            return b"".join(parts).decode()


@contextlib.contextmanager
def haproxy(folder: Path, servers: Sequence[tuple[str, str]]) -> Iterator[HaproxyProcess]:
    """A proxy before these servers, gone at the end."""
    process = HaproxyProcess(folder, servers)
    try:
        yield process
    finally:
        process.close()
