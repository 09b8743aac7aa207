"""How many streamed tokens per second one front-end process carries, with an engine that costs nothing.

    python bench/serving_frontend.py --streams 100 --streams 250 --step-ms 20

Each stream gets one token per engine step and answers all the time. Reported is the front end's processor time per
token, which says what a core could carry, beside what arrived at the clients (whose processes share this machine).
Writes ``bench/results/NAME.json``.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from provenance import commit, portable
from serving_load import constant_streams
from serving_pump import STEP_VARIABLE
from serving_report import summarise
from serving_run import HEAD_START_S, Protocol, apply_load

from pensieve.debug import child_environment
from pensieve.replay.report import environment
from pensieve.spawn import wait_ready

RESULTS = Path(__file__).parent / "results"
RAMP_S = 2.0
START_LIMIT_S = 60.0


@contextmanager
def pump_server(step_ms: float, *arguments: str) -> Iterator[tuple[int, str, str]]:
    """A server in front of the pump: its process id, gRPC and admin address."""
    command = [sys.executable, str(Path(__file__).parent / "serving_pump.py"), "--listen", "127.0.0.1:0"]
    environment = child_environment(failpoints=False) | {STEP_VARIABLE: str(step_ms)}
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process.pid, *wait_ready(process, START_LIMIT_S)
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class CpuWindow:
    """Processor time of processes between two readings of the monotonic clock."""

    def __init__(self, pids: dict[str, int], begin: float, end: float) -> None:
        self._pids, self._begin, self._end = pids, begin, end
        self.seconds: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> dict[str, float]:
        self._thread.join()
        return self.seconds

    def _run(self) -> None:
        time.sleep(max(0.0, self._begin - time.monotonic()))
        before = {name: cpu_seconds(pid) for name, pid in self._pids.items()}
        time.sleep(max(0.0, self._end - time.monotonic()))
        self.seconds = {name: cpu_seconds(pid) - before[name] for name, pid in self._pids.items()}


def measure(
    streams: int, step_ms: float, protocol: Protocol, output_tokens: int, store: str
) -> dict[str, Any]:
    """One number of streams on a server of its own."""
    turns = 1 + int(protocol.seconds / (output_tokens * step_ms / 1e3))
    load = constant_streams(streams, 38, output_tokens, turns, RAMP_S)
    with pump_server(step_ms, "--model", "demo", "--store", store) as (pid, target, admin):
        pids = {"front_end": pid, "engine": children(pid)[0]}
        begin = time.monotonic() + HEAD_START_S
        cpu = CpuWindow(pids, begin + protocol.window_start_s, begin + protocol.seconds)
        seen = apply_load(target, admin, load, protocol, seed=streams)
        used = cpu.join()
    summary = summarise(streams / step_ms * 1e3, load, protocol, seen)
    tokens = summary["streamed_tokens_per_s"] * protocol.window_s
    return {
        "streams": streams,
        "offered_tokens_per_s": streams / step_ms * 1e3,
        "streamed_tokens_per_s": summary["streamed_tokens_per_s"],
        "messages_per_s": summary["messages_per_s"],
        "turns_per_s": summary["turns_per_s"],
        "failures": summary["failures"],
        "inter_token_s": summary["inter_token_s"],
        "cpu_share": {name: seconds / protocol.window_s for name, seconds in used.items()},
        "front_end_us_per_token": used["front_end"] / tokens * 1e6 if tokens else None,
        "tokens_per_s_per_core": tokens / used["front_end"] if used["front_end"] else None,
    }


@click.command()
@click.option(
    "--streams", type=click.IntRange(min=1), multiple=True, default=(100, 250, 400), show_default=True
)
@click.option("--step-ms", type=float, default=20.0, show_default=True, help="Length of an engine step.")
@click.option(
    "--output-tokens", type=click.IntRange(min=2), default=200, show_default=True, help="Of each turn."
)
@click.option("--seconds", type=float, default=12.0, show_default=True)
@click.option("--window", type=float, default=8.0, show_default=True, help="The last so many seconds count.")
@click.option("--clients", type=click.IntRange(1, 64), default=2, show_default=True, help="Client processes.")
@click.option("--store", default="", help="History store. Default: SQLite in a temporary folder.")
@click.option("--name", default="front_end", show_default=True, help="Of the result file.")
@click.option(
    "--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Its folder."
)
def main(
    streams: tuple[int, ...], step_ms: float, output_tokens: int, seconds: float, window: float, clients: int,
    store: str, name: str, results: Path,
) -> None:  # fmt: skip
    """Measure the front end."""
    protocol = Protocol(seconds, window, clients)
    rows = []
    for count in streams:
        with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
            url = store or f"sqlite:///{folder}/history.sqlite3"
            rows.append(measure(count, step_ms, protocol, output_tokens, url))
        click.echo(json.dumps(rows[-1]))
    report = {
        "schema": "pensieve.front_end/1",
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": portable(["python", "bench/serving_frontend.py", *sys.argv[1:]]),
        "commit": commit(),
        **environment(),
        "rows": rows,
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
