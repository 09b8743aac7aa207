"""Runs of the demo's acts without fault, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pensieve.client import Turn, TurnState
from pensieve.core import FinishReason, Usage
from pensieve.demo import killed
from pensieve.demo.conversations import Utterance
from pensieve.demo.exchange import SOURCES, Exchange, ServerRun

OUTPUT = 5
NEW = 10


def turn(text: str, usage: Usage) -> Turn:
    return Turn(
        session="s", request_id="r", state=TurnState.COMMITTED, text=text, finish_reason=FinishReason.EOS, usage=usage,
        revision=1, base_revision=0, seed=0, stop_sequence="", input=(), output=None,
    )  # fmt: skip


def receipt(index: int, source: str) -> Usage:
    """Of turn ``index``, from 0: all that came before was found in one place."""
    before = index * (NEW + OUTPUT)
    return Usage(
        context_tokens=before + NEW, new_tokens=NEW, output_tokens=OUTPUT, **{SOURCES[source]: before}
    )


def well(name: str, source: str, seconds: float, turns: int = 6) -> ServerRun:
    """A run without fault: the first turn tells, the others ask."""
    said = [Utterance("My name is Vio."), *[Utterance("What is my name?", "Vio")] * (turns - 1)]
    talk = [
        Exchange(one, turn("Your name is Vio.", receipt(index, source)), seconds)
        for index, one in enumerate(said)
    ]
    run = ServerRun(name, [talk])
    run.counted = {key: run.tokens(key) for key in SOURCES}
    return run


def spoil(run: ServerRun, change: Callable[[Turn], Turn]) -> ServerRun:
    """The same run with its last turn changed."""
    talk = run.conversations[0]
    talk[-1] = replace(talk[-1], turn=change(talk[-1].turn))
    return run


def with_usage(**fields: int) -> Callable[[Turn], Turn]:
    def change(one: Turn) -> Turn:
        usage = {name: getattr(one.usage, name) for name in one.usage.__struct_fields__}
        return replace(one, usage=Usage(**{**usage, **fields}))

    return change


def survived() -> killed.KilledRun:
    """A third act without fault: the third answer of five was cut."""
    *before, cut, one, two = well("Pensieve", "device", 0.1, turns=5).exchanges
    return killed.KilledRun(before, cut, cut.turn.text[:4], 4.2, [one, two], items=10)
