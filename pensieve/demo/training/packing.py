"""Turns dialogues into rows of token ids: what training and forced evaluation read."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pensieve.demo.talk import smalltalk
from pensieve.demo.training.dialogues import Writer, WrittenTurn
from pensieve.demo.training.tokenizer import ASSISTANT, END, SYSTEM, USER

_WEIGHT_SCALE = 100  # weights travel as uint8
_WEIGHT_USER, _WEIGHT_REPLY, _WEIGHT_ANSWER = 3, 30, 100


@dataclass(frozen=True, slots=True)
class Question:
    """An answer inside a row: where it stands, and how far back the value was last mentioned."""

    start: int
    stop: int
    """Token range of the answer, its end token included."""
    distance: int
    """Tokens between the end of the turn that last mentioned the value and the end of the question; -1: never told."""
    kind: str
    """Kind of the value asked for."""


@dataclass(frozen=True, slots=True)
class Row:
    """One dialogue, cut at ``length`` tokens."""

    ids: npt.NDArray[np.uint16]  # [length]
    weights: npt.NDArray[np.uint8]  # [length], of predicting that token
    questions: tuple[Question, ...]


class Packer:
    """Writes and encodes dialogues. One per process; ``seed`` names the stream."""

    def __init__(self, tokenizer_file: Path, seed: str, held_out: bool) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._rng = random.Random(seed)
        self._held_out = held_out
        self._system, self._user, self._assistant, self._end = (
            self._id(name) for name in (SYSTEM, USER, ASSISTANT, END)
        )

    def _id(self, name: str) -> int:
        token = self._tokenizer.token_to_id(name)
        if token is None:
            raise ValueError(f"the tokenizer has no {name}")
        return int(token)

    def row(self, length: int) -> Row:
        """A fresh dialogue of exactly ``length`` tokens."""
        ids: list[int] = []
        weights: list[int] = []
        questions: list[Question] = []
        ends: list[int] = []
        if self._rng.random() < 0.25:
            text = self._rng.choice(smalltalk.SYSTEM_PROMPTS)
            ids += [self._system, *self._encode([text])[0], self._end]
            weights += [0] * len(ids)
        writer = Writer(self._rng, self._held_out)
        while len(ids) < length:
            turns = [writer.next() for _ in range(min(16, 1 + (length - len(ids)) // 24))]
            encoded = self._encode([text for turn in turns for text in (turn.user, turn.assistant)])
            for index, turn in enumerate(turns):
                self._append(turn, encoded[2 * index], encoded[2 * index + 1], ids, weights, questions, ends)
        kept = tuple(question for question in questions if question.stop <= length)
        return Row(np.array(ids[:length], np.uint16), np.array(weights[:length], np.uint8), kept)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [
            encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def _append(
        self,
        turn: WrittenTurn,
        user: list[int],
        reply: list[int],
        ids: list[int],
        weights: list[int],
        questions: list[Question],
        ends: list[int],
    ) -> None:
        known = turn.expected is not None
        weight = _WEIGHT_ANSWER if known or turn.unknown else _WEIGHT_REPLY
        ids += [self._user, *user, self._end, self._assistant]
        weights += [0, *[_WEIGHT_USER] * len(user), _WEIGHT_USER, 0]
        start = len(ids)
        ids += [*reply, self._end]
        weights += [weight] * (len(reply) + 1)
        if known or turn.unknown:
            told = turn.told_at
            # -1: never told; 0: told in the very turn that asks.
            distance = -1 if told is None else start - ends[told] if told < len(ends) else 0
            questions.append(Question(start, len(ids), distance, turn.kind))
        ends.append(len(ids))

    def show(self, row: Row, question: Question, best: npt.NDArray[np.int64]) -> None:
        """Prints a question, its answer and what the model preferred at each place (``best``: [length])."""
        before = self._tokenizer.decode(row.ids[max(0, question.start - 24) : question.start].tolist())
        wanted = self._tokenizer.decode(row.ids[question.start : question.stop].tolist())
        got = self._tokenizer.decode(best[question.start - 1 : question.stop - 1].tolist())
        print(f"  distance {question.distance}: …{before!r}\n    wanted {wanted!r}\n    got    {got!r}")
