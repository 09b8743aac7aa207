"""The third act: the server is killed in the middle of an answer and started again, and the answer continues.

The history is on disk, as in production. The caller does nothing: its stream waits for the server to return at
the same address, and continues where it stopped. The turn has a request id, and everything confirmed is
durable.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.text import Text

from pensieve.client import Client, Session, Turn
from pensieve.demo.conversations import Conversation, Utterance, conversations
from pensieve.demo.exchange import Exchange, busy, own_servers
from pensieve.own_server import OwnServer

OPTIONS: Final = [
    *("--model", "demo", "--device", "cpu"),
    *("--device-cache", "4096tokens", "--host-cache", "4096tokens"),
]
TURNS: Final = 12
TRIES: Final = 4
"""Answers in which the server may be killed: one may end before the signal arrives."""


@dataclass(slots=True)
class KilledRun:
    before: list[Exchange] = field(default_factory=list)
    cut: Exchange | None = None
    """The turn during which the server was killed; None if each answer ended before that."""
    said: str = ""
    silence_s: float = 0.0
    """From the kill to the rest of the answer."""
    later: list[Exchange] = field(default_factory=list)
    items: int = 0
    kills: int = 0
    deaths: int = 0
    """All ends of the server; more than ``kills`` if it is also killed from outside."""

    @property
    def after(self) -> Exchange | None:
        return self.later[0] if self.later else None


def script(seed: int) -> Conversation:
    (found,) = conversations(1, TURNS, seed)
    return found


def serve_and_hold(conversation: Conversation, console: Console) -> KilledRun:
    """Run the act: start a server with its own store, talk, kill it in the middle of an answer, start it again."""
    run = KilledRun()
    with ExitStack() as stack:
        with busy(console, "starting a server with its history on disk …"):
            (owner,) = stack.enter_context(own_servers(OPTIONS))
        with Client(owner.target) as client:
            session = client.create_session()
            talk(session, conversation, owner, run, console)
            run.items = session.refresh().item_count
        run.deaths = owner.deaths
    return run


def talk(
    session: Session, conversation: Conversation, owner: OwnServer, run: KilledRun, console: Console
) -> None:
    """Hold the conversation; kill the server during one of the answers before the last."""
    for number, said in enumerate(conversation):
        last = number == len(conversation) - 1
        if run.cut is None and not last and number >= len(conversation) - 1 - TRIES:
            exchange = answer_with_a_kill(session, said, owner, run, console)
            if run.cut is None:
                run.before.append(exchange)
            continue
        exchange = Exchange(said, session.send(said.text, max_output_tokens=64, temperature=0.0))
        if run.cut is None:
            run.before.append(exchange)
            continue
        run.later.append(exchange)
        if len(run.later) == 1:
            console.print(Text.assemble(("you    ", "bold"), said.text))
            console.print(Text.assemble(("model  ", "bold"), exchange.turn.text.strip()))


def answer_with_a_kill(
    session: Session, said: Utterance, owner: OwnServer, run: KilledRun, console: Console
) -> Exchange:
    """Ask, and kill the server once a part of the answer has arrived.

    The answer may already be complete and in transit. Then its rest comes from the history, and nothing is
    restored to memory. It counts as cut if the server restarted it.
    """
    arrived, killed_at, silence_s, owned, anew = "", 0.0, 0.0, "", False
    with session.stream(said.text, max_output_tokens=64, temperature=0.0) as stream:
        for piece in stream:
            anew = anew or piece.restarted
            if anew and not silence_s and piece.text:
                silence_s = time.perf_counter() - killed_at
            arrived += piece.text
            if arrived.strip() and not killed_at:
                owner.kill()
                run.kills += 1
                killed_at, owned = time.perf_counter(), arrived
        turn: Turn = stream.turn
    exchange = Exchange(said, turn)
    owner.wait_ready()
    if silence_s:
        run.cut, run.said, run.silence_s = exchange, owned, silence_s
        rest = turn.text[len(owned) :].strip()
        console.print(Text.assemble(("you    ", "bold"), said.text))
        console.print(Text.assemble(("model  ", "bold"), owned.strip()))
        console.print(Text(f"       ✂ killed; started again, and {silence_s:.1f} s later it goes on:", "red"))
        console.print(Text(f"       {rest}"))
    return exchange


def result(run: KilledRun) -> str:
    """Return the outcome in at most three lines."""
    after = run.after
    if run.cut is None or after is None:
        return "Each answer was over before the server could be killed in its middle; it lost none."
    usage = after.turn.usage
    kept = usage.gpu_cached_tokens + usage.swapped_in_tokens
    return (
        f"{run.silence_s:.1f} s after the kill the answer went on where it had stopped.\n"
        f"Of the next turn {kept:,} of {usage.context_tokens:,} tokens were in memory again,"
        f" {usage.new_tokens} were new;\n"
        f"all {run.items // 2} turns are in the history, each once."
    )


def problems(run: KilledRun) -> list[str]:
    held = [*run.before, *([run.cut] if run.cut is not None else []), *run.later]
    found = []
    for exchange in held:
        if not exchange.is_right:
            found.append(
                f"asked {exchange.said.text!r}, wanted {exchange.said.expected!r}, got {exchange.turn.text!r}"
            )
        if not exchange.turn.usage.reconciles:
            found.append(f"the receipt does not add up: {exchange.turn.usage}")
    if run.cut is not None and not run.cut.turn.text.startswith(run.said):
        found.append(f"the answer began {run.said!r} and became {run.cut.turn.text!r}")
    if run.after is not None and run.deaths <= run.kills and run.after.turn.usage.recomputed_tokens:
        found.append(f"the turn after computed {run.after.turn.usage.recomputed_tokens} tokens again")
    if run.items != 2 * len(held):
        found.append(
            f"{len(held)} turns were held, and the history has {run.items} items, not {2 * len(held)}"
        )
    return found
