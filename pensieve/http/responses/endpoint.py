"""``/v1/responses``: create, retrieve, delete, cancel, the items of the input, and compaction.

A conversation that was compacted begins with a compaction item, which holds the summary. Responses before it stay as
they are and can be continued: the summary is written in a fork.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from pensieve.client import AsyncSession, Role, Turn, TurnState, Usage
from pensieve.errors import Aborted, Cancelled, ContextLimitExceeded, FailedPrecondition, NotFound
from pensieve.http.common.answers import EventStream, cancel_on_disconnect
from pensieve.http.common.callers import Caller
from pensieve.http.common.calls import Call, compact_ahead, compact_session, count_ahead, warm_ahead
from pensieve.http.common.contents import HashedHistory, Message, MessageHistory
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.failures import HttpFailure, invalid_field
from pensieve.http.common.heads import note_before_end
from pensieve.http.common.requests import named_form, parse_whole_number
from pensieve.http.responses.chain import (
    ResponseStarter,
    answer_item,
    find_conversation,
    first_history,
    resolve_references,
)
from pensieve.http.responses.ids import ResponseId, conversation_id
from pensieve.http.responses.objects import Events, KeptResponse, Response, input_message, page, usage_of
from pensieve.http.responses.requests import (
    CompactedContext,
    CompactRequest,
    ResponseRequest,
    ValidatedResponse,
    compaction_item,
)
from pensieve.http.tools import tool_use

log = logging.getLogger(__name__)


async def compacted(door: HttpDoor, starter: ResponseStarter) -> dict[str, Any]:
    """Return the conversation as a compaction item."""
    ttl_s = door.settings.completion_ttl_s
    look = partial(replace(starter, keeps_settings=True).look_ahead, door.heads, ttl_s)
    info, done, _ = await compact_ahead(starter.caller.client, look, ttl_s, with_new=True)
    instructions = await _instructions(starter, info.system_prompt)
    context = CompactedContext.from_prompt(info.system_prompt, instructions, info.summary)
    name = str(ResponseId(info.id, str(starter.call.id), info.revision))
    return {
        "id": name,
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [compaction_item(name.removeprefix("resp_"), context.content)],
        "usage": usage_of(done.usage or Usage()),
    }


async def _instructions(starter: ResponseStarter, prompt: str) -> str | None:
    """Return the instructions with which the context's system prompt begins. They do not belong to the conversation."""
    head = ResponseId.parse(starter.body.previous_response_id or "")
    return starter.body.instructions if head is None else await starter.prompt_instructions(head, prompt)


async def compacted_if_long(
    door: HttpDoor, starter: ResponseStarter, threshold: int
) -> tuple[ResponseStarter, str]:
    """Compact the conversation if the response's context would have ``threshold`` tokens or more. Return the starter
    of the response, and the content of the compaction item: "" if no compaction was needed or possible."""
    body = starter.body
    client, ttl_s = starter.caller.client, door.settings.completion_ttl_s
    # Sessions made here are not of the response, and have no claim.
    look = partial(replace(starter, call=Call(uuid.uuid4())).look_ahead, door.heads, ttl_s)
    if await count_ahead(client, look) < threshold:
        return starter, ""
    in_conversation = body.conversation_id is not None
    try:
        if in_conversation:
            new: Sequence[Message] = starter.asked.messages
            session = await find_conversation(client, str(body.conversation_id), "conversation")
            info = (await compact_session(session, str(uuid.uuid5(starter.call.id, "compact")))).session
        else:
            info, _, new = await compact_ahead(client, look, ttl_s, with_new=False)
    except (FailedPrecondition, ContextLimitExceeded) as error:
        log.info("a response begins without compaction: %s", error.reason)
        return starter, ""
    instructions = None if in_conversation else body.instructions
    context = CompactedContext.from_prompt(info.system_prompt, instructions, info.summary, new)
    if in_conversation:
        return starter, context.content
    use = starter.use.with_session_tools(starter.info, bool(info.tools))
    history = MessageHistory(
        info.system_prompt,
        (),
        tuple(new),
        tools=info.tools,
        summary=info.summary,
        subject=info.subject,
        form=use.form,
        drops_oldest=body.drops_oldest,
    )
    transcript = HashedHistory(history, starter.caller.scope)
    return replace(starter, use=use, transcript=transcript), context.content


async def create(request: Request) -> HttpResponse:
    door = HttpDoor.from_request(request)
    asked = await door.bodies.read(request, ResponseRequest, ResponseRequest.validated)
    body = asked.body
    async with AsyncExitStack() as held:
        if body.prewarms:
            starter, kept = await _starter(request, held, asked, Call(uuid.uuid4()))
            return door.answer(await _prewarm(door, starter, kept), request)
        call = await door.bodies.offload(request, Call.from_request, request, body)
        starter, kept = await _starter(request, held, asked, call if body.stored else call.as_unstored())
        threshold = body.compact_threshold(starter.info.context_limit)
        if threshold is not None:
            starter, compaction = await compacted_if_long(door, starter, threshold)
            kept = msgspec.structs.replace(kept, compaction=compaction)
            starter = replace(starter, annotations=kept.annotations)
        begun = await starter.begin(door.heads, door.settings.unstored_ttl_s)
        if threshold is not None and call.is_retryable:
            # An earlier try may have begun the turn, from another summary.
            kept = KeptResponse.from_turn(await begun.session.get_turn(begun.id.turn_id)) or kept
        if not body.stored:
            # A client that resends its history finds its beginning cached.
            held.push_async_callback(begun.session.delete, allow_missing=True, keep_cached=not body.is_branch)
        held.callback(begun.stream.close)
        response = Response(begun.id, kept, begun.form)
        if body.stream:
            chunks = note_before_end(
                Events(response).stream_events(begun.stream),
                begun.stream,
                partial(begun.record, door.heads),
            )
            return EventStream(chunks, held.pop_all(), door.headers(request))
        if body.background:
            # Followed without a client: the SDK begins it again when the engine dies.
            door.follow(begun.id.turn_id, begun.stream.finish(), held.pop_all())
            return door.answer(response.in_progress(), request)
        turn = await cancel_on_disconnect(request, begun.stream.finish())
        begun.record(door.heads, turn)
        # A retry gets what the first try was told.
        return door.answer(Response.from_turn(begun.id, starter.info, turn).finished(turn), request)


async def input_tokens(request: Request) -> HttpResponse:
    """Return the tokens of the context that a response would start from."""
    door = HttpDoor.from_request(request)
    asked = await door.bodies.read(request, ResponseRequest, ResponseRequest.validated)
    async with AsyncExitStack() as held:
        starter, _ = await _starter(request, held, asked, Call(uuid.uuid4()))
        look = partial(starter.look_ahead, door.heads, door.settings.unstored_ttl_s)
        tokens = await count_ahead(starter.caller.client, look)
    return door.answer({"object": "response.input_tokens", "input_tokens": tokens}, request)


async def compact(request: Request) -> HttpResponse:
    """Return a conversation as a compaction item, which stands for it in the input of later responses."""
    door = HttpDoor.from_request(request)
    asked = await door.bodies.read(request, CompactRequest, CompactRequest.validated)
    async with AsyncExitStack() as held:
        starter, _ = await _starter(request, held, asked, Call(uuid.uuid4()), answered=True)
        return door.answer(await compacted(door, starter), request)


async def _prewarm(door: HttpDoor, starter: ResponseStarter, kept: KeptResponse) -> dict[str, Any]:
    """Have the response's context computed, and return a response without output, which is not stored."""
    ttl_s = door.settings.completion_ttl_s
    look = partial(starter.look_ahead, door.heads, ttl_s)
    session = await warm_ahead(starter.caller.client, look, ttl_s)
    tokens = (await session.count_tokens()).context_tokens
    shown = msgspec.structs.replace(kept, asked=msgspec.structs.replace(kept.asked, store=False))
    return Response(ResponseId(session.id, str(starter.call.id), 0), shown).prewarmed(tokens)


async def _starter(
    request: Request, held: AsyncExitStack, asked: ValidatedResponse, call: Call, *, answered: bool = False
) -> tuple[ResponseStarter, KeptResponse]:
    """Return the response that is asked for. ``answered``: see ``first_history``. Raises HttpFailure for another
    model, or a missing item."""
    door, body = HttpDoor.from_request(request), asked.body
    caller = await held.enter_async_context(door.callers.for_request(request))
    model = await door.require_model(caller, body.model)
    info = await door.server_info(caller)
    asked = await resolve_references(asked, caller, info)
    tools, has_form = body.tools or (), body.form is not None
    use = await door.bodies.offload(request, tool_use, info, tools, body.tool_choice, has_form=has_form)
    held.enter_context(named_form(body.form))
    kept = KeptResponse(int(time.time()), model, body)
    annotations = await door.bodies.offload(request, lambda: kept.annotations)
    transcript = await door.bodies.offload(request, first_history, asked, use, caller.scope, answered)
    return ResponseStarter(caller, asked, call, annotations, use, info, transcript), kept


async def retrieve(request: Request) -> HttpResponse:
    """Return a response as it stands, or resume its stream."""
    door = HttpDoor.from_request(request)
    async with AsyncExitStack() as held:
        caller = await held.enter_async_context(door.callers.for_request(request))
        found, session, turn = await _find(request, caller, lost=True)
        if request.query_params.get("stream") != "true":
            return door.answer(await _later(door, caller, found, turn), request)
        if not found.background:
            raise invalid_field("stream", "only the streams of responses with background=true are resumed")
        given = request.query_params.get("starting_after")
        after = -1 if given is None else parse_whole_number(given)
        if after is None:
            raise invalid_field("starting_after", "must be the number of an event")
        stream = session.attach(found.turn_id, max_chunk_tokens=1)
        held.callback(stream.close)
        await stream.accepted()
        response = Response.from_turn(found, await door.server_info(caller), turn)
        events = Events(response, after).stream_events(stream)
        return EventStream(events, held.pop_all(), door.headers(request))


async def cancel(request: Request) -> HttpResponse:
    door = HttpDoor.from_request(request)
    async with door.callers.for_request(request) as caller:
        found, session, turn = await _find(request, caller)
        if turn.state is TurnState.RUNNING:
            turn = await session.cancel(found.turn_id, keep="partial")
        return door.answer(await _later(door, caller, found, turn), request)


async def delete(request: Request) -> HttpResponse:
    door = HttpDoor.from_request(request)
    async with door.callers.for_request(request) as caller:
        found, session, turn = await _find(request, caller)
        if turn.state is TurnState.RUNNING:
            await session.cancel(found.turn_id, keep="nothing")
            await _erase_empty(session)
        elif turn.items:
            await _erase(session, turn)
    return door.answer({"id": str(found), "object": "response", "deleted": True}, request)


async def input_items(request: Request) -> HttpResponse:
    door = HttpDoor.from_request(request)
    async with door.callers.for_request(request) as caller:
        found, _, turn = await _find(request, caller)
    items = [input_message(found.session_id, item) for item in turn.input]
    return door.answer(page(items, request), request)


async def _find(
    request: Request, caller: Caller, *, lost: bool = False
) -> tuple[ResponseId, AsyncSession, Turn]:
    """Return the turn that an id names. Raises HttpFailure (404). ``lost``: report a background response that
    was lost with its server as failed."""
    text = request.path_params["response"]
    found = ResponseId.parse(text)
    if found is None:
        raise _missing(text)
    session = caller.client.session(found.session_id)
    try:
        turn = await session.get_turn(found.turn_id)
        erased = turn.discard_reason == Cancelled.default_reason
        if erased or (turn.output is not None and await answer_item(session, turn) is None):
            raise _missing(text)
    except NotFound as error:
        if not (lost and found.background and error.reason == "TURN_NOT_FOUND"):
            raise _missing(text) from None
        turn = _lost(session, found)
    return found, session, turn


def _lost(session: AsyncSession, found: ResponseId) -> Turn:
    return Turn(
        session=session.name,
        request_id=found.turn_id,
        state=TurnState.DISCARDED,
        text="",
        finish_reason=None,
        usage=Usage(),
        revision=0,
        base_revision=found.revision - 1,
        seed=0,
        stop_sequence="",
        input=(),
        output=None,
        discard_reason="TURN_NOT_FOUND",
    )


async def _erase_empty(session: AsyncSession) -> None:
    """Delete a session made for a response that was erased before it had any items."""
    with contextlib.suppress(NotFound, Aborted):  # Aborted: another request uses it
        revision = (await session.refresh()).revision
        if conversation_id(session.id) or any(one.role is not Role.SYSTEM for one in await session.items()):
            return
        await session.delete(expected_revision=revision, allow_missing=True)


async def _erase(session: AsyncSession, turn: Turn) -> None:
    revision = (await session.refresh()).revision
    items = await session.items()
    if items[-1].request_id != turn.request_id:
        raise HttpFailure(
            409,
            "later responses build on this one: delete those first",
            code="has_successors",
        )
    before = [one for one in items if one.request_id != turn.request_id]
    # An empty conversation stays; any other session was made for its responses.
    if conversation_id(session.id) or any(one.role is not Role.SYSTEM for one in before):
        to_item = before[-1].item if before else 0
        await session.rewind(to_item=to_item, erase=True, expected_revision=revision)
    else:
        await session.delete(expected_revision=revision, allow_missing=True)


async def _later(door: HttpDoor, caller: Caller, found: ResponseId, turn: Turn) -> dict[str, Any]:
    response = Response.from_turn(found, await door.server_info(caller), turn)
    runs = turn.state is TurnState.RUNNING or (
        # Its engine died, and the turn is about to be begun again.
        turn.discard_reason == "ENGINE_FAILED" and door.follows(turn.request_id)
    )
    return response.in_progress() if runs else response.finished(turn)


def _missing(text: str) -> HttpFailure:
    return HttpFailure(404, f"no such response: {text}", param="response_id")
