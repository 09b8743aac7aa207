"""Cuts conversations to what is asked for and to what every target can hold, and counts what was cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pensieve.replay.load.workload import Conversation, Piece, TurnLengths, truncate_pieces


@dataclass(frozen=True, slots=True)
class Shaping:
    """What is to be made of a workload; None: as recorded."""

    scale_lengths: float = 1.0
    """Every length is multiplied by this, and stays at least one token: for models with short contexts."""
    max_turns: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    system_tokens: int = 0
    """Put so many tokens before the first input of every conversation, the same ones for all."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """What is replayed, and how much less than the dataset it is."""

    conversations: tuple[Conversation, ...]
    cut_conversations: int
    """How many end early because the context would not fit."""
    dropped_conversations: int
    """How many are left out because not even their first turn fits."""
    dropped_turns: int
    """How many turns both kinds lack."""

    @property
    def turns(self) -> int:
        return sum(len(talk.turns) for talk in self.conversations)


def shape(conversations: Iterable[Conversation], wanted: Shaping, context_limit: int) -> Shaped:
    """Cut ``conversations`` to size. ``context_limit``: the smallest of all targets, so that all do the same work; a
    context must stay below it."""
    kept: list[Conversation] = []
    cut = dropped = turns_lost = 0
    for talk in conversations:
        turns = [_resized(turn, wanted) for turn in talk.turns[: wanted.max_turns]]
        prefix = _prefix(talk.prefix, wanted, turns[0].input_tokens)
        if wanted.system_tokens:
            turns[0] = replace(turns[0], input_tokens=wanted.system_tokens + turns[0].input_tokens)
        fitting = _that_fit(turns, context_limit)
        turns_lost += len(turns) - len(fitting)
        if not fitting:
            dropped += 1
            continue
        cut += len(fitting) < len(turns)
        kept.append(Conversation(talk.key, tuple(fitting), prefix))
    return Shaped(tuple(kept), cut, dropped, turns_lost)


def _prefix(pieces: tuple[Piece, ...], wanted: Shaping, first_input: int) -> tuple[Piece, ...]:
    """What is left of the pieces; of the first input, as it is now, they leave a token."""
    scaled = ((name, round(tokens * wanted.scale_lengths)) for name, tokens in pieces)
    kept = truncate_pieces(tuple(piece for piece in scaled if piece[1]), first_input - 1)
    return (("system prompt of all", wanted.system_tokens), *kept) if wanted.system_tokens else kept


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
