"""The steps of a flow, and the one that all others are made of: a unary call, sent again where that is safe."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from pensieve.client._retry import Backoff, Verdict, verdict
from pensieve.client._transport import ClientSettings
from pensieve.errors import PensieveError
from pensieve.v1 import pensieve_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Invoke:
    """Make one unary call."""

    method: str
    request: Message
    session: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait this many seconds."""

    seconds: float


Flow = Generator[Invoke | Sleep, Any, T]

DISCARD_TIMEOUT_S = 5.0


def call(
    settings: ClientSettings, method: str, request: Message, *, session: str = "", replay: bool = True
) -> Flow[Any]:
    """One unary call, sent again while that is safe and worth it. ``replay=False``: at most once."""
    backoff = Backoff(settings.retry)
    while True:
        try:
            return (yield Invoke(method, request, session, settings.timeout))
        except PensieveError as error:
            what = verdict(error)
            if not replay or what is Verdict.RAISE:
                raise
            delay = backoff.delay(at_least=error.retry_after_s, slowly=what is Verdict.RESEND_SLOWLY)
            if delay is None:
                raise
        yield Sleep(delay)


def discard(session: str, request_id: str) -> Invoke:
    """Tells the server that nobody will come back for this turn; else the session stays busy for the grace time."""
    keep = pb.CancelTurnRequest.KEEP_NOTHING
    request = pb.CancelTurnRequest(session=session, request_id=request_id, keep=keep)
    return Invoke("CancelTurn", request, session, DISCARD_TIMEOUT_S)
