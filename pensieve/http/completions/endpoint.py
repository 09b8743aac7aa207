"""``POST /v1/completions``."""

from __future__ import annotations

from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import Response

from pensieve.http.common.calls import Call
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.presence import while_there
from pensieve.http.common.streams import EventStream
from pensieve.http.completions.answers import TextCompletion
from pensieve.http.completions.begin import begin_all
from pensieve.http.completions.requests import CompletionRequest


async def create(request: Request) -> Response:
    """Go on with the prompts."""
    door = HttpDoor.of(request)
    asked = await door.bodies.read(request, CompletionRequest, CompletionRequest.asked)
    body = asked.body
    call = await door.bodies.aside(request, Call.of, request, body)
    async with AsyncExitStack() as held:
        caller = await held.enter_async_context(door.callers.of(request))
        model = await door.model_of(caller, body.model)
        begun = await begin_all(caller, asked, call, door.settings.completion_ttl_s, held)
        completion = TextCompletion(f"cmpl-{call.id.hex}", model, body, begun)
        if body.stream:
            return EventStream(completion.chunks(), held.pop_all(), door.headers(request))
        return door.answer(await while_there(request, completion.whole()), request)
