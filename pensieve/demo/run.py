"""``pensieve demo``: watch a small model remember while its memory is taken apart.

Starts a server whose two cache tiers are far too small for the conversations it holds, so that chunks are swapped out
and in, dropped and recomputed and running answers suspended all the time; holds interleaved conversations over gRPC;
prints them with a receipt per turn; checks every recalled fact and every receipt; then runs the same conversations on a
server that keeps nothing between turns, and compares.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from pensieve import AsyncClient
from pensieve.client import Turn
from pensieve.demo.talk.scenario import Conversation, conversations
from pensieve.spawn import ServerProcess


@dataclass(slots=True)
class Exchange:
    """One turn as it went."""

    user: str
    expected: str | None
    turn: Turn

    @property
    def right(self) -> bool:
        """Whether the fact asked for is in the answer; a turn that asks for none is right."""
        return self.expected is None or self.expected.lower() in self.turn.text.lower()


@dataclass(slots=True)
class Run:
    """All conversations on one server."""

    name: str
    seconds: float = 0.0
    exchanges: list[list[Exchange]] = field(default_factory=list)
    suspensions: int = 0
    dropped_tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def all(self) -> list[Exchange]:
        return [exchange for conversation in self.exchanges for exchange in conversation]

    def tokens(self, source: str) -> int:
        return sum(getattr(exchange.turn.usage, source) for exchange in self.all())

    @property
    def asked(self) -> int:
        return sum(exchange.expected is not None for exchange in self.all())

    @property
    def right(self) -> int:
        return sum(exchange.expected is not None and exchange.right for exchange in self.all())


async def hold(
    client: AsyncClient, conversation: Conversation, progress: Progress, task: TaskID
) -> list[Exchange]:
    """One conversation, turn by turn."""
    session = await client.create_session()
    exchanges: list[Exchange] = []
    for line in conversation:
        turn = await session.send(line.text, max_output_tokens=64, temperature=0.0)
        exchanges.append(Exchange(line.text, line.expected, turn))
        progress.advance(task)
    await session.delete()
    return exchanges


async def hold_all(
    target: str, scripts: list[Conversation], progress: Progress, name: str
) -> list[list[Exchange]]:
    """All conversations at once: their turns interleave on the server."""
    task = progress.add_task(name, total=sum(len(script) for script in scripts))
    async with AsyncClient(target) as client:
        return list(await asyncio.gather(*(hold(client, script, progress, task) for script in scripts)))


def serve_and_hold(name: str, arguments: list[str], scripts: list[Conversation], console: Console) -> Run:
    """Start a server, hold the conversations, read its counters, stop it."""
    run = Run(name)
    columns = (TextColumn("{task.description:>24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        console.status(f"starting the {name} server …"),
        ServerProcess("--model", "demo", "--store", "memory:", *arguments) as server,
    ):
        console.print(
            f"{name} server: pensieve serve --model demo --store memory: {' '.join(arguments)}", style="dim"
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            started = time.perf_counter()
            run.exchanges = asyncio.run(hold_all(server.target, scripts, progress, name))
            run.seconds = time.perf_counter() - started
        run.suspensions = int(server.metric("pensieve_suspensions_total"))
        run.dropped_tokens = int(server.metric("pensieve_dropped_tokens_total"))
        check_receipts(run, server)
    return run


def check_receipts(run: Run, server: ServerProcess) -> None:
    """Within a turn, from turn to turn, and against the server's own counters."""
    for number, conversation in enumerate(run.exchanges, 1):
        before = 0
        for index, exchange in enumerate(conversation, 1):
            usage = exchange.turn.usage
            if not usage.reconciles:
                run.problems.append(f"session {number} turn {index}: the receipt does not add up: {usage}")
            if index > 1 and usage.context_tokens != before + usage.new_tokens:
                run.problems.append(
                    f"session {number} turn {index}: {usage.context_tokens} tokens of context, but the turn before"
                    f" ended with {before} and {usage.new_tokens} are new"
                )
            before = usage.context_tokens + usage.output_tokens
    for source, field_name in (
        ("device", "gpu_cached_tokens"),
        ("host", "swapped_in_tokens"),
        ("recomputed", "recomputed_tokens"),
        ("new", "new_tokens"),
    ):
        counted = int(server.metric("pensieve_context_tokens_total", source=source))
        if counted != run.tokens(field_name):
            run.problems.append(
                f"receipts say {run.tokens(field_name)} {source} tokens, the server counted {counted}"
            )


def print_transcript(run: Run, console: Console) -> None:
    """Every line of every conversation, a receipt behind each answer."""
    for number, conversation in enumerate(run.exchanges, 1):
        console.rule(f"session {number}", align="left")
        for exchange in conversation:
            usage = exchange.turn.usage
            console.print(f"[bold]you[/]    {exchange.user}", highlight=False)
            mark = (
                "" if exchange.expected is None else " [green]✓[/]" if exchange.right else " [red]✗ WRONG[/]"
            )
            console.print(f"[bold]model[/]  {exchange.turn.text.strip()}{mark}", highlight=False)
            console.print(
                f"       {usage.context_tokens} context = {usage.gpu_cached_tokens} device"
                f" + {usage.swapped_in_tokens} host + {usage.recomputed_tokens} recomputed + {usage.new_tokens} new"
                f" → {usage.output_tokens} output",
                style="dim",
                highlight=False,
            )


def print_summary(run: Run, stateless: Run, console: Console) -> None:
    """What happened, side by side."""
    table = Table("", run.name, stateless.name, title="summary")
    rows: tuple[tuple[str, Callable[[Run], str]], ...] = (
        ("sessions × turns", lambda r: f"{len(r.exchanges)} × {len(r.exchanges[0])}"),
        ("recall answers right", lambda r: f"{r.right} of {r.asked}"),
        ("tokens hit on the device", lambda r: f"{r.tokens('gpu_cached_tokens'):,}"),
        ("tokens swapped in from the host", lambda r: f"{r.tokens('swapped_in_tokens'):,}"),
        ("tokens recomputed", lambda r: f"{r.tokens('recomputed_tokens'):,}"),
        ("new tokens", lambda r: f"{r.tokens('new_tokens'):,}"),
        ("tokens dropped", lambda r: f"{r.dropped_tokens:,}"),
        ("answers suspended and resumed", lambda r: f"{r.suspensions:,}"),
        ("seconds", lambda r: f"{r.seconds:.1f}"),
    )
    for label, value in rows:
        table.add_row(label, value(run), value(stateless))
    console.print(table)
    console.print(f"stateless took {stateless.seconds / run.seconds:.2f} × the time", highlight=False)
    if run.suspensions == 0:
        console.print(
            "no answer had to be suspended this time; a smaller --device-cache shows it", style="dim"
        )


def verdict(run: Run, stateless: Run) -> list[str]:
    """Everything that is wrong; empty when all is well."""
    problems = run.problems + stateless.problems
    for one in (run, stateless):
        problems += [
            f"{one.name}: asked {exchange.user!r}, wanted {exchange.expected!r}, got {exchange.turn.text!r}"
            for exchange in one.all()
            if not exchange.right
        ]
    for label, source in (
        ("hit", "gpu_cached_tokens"),
        ("swapped in", "swapped_in_tokens"),
        ("recomputed", "recomputed_tokens"),
    ):
        if run.tokens(source) == 0:
            problems.append(f"no token was {label}: the tiers are too large to show anything")
    return problems


@click.command(context_settings={"show_default": True})
@click.option("--sessions", default=16, type=click.IntRange(1, 200), help="Conversations held at once.")
@click.option("--turns", default=8, type=click.IntRange(2, 60), help="Turns of each conversation.")
@click.option("--seed", default=1, help="Which conversations.")
@click.option("--device-cache", default="768tokens", help="Size of the first tier.")
@click.option("--host-cache", default="1920tokens", help="Size of the second tier.")
@click.option("--chunk-tokens", default=8, help="Tokens per chunk.")
@click.option("--quiet", is_flag=True, help="Print the summary only.")
def demo(
    sessions: int, turns: int, seed: int, device_cache: str, host_cache: str, chunk_tokens: int, quiet: bool
) -> None:
    """Watch a small model remember: no GPU, no download.

    Exits with 1 if an answer is wrong, a receipt does not add up, or a path of the cache was not taken.
    """
    console = Console(soft_wrap=True)
    scripts = conversations(sessions, turns, seed)
    tiers = ["--device-cache", device_cache, "--host-cache", host_cache, "--chunk-tokens", str(chunk_tokens)]
    tiers += ["--decode-reserve", "0"]  # no reserve: answers do get suspended
    run = serve_and_hold("Pensieve", tiers, scripts, console)
    if not quiet:
        print_transcript(run, console)
    stateless = serve_and_hold("stateless", [*tiers, "--stateless"], scripts, console)
    print_summary(run, stateless, console)
    problems = verdict(run, stateless)
    for problem in problems:
        console.print(problem, style="red", highlight=False)
    sys.exit(1 if problems else 0)
