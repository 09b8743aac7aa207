"""Starts a server of ``evaluation.experiments`` alone on the device, and ends it with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from evaluation.experiments import System
from sharing.clients import Client, OpenAIClient, PensieveClient, Refused

from pensieve.spawn import READY

POLL_S = 0.25
GRACE_S = 15.0
"""For a server that was told to end; then it is killed."""
IDLE_MIB, IDLE_WAIT_S = 3000, 20.0
"""The device counts as free below this, and is waited for so long."""
LAST_LINES = 40


@asynccontextmanager
async def running(
    system: System, model: Path, context: int, log: Path, scratch: Path, timeout_s: float
) -> AsyncIterator[tuple[Client, float]]:
    """A client of the server, and the seconds that its start took. Raises Refused with its last words."""
    scratch.mkdir(parents=True, exist_ok=True)
    names = {
        "python": sys.executable, "model": str(model), "context": str(context), "port": str(_free_port()),
        "scratch": str(scratch),
    }  # fmt: skip
    command = [word.format_map(names) for word in system.command]
    url = system.url.format_map(names)
    started = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | dict(system.environment),
            )  # fmt: skip
        except OSError as error:
            raise Refused(f"{command[0]} does not start: {error}") from error
    client: Client | None = None
    try:
        client = await _connected(process, url, log, started + timeout_s)
        yield client, time.monotonic() - started
    finally:
        if client is not None:
            with contextlib.suppress(Exception):
                await client.close()
        await asyncio.to_thread(_end, process)
        shutil.rmtree(scratch, ignore_errors=True)


async def _connected(process: subprocess.Popen[bytes], url: str, log: Path, deadline: float) -> Client:
    """A client that is open. Raises Refused when the server ends, or is not up in time."""
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Refused(f"the server ended with status {process.returncode}:\n{last_lines(log)}")
        client: Client | None = OpenAIClient(url) if url else None
        if client is None:
            found = READY.search(log.read_text(encoding="utf-8", errors="replace"))
            client = PensieveClient(found["grpc"], found["admin"]) if found else None
        if client is not None:
            try:
                await client.open()
            except Exception:
                if not url:
                    raise
                await client.close()  # vLLM listens when it is up
            else:
                return client
        await asyncio.sleep(POLL_S)
    raise Refused(f"the server was not up in time:\n{last_lines(log)}")


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, SIGKILL to what is left of its session, and wait for the device's memory."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + IDLE_WAIT_S
    while time.monotonic() < deadline and _used_mib() > IDLE_MIB:
        time.sleep(POLL_S)


def _used_mib() -> int:
    """Memory in use on the first device; 0 where there is none."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return 0
    query = [path, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0]) if done.returncode == 0 and done.stdout.split() else 0


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port
