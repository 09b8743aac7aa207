"""Pensieve under a ShareGPT-like load through gRPC: turns per second, latency, time to first token.

    python bench/dummy_model.py llama-2-13b-gqa10 FOLDER
    python bench/serving.py --rate 60 --rate 120 --model-folder FOLDER \
        --server-args "--device cuda --load-format dummy --device-cache 40GiB --host-cache 64GiB"

Starts the server, waits for its ready line, applies each rate in turn (the cache is emptied in between), and ends the
server by SIGTERM. A turn is sent a drawn pause after the answer before it ended; answers are greedy and have forced
lengths; inputs are token ids. Normalised latency is (end - send) / output tokens of a turn, where the end is the
message that says that the turn is durable. Writes ``bench/results/NAME.json`` and ``NAME.md``. Exit code 1 when a turn
failed, a receipt does not add up or the server did not survive.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from provenance import commit, gpu_name, portable
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from serving_client import Progress as Counts
from serving_load import sessions
from serving_report import markdown, summarise
from serving_run import ClientError, Protocol, apply_load, evict_all

from pensieve.replay.report import environment
from pensieve.spawn import ServerProcess, SpawnError

RESULTS = Path(__file__).parent / "results"
SETTLE_S = 3.0
"""Between two loads on one server, for turns that were cut off to be gone."""


def run_rate(
    server: ServerProcess, rate: float, think_s: float, protocol: Protocol, max_context: int, console: Console
) -> dict[str, Any]:
    """One load on a running server. Raises ClientError."""
    seed = round(rate)
    load = sessions(rate, think_s, protocol.seconds, seed, max_context)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[seen]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{rate:g} req/s", total=protocol.seconds, seen="")

        def watch(elapsed: float, counts: Counts) -> None:
            seen = f"{counts.done} turns, {counts.running} running, {counts.failed} failed, {counts.tokens} tokens"
            progress.update(bar, completed=max(0.0, min(elapsed, protocol.seconds)), seen=seen)

        seen = apply_load(server.target, server.admin, load, protocol, seed, watch)
    return summarise(rate, load, protocol, seen)


def measure(
    start: Callable[[], ServerProcess],
    rates: tuple[float, ...],
    fresh: bool,
    one: Callable[..., dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Results of all rates that could be measured, and what went wrong with the server."""
    runs: list[dict[str, Any]] = []
    problems: list[str] = []
    left = list(rates)
    while left:
        server = start()
        try:
            while left:
                rate = left.pop(0)
                runs.append(one(server, rate))
                problems += _health(server, rate, runs[-1])
                if fresh or not server.running:
                    break
                if left:
                    asyncio.run(_clear(server.admin))
        finally:
            problems += _end(server)
    return runs, problems


def _health(server: ServerProcess, rate: float, run: dict[str, Any]) -> list[str]:
    """What happened to the server during a load."""
    restarts = run["server"].get("counters", {}).get("pensieve_engine_restarts_total", 0)
    found = [f"rate {rate:g}: the engine was replaced {restarts:.0f} times"] if restarts else []
    if run["server"].get("problem"):
        found.append(f"rate {rate:g}: metrics could not be read ({run['server']['problem']})")
    if not server.running:
        found.append(f"rate {rate:g}: the server died")
    return found


async def _clear(admin: str) -> None:
    await asyncio.sleep(SETTLE_S)
    await evict_all(admin)


def _end(server: ServerProcess) -> list[str]:
    try:
        status = server.stop()
    except SpawnError:
        return ["the server did not end after SIGTERM"]
    return [f"the server ended with status {status}"] if status else []


@click.command()
@click.option("--rate", "rates", type=click.FloatRange(0, min_open=True), multiple=True, required=True, metavar="R",
              help="Turns per second offered in the steady state; again for several. Also the seed.")  # fmt: skip
@click.option(
    "--model-folder", default="demo", show_default=True, help="What `pensieve serve --model` takes."
)
@click.option(
    "--server-args", default="", metavar="ARGUMENTS", help="More options for `pensieve serve`, quoted."
)
@click.option("--store", default="", metavar="URL",
              help="History store. Default: SQLite in a temporary folder, flushed to disk as in use.")  # fmt: skip
@click.option("--seconds", type=float, default=75.0, show_default=True, help="Length of each load.")
@click.option("--window", type=float, default=35.0, show_default=True, help="The last so many seconds count.")
@click.option(
    "--think-time", type=float, default=10.0, show_default=True, metavar="S", help="Mean pause of users."
)
@click.option("--max-context", type=click.IntRange(min=64), default=16384, show_default=True, metavar="N",
              help="Sessions end before this many tokens.")  # fmt: skip
@click.option("--clients", type=click.IntRange(1, 64), default=4, show_default=True, help="Client processes.")
@click.option("--fresh-server", is_flag=True, help="Start the server anew for each rate.")
@click.option("--start-timeout", type=float, default=600.0, show_default=True, metavar="S",
              help="For the server to print its ready line.")  # fmt: skip
@click.option("--name", default="serving", show_default=True, help="Of the two result files.")
@click.option(
    "--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Their folder."
)
def main(
    rates: tuple[float, ...], model_folder: str, server_args: str, store: str, seconds: float, window: float,
    think_time: float, max_context: int, clients: int, fresh_server: bool, start_timeout: float, name: str,
    results: Path,
) -> None:  # fmt: skip
    """Serve the load at each rate and report."""
    if not 0 < window <= seconds:
        raise click.UsageError("--window must lie within --seconds")
    console = Console(stderr=True)
    protocol = Protocol(seconds, window, clients)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pensieve-bench-"))
        url = store or f"sqlite:///{folder}/history.sqlite3"
        arguments = ("--model", model_folder, "--store", url, *shlex.split(server_args))
        shown = (
            "--model",
            model_folder,
            "--store",
            store or "sqlite:///TEMPORARY",
            *shlex.split(server_args),
        )
        try:
            runs, problems = measure(
                lambda: ServerProcess(*arguments, start_timeout_s=start_timeout),
                rates,
                fresh_server,
                lambda server, rate: run_rate(server, rate, think_time, protocol, max_context, console),
            )
        except (SpawnError, ClientError) as error:
            raise click.ClickException(str(error)) from error
    report = {
        "schema": "pensieve.serving/1",
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": portable(["python", "bench/serving.py", *sys.argv[1:]]),
        "commit": commit(),
        "device": gpu_name(),
        **environment(),
        "model": Path(model_folder).name,
        "serve": portable(shown),
        "protocol": {
            "seconds": seconds, "window_s": window, "think_s": think_time, "clients": clients,
            "max_context": max_context, "fresh_server": fresh_server,
        },
        "runs": runs,
        "problems": problems,
    }  # fmt: skip
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    page = markdown(report)
    (results / f"{name}.md").write_text(page, encoding="utf-8")
    click.echo(page)
    if problems or any(run["turns"]["failed"] or run["receipts"]["violations"] for run in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
