"""An agent's conversation in a small context: compaction in the session against a client that starts over.

    python bench/compaction.py --model demo
    python bench/compaction.py --model smollm2 --summary 96

Each turn brings the result of a tool, and the answer is the next call, from a fixed list; every sixth turn is a
question of the user, answered in words. Beyond ``--compact-at`` tokens of context each way makes room:

* in the session: ``session.compact()``, and the next turn follows at once;
* in idle time: the same, and the next turn comes when the new context is warm;
* starts over: the client sends the whole history to a call of its own for a summary, then creates a new session.

Each way has a server of its own, and they take their turns alternately. A pause is the time from an answer's end to the
next answer's first token, where the context was made smaller in between; idle time is not part of it.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
from common.provenance import commit, portable, table, write_report
from rich.console import Console

from pensieve.client import Client, InputLike, Role, Session
from pensieve.core import Usage
from pensieve.demo.exchange import own_servers
from pensieve.machine import usable_cores

IN_SESSION, IDLE, OVER = WAYS = ("in the session", "in idle time", "starts over")
PROMPT: Final = "You are a coding agent. Tools: read_file(path), search(text), run_tests(), edit(path, text)."
ASK: Final = "Summarise this conversation: what the user wants, what was decided, and the open questions."
CALLS: Final = ['read_file("src/main.py")', 'search("def open")', "run_tests()", 'edit("a.py", "x = 1")']
WORDS: Final = (
    "path",
    "line",
    "value",
    "file",
    "open",
    "read",
    "test",
    "error",
    "table",
    "index",
    "key",
    "count",
)
EVERY: Final = 6
"""Turns from one question of the user to the next."""
STILL_S: Final = 2.0
"""A warm-up is over when the session's tokens on the device have not changed for so long."""


@dataclass(frozen=True, slots=True)
class Sizes:
    turns: int
    words: int
    compact_at: int
    keep_turns: int
    summary: int


@dataclass(slots=True)
class Agent:
    """One way, on its own server. Times in seconds, tokens as the receipts count them."""

    way: str
    client: Client
    sizes: Sizes
    session: Session = field(init=False)
    context: int = 0
    computed: int = 0
    """Tokens of prompts that the server computed, for turns, summaries and new contexts."""
    firsts: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    shrinking: list[float] = field(default_factory=list)
    """Seconds of each call or calls that made the context smaller."""
    saved: list[int] = field(default_factory=list)
    """Tokens computed by each of them."""

    def __post_init__(self) -> None:
        self.session = self._opened(self._prompt, ())

    def turn(self, number: int) -> None:
        """Make room if the context is over the limit, then take turn ``number``. Raises PensieveError."""
        spent, over = 0.0, self.context > self.sizes.compact_at
        before = self.computed
        if over:
            began = time.perf_counter()
            self._start_over() if self.way == OVER else self._compact()
            spent = time.perf_counter() - began
            self.shrinking.append(spent)
            if self.way == IDLE:
                spent = 0.0
                self._wait_until_warm()
        first, usage = self._take(number)
        if over:
            self.pauses.append(spent + first)
            # The warm-up has no receipt: what the first turn finds, it has computed.
            self.computed += 0 if self.way == OVER else usage.gpu_cached_tokens
            self.saved.append(self.computed - before)
        else:
            self.firsts.append(first)

    def row(self) -> dict[str, Any]:
        firsts = sorted(self.firsts)
        return {
            "way": self.way, "turns": len(firsts) + len(self.pauses), "computed tokens": self.computed,
            "first token ms p50": _ms(statistics.median(firsts)),
            "p99": _ms(firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))]),
            "contexts made smaller": len(self.pauses), "computed for each": _mean(self.saved),
            "pause ms": _ms(statistics.median(self.pauses)) if self.pauses else "",
            "longest": _ms(max(self.pauses)) if self.pauses else "",
            "of it the summary and the change": _ms(statistics.median(self.shrinking)) if self.shrinking else "",
        }  # fmt: skip

    @property
    def _prompt(self) -> str:
        return f"{PROMPT} Project: {self.way}."

    def _opened(self, prompt: str, items: Sequence[InputLike]) -> Session:
        return self.client.create_session(
            system_prompt=prompt, initial_items=items, followed_by=[Role.USER] if items else [],
            temperature=0, ignore_eos=True,
        )  # fmt: skip

    def _take(self, number: int) -> tuple[float, Usage]:
        asks = number % EVERY == 0
        rng = random.Random(number)
        words = " ".join(rng.choices(WORDS, k=self.sizes.words))
        text = f"Task {number}: {words}" if asks else f"Result of the tool: {words}"
        began, first = time.perf_counter(), 0.0
        options: dict[str, Any] = {"max_output_tokens": 24} | ({} if asks else {"choice": CALLS})
        stream = self.session.stream(text, **options)
        for _ in stream:
            first = first or time.perf_counter() - began
        usage = stream.finish().usage
        assert usage is not None
        self.context = usage.context_tokens + usage.output_tokens
        self.computed += _computed(usage)
        return first, usage

    def _compact(self) -> None:
        done = self.session.compact(keep_turns=self.sizes.keep_turns, max_summary_tokens=self.sizes.summary)
        assert done.usage is not None
        self.computed += _computed(done.usage)

    def _start_over(self) -> None:
        items = [item for item in self.session.items() if item.role is not Role.SYSTEM]
        told = "\n".join(f"{item.role}: {item.text}" for item in items)
        asked = self._opened(ASK, ())
        done = asked.send(told, max_output_tokens=self.sizes.summary)
        assert done.usage is not None
        self.computed += _computed(done.usage)
        kept = [(item.role, item.text) for item in items[-2 * self.sizes.keep_turns :]]
        self.session = self._opened(
            f"{self._prompt}\n\nSummary of the conversation so far:\n{done.text}", kept
        )

    def _wait_until_warm(self) -> None:
        held, quiet = -1, time.monotonic()
        while time.monotonic() < quiet + STILL_S:
            residency = self.session.refresh(residency=True).residency
            now = 0 if residency is None else residency.gpu_tokens
            if now != held:
                held, quiet = now, time.monotonic()
            time.sleep(0.05)


def _computed(usage: Usage) -> int:
    return usage.new_tokens + usage.recomputed_tokens


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def _mean(values: Sequence[int]) -> int | str:
    return round(statistics.mean(values)) if values else ""


def converse(agents: Sequence[Agent], turns: int, on_turn: Any = None) -> None:
    """All turns of all ways; each way begins equally often."""
    for number in range(turns):
        for place in range(len(agents)):
            agents[(number + place) % len(agents)].turn(number)
        if on_turn is not None:
            on_turn(number)


@click.command(context_settings={"show_default": True})
@click.option("--model", default="demo")
@click.option("--context", default=4096, help="Longest context in tokens.")
@click.option("--turns", default=60)
@click.option("--words", default=80, help="Words of a tool's result.")
@click.option("--compact-at", default=3000, help="Tokens of context after which room is made.")
@click.option("--keep-turns", default=4)
@click.option("--summary", default=128, help="Tokens of a summary.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/compaction"))
def main(model: str, context: int, out: Path, **sizes: int) -> None:
    """Hold the conversation in each way, and compare."""
    options = [
        *("--model", model, "--device", "cpu", "--threads", "1", "--context-limit", str(context)),
        *("--device-cache", f"{4 * context}tokens", "--host-cache", "0"),
    ]
    with Console(stderr=True).status("starting") as status, own_servers(*[options] * len(WAYS)) as servers:
        clients = [Client(server.wait_ready().target, timeout=600) for server in servers]
        agents = [Agent(way, client, Sizes(**sizes)) for way, client in zip(WAYS, clients, strict=True)]
        converse(agents, sizes["turns"], lambda number: status.update(f"turn {number}"))
    rows = [agent.row() for agent in agents]
    report = {
        "command": portable(["python", *sys.argv]), "commit": commit(), "cores": usable_cores(), "rows": rows,
        "firsts_s": {agent.way: agent.firsts for agent in agents},
        "pauses_s": {agent.way: agent.pauses for agent in agents},
    }  # fmt: skip
    lines = [f"`{report['command']}`, commit {report['commit']}, {report['cores']} cores.", "", *table(rows)]
    write_report(out, f"compaction_{Path(model).stem}", report, lines)
    click.echo("\n".join(lines))


if __name__ == "__main__":
    main()
