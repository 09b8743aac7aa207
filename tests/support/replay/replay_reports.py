"""Reports as a sweep writes them, made of invented turns; and one as the first version wrote it."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np

from pensieve.core import Usage
from pensieve.replay.measure import SCHEMA, environment, summarise
from pensieve.replay.records import Outcome, TurnRecord
from pensieve.replay.targets.base import TargetInfo

SYSTEMS = {"Pensieve": 8.0, "Pensieve <stateless> & $slow$": 4.0, "_stub": 2.5}
"""Name → turns/s that it can carry. Names that break what does not escape them."""
RATES = (1.0, 2.0, 3.5)
CONVERSATIONS, TURNS = 12, 5


def turn_records(seed: int, rate: float, capacity: float, *, stateless: bool) -> tuple[TurnRecord, ...]:
    """Waiting grows as the rate nears the capacity; a stateless system recomputes its contexts."""
    generator = np.random.default_rng([seed, round(rate * 10)])
    wait = 0.05 / max(0.05, 1 - rate / capacity)
    found = []
    for number in range(CONVERSATIONS):
        now, context = number * TURNS / rate, 0
        for turn in range(TURNS):
            new, output = int(generator.integers(20, 60)), int(generator.integers(5, 30))
            first = now + wait * float(generator.uniform(0.5, 2.0)) * (2 if stateless and turn else 1)
            step = wait * 0.2
            arrivals = [(1, first + step * token) for token in range(output)]
            kept = 0 if stateless else context // 2
            usage = Usage(
                context_tokens=context + new, new_tokens=new, gpu_cached_tokens=kept,
                swapped_in_tokens=kept // 3, recomputed_tokens=context - kept - kept // 3, output_tokens=output,
            )  # fmt: skip
            end = arrivals[-1][1]
            found.append(TurnRecord(number, turn, new, now, now + 0.001, arrivals, end, usage))
            now, context = end + 0.5, context + new + output
    return tuple(found)


def sweep(
    systems: dict[str, float] = SYSTEMS, rates: tuple[float, ...] = RATES, seeds: tuple[int, ...] = (0,)
) -> dict[str, Any]:
    """A report with an entry per system, rate and seed."""
    targets: list[dict[str, Any]] = []
    for rate in rates:
        for seed in seeds:
            for name, capacity in systems.items():
                records = turn_records(seed, rate, capacity, stateless="stateless" in name)
                duration = max(record.done_s for record in records)
                info = TargetInfo(1000, 4096, {"model": "tiny", "serve": f"--model {name}"})
                targets.append(summarise(Outcome(name, info, records, 0, duration)))
                targets[-1] |= {"rate": rate, "seed": seed, "clients": None, "swap": {"in_bytes": 4096},
                                "running_turns": {"mean": 1.5, "max": 3.0}}  # fmt: skip
    arrivals = {"rate": rates[0], "seed": seeds[0], "think_time_s": 0.5, "recorded": False}
    return {
        "schema": SCHEMA,
        "created": "2026-01-02T03:04:05+00:00",
        "command": ["pensieve", "replay", "chat</script>.json", "--rate", "1"],
        **environment(),
        "dataset": {"name": "chat<b>.json", "sha256": "00ff"},
        "options": {"shape": {"max_turns": None}, "arrivals": arrivals, "run": {"concurrency": None}},
        "workload": {
            "conversations": CONVERSATIONS,
            "turns": CONVERSATIONS * TURNS,
            "cut_conversations": 0,
            "dropped_conversations": 0,
            "context_limit": 4096,
        },
        "targets": targets,
        "intervals": [
            {
                "target": name,
                "rate": rate,
                "clients": None,
                "seeds": list(seeds),
                "metrics": {
                    "normalised_latency_s.mean": {"mean": 0.05, "low": 0.01, "high": 0.09, "n": len(seeds)}
                },
            }
            for name in systems
            for rate in rates
            if len(seeds) > 1
        ],
        "valid": True,
        "invalid_reasons": [],
        "unreached": [],
    }


def first_version(rate: float = 2.0) -> dict[str, Any]:
    """Without what later versions added."""
    report = copy.deepcopy(sweep({"Pensieve": 8.0}, (rate,)))
    for key in ("intervals", "valid", "invalid_reasons", "unreached"):
        del report[key]
    for summary in report["targets"]:
        for key in ("rate", "seed", "clients", "swap", "ttft_quantiles_s", "active_sessions"):
            del summary[key]
    parsed: dict[str, Any] = json.loads(json.dumps(report))
    return parsed
