"""A whole server in a process of its own, with the fake engine behind it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pensieve.debug import child_environment
from pensieve.spawn import SpawnError, wait_addresses
from support.engine.fake_engine import BUILDER, SCRIPT_FILE, Script
from support.service.kept_tokenizer import write_kept_folder

START_LIMIT_S = 60.0

_PROGRAM = """
import gc, json, sys, threading
gc.disable()  # as the command does
import msgspec
from pensieve.options.serve import ServeOptions
from pensieve.server.app import run
from support.service.kept_tokenizer import use_kept_tokenizers

use_kept_tokenizers()
options = msgspec.convert(json.loads(sys.argv[1]), ServeOptions, dec_hook=lambda kind, value: kind(value))
status = run(options, builder=sys.argv[2])
assert "torch" not in sys.modules, "the front end must not import torch"
left = [thread.name for thread in threading.enumerate() if "poll" in thread.name]
assert not left, f"gRPC's threads run while the process ends: {left}"
sys.exit(status)
"""

WITHOUT_UVLOOP = "import sys; sys.modules['uvloop'] = None\n"
"""``begin`` of a server on asyncio's event loop. Its HTTP door has uvloop's nevertheless."""


def model_folder(folder: Path, script: Script | None = None) -> Path:
    """A folder that the front end takes for a model, and the fake engine for its script."""
    write_kept_folder(folder)
    if script is not None:
        (folder / SCRIPT_FILE).write_bytes(msgspec.json.encode(script))
    return folder


@dataclass
class ServerProcess:
    """A started server; ``grpc``, ``admin`` and, with that option, ``http`` are HOST:PORT after ``wait_ready``."""

    process: subprocess.Popen[str]
    errors: Path
    grpc: str = ""
    admin: str = ""
    http: str = ""

    def wait_ready(self) -> None:
        try:
            self.grpc, self.admin, self.http = wait_addresses(self.process, START_LIMIT_S)
        except SpawnError as error:
            raise AssertionError(f"{error}\n{self.stderr}") from error

    @property
    def stderr(self) -> str:
        return self.errors.read_text()

    @property
    def engine_pid(self) -> int:
        """Process id of the one child, the engine."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def finish(self) -> tuple[int, str]:
        """Wait for its end; exit status and what was left on stdout."""
        rest, _ = self.process.communicate(timeout=40)
        return self.process.returncode, rest


@contextmanager
def launched(
    folder: Path, script: Script | None = None, *, ready: bool = True, environment: dict[str, str] | None = None,
    builder: str = BUILDER, cwd: Path | None = None, begin: str = "", **options: object,
) -> Iterator[ServerProcess]:  # fmt: skip
    """Start one whose files lie in ``folder``; it is killed in the end if it still runs. ``builder``: of its engine.

    ``begin``: Python that its process runs before it is a server. Not a ``preexec_fn``: that runs in a fork of this
    process, where gRPC's handlers start threads again, and those die of closed descriptors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "store": "memory:",
        "drain_grace_s": 20.0,
        "model": str(model_folder(folder / "model", script)),
        **options,
    }
    errors = folder / "stderr.txt"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", begin + _PROGRAM, json.dumps(values), builder],
            env={
                **child_environment(),
                "GRPC_VERBOSITY": "ERROR",
                **(environment or {}),
            },  # as the command does
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    server = ServerProcess(process, errors)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
