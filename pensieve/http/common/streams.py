"""Server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Final

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""The second keeps nginx from holding events back."""


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event, to be sent in one piece: some clients lose one that is split, and see none that ends in CRLF."""
    line = b"data: " + msgspec.json.encode(data) + b"\n\n"
    return line if name is None else b"event: " + name.encode() + b"\n" + line


class EventStream(StreamingResponse):
    """Sends events; ``held`` is closed when the last is out or the client has gone."""

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack, headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**_HEADERS, **headers})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._held.aclose()
