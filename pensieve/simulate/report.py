"""Reports of simulations in the format of ``pensieve replay``: the same numbers, pages and plots.

bench/README.md describes the fields that a replay does not have.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from rich.console import Console

from pensieve.replay.load.workload import Dataset, Shaped
from pensieve.replay.measure import SCHEMA, environment, intervals
from pensieve.replay.presentation.curves import entries, unsteady
from pensieve.replay.presentation.table import format_number, print_curves, print_grid
from pensieve.simulate import history
from pensieve.simulate.run import Simulation
from pensieve.simulate.scenario.load import Load

_COMPARED: Final = "x clairvoyant"
_HEADS: Final = (
    "device %", "host %", "recomputed %", "recomputed s", _COMPARED, "TTFT ms mean / p90 warm",
    "norm. ms/token mean / p90", "turns", "wall s",
)  # fmt: skip


def build_report(
    data: Dataset,
    shaped: Shaped,
    work: Sequence[Simulation],
    results: Sequence[dict[str, Any]],
    system_tokens: int = 0,
) -> dict[str, Any]:
    """Build the JSON report: each load is a run, each policy a target; settings and engine are the same.

    ``over_clairvoyant``: recomputed cost as a multiple of the clairvoyant policy's in the same run.
    """
    loads = list(dict.fromkeys((one.load.rate, one.load.seed) for one in work))
    targets = [
        _target_json(one, result, loads.index((one.load.rate, one.load.seed)))
        for one, result in zip(work, results, strict=True)
    ]
    targets.sort(key=lambda row: int(row["run"]))
    for row in targets:
        same = (other for other in targets if other["run"] == row["run"] and other["target"] == "clairvoyant")
        best = next((other["recomputed_cost_s"] for other in same), None)
        row["over_clairvoyant"] = row["recomputed_cost_s"] / best if best else None
    runs = [_run(data, shaped, targets, work, index) for index in range(len(loads))]
    first = work[0]
    return {
        "schema": SCHEMA,
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        **environment(),
        "dataset": {"name": data.name, "sha256": data.sha256},
        "options": {
            "shape": {"system_tokens": system_tokens} if system_tokens else {},
            "arrivals": _arrivals_json(first.load),
            "run": {"force_lengths": True},
            "window": {
                "start_s": first.window and first.window[0],
                "end_s": first.window and first.window[1],
            },
        },
        "workload": runs[0]["workload"],
        "runs": runs,
        "targets": targets,
        "intervals": intervals(targets),
        "valid": True,
        "invalid_reasons": [],
        "unreached": [],
        "gap": _gap(shaped, first, targets, system_tokens),
        "simulation": {
            "engine": first.engine,
            "resampled": first.load.sessions is not None,
            "machine": msgspec.to_builtins(first.settings.machine),
            "settings": _settings_json(first),
        },
    }


def _gap(
    shaped: Shaped, first: Simulation, targets: Sequence[dict[str, Any]], system_tokens: int
) -> dict[str, Any] | None:
    """See ``history.gap``. None if the simulated load differs from the load that the server served."""
    load = first.load
    if load.rate is not None or load.sessions is not None or system_tokens:
        return None
    return history.gap(shaped.conversations, first.window, targets)


def _target_json(one: Simulation, result: Mapping[str, Any], run: int) -> dict[str, Any]:
    settings = one.settings
    size = settings.cache.chunk_tokens
    details = {
        "model": settings.machine.name,
        "simulated": f"{one.engine} engine, {settings.replicas} replica(s), {settings.routing} routing",
        "device_tokens": str(settings.cache.device_chunks * size),
        "host_tokens": str(settings.cache.host_chunks * size),
    }
    return {
        **result, "run": run, "rate": one.load.rate, "clients": None, "seed": one.load.seed, "details": details,
        "vocab_size": None, "context_limit": settings.context_limit, "valid": True, "errors": {}, "error_examples": [],
    }  # fmt: skip


def _run(
    data: Dataset,
    shaped: Shaped,
    targets: Sequence[Mapping[str, Any]],
    work: Sequence[Simulation],
    index: int,
) -> dict[str, Any]:
    first = next(row for row in targets if row["run"] == index)
    workload = {
        "conversations": first["sessions"],
        "turns": first["turns"]["completed"] + first["window"]["turns_outside"],
        "cut_conversations": shaped.cut_conversations,
        "dropped_conversations": shaped.dropped_conversations,
        "dropped_turns": shaped.dropped_turns,
        "context_limit": work[0].settings.context_limit,
        "vocab_size": None,
    }
    return {
        "rate": first["rate"], "seed": first["seed"], "clients": None, "dataset_sha256": data.sha256,
        "workload": workload,
    }  # fmt: skip


def _arrivals_json(load: Load) -> dict[str, Any]:
    gaps = load.think_gaps
    gaps_json = {"name": gaps.name, "sha256": gaps.sha256, "count": len(gaps.seconds)} if gaps else None
    recorded = load.rate is None
    return {
        "rate": load.rate, "think_time_s": load.think_time_s, "think_gaps": gaps_json, "recorded": recorded,
        "seed": load.seed, "run_in_s": load.in_progress.run_in_s if load.in_progress else 0.0,
    }  # fmt: skip


def _settings_json(one: Simulation) -> dict[str, Any]:
    settings = one.settings
    cache = dataclasses.asdict(settings.cache)
    del cache["policy"]  # each target names its own
    return cache | {
        "context_limit": settings.context_limit,
        "max_batch_tokens": settings.max_batch_tokens,
        "max_running": settings.max_running,
        "replicas": settings.replicas,
        "routing": settings.routing,
        "ring_points": settings.ring_points,
        "lose_replica_at": settings.lose_replica_at,
        "replica_returns_at": settings.replica_returns_at,
        "lease_s": settings.lease_s,
        "hints": None if settings.hints is None else settings.hints.noise,
        "slack": settings.slack,
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print a row for each policy and load; for several loads also the ratios of throughput."""
    simulated, work = report["simulation"], report["workload"]
    several = simulated["settings"]["replicas"] > 1
    title = (
        f"{work['conversations']:,} sessions of {report['dataset']['name']}, {simulated['engine']} engine, "
        f"{simulated['settings']['replicas']} replica(s) of {simulated['machine']['name']}"
    )
    compared = any(row["over_clairvoyant"] is not None for row in report["targets"])
    heads = [head for head in _HEADS if compared or head != _COMPARED]
    print_grid(
        console, title, ["policy", "offered"], heads, [_line(row, compared) for row in report["targets"]]
    )
    if len(report["runs"]) > 1:
        print_curves([report], [report["dataset"]["name"]], console)
    else:
        for line in unsteady(entries([report])):
            console.print(line, style="red", markup=False, highlight=False)
    if report["gap"] is not None:
        console.print(_gap_sentence(report["gap"]))
    for row in report["targets"]:
        if row["least_recomputed_cost_s"] is not None:
            least, offered = row["least_recomputed_cost_s"], _offered(row)
            console.print(
                f"No policy can recompute less than {least:.1f} s here ({offered}; space-time bound)."
            )
        if shared := row.get("shared_input_tokens"):
            console.print(
                f"{row['target']}, {_offered(row)}: {shared:,} input tokens were already cached by other sessions."
            )
        if several and row["turns"]["completed"]:
            console.print(
                f"{row['target']}, {_offered(row)}: {_spread_sentence(row['by_replica'], simulated)}."
            )
        if row["receipts"]["violations"]:
            console.print(f"{row['target']}: {row['receipts']['violations']} receipts do not add up")


def _gap_sentence(gap: Mapping[str, Any]) -> str:
    had = gap["measured"]
    sentence = (
        f"Served: {gap['turns']:,} later turns had {gap['history_tokens']:,} tokens of history, of which "
        f"{100 * had['device']:.2f} % were on the device, {100 * had['host']:.2f} % on the host, and "
        f"{100 * had['recomputed']:.2f} % were recomputed"
    )
    if gap["clairvoyant"] is None:
        return f"{sentence}."
    best, vain = gap["clairvoyant"]["recomputed"], gap["recomputed_in_vain"]
    return f"{sentence}; a clairvoyant policy recomputes {100 * best:.2f} %: the gap is {100 * vain:.2f} %."


def _spread_sentence(rows: Sequence[Mapping[str, Any]], simulated: Mapping[str, Any]) -> str:
    mean = sum(row["turns"] for row in rows) / simulated["settings"]["replicas"]
    slow = [row["ttft_s"]["warm"]["p99"] for row in rows if row["ttft_s"]["warm"]["p99"] is not None]
    late = f"; warm TTFT p99 from {1000 * min(slow):.1f} to {1000 * max(slow):.1f} ms" if slow else ""
    return f"the busiest replica had {max(row['turns'] for row in rows) / mean:.2f} times the mean of the turns{late}"


def _line(row: Mapping[str, Any], compared: bool) -> list[str]:
    tokens, warm, each = row["tokens"], row["ttft_s"]["warm"], row["normalised_latency_s"]
    history = tokens["context"] - tokens["new"]
    shares = [
        100 * tokens[name] / history if history else None
        for name in ("gpu_cached", "swapped_in", "recomputed")
    ]
    return [
        row["target"],
        _offered(row),
        *(format_number(share, ".2f") for share in shares),
        f"{row['recomputed_cost_s']:.1f}",
        *([format_number(row["over_clairvoyant"], ".3f")] if compared else []),
        *(
            f"{format_number(times['mean'], '.1f', 1e3)} / {format_number(times['p90'], '.1f', 1e3)}"
            for times in (warm, each)
        ),
        f"{row['turns']['completed']:,}",
        f"{row['wall_s']:.1f}",
    ]


def _offered(row: Mapping[str, Any]) -> str:
    return "as recorded" if row["rate"] is None else f"{row['rate']:g} turns/s"
