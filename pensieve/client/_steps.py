"""The steps that flows consist of, and the basic flow: one unary call, retried if that is safe."""

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
    """Make one call that has one response."""

    method: str
    request: Message | tuple[Message, ...]
    """Several messages: of a call that takes a stream."""
    session: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


Flow = Generator[Invoke | Sleep, Any, T]

DISCARD_TIMEOUT_S = 5.0


class Tries:
    """The tries of one unary call, which share its deadline, ``settings.timeout`` seconds from now."""

    def __init__(self, settings: ClientSettings) -> None:
        self._backoff = Backoff(settings.retry)
        self._deadline = time.monotonic() + settings.timeout
        self._engine_failed = False

    @property
    def remaining_s(self) -> float:
        """Seconds for the next try; at least 1 ms, since gRPC rejects a timeout of zero."""
        return min(MAX_TIMEOUT_S, max(0.001, self._deadline - time.monotonic()))

    def wait_after(self, error: PensieveError) -> Sleep:
        """Return the pause before the next try. Raises ``error`` if there is none."""
        decision = verdict(error)
        if decision is Verdict.RAISE or (decision is Verdict.RESEND_ONCE and self._engine_failed):
            raise error
        self._engine_failed |= decision is Verdict.RESEND_ONCE
        return Sleep(self._backoff.wait_after(error, decision, self.remaining_s))


def call(
    settings: ClientSettings,
    method: str,
    request: Message | tuple[Message, ...],
    *,
    session: str = "",
    replay: bool = True,
) -> Flow[Any]:
    """Make one unary call, retried while that is safe and within budget. ``replay=False``: at most once."""
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
    """Tell the server to discard this turn; otherwise it runs on for the grace time, and may be kept."""
    keep = pb.CancelTurnRequest.KEEP_NOTHING
    request = pb.CancelTurnRequest(session=session, request_id=request_id, keep=keep, stream_id=stream_id)
    soon = replace(settings, timeout=DISCARD_TIMEOUT_S)
    yield from call(soon, "CancelTurn", request, session=session)
