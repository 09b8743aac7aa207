"""``GET /v1/models``: the one model that is served."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pensieve.client import ServerInfo
from pensieve.http.common.door import HttpDoor


async def listing(request: Request) -> Response:
    """All models."""
    door = HttpDoor.of(request)
    async with door.callers.of(request) as caller:
        info = await door.info_of(caller, fresh=True)  # this call has no other answer of the service
    return door.answer({"object": "list", "data": [_model(info)]}, request)


async def retrieve(request: Request) -> Response:
    """One model."""
    door = HttpDoor.of(request)
    async with door.callers.of(request) as caller:
        info = await door.info_of(caller, fresh=True)
        await door.model_of(caller, request.path_params["model"])
    return door.answer(_model(info), request)


def _model(info: ServerInfo) -> dict[str, Any]:
    """The last two are not OpenAI's: the longest context and the vocabulary, in tokens."""
    return {
        "id": info.model,
        "object": "model",
        "created": 0,
        "owned_by": "pensieve",
        "max_model_len": info.context_limit,
        "vocab_size": info.vocab_size,
    }
