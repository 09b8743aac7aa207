"""Holds ``pensieve simulate`` against a server: what the cache did, and how long first tokens took, on the same turns.

    python bench/validate_simulation.py --model demo --name validation_cpu \
        --server-args "--device cpu --threads 1 --device-cache 8192tokens --host-cache 16384tokens"

1. ``pensieve profile`` measures the machine (``NAME.machine.json``) and the cost of recomputation (``NAME.cost.json``).
2. A ShareGPT-like load runs against a ``pensieve serve --record`` of its own (``NAME.trace.jsonl.gz``). Some lone
   turns before it show what the server adds to a first token outside of its engine.
3. Both engines simulate the recorded turns at their recorded arrivals, with the server's sizes and that machine.

Writes ``NAME.json`` and ``NAME.md``. ``--no-simulate`` ends after 2, ``--no-measure`` begins with 3, to simulate
elsewhere than on the machine that was measured. Exit code 1 when an error is above its limit.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import gzip
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from common.provenance import commit, gpu_name, portable

from pensieve.client import Client
from pensieve.engine.cost import CostModel
from pensieve.replay.load.generators import CHATS, generate
from pensieve.replay.load.schedule import Arrivals, Script, scripts
from pensieve.replay.load.workload import Shaping, load, shape
from pensieve.replay.measure import environment
from pensieve.replay.play import player_pool
from pensieve.replay.play.player_pool import ClientFailed
from pensieve.replay.records import RunOptions
from pensieve.replay.targets.base import TurnFailed
from pensieve.replay.targets.grpc_target import PensieveTarget
from pensieve.server.operations.recording import TraceHeader, TraceRow
from pensieve.simulate.run import EngineName, Simulation
from pensieve.simulate.scenario.load import Load
from pensieve.simulate.scenario.machine import Machine, cache_config
from pensieve.simulate.scenario.settings import Settings
from pensieve.spawn import ServerProcess, SpawnError

RESULTS = Path(__file__).parent / "results"
ENGINES: tuple[EngineName, ...] = ("full", "turns")
SOURCES = ("gpu_cached", "swapped_in", "recomputed")
TOKENS_LIMIT, TTFT_LIMIT = 0.05, 0.15
SMALL_SHARE = 0.01
"""A count below this share of all context tokens is compared by its difference over the context tokens."""
LONE_TURNS = 12
TIMES = ("weights_s", "token_s", "kv_s", "pair_s", "row_s", "fixed_s")


@dataclass(frozen=True, slots=True)
class Files:
    """The files that a measurement leaves behind for the simulation."""

    folder: Path
    name: str

    def path(self, kind: str) -> Path:
        return self.folder / f"{self.name}.{kind}"

    @property
    def trace(self) -> Path:
        return self.path("trace.jsonl.gz")

    @property
    def machine(self) -> Path:
        return self.path("machine.json")

    @property
    def cost(self) -> Path:
        return self.path("cost.json")


# -- measuring -------------------------------------------------------------------------------------------------------


def profile(files: Files, model: str, arguments: Sequence[str]) -> None:
    """Machine and cost model. Raises CalledProcessError."""
    command = [sys.executable, "-P", "-m", "pensieve", "profile", "--model", model, *arguments]
    subprocess.run([*command, "--machine", str(files.machine), "--output", str(files.cost)], check=True)


def chats(rate: float, think_s: float, seconds: float, max_context: int) -> list[Script]:
    """ShareGPT-like conversations for ``seconds``, and half as many again: starts are random."""
    count = 20 + round(1.5 * rate * seconds / CHATS["sharegpt"].published.turns)
    drawn = shape(generate("sharegpt", count, round(rate)).conversations, Shaping(), max_context)
    return scripts(drawn.conversations, Arrivals(rate, think_s, seed=round(rate)))


def serve_load(
    files: Files, model: str, arguments: Sequence[str], found: Sequence[Script], options: RunOptions
) -> None:
    """These conversations against a server that records; the machine learns what such a server adds to a turn.

    Raises SpawnError, ClientFailed and TurnFailed.
    """
    files.trace.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as folder:
        store = f"sqlite:///{folder}/history.sqlite3"
        recording = ("--store", store, "--record", str(files.trace), "--cost-profile", str(files.cost))
        with ServerProcess(
            "--model", model, "--max-wait=0", *recording, *arguments, start_timeout_s=600
        ) as server:
            inside = lone_turns(server.target)
            asyncio.run(play(server.target, found, options))
    _, rows = read_trace(files.trace)
    outside = [
        row.ttft_s - seconds for row, seconds in zip(rows, inside, strict=False) if row.ttft_s is not None
    ]
    machine = msgspec.structs.replace(
        Machine.from_json(files.machine), turn_s=max(0.0, statistics.median(outside))
    )
    files.machine.write_bytes(msgspec.json.format(msgspec.json.encode(machine), indent=1) + b"\n")


async def play(address: str, found: Sequence[Script], options: RunOptions) -> None:
    """Play conversations; what came of them is in the server's recording."""
    target = PensieveTarget(address)
    try:
        await player_pool.replay(target, await target.open(), found, options)
    finally:
        await target.close()


def lone_turns(target: str) -> list[float]:
    """Seconds that each of some turns, one at a time, took from the engine's queue to the first token."""
    inside: list[float] = []
    with Client(target) as client:
        for number in range(LONE_TURNS):
            turn = client.create_session().send(f"Turn {number}.", max_output_tokens=2, ignore_eos=True)
            inside.append(turn.usage.queue_s + turn.usage.restore_s + turn.usage.prefill_s)
    return inside


# -- simulating ------------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> tuple[TraceHeader, list[TraceRow]]:
    first, *lines = gzip.decompress(path.read_bytes()).splitlines()
    header = msgspec.json.decode(first, type=TraceHeader)
    return header, [msgspec.json.decode(line, type=TraceRow) for line in lines]


def served(rows: Sequence[TraceRow]) -> dict[str, Any]:
    """The server's counts and times, as a simulation reports its own."""
    turns = [row for row in rows if row.committed and row.ttft_s is not None]
    tokens = {name: sum(getattr(row, f"{name}_tokens") for row in turns) for name in ("context", *SOURCES)}
    ttft = [row.ttft_s or 0.0 for row in turns]
    answering = sum(row.end_s for row in turns) - sum(ttft)
    return {"turns": len(turns), **tokens, "ttft_s": statistics.fmean(ttft), "answering_s": answering}


def simulated(files: Files, header: TraceHeader, engine: EngineName, machine: Machine) -> dict[str, Any]:
    """The same turns under a virtual clock."""
    told: dict[str, Any] = header.engine
    device, host = (f"{told[tier + '_tokens']}tokens" for tier in ("device", "host"))
    if machine.groups:  # which share the tiers' bytes
        device, host = f"{told['device_bytes']}B", f"{told['host_bytes']}B"
    cache = cache_config(
        machine, device, host, chunk_tokens=told["chunk_tokens"], context_limit=told["context_limit"],
        policy=told["policy"], swap_watermark=told["swap_watermark"], decode_reserve=told["decode_reserve"],
    )  # fmt: skip
    settings = Settings(
        machine, cache, CostModel.from_json(files.cost), told["context_limit"],
        told["max_batch_tokens"], told["max_running"],
    )  # fmt: skip
    found = Simulation(settings, Load(load(files.trace).conversations), engine, told["policy"]).run()
    kinds = [kind for kind in found["ttft_s"].values() if kind["count"]]
    ttft = sum(kind["mean"] * kind["count"] for kind in kinds) / sum(kind["count"] for kind in kinds)
    tokens = {name: found["tokens"][name] for name in ("context", *SOURCES)}
    return {
        "turns": found["turns"]["completed"],
        **tokens,
        "ttft_s": ttft,
        "answering_s": found["answering_s"],
    }


def engines_for(machine: Machine) -> tuple[EngineName, ...]:
    """Engines that know such a model."""
    return ("full",) if machine.groups else ENGINES


def rescaled(
    files: Files, header: TraceHeader, machine: Machine, answering_s: float
) -> tuple[Machine, float]:
    """The machine at the speed it had during the load, by how long answers took from their first token on; and how many
    times slower that is. For machines whose cores are shared: there a profile is out of date in a minute."""
    low, high = 0.25, 8.0
    for _ in range(10):  # slower steps make larger batches, which make slower steps: so not in one go
        factor = math.sqrt(low * high)
        slower = msgspec.structs.replace(machine, **{name: factor * getattr(machine, name) for name in TIMES})
        if simulated(files, header, engines_for(machine)[-1], slower)["answering_s"] < answering_s:
            low = factor
        else:
            high = factor
    return slower, factor


def errors(server: dict[str, Any], simulation: dict[str, Any]) -> dict[str, float]:
    """Relative errors; see ``SMALL_SHARE`` for counts that are next to nothing."""
    found = {"ttft_s": simulation["ttft_s"] / server["ttft_s"] - 1}
    for name in SOURCES:
        counted = server[name] >= SMALL_SHARE * server["context"]
        found[name] = (simulation[name] - server[name]) / server["context" if not counted else name]
    return found


def within_limits(found: dict[str, float]) -> bool:
    """Whether a simulation is as close as it has to be."""
    return all(
        abs(error) <= (TTFT_LIMIT if name == "ttft_s" else TOKENS_LIMIT) for name, error in found.items()
    )


def compare(files: Files, *, rescale: bool = False) -> dict[str, Any]:
    """Server and simulations side by side."""
    header, rows = read_trace(files.trace)
    server, machine, slower = served(rows), Machine.from_json(files.machine), 1.0
    if rescale:
        machine, slower = rescaled(files, header, machine, server["answering_s"])
    engines = {engine: simulated(files, header, engine, machine) for engine in engines_for(machine)}
    return {
        "server": server,
        **engines,
        "errors": {engine: errors(server, found) for engine, found in engines.items()},
        "limits": {"tokens": TOKENS_LIMIT, "ttft_s": TTFT_LIMIT},
        "engine": header.engine,
        "fitted": msgspec.to_builtins(machine),
        "slower": slower,
    }


def page(report: dict[str, Any]) -> str:
    fitted, where = report["fitted"], report["machine"]
    lines = [
        "# Simulation against server",
        "",
        f"`{report['command']}`",
        "",
        f"{report['device'] or where['cpu']}, {where['cores']} cores, {where['system']}; commit {report['commit']}; "
        f"{report['created']}.",
        f"Machine model fitted on it: off by {fitted['mean_error']:.1%} on average, {fitted['worst_error']:.1%} at "
        f"worst over single steps; {fitted['turn_s'] * 1e3:.1f} ms a turn outside of the engine."
        + (
            f" Times of steps × {report['slower']:.2f}, from what answers took."
            if report["slower"] != 1
            else ""
        ),
        "",
        "| | turns | hit | swapped in | recomputed | mean TTFT ms |",
        "|---|---|---|---|---|---|",
    ]
    engines = list(report["errors"])
    for name in ("server", *engines):
        row = report[name]
        tokens = " | ".join(f"{row[source]:,}" for source in SOURCES)
        lines.append(f"| {name} | {row['turns']:,} | {tokens} | {row['ttft_s'] * 1e3:.1f} |")
    for name in engines:
        found = report["errors"][name]
        shown = " | ".join(f"{found[key]:+.1%}" for key in (*SOURCES, "ttft_s"))
        lines.append(f"| error of {name} | | {shown} |")
    lines += [
        "",
        f"Limits: tokens {TOKENS_LIMIT:.0%} of the server's own count (of all {report['server']['context']:,} context "
        f"tokens where that count is below {SMALL_SHARE:.0%} of them), mean TTFT {TTFT_LIMIT:.0%}.",
    ]
    return "\n".join(lines) + "\n"


@click.command(context_settings={"show_default": True})
@click.option("--model", default="demo", help="What `pensieve serve --model` takes.")
@click.option(
    "--profile-args", default="", metavar="ARGUMENTS", help="More options for `pensieve profile`, quoted."
)
@click.option(
    "--server-args", default="", metavar="ARGUMENTS", help="More options for `pensieve serve`, quoted."
)
@click.option("--rate", type=float, default=2.0, help="Turns per second offered.")
@click.option("--think-time", type=float, default=10.0, help="Mean pause of users, seconds.")
@click.option("--seconds", type=float, default=90.0, help="Length of the load.")
@click.option(
    "--max-context",
    type=click.IntRange(min=64),
    default=2048,
    metavar="N",
    help="Sessions end before this many tokens.",
)
@click.option("--clients", type=click.IntRange(1, 64), default=1, help="Client processes.")
@click.option(
    "--measure/--no-measure", default=True, help="Measure, or take the files of an earlier measurement."
)
@click.option("--simulate/--no-simulate", "simulates", default=True, help="Simulate and compare.")
@click.option(
    "--rescale/--no-rescale",
    default=False,
    help="Take the machine's speed from the answers of the load: where its cores are shared with others.",
)
@click.option("--name", default="validation", help="Of the files.")
@click.option(
    "--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Their folder."
)
def main(
    model: str, profile_args: str, server_args: str, rate: float, think_time: float, seconds: float, max_context: int,
    clients: int, measure: bool, simulates: bool, rescale: bool, name: str, results: Path,
) -> None:  # fmt: skip
    """Measure, simulate, compare."""
    results.mkdir(parents=True, exist_ok=True)
    files = Files(results, name)
    where = files.path("json")
    if measure:
        try:
            profile(files, model, shlex.split(profile_args))
            found = chats(rate, think_time, seconds, max_context)
            options = RunOptions(stop_s=seconds, processes=clients)
            serve_load(files, model, shlex.split(server_args), found, options)
        except (SpawnError, ClientFailed, TurnFailed, subprocess.CalledProcessError) as error:
            raise click.ClickException(str(error)) from error
        about = {
            "schema": "pensieve.validation/1",
            "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "command": portable(["python", "bench/validate_simulation.py", *sys.argv[1:]]),
            "commit": commit(),
            "device": gpu_name(),
            **environment(),
        }
        where.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if not simulates:
        return
    report = json.loads(where.read_text(encoding="utf-8")) | compare(files, rescale=rescale)
    where.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    files.path("md").write_text(page(report), encoding="utf-8")
    click.echo(page(report))
    if not all(within_limits(found) for found in report["errors"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
