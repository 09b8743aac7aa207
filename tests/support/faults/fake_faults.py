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
    turn: pb.Turn | None = None


@dataclass
class FakeSession:
    """One session."""

    message: pb.Session
    items: list[pb.Item] = field(default_factory=list)
    turns: dict[str, FakeTurn] = field(default_factory=dict)
    active: str = ""
    next_item: int = 1
