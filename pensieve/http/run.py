"""Runs the door on a socket."""

from __future__ import annotations

import signal
import socket
from types import FrameType

import uvicorn

from pensieve.http.app import make_app
from pensieve.http.common.settings import DoorSettings

__all__ = ["DoorSettings", "serve"]

DRAIN_S = 30
"""How long running answers may take to end when the door is closed."""


async def serve(settings: DoorSettings, listener: socket.socket) -> None:
    """Take calls until SIGTERM or SIGINT; then let running ones end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn takes both over, and when it has ended it raises them again: to the program that was asked to end and
        # did, that is no failure.
        signal.signal(number, _ended)
    # Connections inherit it. asyncio would set it only where a socket says that it is TCP, which this one does not; and
    # without it an event waits up to 40 ms for the caller's acknowledgement of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(
        make_app(settings),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
        h11_max_incomplete_event_size=64 * 1024,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def _ended(_: int, __: FrameType | None) -> None:
    return
