"""Pensieve beside vLLM with prefix caching where contexts have a common beginning: prompts, forks, candidates.

    python bench/sharing/peers.py --out OUT

One server after the other alone on the device, each with the same KV memory, no host tier and the same batch limits,
over the same tokens (``loads`` says which); then again, as long as there is time. Both get token ids, answers have a
forced length. A turn counts from its arrival, what it takes to make a session or a fork included. The servers are those
of ``bench/evaluate.py``; vLLM's environment is that of bench/README.md. Results are written as they come.

Memory in use is what each server says: of vLLM's the blocks of running requests, of Pensieve's also what idle sessions
keep. With everything running at once, as in all loads but the stream, both mean the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

import dummy_model
from common.provenance import commit, gpu_name, portable
from evaluation import experiments
from evaluation.experiments import NO_HOST_TIER, System
from evaluation.scales import FULL
from sharing import loads
from sharing.clients import Client
from sharing.loads import LOADS, Row, Sizes, Trial
from sharing.servers import last_lines, running

START_S, LOAD_S = 170.0, 80.0
"""The most that a start and a load may take."""
RESERVE_S = 8.0
"""Kept for the end of a server and the report."""
OURS_ONLY = tuple(LOADS)[-1:]
SHOWN = (
    ("first p50", "first_token_s", "p50"),
    ("first p95", "first_token_s", "p95"),
    ("turn p50", "turn_s", "p50"),
)


def systems(small: bool) -> list[System]:
    scale = experiments.SMALL if small else FULL
    ours = experiments.pensieve(scale, "Pensieve", *NO_HOST_TIER)
    return [ours, experiments.vllm(scale, "vLLM", "--enable-prefix-caching")]


@dataclass(slots=True)
class Run:
    """The whole measurement: what is to be done until when, and what came of it."""

    out: Path
    sizes: Sizes
    chosen: Sequence[str]
    model: Path
    context: int
    deadline: float
    report: Row = field(default_factory=dict)
    taken_s: dict[str, float] = field(default_factory=dict)
    """System → seconds of its latest life, start and end included."""

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    async def life(self, system: System, number: int, scratch: Path) -> None:
        """One server from start to end. What fails is in the report."""
        name = system.name
        begun = time.monotonic()
        log = self.out / f"{name.lower()}-{number}.log"
        life: Row = {"system": name, "round": number, "loads": {}, "start_s": None, "error": ""}
        self.report["lives"].append(life)
        try:
            timeout_s = min(START_S, self.left_s() - RESERVE_S)
            async with running(system, self.model, self.context, log, scratch, timeout_s) as (
                client,
                start_s,
            ):
                life["start_s"] = start_s
                self.say(f"{name} {number}: up after {start_s:.0f} s")
                await self._play("warm up", client, life, number)
                for load in self.chosen:
                    if load not in OURS_ONLY or name == "Pensieve":
                        await self._play(load, client, life, number)
        except Exception as failure:
            life["error"] = f"{type(failure).__name__}: {str(failure)[:3000]}"
            if log.exists():
                life["log"] = last_lines(log)
            self.say(f"{name} {number}: {life['error'][:300]}")
        self.taken_s[name] = time.monotonic() - begun
        self.write()

    async def _play(self, load: str, client: Client, life: Row, number: int) -> None:
        """One load, and then an empty cache. A server that fails at it gets the next one all the same."""
        limit_s = min(LOAD_S, self.left_s() - RESERVE_S)
        if limit_s < 5:
            life["loads"][load] = {"error": "not run: no time was left"}
            return
        trial = Trial(client, self.sizes, random.Random(f"{load} {number}"))
        error = ""
        try:
            async with asyncio.timeout(limit_s):
                await (loads.warm_up if load == "warm up" else LOADS[load])(trial)
        except TimeoutError:
            error = f"stopped after {limit_s:.0f} s"
        except Exception as failure:
            error = f"{type(failure).__name__}: {str(failure)[:500]}"
        life["loads"][load] = {**trial.row(), "error": error}
        try:
            async with asyncio.timeout(20):
                await client.forget(trial.contexts)
        except Exception as failure:
            life["loads"][load]["forgetting"] = repr(failure)[:300]
        told = life["loads"][load]
        self.say(
            f"{life['system']} {number}: {load}: {told['turns']} turns, {told['turns_per_s']:.1f}/s {error}"
        )
        self.write()

    def say(self, text: str) -> None:
        click.echo(f"[{self.left_s():4.0f} s left] {text}")

    def write(self) -> None:
        (self.out / "sharing_peers.json").write_text(
            json.dumps(self.report, indent=1) + "\n", encoding="utf-8"
        )
        (self.out / "sharing_peers.md").write_text(as_markdown(self.report), encoding="utf-8")


def as_markdown(report: Row) -> str:
    """A table of all loads, the ratios, and what failed."""
    lines = [
        f"`{report['command']}`", "",
        f"{report['device'] or 'no GPU'}, commit {report['commit'] or 'unknown'}; {report['model']}; "
        f"{report['sizes']}", "",
        "| load | system | round | turns | failed | " + " | ".join(f"{name} ms" for name, *_ in SHOWN)
        + " | turns/s | output tokens/s | KV peak tokens | cached of a context | client CPU |",
        "|---" * (10 + len(SHOWN)) + "|",
    ]  # fmt: skip
    for load in ("warm up", *LOADS):
        for life in report["lives"]:
            row = life["loads"].get(load)
            if row and "turns" in row:
                lines.append(f"| {load} | {life['system']} | {life['round']} | {_cells(row)} |")
    lines += ["", *_ratios(report), ""]
    for life in report["lives"]:
        where = f"{life['system']}, round {life['round']}"
        lines.append(
            f"* {where}: up after {life['start_s'] and round(life['start_s'])} s {life['error'][:300]}"
        )
        for load, row in life["loads"].items():
            told = [row.get("error", ""), row.get("forgetting", ""), *row.get("failures", [])[:1]]
            lines += [f"* {where}, {load}: {text[:200]}" for text in told if text]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> str:
    times = [(row[key] or {}).get(part) for _, key, part in SHOWN]
    cells = [
        row["turns"], row["failed"], *("" if at is None else f"{1e3 * at:.0f}" for at in times),
        f"{row['turns_per_s']:.2f}", f"{row['output_tokens_per_s']:.0f}", _whole(row["kv_peak_tokens"]),
        _whole(row["cached_tokens_mean"]), f"{row['client_cpu']:.2f}",
    ]  # fmt: skip
    return " | ".join(map(str, cells))


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _ratios(report: Row) -> list[str]:
    """Pensieve over vLLM, means of the rounds in which all turns were answered."""
    lines = []
    for load in LOADS:
        found: dict[str, list[Row]] = {}
        for life in report["lives"]:
            row = life["loads"].get(load)
            if row and row.get("turns") and not row["failed"] and not row["error"]:
                found.setdefault(life["system"], []).append(row)
        if {"Pensieve", "vLLM"} <= set(found):
            ours, theirs = found["Pensieve"], found["vLLM"]
            parts = [f"turns/s {_ratio(ours, theirs, lambda row: row['turns_per_s'])}"]
            for name, key, part in SHOWN:
                parts.append(f"{name} {_ratio(ours, theirs, lambda row, key=key, part=part: row[key][part])}")
            if all(row["kv_peak_tokens"] for row in (*ours, *theirs)):
                parts.append(f"KV peak {_ratio(ours, theirs, lambda row: row['kv_peak_tokens'])}")
            lines.append(f"* {load}, Pensieve ÷ vLLM: {', '.join(parts)}")
    return lines


def _ratio(ours: Sequence[Row], theirs: Sequence[Row], read: Any) -> str:
    below = statistics.fmean(map(read, theirs))
    return f"{statistics.fmean(map(read, ours)) / below:.2f}" if below else "?"


async def measure(run: Run, chosen: Sequence[System], rounds: int, scratch: Path) -> None:
    """All systems in turns, each as often as there is time for a life as long as its last one."""
    for number in range(1, rounds + 1):
        for system in chosen:
            expected = run.taken_s.get(system.name, 30.0)
            if run.left_s() - RESERVE_S < expected:
                run.say(f"{system.name} {number}: not begun, it takes {expected:.0f} s")
                continue
            await run.life(system, number, scratch / f"{system.name}-{number}")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of results and logs.")
@click.option("--seconds", type=float, default=510.0, show_default=True, help="That all may take.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="Lives of each server."
)
@click.option("--only", type=click.Choice(["Pensieve", "vLLM"]), help="Only this system.")
@click.option("--load", "chosen", type=click.Choice(list(LOADS)), multiple=True,
              help="Only this load; again for several. Default: all but the last.")  # fmt: skip
@click.option("--small", is_flag=True, help="On a CPU with a tiny model: only shows that it runs.")
def main(
    out: Path, seconds: float, rounds: int, only: str | None, chosen: tuple[str, ...], small: bool
) -> None:
    """Measure both systems side by side."""
    deadline = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    shape = "tiny-llama-gqa2" if small else "llama-2-13b-gqa10"
    sizes = loads.SMALL if small else Sizes()
    with tempfile.TemporaryDirectory(prefix="pensieve-sharing-") as folder:
        model = dummy_model.make(shape, Path(folder) / "model")
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        names = chosen or tuple(load for load in LOADS if load not in OURS_ONLY)
        run = Run(out, sizes, names, model, config["max_position_embeddings"], deadline)
        both = [system for system in systems(small) if only in (None, system.name)]
        run.report = {
            "schema": "pensieve.sharing_peers/1", "command": f"python {portable(sys.argv)}", "commit": commit(),
            "device": gpu_name(), "model": shape, "sizes": asdict(sizes), "lives": [],
            "commands": {system.name: " ".join(system.command) for system in both},
        }  # fmt: skip
        run.write()
        asyncio.run(measure(run, both, rounds, Path(folder)))
    run.write()
    click.echo(as_markdown(run.report))
    if any(life["error"] for life in run.report["lives"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
