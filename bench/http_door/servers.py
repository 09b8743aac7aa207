"""The servers that ``peers`` measures, each alone on the device: Pensieve behind its HTTP door, and others."""

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
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc.aio
from common.servers import cpu_seconds
from evaluation import experiments
from evaluation.experiments import NO_HOST_TIER, System
from evaluation.jobs import last_lines
from evaluation.scales import FULL, SMALL

from pensieve.spawn import READY
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as rpc

STAND_IN = Path(__file__).parents[1] / "stand_ins" / "chat_server.py"
POLL_S = 0.25
GRACE_S = 15.0
"""Time for a server to end after SIGTERM; then it is killed."""
DOOR_START_S = 60.0
IDLE_MIB, IDLE_WAIT_S = 3000, 20.0
"""The device counts as free below this; it is waited for at most this long."""


class Refused(Exception):
    """A server did not answer as asked."""


@dataclass(frozen=True, slots=True)
class Serving:
    url: str
    start_s: float
    admin: str = ""
    """Pensieve's admin address; empty for others."""
    door: int | None = None
    """Process id of the door, where it is one of its own."""

    def door_cpu_s(self) -> float | None:
        return None if self.door is None else cpu_seconds(self.door)

    async def empty_cache(self) -> None:
        """Raises Refused, or the error of the call."""
        if self.admin:
            async with grpc.aio.insecure_channel(self.admin) as channel:
                await rpc.AdminServiceStub(channel).EvictCache(pb.EvictCacheRequest(), timeout=60)
            return
        async with aiohttp.ClientSession(self.url) as http, http.post("/reset_prefix_cache") as response:
            if not response.ok:
                raise Refused(f"the prefix cache was not emptied: HTTP {response.status}")


def systems(small: bool) -> list[System]:
    """Pensieve and vLLM with the same KV memory on the device and no other. In small a stand-in is for vLLM."""
    scale = SMALL if small else FULL
    ours = experiments.pensieve(scale, "Pensieve", *NO_HOST_TIER)
    if not small:
        return [ours, experiments.vllm(scale, "vLLM", "--enable-prefix-caching")]
    command = ("{python}", "-P", str(STAND_IN), "{model}", "--port", "{port}")
    return [ours, System("stand-in", command, 5.0, "http://127.0.0.1:{port}")]


@asynccontextmanager
async def served(
    system: System, model: Path, context: int, log: Path, scratch: Path, timeout_s: float
) -> AsyncIterator[Serving]:
    """A server, and the door where it needs one. Raises Refused with its last words."""
    scratch.mkdir(parents=True, exist_ok=True)
    names = {
        "python": sys.executable, "model": str(model), "context": str(context), "port": str(_free_port()),
        "scratch": str(scratch),
    }  # fmt: skip
    command = [word.format_map(names) for word in system.command]
    url = system.url.format_map(names)
    began = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | dict(system.environment),
            )  # fmt: skip
        except OSError as error:
            raise Refused(f"{command[0]} does not start: {error}") from error
    try:
        if url:
            await _up(process, log, began + timeout_s, url)
            yield Serving(url, time.monotonic() - began)
        else:
            grpc_address, admin = await _up(process, log, began + timeout_s)
            # Not in the folder that is removed at the end.
            async with door(grpc_address, log.with_name(f"{log.stem}-door.log")) as (http, pid):
                yield Serving(http, time.monotonic() - began, admin, pid)
    finally:
        await asyncio.to_thread(_end, process)
        shutil.rmtree(scratch, ignore_errors=True)


@asynccontextmanager
async def door(target: str, log: Path) -> AsyncIterator[tuple[str, int]]:
    """``pensieve gateway``: its address and process id. Raises Refused with its last words."""
    words = ["gateway", "--target", target, "--listen", "127.0.0.1:0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pensieve", *words], stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + DOOR_START_S
        while not (lines := [one for one in _text(log).splitlines() if one.startswith("ready http=")]):
            await _still_starting(process, log, deadline)
        yield f"http://{lines[0].removeprefix('ready http=')}", process.pid
    finally:
        await asyncio.to_thread(_stop, process)


async def _up(process: subprocess.Popen[bytes], log: Path, deadline: float, url: str = "") -> tuple[str, str]:
    """Wait until the server is up; its addresses for calls and for its admin port, by its ready line, or none when it
    answers at ``url``. Raises Refused when the server ends, or is not up in time."""
    while True:
        if url:
            with contextlib.suppress(aiohttp.ClientError):  # it listens when it is up
                async with aiohttp.ClientSession(url) as http, http.get("/v1/models") as response:
                    if response.ok:
                        return "", ""
        elif found := READY.search(_text(log)):
            return found["grpc"], found["admin"]
        await _still_starting(process, log, deadline)


async def _still_starting(process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    if process.poll() is not None:
        raise Refused(f"the server ended with status {process.returncode}:\n{last_lines(_text(log))}")
    if time.monotonic() > deadline:
        raise Refused(f"the server was not up in time:\n{last_lines(_text(log))}")
    await asyncio.sleep(POLL_S)


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    process.kill()
    process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the server, kill what is left of its session, and wait until the device's memory is free."""
    _stop(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
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
