"""The second act: many conversations at once on tiers far too small for them, and every answer still right.

All the time, chunks are swapped out and in, dropped and recomputed, and running answers are suspended.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from pensieve.client import AsyncClient
from pensieve.demo.conversations import Conversation
from pensieve.demo.exchange import Exchange, ServerRun, busy, own_servers, wrong_answers, wrong_receipts

_FOUND = {
    "device": "found on the device",
    "host": "swapped in from host memory",
    "recomputed": "dropped before, computed again",
    "new": "new in its turn",
}


@dataclass(frozen=True, slots=True)
class CrowdRun:
    run: ServerRun
    seconds: float
    suspensions: int
    dropped_tokens: int


class Counter:
    """Counts finished turns: a bar on a terminal, otherwise one plain line half-way."""

    def __init__(self, total: int, console: Console) -> None:
        self._total = total
        self._console = console
        self._done = 0
        columns = (
            TextColumn("{task.description:>9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task("turns", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self) -> None:
        self._done += 1
        self._progress.advance(self._task)
        if not self._console.is_terminal and self._done == self._total // 2:
            self._console.print(f"{self._done} of {self._total} turns", highlight=False)


async def hold_one(client: AsyncClient, conversation: Conversation, counter: Counter) -> list[Exchange]:
    session = await client.create_session()
    exchanges: list[Exchange] = []
    for said in conversation:
        exchanges.append(Exchange(said, await session.send(said.text, max_output_tokens=64, temperature=0.0)))
        counter.add()
    await session.delete()
    return exchanges


async def hold(target: str, scripts: list[Conversation], counter: Counter) -> list[list[Exchange]]:
    """Hold all conversations at once; their turns interleave on the server."""
    async with AsyncClient(target) as client:
        return list(await asyncio.gather(*(hold_one(client, script, counter) for script in scripts)))


def serve_and_hold(options: list[str], scripts: list[Conversation], console: Console) -> CrowdRun:
    """Run the act: start the server, hold the conversations, read its counters, stop it."""
    with ExitStack() as stack:
        with busy(console, "starting the server …"):
            (server,) = stack.enter_context(own_servers(options))
        started = time.perf_counter()
        with Counter(sum(map(len, scripts)), console) as counter:
            run = ServerRun("Pensieve", asyncio.run(hold(server.target, scripts, counter)))
        seconds = time.perf_counter() - started
        run.count(server)
        alive = server.wait_ready()
        suspensions = int(alive.metric("pensieve_suspensions_total"))
        dropped = int(alive.metric("pensieve_dropped_tokens_total"))
    return CrowdRun(run, seconds, suspensions, dropped)


def result(act: CrowdRun) -> Table:
    run = act.run
    total = max(1, sum(run.tokens(source) for source in _FOUND))
    table = Table("context of all turns", Column("tokens", justify="right"), Column("share", justify="right"))
    for source, label in _FOUND.items():
        table.add_row(label, f"{run.tokens(source):,}", f"{run.tokens(source) / total:.0%}")
    table.add_section()
    right = run.asked - len(wrong_answers(run))
    adding_up = sum(exchange.turn.usage.reconciles for exchange in run.exchanges)
    for label, value in (
        ("tokens whose state was dropped", f"{act.dropped_tokens:,}"),
        ("running answers suspended and resumed", f"{act.suspensions:,}"),
        ("recalled facts that are right", f"{right} of {run.asked}"),
        ("receipts that add up", f"{adding_up} of {len(run.exchanges)}"),
        ("seconds", f"{act.seconds:.1f}"),
    ):
        table.add_row(label, value, "")
    return table


def problems(act: CrowdRun) -> list[str]:
    found = wrong_answers(act.run) + wrong_receipts(act.run)
    for source, what, advice in (
        ("device", "hit", "enlarge --device-cache"),
        ("host", "swapped in", "reduce --device-cache, or enlarge --host-cache"),
        ("recomputed", "recomputed", "reduce --host-cache, or raise --sessions or --turns"),
    ):
        if act.run.tokens(source) == 0:
            found.append(f"no token was {what}, so the act shows too little: {advice}")
    return found
