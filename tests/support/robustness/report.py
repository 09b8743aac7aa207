"""What a run came to, as a table for people and as JSON."""

from __future__ import annotations

import datetime
import json
import os
from collections import Counter
from typing import Any

from support.robustness.arena import Outcome
from support.robustness.nemesis import FAULTS, Nemesis

ROWS = {
    "server kills (SIGKILL)": ("server kill",),
    "engine kills (SIGKILL)": ("engine kill",),
    "Redis kills (SIGKILL, restarted)": ("Redis kill",),
    "connections cut, or half-open and then cut": ("cut", "cut in a message", "half-open"),
    "pauses (SIGSTOP) of server, engine, Redis": ("server pause", "engine pause", "Redis pause"),
    "system calls of SQLite that failed with EIO": ("I/O error",),
    "stretches in which all that passed a connection was held up": ("delay",),
}
"""Line of the table → kinds of fault."""


def total(outcomes: list[Outcome]) -> Counter[str]:
    """Faults of all legs that hit."""
    return sum((counter for one in outcomes for counter in one.faults.values()), Counter())


def as_json(outcomes: list[Outcome], command: str) -> dict[str, Any]:
    """For ``bench/results/robustness.json``."""
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "runs": [_run(one) for one in outcomes],
    }


def _run(one: Outcome) -> dict[str, Any]:
    return {
        "seed": one.seed,
        "seconds": round(one.seconds, 1),
        "stalls": one.stalls,
        "longest_calm_s": round(one.longest_calm_s, 2),
        "ended_at_failpoints": dict(sorted(one.crashes.items())),
        "legs": {
            name: {
                "faults": {kind: one.faults[name][kind] for kind in FAULTS if kind in one.faults[name]},
                "operations": one.operations[name],
                "sessions": verdict.sessions,
                "turns_committed": verdict.turns,
                "turns_acknowledged": verdict.acknowledged,
                "answers_computed_again": verdict.answers,
                "lost": verdict.count("lost"),
                "doubled": verdict.count("doubled"),
                "violations": [[found.kind, found.session, found.what] for found in verdict.violations[:50]],
                "refused_in_the_end": dict(one.errors[name].most_common()),
            }
            for name, verdict in one.verdicts.items()
        },
    }


def table(outcomes: list[Outcome], command: str) -> str:
    """Markdown."""
    faults = total(outcomes)
    verdicts = [verdict for one in outcomes for verdict in one.verdicts.values()]
    seconds = sum(one.seconds for one in outcomes)
    crashes = sum((one.crashes for one in outcomes), Counter())
    lines = ["| what | how often |", "|---|---:|"]
    lines += [f"| {name} | {sum(faults[kind] for kind in kinds):,} |" for name, kinds in ROWS.items()]
    lines += [
        f"| processes that ended at a failpoint | {crashes.total():,} |",
        f"| operations of clients | {sum(n for one in outcomes for n in one.operations.values()):,} |",
        f"| sessions | {sum(one.sessions for one in verdicts):,} |",
        f"| turns committed, each told to some client | {sum(one.acknowledged for one in verdicts):,} |",
        f"| answers computed again and found equal | {sum(one.answers for one in verdicts):,} |",
        f"| turns lost | {sum(one.count('lost') for one in verdicts)} |",
        f"| turns doubled | {sum(one.count('doubled') for one in verdicts)} |",
        f"| violations of any kind | {sum(len(one.violations) for one in verdicts)} |",
        f"| times that nothing was acknowledged for 30 s | {sum(one.stalls for one in outcomes)} |",
        f"| longest time that clients needed for a few turns after a fault | "
        f"{max(one.longest_calm_s for one in outcomes):.1f} s |",
    ]
    seeds = ", ".join(str(one.seed) for one in outcomes)
    head = f"`{command}`: {seconds / 60:.0f} minutes on {os.cpu_count()} cores, seed {seeds}."
    return "\n".join([head, "", *lines, ""])


def line(nemeses: list[Nemesis], acknowledged: int, seconds: float) -> str:
    """Progress."""
    faults = sum((one.tally for one in nemeses), Counter())
    counts = " ".join(
        f"{name.split(' (')[0]}={sum(faults[kind] for kind in kinds)}" for name, kinds in ROWS.items()
    )
    return f"{seconds:6.0f} s  turns acknowledged={acknowledged}  {counts}"


def dump(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, sort_keys=True) + "\n"
