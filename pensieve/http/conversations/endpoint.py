"""``/v1/conversations``: create, retrieve, update, delete, and their items."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pensieve.client import AsyncSession, Item, Role, SessionInfo
from pensieve.errors import NotFound
from pensieve.http.common.bodies import read_json
from pensieve.http.common.callers import Caller
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.failures import HttpFailure
from pensieve.http.common.requests import request_id_of
from pensieve.http.conversations.requests import ConversationRequest, ItemsRequest, MetadataRequest
from pensieve.http.responses.ids import ResponseId, conversation_id, conversation_session, item_id
from pensieve.http.responses.objects import input_message, listing
from pensieve.http.responses.pages import page


async def create(request: Request) -> Response:
    """A new conversation, with up to 20 items that were said elsewhere."""
    door = HttpDoor.of(request)
    body = await read_json(request, ConversationRequest, door.settings.max_body_bytes)
    body.check()
    made_of = request_id_of(request)
    said = body.messages
    first = next((n for n, one in enumerate(said) if one.role is not Role.SYSTEM), len(said))
    async with door.callers.of(request) as caller:
        session = await caller.client.create_session(
            session_id=f"conv-{made_of.hex}",
            system_prompt="\n\n".join(one.text for one in said[:first]) or None,
            initial_items=[(one.role, one.text) for one in said[first:]],
            labels=body.metadata,
            request_id=str(uuid.uuid5(made_of, "session")),
        )
    assert session.info is not None
    return door.answer(_document(session.info), request)


async def retrieve(request: Request) -> Response:
    """A conversation; its items are a list of their own."""
    door = HttpDoor.of(request)
    async with door.callers.of(request) as caller:
        info = await (await _session(request, caller)).refresh()
    return door.answer(_document(info), request)


async def update(request: Request) -> Response:
    """Replace the metadata."""
    door = HttpDoor.of(request)
    body = await read_json(request, MetadataRequest, door.settings.max_body_bytes)
    body.check()
    async with door.callers.of(request) as caller:
        session = await _session(request, caller)
        info = await session.update(labels=body.metadata or {})
    return door.answer(_document(info), request)


async def delete(request: Request) -> Response:
    """Erase a conversation, responses and all."""
    door = HttpDoor.of(request)
    async with door.callers.of(request) as caller:
        session = await _session(request, caller)
        await session.delete()
    gone = {"id": conversation_id(session.id), "object": "conversation.deleted", "deleted": True}
    return door.answer(gone, request)


async def items(request: Request) -> Response:
    """A page of the items, newest first unless ``order=asc``."""
    door = HttpDoor.of(request)
    async with door.callers.of(request) as caller:
        found = await _items(await _session(request, caller))
    return door.answer(page(found, request), request)


async def item(request: Request) -> Response:
    """One item."""
    door = HttpDoor.of(request)
    async with door.callers.of(request) as caller:
        session = await _session(request, caller)
        found = await _place(request, session, await session.items())
    return door.answer(input_message(session.id, found), request)


async def add(request: Request) -> Response:
    """Items that were said elsewhere, behind the others."""
    door = HttpDoor.of(request)
    body = await read_json(request, ItemsRequest, door.settings.max_body_bytes)
    body.check()
    async with door.callers.of(request) as caller:
        session = await _session(request, caller)
        added = await session.append(
            [(one.role, one.text) for one in body.messages], request_id=str(request_id_of(request))
        )
    return door.answer(listing([input_message(session.id, one) for one in added]), request)


async def remove(request: Request) -> Response:
    """Takes out the newest item; a history that was gone on from keeps its middle. Answers the conversation."""
    door = HttpDoor.of(request)
    async with door.callers.of(request) as caller:
        session = await _session(request, caller)
        assert session.info is not None
        revision = session.info.revision
        items = await session.items()
        found = await _place(request, session, items)
        if found is not items[-1]:
            raise HttpFailure(
                400,
                "only the newest item can be taken out: the others were gone on from",
                param="item_id",
                code="unsupported_operation",
            )
        info = await session.rewind(
            to_item=items[-2].item if len(items) > 1 else 0, expected_revision=revision
        )
    return door.answer(_document(info), request)


async def _place(request: Request, session: AsyncSession, items: list[Item]) -> Item:
    """The item that the request names, by its own id or, an answer, by that of its response's message.

    Raises HttpFailure (404).
    """
    wanted = request.path_params["item"]
    answer = ResponseId.parse(f"resp_{wanted.removeprefix('msg_')}")
    for one in items:
        if item_id(session.id, one.item) == wanted:
            return one
        is_answer = one.role is Role.ASSISTANT and answer is not None and one.request_id == answer.turn_id
        if is_answer and answer is not None and answer.session_id == session.id:
            return one
    raise HttpFailure(404, f"no such item: {wanted}", kind="not_found_error", param="item_id")


async def _session(request: Request, caller: Caller) -> AsyncSession:
    """The session of a conversation. Raises HttpFailure (404)."""
    name = request.path_params["conversation"]
    session_id = conversation_session(name)
    missing = HttpFailure(
        404, f"no such conversation: {name}", kind="not_found_error", param="conversation_id"
    )
    if session_id is None:
        raise missing
    session = caller.client.session(session_id)
    try:
        await session.refresh()
    except NotFound:
        raise missing from None
    return session


async def _items(session: AsyncSession) -> list[dict[str, Any]]:
    return [input_message(session.id, one) for one in await session.items()]


def _document(info: SessionInfo) -> dict[str, Any]:
    created = int(info.create_time.timestamp()) if info.create_time is not None else 0
    return {
        "id": conversation_id(info.id),
        "object": "conversation",
        "created_at": created,
        "metadata": dict(info.labels),
    }
