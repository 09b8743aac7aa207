"""One job of the evaluation: a server on a device of its own, swept over its rates by one ``pensieve replay``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.experiments import System
from evaluation.plan import Job

START_TIMEOUT_S = 300.0
INTERRUPT_GRACE_S = 8.0
"""Time for an interrupted replay to stop its server. What then still runs is killed."""
KILL_S = 10.0
"""Time for the kernel to end what was killed, and to free what it had on the device."""
LAST_LINES = 30
"""How much of a failed server's log goes into the results."""
MARK = "BENCH_EVALUATE_JOB"
"""Environment variable that every process of a job has: by it, what a job left behind is found."""
_UP = re.compile(r"^ *(\d+\.\d+) .*(?:ready grpc=|Application startup complete|listening \d)", re.MULTILINE)
_KEEPER = Path(__file__).with_name("server.py")
_FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.@+-]+/)+(?=[\w.@+-])")
_numbers = itertools.count()
_ports = itertools.count(18000 + os.getpid() % 1000 * 10)
"""Two of these programs that run at a time begin at different ports."""


@dataclass(frozen=True, slots=True)
class Device:
    """A part of the machine: one GPU, or none, and cores that no other device has."""

    name: str
    """Number of a GPU, or several with ``+`` between them; ``cpu``: no GPU."""
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """The folders in which jobs find and leave things."""

    scratch: Path
    models: Mapping[str, Path]
    """Shape → folder."""


@dataclass(frozen=True, slots=True)
class JobResult:
    job: Job
    device: str
    command: str
    """The server's command line, with names in place of this machine's folders."""
    replay: str
    wall_s: float
    start_up_s: float | None
    """Time until the server said that it was up; None: it never did."""
    report: dict[str, Any] | None
    """What ``pensieve replay --json`` wrote."""
    error: str
    """Empty when the server was measured; without the folders of this machine."""
    logs: dict[str, str] = field(default_factory=dict)


def devices(names: Sequence[str]) -> list[Device]:
    """The usable cores, split evenly among them. Raises ValueError when there are fewer cores than devices."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // len(names)
    if not each:
        raise ValueError(f"{len(names)} devices, but only {len(cores)} cores")
    return [Device(name, tuple(cores[i * each : (i + 1) * each])) for i, name in enumerate(names)]


async def run_job(
    job: Job, device: Device, site: Site, say: Callable[[str], None], left_s: Callable[[], float]
) -> JobResult:
    """Run to the end, or until no time is left, which is asked every second: the result then has the rates that were
    done. Whatever goes wrong with the server or the replay is in it, too."""
    number = next(_numbers)
    scratch = site.scratch / f"job{number}"
    scratch.mkdir()
    command = replay_command(job, site, scratch)
    mark = f"{os.getpid()}-{number}"
    started = time.monotonic()
    stopped = ""

    def tick() -> bool:
        say(_progress(job, scratch, started))
        return left_s() > 0

    try:
        status = await _replay(command, device, scratch, mark, tick)
        if status is None:
            status, stopped = 1, f"stopped after {time.monotonic() - started:.0f} s: no time was left"
    finally:
        await _end_leftovers(mark)
        shutil.rmtree(scratch / "data", ignore_errors=True)
    return _result(job, device, command, scratch, time.monotonic() - started, status, stopped)


def replay_command(job: Job, site: Site, scratch: Path) -> list[str]:
    """The whole command line; the server's is one word of it."""
    workload, system, folder = job.line.workload, job.line.system, site.models[job.line.model]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocabulary, context = str(config["vocab_size"]), str(config["max_position_embeddings"])
    own = scratch / "data"
    own.mkdir()
    names = {
        "python": sys.executable, "model": str(folder), "context": context, "port": str(_free_port()),
        "scratch": str(own),
    }  # fmt: skip
    server = [f"{name}={shlex.quote(value)}" for name, value in system.environment]
    keeper = (sys.executable, "-P", str(_KEEPER), str(scratch / "server.log"))
    server.append(shlex.join([*keeper, *(word.format_map(names) for word in system.command)]))
    url = system.url.format_map(names)
    return [
        sys.executable, "-P", "-m", "pensieve", "replay", workload.dataset,
        "--conversations", str(workload.conversations),
        "--rates", ",".join(f"{rate:g}" for rate in sorted(job.rates)),
        "--think-time", f"{workload.think_s:g}",
        "--run-in", f"{workload.run_in_s:g}",
        "--warm-up", f"{workload.warm_up_s:g}", "--window", f"{workload.window_s:g}",
        "--vocab-size", vocabulary, "--context-limit", context,
        *workload.replay,
        "--start-timeout", f"{START_TIMEOUT_S:g}",
        "--name", job.line.label,
        "--start", " ".join([url, *server] if url else server),
        "--json", str(scratch / "report.json"),
    ]  # fmt: skip


async def _replay(
    command: list[str], device: Device, scratch: Path, mark: str, tick: Callable[[], bool]
) -> int | None:
    """Exit status; None: ``tick`` said to stop. When stopped the replay is interrupted, which ends its server."""
    environment = os.environ | {
        MARK: mark,
        "CUDA_VISIBLE_DEVICES": "" if device.name == "cpu" else device.name.replace("+", ","),
    }
    with (scratch / "replay.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            start_new_session=True,  # Ctrl-C in the terminal is for this program
            preexec_fn=lambda: os.sched_setaffinity(0, device.cores),
        )  # fmt: skip
    try:
        while tick():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    return await process.wait()
        return process.returncode
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERRUPT_GRACE_S):
                    await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _end_leftovers(mark: str) -> None:
    """Kill what still carries the mark, and wait until it is gone: a server outlives a replay that was killed, and
    would keep the device. What cannot be killed within the time is left to whoever finds it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KILL_S):
            while left := _marked(mark):
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                await asyncio.sleep(0.05)


def _marked(mark: str) -> list[int]:
    """Processes with the mark in their environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        # Processes of others cannot be read, and any may end meanwhile.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _result(
    job: Job, device: Device, command: list[str], scratch: Path, wall_s: float, status: int, stopped: str
) -> JobResult:  # fmt: skip
    logs = {name: _text(scratch / name) for name in ("replay.log", "server.log")}
    report: dict[str, Any] | None = None
    written = _text(scratch / "report.json")
    if written:
        report = json.loads(written)
    error = stopped
    if report is not None and report["unreached"]:
        error = error or str(report["unreached"][0]["error"])
    if report is None or not report["targets"]:
        error = error or f"the replay ended with status {status}: {last_lines(logs['replay.log'])}"
    server = command[command.index("--start") + 1]
    server = server.partition(" ")[2] if job.line.system.url else server
    error = without_folders(error.replace(server, "SERVER"))
    up = _UP.search(logs["server.log"])
    return JobResult(
        job, device.name, _shown(job.line.system), _portable(command), wall_s, float(up[1]) if up else None,
        report, error, logs,
    )  # fmt: skip


def last_lines(text: str, lines: int = LAST_LINES) -> str:
    return "\n".join(text.rstrip("\n").split("\n")[-lines:])


def without_folders(text: str) -> str:
    """Absolute paths are cut to their last part."""
    return _FOLDERS.sub("", text)


def _shown(system: System) -> str:
    """The system's command line as the table has it: names stand for folders and ports."""
    words = [
        *(f"{name}={value}" for name, value in system.environment),
        *(shlex.quote(word) if " " in word else word for word in system.command),
    ]
    return " ".join(words).replace("{{", "{").replace("}}", "}")


def _portable(command: Sequence[str]) -> str:
    """Without the folders of this machine, and without the server's command, which stands beside it."""
    words = list(command)
    words[words.index("--start") + 1] = "SERVER"
    words[words.index("--json") + 1] = "report.json"
    return shlex.join(["pensieve", *words[words.index("replay") :]])


def _progress(job: Job, scratch: Path, started: float) -> str:
    """How far the job is, for people. The replay does not say at which rate it is; the clock does."""
    elapsed = time.monotonic() - started
    up = _UP.search(_text(scratch / "server.log"))
    if up is None:
        return f"{job.title}: starting for {elapsed:.0f} s"
    point = int((elapsed - float(up[1])) / job.step_s)
    rate = sorted(job.rates)[min(point, len(job.rates) - 1)]
    return (
        f"{job.title}: up after {float(up[1]):.1f} s, should be at {rate:g} turns/s, "
        f"{elapsed:.0f} of about {job.seconds:.0f} s"
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _free_port() -> int:
    """A port that nobody else takes before the server does, which may be minutes later.

    Hence none of those that the kernel gives to outgoing connections (32768 and up), and each only once.
    """
    return next(port for port in _ports if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
