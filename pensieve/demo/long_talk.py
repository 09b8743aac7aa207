"""The first act: one long conversation, held at once on a server that keeps its state and on a stateless one.

With a real model it is the only act: a long message and short turns. Its answers are not checked for content;
both servers must give the same ones.

Both servers get the same turns, one at a time and greedily, and alternate in going first, so that other load on
the machine affects both alike. The time to the first token is measured at the caller.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pensieve.client import Client, Session
from pensieve.demo.conversations import (
    LONG_FACTS,
    SHORT_QUESTIONS,
    Conversation,
    Utterance,
    long_conversation,
    notes_and_questions,
)
from pensieve.demo.exchange import Exchange, ServerRun, busy, own_servers, wrong_answers, wrong_receipts

STATEFUL, STATELESS = "Pensieve", "stateless"
_AMPLE_MEMORY = [
    *("--model", "demo", "--device", "cpu"),
    *("--device-cache", "16384tokens", "--host-cache", "16384tokens"),
]
SERVERS: Final = {STATEFUL: _AMPLE_MEMORY, STATELESS: [*_AMPLE_MEMORY, "--stateless"]}

STORIES: Final = 10
SENTENCE_TOKENS: Final = 12.5
"""Average tokens per sentence of a story."""
OTHER_TOKENS: Final = 350
"""About how many tokens the facts, questions and answers have."""
LAST_TURNS: Final = LONG_FACTS
"""The closing number is the median of this many turns at the end; all of them ask for a fact."""
HEIGHT: Final = 4
REAL_CONTEXT_TOKENS: Final = 4000
REAL_LAST_TURNS: Final = len(SHORT_QUESTIONS)
"""The closing number with a real model is the median of the short turns."""
REAL_SENTENCE_TOKENS: Final = 8.55
"""Average tokens of SmolLM2 per sentence of the notes."""
REAL_OTHER_TOKENS: Final = 150
"""About how many tokens the system prompt, questions and answers have."""
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


def script(context_tokens: int, seed: int) -> Conversation:
    sentences = round((context_tokens - OTHER_TOKENS) / STORIES / SENTENCE_TOKENS)
    return long_conversation(STORIES, max(1, sentences), seed)


def real_script(context_tokens: int, seed: int) -> Conversation:
    """Return a conversation of about this many tokens of SmolLM2."""
    return notes_and_questions(
        max(1, round((context_tokens - REAL_OTHER_TOKENS) / REAL_SENTENCE_TOKENS)), seed
    )


def real_servers(model: str) -> dict[str, list[str]]:
    """Name → options of its ``pensieve serve``, with memory for SmolLM2's whole context of 8,192 tokens."""
    ample = [*("--model", model, "--device", "cpu"), *("--device-cache", "8192tokens", "--host-cache", "0")]
    return {STATEFUL: ample, STATELESS: [*ample, "--stateless"]}


class Audience(Protocol):
    def on_asked(self, name: str) -> None:
        """A turn was sent to this server."""

    def on_answered(self, name: str, exchange: Exchange) -> None:
        """The turn has ended."""


def ask(session: Session, said: Utterance, clock: Callable[[], float] = time.perf_counter) -> Exchange:
    """Hold one turn, and measure the time from the call to the first token's arrival here."""
    started = clock()
    first_token_s: float | None = None
    with session.stream(said.text, max_output_tokens=64, temperature=0.0) as stream:
        for piece in stream:
            if first_token_s is None and piece.token_count > 0:
                first_token_s = clock() - started
    return Exchange(said, stream.turn, clock() - started if first_token_s is None else first_token_s)


def hold(
    conversation: Conversation,
    sessions: Sequence[tuple[str, Session]],
    audience: Audience,
    clock: Callable[[], float] = time.perf_counter,
) -> list[ServerRun]:
    runs = {name: ServerRun(name, [[]]) for name, _ in sessions}
    for number, said in enumerate(conversation):
        for name, session in sessions if number % 2 == 0 else reversed(sessions):
            audience.on_asked(name)
            exchange = ask(session, said, clock)
            runs[name].conversations[0].append(exchange)
            audience.on_answered(name, exchange)
    return list(runs.values())


def serve_and_hold(
    conversation: Conversation, console: Console, options: Mapping[str, Sequence[str]] = SERVERS
) -> tuple[ServerRun, ServerRun]:
    """Run the act: start both servers, hold the conversation, read the servers' counters, stop them.
    ``options`` has the names of ``SERVERS``, and for each the options of its ``pensieve serve``."""
    with ExitStack() as stack:
        with busy(console, "starting both servers …"):
            started = stack.enter_context(own_servers(*options.values()))
        servers = dict(zip(options, started, strict=True))
        clients = {name: stack.enter_context(Client(server.target)) for name, server in servers.items()}
        sessions = [(name, client.create_session()) for name, client in clients.items()]
        with Stage(len(conversation), console) as stage:
            stateful, stateless = hold(conversation, sessions, stage)
        for run in (stateful, stateless):
            run.count(servers[run.name])
    return stateful, stateless


class Stage:
    """Draws the act: two rows of growing bars on a terminal, otherwise a plain line per turn."""

    def __init__(self, turns: int, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self._turns = turns
        self._console = console
        self._clock = clock
        self._seconds: dict[str, list[float]] = {name: [] for name in SERVERS}
        self._context = 0
        self._running: tuple[str, float] | None = None
        self._live = Live(
            get_renderable=self.picture,
            console=console,
            refresh_per_second=8,
            auto_refresh=console.is_terminal,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running = None
        if self._console.is_terminal:
            self._live.stop()

    def on_asked(self, name: str) -> None:
        self._running = (name, self._clock())

    def on_answered(self, name: str, exchange: Exchange) -> None:
        self._running = None
        self._seconds[name].append(exchange.first_token_s)
        self._context = max(self._context, exchange.turn.usage.context_tokens)
        counts = {len(seconds) for seconds in self._seconds.values()}
        if len(counts) == 1 and not self._console.is_terminal:
            times = "".join(f"   {name} {seconds[-1]:6.3f} s" for name, seconds in self._seconds.items())
            context = exchange.turn.usage.context_tokens
            self._console.print(f"turn {counts.pop():2} {context:6,} tokens{times}", highlight=False)

    def picture(self) -> Group:
        """Return both rows at one scale. The bar of the running turn grows with time."""
        rows = {name: list(seconds) for name, seconds in self._seconds.items()}
        done = min(len(seconds) for seconds in self._seconds.values())
        state = f"{self._context:,} tokens"
        running = self._running  # read once: another thread draws
        if running is not None:
            name, since = running
            rows[name].append(self._clock() - since)
            state += f", turn {done + 1}/{self._turns}: {name}"
        top = max((value for values in rows.values() for value in values), default=0.0)
        column_width = fitting_width(self._turns, self._console.width - 12)
        lines = [Text(f"time to first token (full height {top:.2f} s), {state}", "dim")]
        for (name, values), style in zip(rows.items(), ("green", "yellow"), strict=True):
            for number, line in enumerate(bars(values, top, HEIGHT, column_width)):
                label = name if number == HEIGHT - 1 else ""
                lines.append(Text.assemble(f"{label:>9} │", (line, style)))
        lines.append(Text(f"{'turns':>9} └{'─' * (self._turns * column_width - 1)}", "dim"))
        return Group(*lines)


def bar(value: float, top: float, height: int) -> str:
    """Return one bar from its lowest character to its highest. Any value above 0 is visible."""
    if not top > 0:
        return " " * height
    eighths = min(height * 8, max(round(value / top * height * 8), 1 if value > 0 else 0))
    return "".join(_EIGHTHS[max(0, min(8, eighths - 8 * row))] for row in range(height))


def bars(values: Sequence[float], top: float, height: int, column_width: int) -> list[str]:
    """Return the lines from the top down. Each bar is one column narrower than ``column_width`` if that is above 1."""
    width = max(1, column_width - 1)
    upright = [bar(value, top, height) for value in values]
    return [
        "".join(one[row] * width + " " * (column_width - width) for one in upright).rstrip()
        for row in reversed(range(height))
    ]


def fitting_width(count: int, columns: int) -> int:
    return max(1, min(3, columns // max(1, count)))


def medians(stateful: ServerRun, stateless: ServerRun, turns: int = LAST_TURNS) -> tuple[float, float]:
    """Return each run's median time to the first token over its last turns."""
    last = [run.exchanges[-turns:] for run in (stateful, stateless)]
    stateful_s, stateless_s = (statistics.median(exchange.first_token_s for exchange in one) for one in last)
    return stateful_s, stateless_s


def result(stateful: ServerRun, stateless: ServerRun, turns: int = LAST_TURNS) -> str:
    stateful_s, stateless_s = medians(stateful, stateless, turns)
    ratio = stateless_s / stateful_s
    how = f"{ratio:.0f} times sooner" if ratio >= 10 else f"{ratio:.1f} times sooner"
    if ratio < 1.2:
        how = "no sooner (a longer --context shows the difference)"
    context = stateful.exchanges[-1].turn.usage.context_tokens
    return (
        f"Where the state is kept, the first token comes {how}.\n"
        f"Medians of the last {turns} turns, at {context:,} tokens:"
        f" {stateful_s * 1e3:,.0f} ms against {stateless_s * 1e3:,.0f} ms."
    )


def problems(stateful: ServerRun, stateless: ServerRun) -> list[str]:
    found = [line for run in (stateful, stateless) for line in wrong_answers(run) + wrong_receipts(run)]
    for number, (one, other) in enumerate(zip(stateful.exchanges, stateless.exchanges, strict=True), 1):
        if one.turn.text != other.turn.text:
            found.append(f"turn {number}: {STATEFUL} said {one.turn.text!r}, {STATELESS} {other.turn.text!r}")
    if stateful.tokens("recomputed") and not stateful.deaths:
        found.append(
            f"{STATEFUL} recomputed {stateful.tokens('recomputed'):,} tokens that it had room to keep"
        )
    if kept := stateless.tokens("device") + stateless.tokens("host"):
        found.append(f"{STATELESS} found {kept:,} tokens that it should have forgotten")
    return found
