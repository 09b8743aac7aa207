"""Counts and times of HTTP calls, for Prometheus at ``/metrics``: by route and status, never by caller."""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Seconds."""


class HttpMetrics:
    """The registry and what is in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector("pensieve_http", registry=self.registry)
        self.calls = Counter(
            "pensieve_http_calls", "HTTP calls that have ended.", ("route", "status"), registry=self.registry
        )
        self.open = Gauge("pensieve_http_open_calls", "HTTP calls under way.", registry=self.registry)
        self.first_byte = Histogram(
            "pensieve_http_first_byte_seconds",
            "Time from a call's header to the first byte of its answer's body.",
            ("route",),
            buckets=_BUCKETS,
            registry=self.registry,
        )

    async def show(self, request: Request) -> Response:
        """The page."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class Measured:
    """ASGI middleware: counts each call when it ends."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, first = time.monotonic(), "none", True

        async def noted(message: Message) -> None:
            nonlocal status, first
            if message["type"] == "http.response.start":
                status = str(message["status"])
            elif first:
                first = False
                self._metrics.first_byte.labels(_route(scope)).observe(time.monotonic() - began)
            await send(message)

        with self._metrics.open.track_inprogress():
            try:
                await self._app(scope, receive, noted)
            finally:
                self._metrics.calls.labels(_route(scope), status).inc()


def _route(scope: Scope) -> str:
    """The route as it is written, so that ids do not become labels."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "unknown"
