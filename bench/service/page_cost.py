"""What the web page costs a server: turns a second with the page open and without, in turns.

    python bench/service/page_cost.py --sessions 1000 --rounds 5

The engine is ``priced_engine``: the real scheduler and cache around a model that only takes its time. First every
session has one turn; then callers, in a process of their own, make one turn after the other over all of them. Of each
round one half is without the page and the other with: that asks for what an open page asks for, as often (state each
second, series each five, the gap each fifteen). Which half comes first changes from round to round.
Beside turns, which depend on what else the machine does, the processor time of server and engine is
taken. The last line is one JSON document.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

from service.page_talk import Talk, begin, converse
from service.priced_engine import STEP_VARIABLE, TOKEN_VARIABLE

from pensieve.debug import child_environment
from pensieve.spawn import wait_ready

START_LIMIT_S = 60.0
ASKS = (("state.json?limit=5000", 1.0), ("series.json", 5.0), ("gap.json", 15.0))


@dataclass
class OpenPage:
    """Asks what an open page asks, from ``look``\'s beginning to its end."""

    address: str
    asked: list[float] = field(default_factory=list)
    """Seconds that each answer with the state took."""
    size: int = 0

    def look(self, until: float) -> None:
        due = [time.monotonic()] * len(ASKS)
        while (now := time.monotonic()) < until:
            for number, (path, every) in enumerate(ASKS):
                if now >= due[number]:
                    due[number] = now + every
                    begun = time.monotonic()
                    with urllib.request.urlopen(f"http://{self.address}/{path}", timeout=30) as answer:
                        body = answer.read()
                    if number == 0:
                        self.asked.append(time.monotonic() - begun)
                        self.size = len(body)
            time.sleep(0.02)


def processor_s(pid: int) -> float:
    """Seconds that a process and its children have computed so far."""
    children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    ticks = 0
    for one in (pid, *(int(child) for found in children for child in found)):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(step_ms: float, token_us: float) -> Iterator[tuple[str, str, int]]:
    """The addresses of a server, gRPC and admin port, and its process."""
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        command = [
            *(sys.executable, str(Path(__file__).parent / "priced_engine.py"), "--model", "demo"),
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "warning"),
            *("--store", f"sqlite:///{folder}/history.sqlite3"),
        ]
        environment = child_environment(failpoints=False)
        environment |= {STEP_VARIABLE: str(step_ms), TOKEN_VARIABLE: str(token_us)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                yield *wait_ready(process, START_LIMIT_S), process.pid
            finally:
                process.kill()


def per_second(ended: list[float], begun: float, until: float) -> float:
    return sum(begun <= at < until for at in ended) / (until - begun)


@click.command()
@click.option("--sessions", type=int, default=1000, show_default=True)
@click.option("--callers", type=int, default=32, show_default=True)
@click.option("--rounds", type=int, default=5, show_default=True)
@click.option("--seconds", type=float, default=20.0, show_default=True, help="Of each half of a round.")
@click.option("--step-ms", type=float, default=10.0, show_default=True, help="Price of a step.")
@click.option("--token-us", type=float, default=20.0, show_default=True, help="Price of a token in it.")
@click.option("--output-tokens", type=int, default=20, show_default=True, help="Of each answer.")
def main(
    sessions: int, callers: int, rounds: int, seconds: float, step_ms: float, token_us: float, output_tokens: int
) -> None:  # fmt: skip
    """Measure turns a second with the page open and without."""
    spawn = multiprocessing.get_context("spawn")
    with (
        serving(step_ms, token_us) as (address, admin, pid),
        ProcessPoolExecutor(1, mp_context=spawn) as pool,
    ):
        talk = Talk(address, sessions, callers, output_tokens)
        names = pool.submit(begin, talk).result()
        talk = Talk(address, sessions, callers, output_tokens, names)
        page = OpenPage(admin)
        first = time.monotonic() + 3.0  # the callers find their sessions
        halves = [
            (first + at * seconds, (at + at // 2) % 2 == 1) for at in range(2 * rounds)
        ]  # without, with, with, without, …
        computed: list[float] = []
        calling = pool.submit(converse, talk, first + 2 * rounds * seconds)
        for begun, is_open in halves:
            time.sleep(max(begun - time.monotonic(), 0.0))
            before = processor_s(pid)
            if is_open:
                page.look(begun + seconds)
            time.sleep(max(begun + seconds - time.monotonic(), 0.0))
            computed.append(processor_s(pid) - before)
        ended = calling.result()
    rates = [(is_open, per_second(ended, begun, begun + seconds)) for begun, is_open in halves]
    shut = [rate for is_open, rate in rates if not is_open]
    opened = [rate for is_open, rate in rates if is_open]
    ratios = [b / a for a, b in zip(shut, opened, strict=True)]

    def per_turn(wanted: bool) -> float:
        spent = sum(cpu for cpu, (is_open, _) in zip(computed, rates, strict=True) if is_open == wanted)
        turns = sum(rate * seconds for is_open, rate in rates if is_open == wanted)
        return round(1e3 * spent / max(turns, 1.0), 3)

    found: dict[str, Any] = {
        "sessions": sessions,
        "turns_per_s_without": [round(rate, 2) for rate in shut],
        "turns_per_s_with": [round(rate, 2) for rate in opened],
        "ratio_of_medians": round(statistics.median(opened) / statistics.median(shut), 4),
        "processor_ms_per_turn_without": per_turn(False),
        "processor_ms_per_turn_with": per_turn(True),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "state_ms_p50": round(1e3 * statistics.median(page.asked), 1),
        "state_ms_max": round(1e3 * max(page.asked), 1),
        "state_bytes": page.size,
    }
    click.echo(
        f"without the page: {statistics.median(shut):.1f} turns/s; with it: {statistics.median(opened):.1f}"
    )
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
