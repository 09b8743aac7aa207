"""What hints are worth: recomputation and first tokens on the simulated server, with clients that say when they return.

    cd bench; python -m policy_study.hints --traces FOLDER

FOLDER as for ``policies.py``. Three loads, each at two sizes of memory: Mooncake, whose sessions are drawn from the
trace with their recorded gaps; the ShareGPT sample with the gaps of Mooncake; and agents, whose lengths and pauses are
drawn here (``Agents``). Clients say nothing, or how long until their next turn and which one is the last: as it is, or
with a lognormal error; or only one of both; or all sessions that end promise another turn instead. Writes
``results/hints.json`` and ``.md``.
"""

from __future__ import annotations

import json
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import click
import numpy as np
from common.provenance import commit, portable
from policies import MOONCAKE, RESULTS, SEEDS, SHAREGPT, Run, Workload, dataset, settings

from pensieve.core import Hints
from pensieve.replay.load.schedule import Gaps
from pensieve.replay.load.shaping import Shaping, shape
from pensieve.replay.load.workload import Conversation, TurnLengths
from pensieve.simulate.run import Simulation
from pensieve.simulate.scenario.load import Life, Load
from pensieve.simulate.scenario.settings import ClientHints, Settings
from pensieve.simulate.turns import batch

POLICIES = ("gittins", "retention")
PROMISED_S = 60.0
"""The next turn that never comes, in the load of clients that promise one."""
TOLD: dict[str, ClientHints | None] = {
    "none": None,
    "exact": ClientHints(0.0),
    "error 0.5": ClientHints(0.5),
    "error 1.0": ClientHints(1.0),
    "pauses only, error 0.5": ClientHints(0.5, ends=False),
    "ends only": ClientHints(pauses=False),
    "error 0.5, ends denied": ClientHints(0.5, ends=False),
}
DENIED = "error 0.5, ends denied"
FOUND = RESULTS / "hints_found.md"
METHOD = """Turns engine, the machine of `pensieve simulate`, a quarter of the memory is the device. Means
over seeds 4, 5 and 6; in brackets the least and the greatest recomputed tokens of a seed against the same seed without
hints. The last three rows of a table are of seed 4 alone, so only their brackets compare. Each run is of whole sessions
from an empty cache to the last answer."""
ASIDE = ("pauses only, error 0.5", "ends only", DENIED)
"""With the first seed and the smaller size only."""


@dataclass(frozen=True, slots=True)
class Agents(Workload):
    """Sessions of agents: a long prompt, then calls of tools whose results are the input of the next turn.

    86 % of the pauses are below a second and 95 % below ten (what vllm-project/router #285 reports of agents); the
    others are up to ten minutes, where a person or a slow job is waited for. Within each part times are log-uniform.
    """

    def load(self, traces: Path, context_limit: int, seed: int) -> Load:
        rng = np.random.default_rng([seed, 77])
        talks = [self._talk(number, rng) for number in range(2000)]
        edges = np.log([0.05, 1.0, 10.0, 600.0])
        part = rng.choice(3, 20_000, p=(0.86, 0.09, 0.05))
        pauses = np.exp(rng.uniform(edges[part], edges[part + 1]))
        gaps = Gaps("agents", "drawn", tuple(pauses.tolist()))
        shaped = shape(talks, Shaping(), context_limit).conversations
        return Load(shaped, self.sessions, self.rate, None, seed, gaps)

    @staticmethod
    def _talk(number: int, rng: np.random.Generator) -> Conversation:
        turns = 1 + int(rng.geometric(1 / 14))
        inputs = np.clip(rng.lognormal(np.log(300), 1.0, turns), 8, 6000).astype(int)
        inputs[0] += int(rng.uniform(2000, 6000))
        outputs = np.clip(rng.lognormal(np.log(120), 0.7, turns), 8, 1500).astype(int)
        return Conversation(
            f"agent{number}",
            tuple(TurnLengths(int(i), int(o)) for i, o in zip(inputs, outputs, strict=True)),
        )


LOADS: dict[str, tuple[Workload, tuple[int, ...]]] = {
    "mooncake": (
        Workload("Mooncake, 700 sessions with recorded gaps", MOONCAKE, 700, 0.6),
        (1_000_000, 1_500_000),
    ),
    "sharegpt": (
        Workload(
            "ShareGPT sample, 700 sessions with the gaps of Mooncake", SHAREGPT, 700, 4.0, gaps=MOONCAKE
        ),
        (200_000, 400_000),
    ),
    "agents": (Agents("agents, 300 sessions", "", 300, 1.5), (200_000, 400_000)),
}
"""With sizes of both tiers together, in tokens; a quarter is the device."""


def simulated(load: str, size: int, policy: str, told: str, seed: int, traces: Path) -> dict[str, Any]:
    """The numbers of one simulation."""
    workload = LOADS[load][0]
    run = Run(load, load, workload, size // 4, size * 3 // 4, policy, seed)
    server = replace(settings(run), hints=TOLD[told])
    batch.hints_of = denying if told == DENIED else HINTS_OF
    found = Simulation(server, workload.load(traces, server.context_limit, seed), "turns", policy).run()
    tokens = found["tokens"]
    return {
        "load": load, "tokens": size, "policy": policy, "told": told, "seed": seed,
        "turns": found["turns"]["completed"], "history_tokens": tokens["context"] - tokens["new"],
        "recomputed_tokens": tokens["recomputed"], "recomputed_cost_s": found["recomputed_cost_s"],
        "swapped_in_tokens": tokens["swapped_in"], "ttft_warm_mean_s": found["ttft_s"]["warm"]["mean"],
        "ttft_warm_p90_s": found["ttft_s"]["warm"]["p90"], "violations": found["receipts"]["violations"],
    }  # fmt: skip


def denying(server: Settings, life: Life, turn: int, now: float) -> Hints | None:
    """Hints of clients that promise another turn at the last one, too."""
    return HINTS_OF(server, life, turn, now) or Hints(next_turn_s=PROMISED_S)


HINTS_OF = batch.hints_of


def markdown(report: dict[str, Any], found_beside: str) -> str:
    """The tables, one for each load and size; means over the seeds."""
    lines = [
        "# What hints are worth, in simulation",
        "",
        found_beside,
        f"`{report['command']}`, commit {report['commit']}, {report['machine']}.",
        METHOD,
        "",
    ]
    for load, (workload, sizes) in LOADS.items():
        for size in sizes if any(row["load"] == load for row in report["rows"]) else ():
            lines += [f"**{workload.title}, {size:,} tokens** (recomputed share of the history, in brackets against no "
                      "hints; TTFT of later turns: mean / p90 in ms)", "",
                      "| told | " + " | ".join(f"{policy}: recomputed | TTFT" for policy in POLICIES) + " |",
                      "|---|" + "---:|" * 2 * len(POLICIES)]  # fmt: skip
            lines += [
                _line(report["rows"], load, size, told)
                for told in TOLD
                if told not in ASIDE or size == sizes[0]
            ]
            lines += [""]
    return "\n".join(lines)


def _line(rows: list[dict[str, Any]], load: str, size: int, told: str) -> str:
    cells = [told]
    for policy in POLICIES:
        of = [row for row in rows if (row["load"], row["tokens"], row["policy"]) == (load, size, policy)]
        here, before = ([row for row in of if row["told"] == name] for name in (told, "none"))
        share = [100 * row["recomputed_tokens"] / row["history_tokens"] for row in here]
        before = [row for row in before if row["seed"] in {one["seed"] for one in here}]
        ratios = sorted(
            a["recomputed_tokens"] / b["recomputed_tokens"] for a, b in zip(here, before, strict=True)
        )
        cells.append(f"{mean(share):.2f} % ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        cells.append(
            " / ".join(f"{1e3 * mean(r[f'ttft_warm_{x}_s'] for r in here):.0f}" for x in ("mean", "p90"))
        )
    return "| " + " | ".join(cells) + " |"


@click.command()
@click.option("--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--jobs", default=1, help="Simulations at a time.")
@click.option("--load", "loads", multiple=True, type=click.Choice(list(LOADS)), default=list(LOADS))
@click.option("--seeds", "count", default=len(SEEDS), help="How many seeds.")
def main(traces: Path, jobs: int, loads: tuple[str, ...], count: int) -> None:
    """Simulate, and write the results."""
    work = [
        (load, size, policy, told, seed, traces)
        for seed in SEEDS[:count] for load in loads for size in LOADS[load][1] for policy in POLICIES for told in TOLD
        if told not in ASIDE or (seed == SEEDS[0] and size == LOADS[load][1][0])
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []
    report = {
        "command": portable(["python", *sys.argv]), "commit": commit(),
        "machine": f"CPU only: {platform.machine()}, python {platform.python_version()}, numpy {np.__version__}",
        "data": {name: dataset(traces, name).sha256 for name in (MOONCAKE, SHAREGPT)}, "rows": rows,
    }  # fmt: skip
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for done in pool.map(simulated, *zip(*work, strict=True)):
            rows.append(done)
            click.echo(f"{len(rows)} of {len(work)}", err=True)
            (RESULTS / "hints.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / "hints.md").write_text(markdown(report, FOUND.read_text()))


if __name__ == "__main__":
    main()
