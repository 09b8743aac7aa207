"""The ASGI application: routes, and errors in one form whatever goes wrong."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pensieve.errors import PensieveError
from pensieve.http import health, models
from pensieve.http.chat import endpoint as chat
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.entrance import Entrance
from pensieve.http.common.failures import HttpFailure, failure_of
from pensieve.http.common.settings import DoorSettings
from pensieve.http.completions import endpoint as completions
from pensieve.http.conversations import endpoint as conversations
from pensieve.http.metrics import HttpMetrics, Measured
from pensieve.http.paths import Unslashed
from pensieve.http.responses import endpoint as responses

log = logging.getLogger(__name__)


def make_app(settings: DoorSettings) -> Starlette:
    """The door to one service."""
    door, metrics = HttpDoor(settings), HttpMetrics()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await door.close()
        door.bodies.close()

    cors = Middleware(
        CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
    )
    app = Starlette(
        routes=[
            Route("/health", health.alive),
            Route("/ready", health.ready),
            *([Route("/metrics", metrics.show)] if settings.shows_metrics else []),
            Route("/v1/models", models.listing),
            Route("/v1/models/{model:path}", models.retrieve),
            Route("/v1/chat/completions", chat.create, methods=["POST"]),
            Route("/v1/completions", completions.create, methods=["POST"]),
            Route("/v1/responses", responses.create, methods=["POST"]),
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
            Middleware(Entrance, door),
        ],
        exception_handlers={
            HttpFailure: _failed,
            PensieveError: _refused,
            HTTPException: _no_route,
            Exception: _bug,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # Also for a path that would be one with a slash: see ``Unslashed``.
    app.state.door = door
    app.state.metrics = metrics
    return app


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpFailure)
    return HttpDoor.of(request).refusal(error, request)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, PensieveError)
    return HttpDoor.of(request).refusal(failure_of(error), request)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: f"no such path: {request.scope['path']}", 405: f"{request.method} is not for this path"}
    failure = HttpFailure(
        error.status_code, message.get(error.status_code, error.detail), code="unknown_route"
    )
    return HttpDoor.of(request).refusal(failure, request)


async def _bug(request: Request, error: Exception) -> Response:
    """A fault of ours: its text may hold what a user said, so it goes to no caller."""
    failure = HttpFailure(500, "the server failed", kind="server_error", code="bug")
    return HttpDoor.of(request).refusal(failure, request)
