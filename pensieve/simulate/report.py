"""Runs the policies, and condenses them to numbers and a table. The JSON is described in bench/README.md."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from pensieve.lifeline import die_with_parent
from pensieve.simulate.full import FullSimulation
from pensieve.simulate.load import Load
from pensieve.simulate.settings import Settings
from pensieve.simulate.turns import TurnSimulation

SCHEMA = "pensieve.simulate/1"
EngineName = Literal["full", "turns"]
_counters: Any = None


def simulate(
    settings: Settings, load: Load, engine: EngineName, policy: str, progress: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """One policy; the same settings, load and policy give the same numbers, but for ``wall_s`` and ``peak_rss_mib``."""
    started = time.perf_counter()
    bound: float | None = None
    if engine == "turns":
        turns = TurnSimulation(settings, policy, progress)
        tally = turns.run(load)
        if turns.bound is not None:
            slots = settings.replicas * (settings.cache.device_chunks + settings.cache.host_chunks)
            bound = turns.bound.least_recomputed(slots, tally.ended)
    else:
        tally = FullSimulation(settings, policy, progress).run(load)
    return {
        "policy": policy,
        **tally.summary(),
        "least_recomputed_cost_s": bound,
        "wall_s": time.perf_counter() - started,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def simulate_all(
    settings: Settings,
    load: Load,
    engine: EngineName,
    names: Sequence[str],
    jobs: int,
    progress: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Every policy, ``jobs`` at a time, each in a process of its own. ``progress``: sessions begun, of all together."""
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", len(names), lock=False)
    with ProcessPoolExecutor(jobs, context, _share, (counters, os.getpid())) as pool:
        pending: list[Future[dict[str, Any]]] = [
            pool.submit(_one, settings, load, engine, name, index) for index, name in enumerate(names)
        ]
        for future in pending:
            while not future.done():
                time.sleep(0.1)
                progress(sum(counters))
        return [future.result() for future in pending]


def _share(counters: Any, parent: int) -> None:
    global _counters
    _counters = counters
    if not die_with_parent(parent):
        sys.exit("the program that wanted this simulation is gone")


def _one(settings: Settings, load: Load, engine: EngineName, name: str, index: int) -> dict[str, Any]:
    def count(sessions: int) -> None:
        _counters[index] = sessions

    return simulate(settings, load, engine, name, count)


def document(
    settings: Settings, load: Load, engine: EngineName, trace: dict[str, Any], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """The whole JSON. ``over_clairvoyant``: recomputed cost as a multiple of the clairvoyant policy's."""
    best = next((row["recomputed_cost_s"] for row in results if row["policy"] == "clairvoyant"), None)
    for row in results:
        row["over_clairvoyant"] = row["recomputed_cost_s"] / best if best else None
    return {
        "schema": SCHEMA,
        "engine": engine,
        "trace": trace,
        "load": {
            "sessions": load.total,
            "resampled": load.sessions is not None,
            "rate": load.rate,
            "think_time_s": load.think_time_s,
            "think_from": load.think_gaps.name if load.think_gaps else None,
            "seed": load.seed,
        },
        "machine": msgspec.to_builtins(settings.machine),
        "settings": {
            **dataclasses.asdict(settings.cache),
            "context_limit": settings.context_limit,
            "max_batch_tokens": settings.max_batch_tokens,
            "max_running": settings.max_running,
            "replicas": settings.replicas,
            "routing": settings.routing,
            "lose_replica_at": settings.lose_replica_at,
            "slack": settings.slack,
        },
        "policies": results,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """The policies below each other."""
    load = report["load"]
    table = Table(
        title=f"{load['sessions']:,} sessions of {report['trace']['name']}, {report['engine']} engine, "
        f"{report['settings']['replicas']} replica(s)",
        title_justify="left",
    )
    table.add_column("policy")
    for name in ("device %", "host %", "recomputed %", "recomputed s", "x clairvoyant", "TTFT ms mean / p90 warm",
                 "turns", "wall s"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in report["policies"]:
        tokens, warm = row["tokens"], row["ttft_s"]["warm"]
        history = tokens["context"] - tokens["new"]
        shares = [f"{100 * tokens[name] / history:.2f}" if history else "-" for name in
                  ("gpu_cached", "swapped_in", "recomputed")]  # fmt: skip
        factor = f"{row['over_clairvoyant']:.3f}" if row["over_clairvoyant"] else "-"
        ttft = f"{warm['mean'] * 1e3:.1f} / {warm['p90'] * 1e3:.1f}" if warm["count"] else "-"
        table.add_row(
            row["policy"], *shares, f"{row['recomputed_cost_s']:.1f}", factor, ttft, f"{row['turns']:,}",
            f"{row['wall_s']:.1f}",
        )  # fmt: skip
    console.print(table)
    for row in report["policies"]:
        if row["least_recomputed_cost_s"] is not None:
            least = row["least_recomputed_cost_s"]
            console.print(f"No policy can recompute less than {least:.1f} s here (space-time bound).")
        if row["receipts"]["violations"]:
            console.print(f"{row['policy']}: {row['receipts']['violations']} receipts do not add up")
