"""Cuts conversations to the requested shape and to the limits of all targets, and counts the cuts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pensieve.replay.load.workload import Conversation, Piece, TurnLengths, truncate_pieces


@dataclass(frozen=True, slots=True)
class Shaping:
    """Requested changes of a workload; None: as recorded."""

    scale_lengths: float = 1.0
    """Factor of every length, for models with short contexts; no length falls below one token."""
    max_turns: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    system_tokens: int = 0
    """Tokens put before the first input of every conversation, the same for all."""


@dataclass(frozen=True, slots=True)
class Shaped:
    conversations: tuple[Conversation, ...]
    cut_conversations: int
    """Conversations that end early because the context would not fit."""
    dropped_conversations: int
    """Conversations left out because not even their first turn fits."""
    dropped_turns: int

    @property
    def turns(self) -> int:
        return sum(len(talk.turns) for talk in self.conversations)


def shape(conversations: Iterable[Conversation], wanted: Shaping, context_limit: int) -> Shaped:
    """Cut ``conversations`` so that contexts stay below ``context_limit``, the smallest of all targets."""
    kept: list[Conversation] = []
    cut = dropped = turns_lost = 0
    for talk in conversations:
        turns = [_resized(turn, wanted) for turn in talk.turns[: wanted.max_turns]]
        prefix = _prefix(talk.prefix, wanted, turns[0].input_tokens)
        if wanted.system_tokens:
            turns[0] = replace(turns[0], input_tokens=wanted.system_tokens + turns[0].input_tokens)
        kept_turns = _fitting(turns, context_limit)
        turns_lost += len(turns) - len(kept_turns)
        if not kept_turns:
            dropped += 1
            continue
        cut += len(kept_turns) < len(turns)
        kept.append(Conversation(talk.key, tuple(kept_turns), prefix))
    return Shaped(tuple(kept), cut, dropped, turns_lost)


def _prefix(pieces: tuple[Piece, ...], wanted: Shaping, first_input: int) -> tuple[Piece, ...]:
    """Scale the shared pieces; they leave at least one token of the first input."""
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


def _fitting(turns: list[TurnLengths], limit: int) -> list[TurnLengths]:
    total = 0
    for index, turn in enumerate(turns):
        total += turn.input_tokens + turn.output_tokens
        if total >= limit:
            return turns[:index]
    return turns
