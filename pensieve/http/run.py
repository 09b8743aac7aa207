"""Runs the door on a socket."""

from __future__ import annotations

import socket

import uvicorn

from pensieve.http.app import make_app
from pensieve.http.settings import DoorSettings

__all__ = ["DoorSettings", "serve"]

DRAIN_S = 30
"""How long running answers may take to end when the door is closed."""


async def serve(settings: DoorSettings, listener: socket.socket) -> None:
    """Take calls until SIGTERM or SIGINT; then let running ones end."""
    config = uvicorn.Config(
        make_app(settings),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
        h11_max_incomplete_event_size=64 * 1024,
    )
    await uvicorn.Server(config).serve(sockets=[listener])
