"""Servers in front of a stand-in engine, and what the machine says of their processes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pensieve.debug import child_environment
from pensieve.spawn import wait_addresses

BENCH = Path(__file__).parents[1]
START_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class StandIn:
    pid: int
    address: str


@contextmanager
def stand_in(
    program: str, *options: str, store: str = "", environment: Mapping[str, str], kill: bool = True
) -> Iterator[StandIn]:
    """``program`` (a path below ``bench/``, with the options of ``pensieve serve``) with the demo model's tokenizer.

    The history is in SQLite in a temporary folder unless ``store`` says otherwise. At the end the server is killed, or
    with ``kill=False`` told to end.
    """
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        store = store or f"sqlite:///{folder}/history.sqlite3"
        words = f"--model demo --listen 127.0.0.1:0 --admin 127.0.0.1:0 --store {store}"
        with subprocess.Popen(
            [sys.executable, str(BENCH / program), *words.split(), *options], stdout=subprocess.PIPE, text=True,
            env=child_environment(failpoints=False) | environment,
        ) as process:  # fmt: skip
            try:
                yield StandIn(process.pid, wait_addresses(process, START_LIMIT_S).grpc)
            finally:
                process.kill() if kill else process.terminate()


def write_keys(path: Path, secrets: Mapping[str, str]) -> None:
    """A key file with the key ``ck_TENANT_SECRET`` for each tenant, which may read and write sessions."""
    path.write_text(
        "".join(
            f'[[key]]\nid = "{tenant}"\ntenant = "{tenant}"\nscopes = ["sessions.read", "sessions.write"]\n'
            f'sha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"\n'
            for tenant, secret in secrets.items()
        )
    )
    path.chmod(0o600)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, its threads included; 0 when it is gone."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except FileNotFoundError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except FileNotFoundError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
