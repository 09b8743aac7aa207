"""``GET /v1/models``: the one model that is served."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pensieve.http.common.door import Door


async def listing(request: Request) -> Response:
    """All models."""
    door = Door.of(request)
    async with door.callers.of(request) as caller:
        name = await door.model_of(caller, None)
    return door.answer({"object": "list", "data": [_model(name)]}, request)


async def retrieve(request: Request) -> Response:
    """One model."""
    door = Door.of(request)
    async with door.callers.of(request) as caller:
        name = await door.model_of(caller, request.path_params["model"])
    return door.answer(_model(name), request)


async def health(request: Request) -> Response:
    """Whether this process answers; whether the service does, is told by its own port."""
    return Door.of(request).answer({"status": "ok"}, request)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "pensieve"}
