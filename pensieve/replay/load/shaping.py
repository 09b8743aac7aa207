"""Cuts conversations to what is asked for and to what every target can hold, and counts what was cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pensieve.replay.load.workload import Conversation, TurnLengths


@dataclass(frozen=True, slots=True)
class Shaping:
    """Limits on a workload; None: as recorded."""

    scale_lengths: float = 1.0
    """Every length times this, at least one token: for models with short contexts."""
    max_turns: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Shaped:
    """What is replayed, and how much less than the dataset it is."""

    conversations: tuple[Conversation, ...]
    cut_conversations: int
    """Ended early because the context would not fit."""
    dropped_conversations: int
    """Not even their first turn fits."""
    dropped_turns: int
    """Of both kinds."""

    @property
    def turns(self) -> int:
        return sum(len(talk.turns) for talk in self.conversations)


def shape(conversations: Iterable[Conversation], wanted: Shaping, context_limit: int) -> Shaped:
    """``context_limit``: the smallest of all targets, so that all do the same work. A context must stay below it."""
    kept: list[Conversation] = []
    cut = dropped = turns_lost = 0
    for talk in conversations:
        turns = [_resized(turn, wanted) for turn in talk.turns[: wanted.max_turns]]
        fitting = _that_fit(turns, context_limit)
        turns_lost += len(turns) - len(fitting)
        if not fitting:
            dropped += 1
            continue
        cut += len(fitting) < len(turns)
        kept.append(Conversation(talk.key, tuple(fitting)))
    return Shaped(tuple(kept), cut, dropped, turns_lost)


def _resized(turn: TurnLengths, wanted: Shaping) -> TurnLengths:
    def size(tokens: int, limit: int | None) -> int:
        scaled = max(1, round(tokens * wanted.scale_lengths))
        return scaled if limit is None else min(scaled, limit)

    return replace(
        turn,
        input_tokens=size(turn.input_tokens, wanted.max_input_tokens),
        output_tokens=size(turn.output_tokens, wanted.max_output_tokens),
    )


def _that_fit(turns: list[TurnLengths], limit: int) -> list[TurnLengths]:
    total = 0
    for index, turn in enumerate(turns):
        total += turn.input_tokens + turn.output_tokens
        if total >= limit:
            return turns[:index]
    return turns
