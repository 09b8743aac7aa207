"""``POST /v1/chat/completions``."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext

from starlette.requests import Request
from starlette.responses import Response

from pensieve.client import Turn
from pensieve.http.chat.completions import ChatCompletion
from pensieve.http.chat.named import begin as begin_named
from pensieve.http.chat.requests import ChatRequest
from pensieve.http.common.calls import Call
from pensieve.http.common.contents import NamedTalk
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.heads import begin, noting
from pensieve.http.common.presence import while_there
from pensieve.http.common.streams import EventStream
from pensieve.http.tools.definitions import tool_use


async def create(request: Request) -> Response:
    """Answer the last messages; the history before them is found, not computed."""
    door = HttpDoor.of(request)
    body, talk, options = await door.bodies.read(request, ChatRequest, ChatRequest.asked)
    call = await door.bodies.aside(request, Call.of, request, body)
    async with AsyncExitStack() as held:
        caller = await held.enter_async_context(door.callers.of(request))
        model = await door.model_of(caller, body.model)
        info = await door.info_of(caller)
        use = await door.bodies.aside(request, tool_use, info, body.tools or (), body.tool_choice)
        talk = talk.read_as(use.form, use.text)
        named: NamedTalk | None = None
        around: AbstractAsyncContextManager[None] = nullcontext()
        if body.session:
            # What it holds is not what was resent: nobody is led there by it.
            begun = await begin_named(caller.client, body.session, talk, call, options)
            session, stream, around = begun.session, begun.stream, begun.to_its_end()
        else:
            named = await door.bodies.aside(request, NamedTalk, talk, caller.scope)
            session, stream = await begin(caller, door.heads, named, call, options, door.settings.chat_ttl_s)
        held.callback(stream.close)
        completion = ChatCompletion.of(stream, model, session.id, use.form)

        def note(turn: Turn) -> None:
            if named is not None:
                door.heads.ended(named, session.id, turn)

        if not body.stream:
            async with around:
                turn = await while_there(request, stream.finish())
            note(turn)
            return door.answer(completion.whole(turn), request)
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        said = completion.chunks(
            stream, include_usage=include_usage, scored=bool(body.logprobs), around=around
        )
        chunks = noting(said, stream, note)
        return EventStream(chunks, held.pop_all(), door.headers(request))
