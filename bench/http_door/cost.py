"""What the HTTP door costs: processor time per streamed token, time to the first token, and many streams at once.

    python bench/http_door/cost.py

The server's engine has no model (``stand_ins/front_end_engine.py``), the door is a process of its own in front of it,
and the callers are in another. Everything is measured once by gRPC and once through the door, on the same server.

* tokens: streams that are answered all the time, a token a step; processor time of server and door per token
* first: one conversation each way, a turn here and a turn there by turns; the engine answers at once
* open: so many streams at the same time through the door, all with the same key; whether all end as they should, and
  the memory of server and door

One JSON line each.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

from common.servers import cpu_seconds, resident_bytes
from front_end import server
from http_door.servers import door
from http_door.streams import Broken, Came, Load, Way, conversations, offer

WAYS: tuple[Way, ...] = ("grpc", "chat", "responses")
UNBOUNDED = ("--max-wait", "0", "--max-queued", "100000", "--max-queued-tokens", "0")
WATCH_S = 0.2
OPEN_STEP_MS, OPEN_TOKENS, OPEN_RAMP_S = 1000.0, 60, 30.0
"""The streams of the third part begin spread over ``OPEN_RAMP_S``."""


@dataclass(slots=True)
class Rig:
    address: str
    url: str
    server: int
    door: int

    def load(self, way: Way, streams: int, turns: int, output: int, ramp_s: float = 1.0) -> Load:
        return Load(way, self.address, self.url, streams, turns, output, ramp_s)

    def play(self, load: Load) -> tuple[Came, float, float]:
        """What came of a load, and the seconds of processor time that it took of server and door."""
        before = cpu_seconds(self.server), cpu_seconds(self.door)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as callers:
            came = callers.submit(offer, load).result()
        return came, cpu_seconds(self.server) - before[0], cpu_seconds(self.door) - before[1]


@contextmanager
def rig(step_ms: float) -> Iterator[Rig]:
    """A server with its history in SQLite, whose engine takes a step every ``step_ms``, and a door."""
    with (
        tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder,
        # Nobody is refused: what is measured is what is carried.
        server(step_ms, "", *UNBOUNDED) as running,
        asyncio.Runner() as runner,
    ):
        held, log = AsyncExitStack(), Path(folder) / "door.log"
        url, door_pid = runner.run(held.enter_async_context(door(running.address, log)))
        try:
            yield Rig(running.address, url, running.pid, door_pid)
        finally:
            runner.run(held.aclose())
        said = log.read_text(encoding="utf-8").splitlines()[1:]
        if said:
            raise click.ClickException("the door said: " + "\n".join(said[:20]))


def tokens(streams: int, step_ms: float, output: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Processor time per token, each way."""
    turns = max(1, round(seconds / (output * step_ms / 1e3)))
    with rig(step_ms) as both:
        for way in WAYS:
            came, served, passed = both.play(both.load(way, streams, turns, output))
            if came.failures:
                raise click.ClickException(f"{len(came.failures)} turns failed: {came.failures[0]}")
            spent = passed if way != "grpc" else served
            yield {
                "part": "tokens", "way": way, "streams": streams,
                "offered_tokens_per_s": streams / step_ms * 1e3, "tokens_per_s": came.tokens / came.wall_s,
                "tokens_per_piece": came.tokens / came.pieces,
                "server_us_per_token": served / came.tokens * 1e6,
                "door_us_per_token": passed / came.tokens * 1e6,
                "tokens_per_s_per_core": came.tokens / spent if spent else None,
            }  # fmt: skip


def first(turns: int, output: int) -> Iterator[dict[str, Any]]:
    """Time to the first token, warm, the ways by turns."""
    with rig(1.0) as both:
        times = asyncio.run(_by_turns(both, turns, output))
    direct = statistics.median(times["grpc"])
    for way, taken in times.items():
        ordered = sorted(taken)
        yield {
            "part": "first", "way": way, "turns": len(ordered), "p50_ms": 1e3 * statistics.median(ordered),
            "p95_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
            "p50_over_grpc_ms": 1e3 * (statistics.median(ordered) - direct),
        }  # fmt: skip


async def _by_turns(both: Rig, turns: int, output: int) -> dict[Way, list[float]]:
    times: dict[Way, list[float]] = {way: [] for way in WAYS}
    async with AsyncExitStack() as held:
        talks = {
            way: (await held.enter_async_context(conversations(both.load(way, 1, turns, output))))[0]
            for way in WAYS
        }
        for number in range(turns + 1):
            for way, talk in talks.items():
                try:
                    taken, _ = await talk.turn(output)
                except Broken as failure:
                    raise click.ClickException(f"{way}: {failure}") from failure
                if number:  # the first connects
                    times[way].append(taken)
    return times


def held_open(streams: int) -> Iterator[dict[str, Any]]:
    """Many streams at once, with all their leases on one disk."""
    with rig(OPEN_STEP_MS) as both:
        both.play(both.load("chat", 1, 1, OPEN_TOKENS))
        memory = {"server": _resident_mb(both.server), "door": _resident_mb(both.door)}
        for way in WAYS[1:]:
            with _watched(both) as peak:
                came, _, passed = both.play(both.load(way, streams, 1, OPEN_TOKENS, OPEN_RAMP_S))
            yield {
                "part": "open", "way": way, "streams": streams, "ended": len(came.first_s),
                "failed": len(came.failures), "failures": came.failures[:3], "wall_s": came.wall_s,
                "open_at_most": peak["open"], "first_max_s": max(came.first_s, default=0.0),
                "door_mb": peak["door"], "door_kb_per_stream": (peak["door"] - memory["door"]) * 1e3 / streams,
                "server_mb": peak["server"], "server_mb_before": memory["server"], "door_mb_before": memory["door"],
                "door_cpu_s": passed,
            }  # fmt: skip


@contextmanager
def _watched(both: Rig) -> Iterator[dict[str, float]]:
    """The largest resident sets in MB, and the most connections that callers had to the door."""
    peak, over = {"server": 0.0, "door": 0.0, "open": 0.0}, threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_S):
            for name, pid in (("server", both.server), ("door", both.door)):
                peak[name] = max(peak[name], _resident_mb(pid))
            peak["open"] = max(peak["open"], float(_connections(both.url)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def _resident_mb(pid: int) -> float:
    return resident_bytes(pid) / 1e6


def _connections(url: str) -> int:
    """Established connections that were made to a local port."""
    port = f":{int(url.rpartition(':')[2]):04X}"
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(1 for row in rows if row[1].endswith(port) and row[3] == "01")


@click.command(context_settings={"show_default": True})
@click.option(
    "--part",
    "parts",
    type=click.Choice(["tokens", "first", "open"]),
    multiple=True,
    help="Only this; again for several.",
)
@click.option(
    "--streams", type=click.IntRange(min=1), multiple=True, default=(50, 100), help="Of the first part."
)
@click.option("--step-ms", type=float, default=25.0, help="Of the first part.")
@click.option("--output-tokens", type=click.IntRange(min=1), default=200)
@click.option("--seconds", type=float, default=10.0, help="Of each load of the first part.")
@click.option("--turns", type=click.IntRange(min=1), default=200, help="Of the second.")
@click.option("--open", "opened", type=click.IntRange(min=1), default=2000, help="Streams of the third part.")
def main(
    parts: Sequence[str], streams: Sequence[int], step_ms: float, output_tokens: int, seconds: float, turns: int,
    opened: int,
) -> None:  # fmt: skip
    """Measure the door."""
    rows: dict[str, Any] = {
        "tokens": lambda: (
            row for count in streams for row in tokens(count, step_ms, output_tokens, seconds)
        ),
        "first": lambda: first(turns, 4),
        "open": lambda: held_open(opened),
    }
    for part, measured in rows.items():
        if not parts or part in parts:
            for row in measured():
                click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
