"""The servers of an act, the turns held on one of them, and all checks of those turns."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from pensieve.client import Turn
from pensieve.demo.conversations import Utterance
from pensieve.own_server import OwnServer

SOURCES: Final[Mapping[str, str]] = {
    "device": "gpu_cached_tokens",
    "host": "swapped_in_tokens",
    "recomputed": "recomputed_tokens",
    "new": "new_tokens",
}
"""Source of context tokens, as the server's counter names it → the receipt's field."""


@dataclass(frozen=True, slots=True)
class Exchange:
    said: Utterance
    turn: Turn
    first_token_s: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether the answer contains the expected fact; True if the turn asks for none."""
        return self.said.expected is None or self.said.expected.lower() in self.turn.text.lower()


@dataclass(slots=True)
class ServerRun:
    """Conversations held on one server, and the server's counters."""

    name: str
    conversations: list[list[Exchange]]
    counted: dict[str, int] = field(default_factory=dict)
    deaths: int = 0
    """How often the server was killed from outside during the run. Its counters restart with each process."""

    @property
    def exchanges(self) -> list[Exchange]:
        return [exchange for conversation in self.conversations for exchange in conversation]

    @property
    def asked(self) -> int:
        return sum(exchange.said.expected is not None for exchange in self.exchanges)

    def tokens(self, source: str) -> int:
        return sum(getattr(exchange.turn.usage, SOURCES[source]) for exchange in self.exchanges)

    def count(self, server: OwnServer) -> None:
        """Read the server's counters. Call it last, before the server stops."""
        alive, self.deaths = server.wait_ready(), server.deaths
        for source in SOURCES:
            self.counted[source] = int(alive.metric("pensieve_context_tokens_total", source=source))

    @property
    def interruptions(self) -> str:
        times = "once" if self.deaths == 1 else f"{self.deaths} times"
        return (
            f"{self.name}: the server was ended {times} from outside; each turn went on."
            if self.deaths
            else ""
        )


def wrong_answers(run: ServerRun) -> list[str]:
    return [
        f"{run.name}: asked {exchange.said.text!r}, wanted {exchange.said.expected!r}, got {exchange.turn.text!r}"
        for exchange in run.exchanges
        if not exchange.is_right
    ]


def wrong_receipts(run: ServerRun) -> list[str]:
    """Return a line for each receipt that does not add up: by itself, with the previous turn, or with the
    server's counters."""
    problems = []
    for number, conversation in enumerate(run.conversations, 1):
        before = 0
        for index, exchange in enumerate(conversation, 1):
            usage = exchange.turn.usage
            where = f"{run.name}: conversation {number} turn {index}"
            if not usage.reconciles:
                problems.append(f"{where}: the receipt does not add up: {usage}")
            # Not equal: an input that another conversation began with too has fewer new tokens.
            if usage.context_tokens < before + usage.new_tokens or usage.recomputed_tokens > before:
                problems.append(
                    f"{where}: {usage.context_tokens} tokens of context, {usage.recomputed_tokens} recomputed,"
                    f" but the turn before ended with {before} and {usage.new_tokens} are new"
                )
            before = usage.context_tokens + usage.output_tokens
    for source in () if run.deaths else SOURCES:
        if run.counted[source] != run.tokens(source):
            problems.append(
                f"{run.name}: receipts say {run.tokens(source)} {source} tokens,"
                f" the server counted {run.counted[source]}"
            )
    return problems


def busy(console: Console, what: str) -> AbstractContextManager[object]:
    """Announce a step that takes some seconds: a spinner on a terminal, otherwise a plain line."""
    if console.is_terminal:
        return console.status(what)
    console.print(what)
    return nullcontext()


@contextlib.contextmanager
def own_servers(*commands: Sequence[str]) -> Iterator[list[OwnServer]]:
    """Start one server per list of ``pensieve serve`` options, in parallel, each with a history on disk.

    A server that is killed from outside is started again. The block's end stops all of them and deletes their
    histories. Raises SpawnError.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pensieve-demo-")))
        made = [
            OwnServer(*options, "--store", f"sqlite:///{folder / f'history-{number}.sqlite3'}")
            for number, options in enumerate(commands, 1)
        ]
        for one in made:
            stack.callback(one.close)
        yield [stack.enter_context(one) for one in made]
