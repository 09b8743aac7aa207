"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Final

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

SILENT: Final = b":\n\n"
"""A comment, which clients drop: proxies and clients see that the answer is still to come."""
DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""The second keeps nginx from holding events back."""


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event, to be sent in one piece: some clients lose one that is split, and see none that ends in CRLF."""
    line = b"data: " + msgspec.json.encode(data) + b"\n\n"
    return line if name is None else b"event: " + name.encode() + b"\n" + line


class EventStream(StreamingResponse):
    """Sends events, and comments where there are none for the door's ``heartbeat_s``.

    ``held`` is closed when the last event is out or the client has gone.
    """

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack, headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**_HEADERS, **headers})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        steady = _Steady(send, scope["app"].state.door.settings.heartbeat_s)
        try:
            await super().__call__(scope, receive, steady.send)
        finally:
            steady.end()
            await self._held.aclose()


class _Steady:
    """Sends what the answer says, and a comment after each ``heartbeat_s`` seconds without a byte."""

    def __init__(self, send: Send, heartbeat_s: float) -> None:
        self._send = send
        self._heartbeat_s = heartbeat_s
        self._one = asyncio.Lock()
        self._last = 0.0
        self._beating: asyncio.Task[None] | None = None
        """From the head of the answer to its end."""

    async def send(self, message: Message) -> None:
        async with self._one:
            await self._send(message)
            self._last = asyncio.get_running_loop().time()
            if message["type"] == "http.response.start":
                self._beating = asyncio.create_task(self._beat(), name="heartbeat")
            elif not message.get("more_body"):
                self.end()

    def end(self) -> None:
        """No more comments."""
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._last + self._heartbeat_s - loop.time())
            async with self._one:
                if loop.time() >= self._last + self._heartbeat_s:
                    await self._send({"type": "http.response.body", "body": SILENT, "more_body": True})
                    self._last = loop.time()
