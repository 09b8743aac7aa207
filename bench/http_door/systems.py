"""The servers that are measured: Pensieve with its HTTP door in front, and others that speak the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from evaluation import experiments
from evaluation.experiments import NO_HOST_TIER, System
from evaluation.scales import FULL, SMALL
from sharing.clients import Client, PensieveClient, Refused
from sharing.servers import last_lines, running

STAND_IN = Path(__file__).parents[1] / "stand_ins" / "chat_server.py"
DOOR_START_S, DOOR_END_S = 60.0, 10.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that is up."""

    client: Client
    """For what clients do not see: emptying the cache."""
    url: str
    """Where clients come in."""
    start_s: float
    door: int | None = None
    """Process id of the door, where it is one of its own."""

    def door_cpu_s(self) -> float | None:
        """Processor time of the door so far, its threads included."""
        if self.door is None:
            return None
        fields = Path(f"/proc/{self.door}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    began = time.monotonic()
    async with running(system, model, context, log, scratch, timeout_s) as (client, start_s):
        if not isinstance(client, PensieveClient):
            yield Serving(client, client.url, start_s)
            return
        # Not in the folder that the server removes at its end.
        async with door(client.address, log.with_name(f"{log.stem}-door.log")) as (url, pid):
            yield Serving(client, url, time.monotonic() - began, pid)


@asynccontextmanager
async def door(target: str, log: Path) -> AsyncIterator[tuple[str, int]]:
    """``pensieve gateway``: its address and process id."""
    command = [
        *(sys.executable, "-P", "-m", "pensieve", "gateway"),
        *("--target", target, "--listen", "127.0.0.1:0"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield await _ready(process, log), process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, DOOR_END_S)
        process.kill()
        process.wait()


async def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + DOOR_START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("ready http="):
                return f"http://{line.removeprefix('ready http=')}"
        await asyncio.sleep(POLL_S)
    raise Refused(f"the door did not come up:\n{last_lines(log)}")
