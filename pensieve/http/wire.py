"""HTTP below the application: what is no HTTP is refused in the form of all errors, and who stands still is left."""

from __future__ import annotations

import asyncio
import http
import uuid
from typing import Any, Final

import msgspec

from pensieve.http.common.failures import HttpFailure

HEAD_S: Final = 30.0
"""How long a request may take up to its body: from the connection, or from its first byte on one that is open."""
STALLED_S: Final = 120.0
"""How long a caller may take nothing of an answer that is waiting for it."""


def guarded(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """uvicorn's ``protocol``, whichever parser it uses, with these bounds."""

    class Guarded(protocol):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._head: asyncio.TimerHandle | None = None
            """Runs while no request is being answered."""
            self._stall: asyncio.TimerHandle | None = None
            """Runs while an answer cannot be written."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stall = self.loop.call_later(STALLED_S, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            _end(self._stall)

        def connection_lost(self, exc: Exception | None) -> None:
            _end(self._head)
            _end(self._stall)
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """uvicorn calls this for what its parser refuses."""
            self._refuse(HttpFailure(400, "the request is not valid HTTP", code="invalid_http"))

        def _watch(self) -> None:
            if self.transport.is_closing() or not (self.cycle is None or self.cycle.response_complete):
                _end(self._head)
                self._head = None
            elif self._head is None:
                self._head = self.loop.call_later(HEAD_S, self._too_late)

        def _too_late(self) -> None:
            message = f"the request's head did not come within {HEAD_S:g} s"
            self._refuse(HttpFailure(408, message, code="request_timeout"))

        def _refuse(self, failure: HttpFailure) -> None:
            begun = self.cycle is not None and self.cycle.response_started
            if not begun or self.cycle.response_complete:  # else it would be read as a part of that answer
                self.transport.write(_answer(failure))
            self.transport.close()

    return Guarded


def _answer(failure: HttpFailure) -> bytes:
    body = msgspec.json.encode(failure.body)
    head = (
        f"HTTP/1.1 {failure.status} {http.HTTPStatus(failure.status).phrase}\r\n"
        f"x-request-id: req_{uuid.uuid4().hex}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body


def _end(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
