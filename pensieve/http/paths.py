"""Paths as callers write them: a slash at the end changes nothing."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class Unslashed:
    """ASGI middleware: a path is served as the one without slashes at its end.

    A redirect instead would lead wherever the caller's ``Host`` says, and behind a proxy not where it came from.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            # In place: the route that is found is noted in the same scope, for the metrics.
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)
