"""``POST /v1/chat/completions``."""

from __future__ import annotations

import contextlib
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import Response

from pensieve.client import AsyncSession, AsyncTurnStream, Turn, TurnOptions
from pensieve.errors import AlreadyExists, DataLoss, NotFound, PensieveError
from pensieve.http.chat.completions import ChatCompletion
from pensieve.http.chat.requests import ChatRequest
from pensieve.http.common.callers import Caller
from pensieve.http.common.calls import Call, CallPlan, is_refusal
from pensieve.http.common.contents import NamedTalk, Talk
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.heads import begin, noting
from pensieve.http.common.imports import added, adding, answered, chunks_of, parted, roles_of
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
        if body.session:
            # What it holds is not what was resent: nobody is led there by it.
            session, stream = await _named(caller, body.session, talk, call, options)
        else:
            named = await door.bodies.aside(request, NamedTalk, talk, caller.scope)
            session, stream = await begin(caller, door.heads, named, call, options, door.settings.chat_ttl_s)
        held.callback(stream.close)
        completion = ChatCompletion.of(stream, model, session.id, use.form)

        def note(turn: Turn) -> None:
            if named is not None:
                door.heads.ended(named, session.id, turn)

        if not body.stream:
            turn = await while_there(request, stream.finish())
            note(turn)
            return door.answer(completion.whole(turn), request)
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        said = completion.chunks(stream, include_usage=include_usage, scored=bool(body.logprobs))
        chunks = noting(said, stream, note)
        return EventStream(chunks, held.pop_all(), door.headers(request))


async def _named(
    caller: Caller, name: str, talk: Talk, call: Call, options: TurnOptions
) -> tuple[AsyncSession, AsyncTurnStream]:
    """A turn of the session that the client names; what is resent of its history is not read."""
    options["request_id"] = str(call.id)
    (early, last), client = parted(talk.new), caller.client
    session = client.session(name)
    await call.settled(client, CallPlan(session=name))
    try:
        async with call.leaving_nothing(client, CallPlan(session=name)), adding(session, early, call, last):
            return session, await answered(session, last, options)
    except (NotFound, DataLoss) as error:
        is_lost = error.reason == "HISTORY_REGRESSED" and error.metadata.get("current_revision") == "0"
        if error.reason != NotFound.default_reason and not is_lost:
            raise
    first, *rest = chunks_of(talk.history) or [()]
    try:
        session = await client.create_session(
            session_id=name,
            system_prompt=talk.system or None,
            tools=talk.tools or None,
            initial_items=[one.given for one in first],
            followed_by=roles_of((*talk.history, *talk.new)[len(first) :]),
        )
    except AlreadyExists:  # Another call has made it in this moment: it is one that was there.
        async with call.leaving_nothing(client, CallPlan(session=name)), adding(session, early, call, last):
            return session, await answered(session, last, options)
    async with call.leaving_nothing(client, CallPlan(session=name)):
        try:
            await added(session, talk.history[len(first) :], call, "history", follow=talk.new)
            await added(session, early, call, follow=last)
            return session, await answered(session, last, options)
        except PensieveError as error:
            if not call.may_be_repeated or is_refusal(error):
                # Under a name that others know, what one of them has added since is not this call's to take back.
                with contextlib.suppress(PensieveError):
                    made = 1 + len(rest) + len(chunks_of(early))
                    await session.delete(expected_revision=made, allow_missing=True)
            raise
