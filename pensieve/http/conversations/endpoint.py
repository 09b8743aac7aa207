"""``/v1/conversations``: create, retrieve, update, delete, and their items."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pensieve.client import AsyncSession, Role, ServerInfo, SessionInfo
from pensieve.errors import NotFound
from pensieve.http.common.bodies import read_json
from pensieve.http.common.callers import Caller
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.failures import HttpFailure
from pensieve.http.common.requests import request_id_of
from pensieve.http.conversations.requests import ConversationRequest, MetadataRequest
from pensieve.http.responses.ids import conversation_id, conversation_session
from pensieve.http.responses.objects import history_items
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
            initial_items=[one.given for one in said[first:]],
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
        found = await _items(await _session(request, caller), await door.info_of(caller))
    return door.answer(page(found, request), request)


async def item(request: Request) -> Response:
    """One item."""
    door = HttpDoor.of(request)
    wanted = request.path_params["item"]
    async with door.callers.of(request) as caller:
        found = await _items(await _session(request, caller), await door.info_of(caller))
    for one in found:
        if one["id"] == wanted:
            return door.answer(one, request)
    raise HttpFailure(404, f"no such item: {wanted}", kind="not_found_error", param="item_id")


async def fixed(request: Request) -> Response:
    """Refuses what a history cannot honour: it grows by turns, and nothing is taken out of its middle."""
    raise HttpFailure(
        400,
        "items are added by responses with this conversation, or when it is created, and are not removed one by one",
        param="items",
        code="unsupported_operation",
    )


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


async def _items(session: AsyncSession, info: ServerInfo) -> list[dict[str, Any]]:
    """An answer is as many items as a response showed it as."""
    assert session.info is not None
    form = info.speech if session.info.tools else replace(info.speech, calls=None)
    found: list[dict[str, Any]] = []
    for one in await session.items():
        found += history_items(session.id, one, form)
    return found


def _document(info: SessionInfo) -> dict[str, Any]:
    created = int(info.create_time.timestamp()) if info.create_time is not None else 0
    return {
        "id": conversation_id(info.id),
        "object": "conversation",
        "created_at": created,
        "metadata": dict(info.labels),
    }
