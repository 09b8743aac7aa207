"""Chat completions whose client resends its history: Pensieve's HTTP door beside vLLM with prefix caching.

    python bench/http_door/peers.py --out OUT

One server after the other alone on the device, each with the same KV memory, no host tier and the same batch limits.
The client is the same, byte for byte; ``loads`` says what it asks. Two loads: answers whose text reads back as the same
tokens, and answers whose text does not. The cache is emptied between them. Results are written as they come.

The first token is the first text that comes. The cached share is what each server says of itself in ``usage``.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

import dummy_model
from common.provenance import commit, gpu_name, portable
from evaluation.experiments import System
from evaluation.jobs import last_lines
from http_door.loads import BIASED, SMALL, ChatTrial, Row, Sizes, Words, warm_up_of
from http_door.servers import Serving, served, systems

START_S, LOAD_S = 150.0, 45.0
"""The most that a start and a load may take."""
RESERVE_S = 8.0
"""Kept for the end of a server and the report."""
LOADS: dict[str, Callable[[Words], Sequence[int]]] = {
    "answers read back the same": lambda words: words.whole[:BIASED],
    "answers read back otherwise": lambda words: words.pieces[:BIASED],
}
"""By name: the tokens that answers are drawn from."""


@dataclass(slots=True)
class DoorRun:
    """The whole measurement: what is to be done until when, and what came of it."""

    out: Path
    sizes: Sizes
    words: Words
    model: Path
    context: int
    deadline: float
    report: Row = field(default_factory=dict)

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    async def life(self, system: System, scratch: Path) -> None:
        """One server from start to end. What fails is in the report."""
        log = self.out / f"{system.name.lower()}.log"
        life: Row = {"system": system.name, "start_s": None, "loads": {}, "error": ""}
        self.report["lives"].append(life)
        try:
            timeout_s = min(START_S, self.left_s() - RESERVE_S)
            async with served(system, self.model, self.context, log, scratch, timeout_s) as server:
                life["start_s"] = server.start_s
                self.say(f"{system.name}: up after {server.start_s:.0f} s")
                await self._play("warm up", self.words.whole[:BIASED], server, life, warm_up_of(self.sizes))
                for name, tokens in LOADS.items():
                    await self._play(name, tokens(self.words), server, life, self.sizes)
        except Exception as failure:
            life["error"] = f"{type(failure).__name__}: {str(failure)[:3000]}"
            if log.exists():
                life["log"] = last_lines(log.read_text(encoding="utf-8", errors="replace"))
            self.say(f"{system.name}: {life['error'][:300]}")
        self.write()

    async def _play(self, name: str, tokens: Sequence[int], server: Serving, life: Row, sizes: Sizes) -> None:
        """One load, and then an empty cache. A server that fails at it gets the next one all the same."""
        limit_s = min(LOAD_S, self.left_s() - RESERVE_S)
        if limit_s < 5:
            life["loads"][name] = {"error": "not run: no time was left"}
            return
        trial = ChatTrial(server.url, self.words, sizes, tokens, random.Random(name))
        before, error = server.door_cpu_s(), ""
        try:
            async with asyncio.timeout(limit_s):
                await trial.play()
        except TimeoutError:
            error = f"stopped after {limit_s:.0f} s"
        except Exception as failure:
            error = f"{type(failure).__name__}: {str(failure)[:500]}"
        row = life["loads"][name] = {**trial.row(), "error": error}
        after = server.door_cpu_s()
        if before is not None and after is not None:
            row["door_cpu_us_per_token"] = 1e6 * (after - before) / max(1, row["output_tokens"])
        try:
            async with asyncio.timeout(20):
                await server.empty_cache()
        except Exception as failure:
            row["forgetting"] = repr(failure)[:300]
        self.say(f"{life['system']}: {name}: {row['turns']} turns, {row['failed']} failed {error}")
        self.write()

    def say(self, text: str) -> None:
        click.echo(f"[{self.left_s():4.0f} s left] {text}")

    def write(self) -> None:
        (self.out / "door_peers.json").write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        (self.out / "door_peers.md").write_text(as_markdown(self.report), encoding="utf-8")

    @property
    def failed(self) -> bool:
        """Whether anything was not measured as it should be."""
        rows = [row for life in self.report["lives"] for row in life["loads"].values()]
        return any(life["error"] for life in self.report["lives"]) or any(
            row["error"] or row["failed"] for row in rows
        )


def as_markdown(report: Row) -> str:
    """A table of all loads, and what failed."""
    lines = [
        f"`{report['command']}`", "",
        f"{report['device'] or 'no GPU'}, commit {report['commit'] or 'unknown'}; {report['model']}; "
        f"{report['sizes']}", "",
        "| load | system | turns | failed | cached of the context | computed tokens a turn | context tokens "
        "| first token p50 ms | p95 ms | turn p50 ms | first turn's first token p50 ms | turns/s "
        "| answers in other tokens | door CPU µs/token |",
        "|---" * 14 + "|",
    ]  # fmt: skip
    for load in ("warm up", *LOADS):
        for life in report["lives"]:
            row = life["loads"].get(load)
            if row and row.get("turns"):
                lines.append(f"| {load} | {life['system']} | {' | '.join(_cells(row))} |")
    lines += ["", "Cached, computed, context, first token and turn are of all turns but the first of each"
              " conversation.", ""]  # fmt: skip
    for life in report["lives"]:
        started = life["start_s"] and round(life["start_s"])
        lines.append(f"* {life['system']}: up after {started} s {life['error'][:300]}")
        for load, row in life["loads"].items():
            told = [row.get("error", ""), row.get("forgetting", ""), *row.get("failures", [])[:1]]
            lines += [f"* {life['system']}, {load}: {text[:200]}" for text in told if text]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    first, turn, cold = row["first_token_s"], row["turn_s"], row["first_token_of_first_turns_s"]
    cpu = row.get("door_cpu_us_per_token")
    return [
        str(row["turns"]), str(row["failed"]),
        *(
            f"{row[key]:{form}}" if row[key] is not None else ""
            for key, form in (
                ("cached_share", ".1%"), ("computed_tokens_mean", ".0f"), ("prompt_tokens_mean", ".0f")
            )
        ),
        *(f"{1e3 * spread[part]:.0f}" if spread else ""
          for spread, part in ((first, "p50"), (first, "p95"), (turn, "p50"), (cold, "p50"))),
        f"{row['turns_per_s']:.1f}", f"{row['other_tokens_share']:.0%}", "" if cpu is None else f"{cpu:.0f}",
    ]  # fmt: skip


async def measure(run: DoorRun, chosen: Sequence[System], scratch: Path) -> None:
    """All systems, one after the other."""
    for system in chosen:
        await run.life(system, scratch / system.name)


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of results and logs.")
@click.option("--seconds", type=float, default=285.0, help="That all may take.")
@click.option("--only", help="Only this system.")
@click.option(
    "--small", is_flag=True, help="On a CPU with a tiny model, a stand-in for vLLM: shows that it runs."
)
def main(out: Path, seconds: float, only: str | None, small: bool) -> None:
    """Measure both systems side by side."""
    deadline = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    shape = "tiny-llama-gqa2" if small else "llama-2-13b-gqa10"
    sizes = SMALL if small else Sizes()
    with tempfile.TemporaryDirectory(prefix="pensieve-door-") as folder:
        model = dummy_model.make(shape, Path(folder) / "model")
        context = json.loads((model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
        run = DoorRun(out, sizes, Words.of(model), model, context, deadline)
        chosen = [system for system in systems(small) if only in (None, system.name)]
        run.report = {
            "schema": "pensieve.door_peers/1", "command": f"python {portable(sys.argv)}", "commit": commit(),
            "device": gpu_name(), "model": shape, "sizes": asdict(sizes), "lives": [],
            "commands": {system.name: " ".join(system.command) for system in chosen},
        }  # fmt: skip
        run.write()
        asyncio.run(measure(run, chosen, Path(folder)))
    run.write()
    click.echo(as_markdown(run.report))
    if run.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
