"""The ASGI application: routes, small endpoints, middleware, and one form for all errors."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pensieve.client import ServerInfo
from pensieve.config import DoorSettings
from pensieve.errors import PensieveError
from pensieve.http import chat, completions, conversations, messages
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.entrance import AdmissionMiddleware
from pensieve.http.common.failures import HttpFailure, failure_from_error
from pensieve.http.responses import endpoint as responses
from pensieve.logs import bind
from pensieve.tracing import incoming_traceparent, trace_id, traceparent_in

_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Seconds."""


class HttpMetrics:
    """Counts and times of calls for Prometheus: by route and status, never by caller."""

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
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class Measured:
    """ASGI middleware: binds a call's trace id, and counts the call when it ends."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = traceparent_in(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        )
        incoming_traceparent.set(header)  # of this call only: each call runs in its own task
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
    """Return the route's pattern, so that ids do not become labels."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "unknown"


class Unslashed:
    """ASGI middleware: strips trailing slashes from the path. A redirect would instead go to the caller's
    ``Host``, which behind a proxy is not the address it called."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            # In place: the router writes the route into the same scope, for the metrics.
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


async def alive(request: Request) -> Response:
    return HttpDoor.from_request(request).answer({"status": "ok"}, request)


async def ready(request: Request) -> Response:
    door = HttpDoor.from_request(request)
    problem = await door.readiness.problem()
    if problem:
        raise HttpFailure(503, problem, code="not_ready", retry_after_s=1.0)
    return door.answer({"status": "ok"}, request)


async def list_models(request: Request) -> Response:
    door = HttpDoor.from_request(request)
    async with door.callers.for_request(request) as caller:
        info = await door.server_info(
            caller, fresh=True
        )  # this call checks the credential with no other call
    ends = {"has_more": False, "first_id": info.model, "last_id": info.model}
    return door.answer({"object": "list", "data": [_model(info)], **ends}, request)


async def retrieve_model(request: Request) -> Response:
    door = HttpDoor.from_request(request)
    async with door.callers.for_request(request) as caller:
        info = await door.server_info(caller, fresh=True)
        await door.require_model(caller, request.path_params["model"])
    return door.answer(_model(info), request)


def _model(info: ServerInfo) -> dict[str, Any]:
    """A model object of OpenAI's protocol and of Anthropic's. ``max_model_len`` and ``vocab_size``, in tokens,
    are in neither."""
    return {
        "id": info.model,
        "object": "model",
        "created": 0,
        "owned_by": "pensieve",
        "type": "model",
        "display_name": info.model,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": info.context_limit,
        "max_tokens": info.context_limit,
        "max_model_len": info.context_limit,
        "vocab_size": info.vocab_size,
    }


def make_app(settings: DoorSettings) -> Starlette:
    door, metrics = HttpDoor(settings), HttpMetrics()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await door.close()
        door.bodies.close()

    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(settings.cors_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "retry-after"],  # the SDKs read them
    )
    app = Starlette(
        routes=[
            Route("/health", alive),
            Route("/ready", ready),
            *([Route("/metrics", metrics.show)] if settings.shows_metrics else []),
            Route("/v1/models", list_models),
            Route("/v1/models/{model:path}", retrieve_model),
            Route("/v1/chat/completions", chat.create, methods=["POST"]),
            Route("/v1/completions", completions.create, methods=["POST"]),
            Route("/v1/messages", messages.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
            Route("/v1/responses", responses.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", responses.input_tokens, methods=["POST"]),
            Route("/v1/responses/compact", responses.compact, methods=["POST"]),
            Route("/v1/responses/{response}", responses.retrieve, methods=["GET"]),
            Route("/v1/responses/{response}", responses.delete, methods=["DELETE"]),
            Route("/v1/responses/{response}/cancel", responses.cancel, methods=["POST"]),
            Route("/v1/responses/{response}/input_items", responses.input_items),
            Route("/v1/conversations", conversations.create, methods=["POST"]),
            Route("/v1/conversations/{conversation}", conversations.retrieve, methods=["GET"]),
            Route("/v1/conversations/{conversation}", conversations.update, methods=["POST"]),
            Route("/v1/conversations/{conversation}", conversations.delete, methods=["DELETE"]),
            Route("/v1/conversations/{conversation}/items", conversations.items, methods=["GET"]),
            Route("/v1/conversations/{conversation}/items", conversations.add, methods=["POST"]),
            Route("/v1/conversations/{conversation}/items/{item}", conversations.item, methods=["GET"]),
            Route("/v1/conversations/{conversation}/items/{item}", conversations.remove, methods=["DELETE"]),
        ],
        middleware=[
            Middleware(Measured, metrics),
            *([cors] if settings.cors_origins else []),
            Middleware(Unslashed),
            Middleware(AdmissionMiddleware, door),
        ],
        exception_handlers={
            HttpFailure: _refused,
            PensieveError: _refused,
            HTTPException: _no_route,
            Exception: _bug,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # See ``Unslashed``.
    app.state.door = door
    app.state.metrics = metrics
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpFailure | PensieveError)
    return HttpDoor.from_request(request).refusal(failure_from_error(error, request.url.path), request)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"no such path: {request.scope['path']}",
        405: f"this path does not take {request.method}",
    }
    failure = HttpFailure(
        error.status_code,
        message.get(error.status_code, error.detail),
        kind="invalid_request_error",
        code="unknown_route",
    )
    answer = HttpDoor.from_request(request).refusal(failure, request)
    if error.status_code == 405:
        answer.headers["allow"] = ", ".join(sorted(_methods_of(request)))
    return answer


def _methods_of(request: Request) -> set[str]:
    """Return the methods that the request's path takes."""
    return {
        method
        for route in request.app.routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods
    }


async def _bug(request: Request, error: Exception) -> Response:
    """An internal error. Its text may quote a user, so the caller does not get it."""
    failure = HttpFailure(500, "the server failed", code="bug")
    return HttpDoor.from_request(request).refusal(failure, request)
