"""``pensieve simulate``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pensieve.config import CacheConfig, parse_cache_size
from pensieve.engine.cost import CostModel, CostProfileError
from pensieve.replay.schedule import Gaps
from pensieve.replay.shaping import Shape, shape
from pensieve.replay.workload import DatasetError, load
from pensieve.simulate import policies
from pensieve.simulate.load import Load
from pensieve.simulate.machine import Machine, MachineError
from pensieve.simulate.report import EngineName, document, show, simulate_all
from pensieve.simulate.settings import Routing, Settings

_POSITIVE = click.IntRange(min=1)
_ABOVE_ZERO = click.FloatRange(min=0, min_open=True)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SLACK_SHARE = 0.08


@click.command(context_settings={"show_default": True, "max_content_width": 110})
@click.argument("trace", type=_FILE)
@click.option("--engine", type=click.Choice(["turns", "full"]), default="turns",
              help="Whole turns as events, or the real engine step by step.")
@click.option("--policy", "names", multiple=True, type=click.Choice(policies.NAMES),
              help="Give it again to compare several.  [default: all]")
@click.option("--sessions", type=_POSITIVE, metavar="N", help="Draw N sessions from the trace; default: each once.")
@click.option("--rate", type=_ABOVE_ZERO, metavar="R", help="Turns per second offered; default: the recorded times.")
@click.option("--think-time", type=click.FloatRange(min=0), metavar="S",
              help="Mean of exponential pauses; default: the recorded gaps.")
@click.option("--think-from", type=_FILE, metavar="TRACE",
              help="Draw the pauses from the times between the turns of this trace.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N")
@click.option("--device-cache", default="400000tokens", metavar="SIZE", help="Per replica.")
@click.option("--host-cache", default="1600000tokens", metavar="SIZE", help="Per replica.")
@click.option("--chunk-tokens", type=_POSITIVE, default=32, metavar="N")
@click.option("--swap-watermark", type=click.FloatRange(0, 1), default=0.25)
@click.option("--decode-reserve", type=click.FloatRange(0, 1), default=0.10)
@click.option("--context-limit", type=_POSITIVE, default=131072, metavar="N", help="Longer sessions are cut.")
@click.option("--max-batch-tokens", type=_POSITIVE, default=2048, metavar="N")
@click.option("--max-running", type=_POSITIVE, default=256, metavar="N")
@click.option("--replicas", type=_POSITIVE, default=1, metavar="N")
@click.option("--routing", type=click.Choice(["affine", "random"]), default="affine",
              help="A session's turns to one replica, or each turn to any.")
@click.option("--lose-replica-at", type=click.FloatRange(min=0), metavar="S",
              help="Replica 0 is gone after S virtual seconds.")
@click.option("--machine", "machine_file", type=_FILE, metavar="FILE", help="JSON with the fields of a machine.")
@click.option("--cost-profile", type=_FILE, metavar="FILE", help="Compute rates from `pensieve profile`.")
@click.option("--exact/--no-exact", default=False,
              help="turns: rank sessions at every need instead of a little ahead; slower.")
@click.option("--jobs", type=_POSITIVE, metavar="N", help="Policies at a time; default: one per core.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write all numbers.")
def simulate(
    trace: Path, engine: EngineName, names: tuple[str, ...], sessions: int | None, rate: float | None,
    think_time: float | None, think_from: Path | None, seed: int, jobs: int | None, json_file: Path | None,
    **given: Any,
) -> None:  # fmt: skip
    """Run scheduler and cache under a virtual clock and compare eviction policies.

    TRACE is a length trace (JSONL: session_id, turn, input_tokens, output_tokens[, timestamp_s]) or ShareGPT JSON,
    maybe gzipped. Exit code 1 when a receipt does not add up.
    """
    settings = make_settings(seed=seed, **given)
    try:
        data = load(trace)
        fitting = shape(data.conversations, Shape(), settings.context_limit)
        gaps = None if think_from is None else Gaps.of(load(think_from))
        lives = Load(fitting.conversations, sessions, rate, think_time, seed, gaps)
    except (DatasetError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    names = names or policies.NAMES
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("sessions", total=lives.total * len(names))
        results = simulate_all(
            settings, lives, engine, names, min(jobs or os.cpu_count() or 1, len(names)),
            lambda done: progress.update(bar, completed=done),
        )  # fmt: skip
    about = {
        "name": data.name,
        "sha256": data.sha256,
        "cut_conversations": fitting.cut_conversations,
        "dropped_conversations": fitting.dropped_conversations,
    }
    report = document(settings, lives, engine, about, results)
    report["command"] = ["pensieve", *sys.argv[1:]]
    out = Console()
    show(report, out if out.is_terminal else Console(width=140))
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if any(row["receipts"]["violations"] for row in results):
        click.get_current_context().exit(1)


def make_settings(
    *, seed: int, device_cache: str, host_cache: str, chunk_tokens: int, swap_watermark: float, decode_reserve: float,
    context_limit: int, max_batch_tokens: int, max_running: int, replicas: int, routing: Routing,
    lose_replica_at: float | None, machine_file: Path | None, cost_profile: Path | None, exact: bool,
) -> Settings:  # fmt: skip
    """From the command line. Raises click exceptions."""
    if lose_replica_at is not None and replicas < 2:
        raise click.UsageError("--lose-replica-at needs --replicas 2 or more: somebody has to go on")
    try:
        machine = Machine.from_json(machine_file) if machine_file else Machine()
        if cost_profile is not None:
            machine = machine.with_profile(CostModel.from_json(cost_profile))
        device, host = (
            parse_cache_size(size, machine.kv_bytes) // chunk_tokens for size in (device_cache, host_cache)
        )
        if device < 1:
            raise ValueError(f"--device-cache {device_cache} does not hold one chunk")
    except (MachineError, CostProfileError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    limit = min(context_limit, device * chunk_tokens)
    return Settings(
        machine=machine,
        cache=CacheConfig(device, host, chunk_tokens, "retention", swap_watermark, decode_reserve),
        cost=machine.cost(chunk_tokens, limit),
        context_limit=limit,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        replicas=replicas,
        routing=routing,
        lose_replica_at=lose_replica_at,
        seed=seed,
        slack=0 if exact else int(_SLACK_SHARE * device),
    )
