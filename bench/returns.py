"""First token of a session that returns, by where its history lies, of servers that this program starts one by one.

    python bench/returns.py --history 8192 --start 'Pensieve=pensieve serve --model FOLDER ...' \
        --start 'vLLM=http://127.0.0.1:8000 vllm serve FOLDER --port 8000 ...'

A session's first turn is its history, its second comes at once. Then other sessions with the same length of history
take their turns, and the first returns: receipts say where its history lay.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from common.provenance import commit, gpu_name, portable, table
from rich.console import Console

from pensieve.core import Usage
from pensieve.replay.targets.base import TargetInfo, TurnRequest
from pensieve.replay.targets.grpc_target import PensieveTarget
from pensieve.replay.targets.openai_target import OpenAITarget
from pensieve.replay.targets.started_target import StartedTarget

SOURCES = ("gpu_cached", "swapped_in", "recomputed", "new")
WARM_UPS = 2
Row = dict[str, Any]


class Returns:
    """One server and what was measured of it."""

    def __init__(self, target: StartedTarget, history: int, new: int) -> None:
        self._target, self._history, self._new = target, history, new
        self._rng = np.random.default_rng(0)
        self._vocabulary = 0
        self.seconds: dict[str, list[float]] = {}
        self.receipts: dict[str, list[Usage]] = {}

    async def measure(self, others: int, repeats: int) -> None:
        """Raises TurnFailed."""
        info: TargetInfo = await self._target.open()
        try:
            self._vocabulary = min(info.vocab_size or 1 << 30, 1 << 15)
            for number in range(WARM_UPS + repeats):
                await self._lap(others, counts=number >= WARM_UPS)
        finally:
            await self._target.close()

    async def _lap(self, others: int, *, counts: bool) -> None:
        session = await self._target.start_session()
        await self._turn("first turn", session, self._history, counts)
        await self._turn("at once", session, self._new, counts)
        for _ in range(others):
            other = await self._target.start_session()
            await self._turn("", other, self._history, False)
        await self._turn(f"after {others} others", session, self._new, counts)

    async def _turn(self, name: str, session: str, tokens: int, counts: bool) -> None:
        ids = self._rng.integers(10, self._vocabulary, tokens, dtype=np.int32)
        arrivals: list[float] = []
        started = time.perf_counter()
        spec = TurnRequest(ids, output_tokens=4, forced=True)
        usage = await self._target.turn(session, spec, lambda count, at: arrivals.append(at))
        if counts:
            self.seconds.setdefault(name, []).append(arrivals[0] - started)
            if usage is not None:
                self.receipts.setdefault(name, []).append(usage)

    def rows(self) -> list[Row]:
        found = []
        for name, seconds in self.seconds.items():
            row: Row = {
                "server": self._target.name,
                "turn": name,
                "TTFT ms": round(1e3 * statistics.median(seconds), 1),
            }
            row |= {"least": round(1e3 * min(seconds), 1), "most": round(1e3 * max(seconds), 1)}
            for source in SOURCES:
                counts = [getattr(usage, f"{source}_tokens") for usage in self.receipts.get(name, [])]
                row[source] = round(statistics.median(counts)) if counts else ""
            found.append(row)
        return found


def started(words: str) -> StartedTarget:
    """A server of ``NAME=[URL] COMMAND``. Raises UsageError."""
    name, _, command = words.partition("=")
    url = command.split()[0] if command.startswith("http") else None
    if not command:
        raise click.UsageError(f"--start {words!r}: NAME=[URL] COMMAND")
    command = command.removeprefix(url or "").strip()
    return StartedTarget(command, url, _connect, name=name, timeout_s=400.0)


def _connect(url: str) -> PensieveTarget | OpenAITarget:
    kind, _, address = url.partition("://")
    return PensieveTarget(address) if kind == "pensieve" else OpenAITarget(url)


@click.command(context_settings={"show_default": True})
@click.option("--start", "servers", multiple=True, required=True, metavar="NAME=[URL] COMMAND")
@click.option("--history", default=8192, help="Tokens of a session's first turn.")
@click.option("--new", default=64, help="Tokens of its later turns.")
@click.option("--others", default=12, help="Sessions that come between.")
@click.option("--repeats", default=5)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("build/returns"), help="FILE.json and FILE.md"
)
def main(servers: tuple[str, ...], history: int, new: int, others: int, repeats: int, out: Path) -> None:
    """Time the first token of returning sessions."""
    rows: list[Row] = []
    with Console(stderr=True).status("") as status:
        for words in servers:
            target = started(words)
            status.update(target.name)
            returns = Returns(target, history, new)
            asyncio.run(returns.measure(others, repeats))
            rows += returns.rows()
    report = {
        "command": portable(["python", *sys.argv]),
        "commit": commit(),
        "device": gpu_name(),
        "rows": rows,
    }
    lines = [
        f"`{report['command']}`",
        "",
        f"{report['device'] or 'no GPU'}, commit {report['commit']}.",
        "",
        *table(rows),
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    click.echo("\n".join(lines))


if __name__ == "__main__":
    main()
