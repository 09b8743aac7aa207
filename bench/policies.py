"""Eviction policies on the simulated server: who has to recompute how much, at equal memory and load.

    python bench/policies.py --traces FOLDER

FOLDER has ``sharegpt_sample.lengths.jsonl.gz`` and ``mooncake_conversation.jsonl.gz``. Parts: five workloads, each at
three sizes of memory, and ``rates`` and ``think``, the settings of Figures 14 and 15 of the EuroSys paper. Each run is
what ``pensieve simulate --engine turns`` does. Writes ``results/policies.json`` and ``.md``; a part that is not asked
for is kept as it is there. ``--quick``: a tenth of the sessions, one seed.
"""

from __future__ import annotations

import functools
import json
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from common.provenance import commit, portable
from policy_study.report import found_beside, markdown

from pensieve.config import CacheConfig
from pensieve.replay.load.generators import generate
from pensieve.replay.load.schedule import Gaps
from pensieve.replay.load.shaping import Shaping, shape
from pensieve.replay.load.workload import Dataset, load
from pensieve.simulate.run import Simulation
from pensieve.simulate.scenario.load import Load
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.scenario.policies import NAMES
from pensieve.simulate.scenario.settings import Settings

RESULTS = Path(__file__).parent / "results"
CHUNK_TOKENS = 32
SHAREGPT = "sharegpt_sample.lengths.jsonl.gz"
MOONCAKE = "mooncake_conversation.jsonl.gz"
SEEDS = (4, 5, 6)
"""Others than the seeds that constants of ``engine.cache.rates.returns`` were chosen on."""
ONE_SEED = frozenset({"trailing-half", "whole-session", "ttl-lru", "arc"})
"""Policies that were never near the best: with the first seed only, as some of them take long."""
SLACK_SHARE = 0.01
"""``slack`` as a share of the device tier's chunks: see ``TurnCache``."""
GQA = Machine()
OPT = msgspec.structs.replace(
    GQA, name="opt-13b on H200: the same with four times the KV", kv_bytes=819_200, kv_s=4 * GQA.kv_s
)
PAPER_DEVICE_BYTES, PAPER_HOST_BYTES = 40e9, 220e9
"""EuroSys §6.1: what each system may use of GPU and CPU memory."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One offered load."""

    title: str
    lengths: str
    """A file of the traces' folder, or a built-in workload."""
    sessions: int | None
    """None: each session of the trace once, at its recorded time."""
    rate: float | None
    """Turns per second, of all replicas."""
    think_s: float | None = None
    gaps: str | None = None
    """Trace whose times between turns are the pauses."""
    machine: Machine = GQA
    replicas: int = 1

    def load(self, traces: Path, context_limit: int, seed: int) -> Load:
        gaps = None if self.gaps is None else Gaps.of(dataset(traces, self.gaps))
        talks = shape(dataset(traces, self.lengths).conversations, Shaping(), context_limit).conversations
        return Load(talks, self.sessions, self.rate, self.think_s, seed, gaps)


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation."""

    part: str
    group: str
    """Runs of one group have the same load and memory: they are compared."""
    workload: Workload
    device_tokens: int
    host_tokens: int
    """Both tiers are those of each replica."""
    policy: str
    seed: int


WORKLOADS = {
    "sharegpt": (
        Workload("ShareGPT sample, think time 60 s", SHAREGPT, 3000, 8.0, 60.0),
        (200_000, 400_000, 800_000),
    ),
    "mooncake": (
        Workload("Mooncake, recorded gaps", MOONCAKE, 2500, 0.6),
        (800_000, 1_600_000, 3_200_000),
    ),
    "recorded": (
        Workload("Mooncake as recorded, four replicas", MOONCAKE, None, None, replicas=4),
        (500_000, 1_000_000, 2_000_000),
    ),
    "gaps": (
        Workload("ShareGPT sample, gaps of Mooncake", SHAREGPT, 3000, 4.0, gaps=MOONCAKE),
        (400_000, 800_000, 1_600_000),
    ),
    "geometric": (
        Workload("geometric ShareGPT, think time 60 s", "sharegpt", 2000, 8.0, 60.0),
        (300_000, 600_000, 1_200_000),
    ),
}
"""With sizes of both tiers together, in tokens; a quarter of them is the device."""
RATES = (2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
THINK_TIMES_S = (15.0, 60.0, 150.0, 300.0, 600.0)
PARTS = (*WORKLOADS, "rates", "think")


@functools.cache
def dataset(traces: Path, name: str) -> Dataset:
    """A trace of the folder; or a built-in workload, enough of it that sessions drawn from it are hardly ever twice."""
    return load(traces / name) if name.endswith(".gz") else generate(name, 20_000, 1)


def runs(parts: Sequence[str], seeds: Sequence[int], scale: float) -> list[Run]:
    """All simulations of these parts. ``scale``: so many times the sessions."""
    found: list[Run] = []

    def add(part: str, group: str, workload: Workload, device: float, host: float, of: Sequence[int]) -> None:
        if workload.sessions is not None:
            workload = replace(workload, sessions=int(workload.sessions * scale))
        found.extend(
            Run(part, group, workload, int(device), int(host), policy, seed)
            for policy in NAMES
            for seed in (of[:1] if policy in ONE_SEED else of)
        )

    for part, (workload, sizes) in WORKLOADS.items():
        for size in sizes if part in parts else ():
            drawn = seeds if workload.sessions is not None else (0,)
            add(part, f"{workload.title}: {size:,} tokens", workload, size / 4, size * 3 / 4, drawn)
    for rate in RATES if "rates" in parts else ():
        workload = Workload(f"{rate:g} turns/s", "sharegpt", 1200, rate, 60.0, machine=OPT)
        sizes_ = PAPER_DEVICE_BYTES / OPT.kv_bytes, PAPER_HOST_BYTES / OPT.kv_bytes
        add("rates", workload.title, workload, *sizes_, seeds)
    for think in THINK_TIMES_S if "think" in parts else ():
        workload = Workload(f"{think:g} s", "sharegpt", 4000, 6.0, think)
        sizes_ = PAPER_DEVICE_BYTES / GQA.kv_bytes, PAPER_HOST_BYTES / GQA.kv_bytes
        add("think", workload.title, workload, *sizes_, seeds[:1])
    return found


def settings(run: Run) -> Settings:
    """Settings of the simulated server."""
    machine = run.workload.machine
    device, host = run.device_tokens // CHUNK_TOKENS, run.host_tokens // CHUNK_TOKENS
    limit = min(131_072, device * CHUNK_TOKENS)
    return Settings(
        machine=machine,
        cache=CacheConfig(device, host, CHUNK_TOKENS),
        cost=machine.cost(CHUNK_TOKENS, limit),
        context_limit=limit,
        replicas=run.workload.replicas,
        seed=run.seed,
        slack=int(SLACK_SHARE * device),
    )


def result(run: Run, traces: Path) -> dict[str, Any]:
    """The numbers of one simulation."""
    server = settings(run)
    offered = run.workload.load(traces, server.context_limit, run.seed)
    found = Simulation(server, offered, "turns", run.policy).run()
    tokens = found["tokens"]
    history = tokens["context"] - tokens["new"]
    beside = history - tokens["gpu_cached"]
    return {
        "part": run.part, "group": run.group, "policy": run.policy, "seed": run.seed,
        "device_tokens": run.device_tokens, "host_tokens": run.host_tokens, "turns": found["turns"]["completed"],
        "hit_rate": found["hit_rate"], "device_hit_rate": found["device_hit_rate"],
        "host_hit_rate": tokens["swapped_in"] / beside if beside else None,
        "recomputed_tokens": tokens["recomputed"], "history_tokens": history,
        "recomputed_cost_s": found["recomputed_cost_s"],
        "least_recomputed_cost_s": found["least_recomputed_cost_s"],
        "ttft_warm_mean_s": found["ttft_s"]["warm"]["mean"], "violations": found["receipts"]["violations"],
        "virtual_s": found["virtual_s"], "wall_s": found["wall_s"],
    }  # fmt: skip


def described(parts: Sequence[str], scale: float) -> dict[str, Any]:
    """The workloads as they go into the JSON."""
    unique = {run.group: run.workload for run in runs(parts, SEEDS[:1], scale)}
    return {
        group: asdict(workload) | {"machine": workload.machine.name} for group, workload in unique.items()
    }


@click.command(context_settings={"show_default": True})
@click.option("--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS)
@click.option("--quick", is_flag=True, help="A tenth of the sessions, one seed; writes policies_quick.*.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Simulations at a time.")
def main(traces: Path, parts: tuple[str, ...], quick: bool, jobs: int) -> None:  # fmt: skip
    """Compare the eviction policies."""
    scale, seeds = (0.1, SEEDS[:1]) if quick else (1.0, SEEDS)
    file = RESULTS / ("policies_quick.json" if quick else "policies.json")
    wanted = runs(parts, seeds, scale)
    started = time.perf_counter()
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        rows = []
        for row in pool.map(functools.partial(result, traces=traces), wanted):
            rows.append(row)
            words = f"{row['group']}, {row['policy']}, seed {row['seed']}: {row['recomputed_cost_s']:.1f} s recomputed"
            print(f"{len(rows)}/{len(wanted)} {words}", file=sys.stderr, flush=True)
    old = json.loads(file.read_text()) if file.exists() else {"rows": [], "workloads": {}, "commands": {}}
    rows = [row for row in old["rows"] if row["part"] not in parts] + rows
    groups = {row["group"] for row in rows}
    about = old["workloads"] | described(parts, scale)
    report = {
        "commands": old["commands"] | dict.fromkeys(parts, portable(["python", *sys.argv])),
        "commit": commit(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "chunk_tokens": CHUNK_TOKENS,
        "slack_share": SLACK_SHARE,
        "workloads": {group: about[group] for group in about if group in groups},
        "rows": rows,
    }
    file.write_text(json.dumps(report, indent=1) + "\n")
    file.with_suffix(".md").write_text(markdown(report, found_beside(file)))
    print(f"{len(wanted)} simulations, {time.perf_counter() - started:.0f} s, {file}")
    if any(row["violations"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
