"""The steps of a flow, and the one that all others are made of: a unary call, sent again where that is safe."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from pensieve.client._retry import Backoff, Verdict, verdict
from pensieve.client._transport import MAX_TIMEOUT_S, ClientSettings
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


class Tries:
    """The tries of one unary call. All of them together end at the call's deadline, ``settings.timeout`` from now."""

    def __init__(self, settings: ClientSettings) -> None:
        self._backoff = Backoff(settings.retry)
        self._deadline = time.monotonic() + settings.timeout
        self._engine_failed = False

    @property
    def remaining_s(self) -> float:
        """Seconds for the next try; never so few that a timeout of gRPC would be refused as none."""
        return min(MAX_TIMEOUT_S, max(0.001, self._deadline - time.monotonic()))

    def wait_after(self, error: PensieveError) -> Sleep:
        """The pause before the next try. Raises ``error`` when there shall be none."""
        what = verdict(error)
        if what is Verdict.RAISE or (what is Verdict.RESEND_ONCE and self._engine_failed):
            raise error
        self._engine_failed |= what is Verdict.RESEND_ONCE
        return Sleep(self._backoff.wait_after(error, what, self.remaining_s))


def call(
    settings: ClientSettings, method: str, request: Message, *, session: str = "", replay: bool = True
) -> Flow[Any]:
    """One unary call, sent again while that is safe and worth it. ``replay=False``: at most once."""
    tries = Tries(settings)
    while True:
        try:
            return (yield Invoke(method, request, session, tries.remaining_s))
        except PensieveError as error:
            if not replay:
                raise
            pause = tries.wait_after(error)
        yield pause


def discard(settings: ClientSettings, session: str, request_id: str, stream_id: str) -> Flow[None]:
    """Tell the server that nobody will come back for this turn; else it runs on for the grace time, and may be kept."""
    keep = pb.CancelTurnRequest.KEEP_NOTHING
    request = pb.CancelTurnRequest(session=session, request_id=request_id, keep=keep, stream_id=stream_id)
    soon = replace(settings, timeout=DISCARD_TIMEOUT_S)
    yield from call(soon, "CancelTurn", request, session=session)
