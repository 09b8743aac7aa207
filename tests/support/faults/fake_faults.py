"""What the fake ConversationService is made of, and what can be made to go wrong with it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import grpc

from pensieve.errors import PensieveError
from pensieve.v1 import pensieve_pb2 as pb


def answer_to(text: str) -> str:
    """What the fake says; contains characters outside ASCII."""
    return f"You said “{text}”. 🙂"


def drawn_answer(text: str, candidate: int) -> str:
    """What the fake says as this candidate; none is the beginning of another."""
    return f"{candidate}: {answer_to(text)}" if candidate else answer_to(text)


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one StreamTurn call."""

    after: int = 0
    """Messages that get through first."""
    code: grpc.StatusCode | None = None
    """End with this bare status, as a dead connection or a proxy would."""
    error: PensieveError | None = None
    """End with this error of ours."""
    trailers: tuple[tuple[str, str], ...] = ()
    silent: bool = False
    """Say nothing any more, until the client goes away."""
    gate: threading.Event | None = None
    """Say nothing until this is set, then go on."""
    end: bool = False
    """End in good order, without ``completed``."""
    lose_attempt: bool = False
    """The attempt dies with the stream: the next one is another."""
    commit: bool = False
    """The turn is committed although its stream broke."""
    skip_messages: int = 0
    """Leave out this many messages after ``after`` messages, and go on."""


@dataclass
class FakeTurn:
    """One turn, committed or not."""

    spec: pb.TurnSpec
    attempt: str
    answer: str
    others: list[str] = field(default_factory=list)
    """Candidates 1, 2, ..."""
    turn: pb.Turn | None = None

    def deltas(self, had: list[int], size: int) -> list[pb.StreamTurnResponse]:
        """All candidates in turn, ``size`` tokens at a time, from where a client is with each."""
        messages = []
        at = [*had, *[0] * len(self.others)]
        answers = [self.answer, *self.others]
        while any(at[i] < len(answer) for i, answer in enumerate(answers)):
            for i, answer in enumerate(answers):
                if text := answer[at[i] : at[i] + size]:
                    delta = pb.TurnDelta(token_offset=at[i], token_count=len(text), text=text, candidate=i)
                    delta.tokens.ids.extend(ord(one) for one in text)
                    messages.append(pb.StreamTurnResponse(delta=delta))
                    at[i] += len(text)
        return messages

    def drawn(self) -> list[pb.Candidate]:
        """The candidates as a committed turn has them."""
        answers = [self.answer, *self.others] if self.others else []
        return [
            pb.Candidate(candidate=i, text=answer, output_tokens=len(answer), finish_reason=1, seed=7 + i)
            for i, answer in enumerate(answers)
        ]


@dataclass
class FakeSession:
    """One session."""

    message: pb.Session
    items: list[pb.Item] = field(default_factory=list)
    turns: dict[str, FakeTurn] = field(default_factory=dict)
    active: str = ""
    next_item: int = 1
