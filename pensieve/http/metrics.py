"""Counts and times of HTTP calls, for Prometheus at ``/metrics``: by route and status, never by caller.

And the trace that a call belongs to: the calls of the service that it leads to belong to the same.
"""

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

from pensieve.logs import bind
from pensieve.tracing import found_in, incoming, trace_id

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
    """ASGI middleware: notes a call's trace, and counts the call when it ends."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = found_in(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        )
        incoming.set(header)  # of this call alone: it is handled in a task of its own
        bind(trace_id=trace_id(header))
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
