"""``/v1/conversations``: create, retrieve, update, delete, and their items."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pensieve.client import AsyncSession, Item, Role, ServerInfo, SessionInfo
from pensieve.errors import NotFound
from pensieve.http.common.callers import Caller
from pensieve.http.common.calls import Call, CallPlan, new_session_id
from pensieve.http.common.contents import Message
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.failures import HttpFailure, invalid_field
from pensieve.http.responses.chain import find_conversation
from pensieve.http.responses.ids import ResponseId, conversation_id
from pensieve.http.responses.objects import KeptResponse, history_items, list_page, page
from pensieve.http.responses.requests import InputItem, check_metadata, messages_of
from pensieve.speech import SpeechForm, read

MAX_ITEMS: Final = 20


class ConversationRequest(msgspec.Struct):
    items: list[InputItem] | None = None
    metadata: dict[str, str] | None = None
    subject: str | None = None

    def validated(self) -> tuple[ConversationRequest, list[Message], dict[str, str] | None]:
        """Return itself, messages and metadata. Raises HttpFailure."""
        check_metadata(self.metadata or {})
        if len(self.items or ()) > MAX_ITEMS:
            raise invalid_field("items", f"at most {MAX_ITEMS}")
        return self, messages_of(self.items or [], "items"), self.metadata


class ItemsRequest(msgspec.Struct):
    items: list[InputItem]

    def validated(self) -> tuple[ItemsRequest, list[Message]]:
        if not 0 < len(self.items) <= MAX_ITEMS:
            raise invalid_field("items", f"must be 1 to {MAX_ITEMS}")
        messages = messages_of(self.items, "items")
        if any(one.is_summary for one in messages):
            raise invalid_field("items", "a compaction item begins a conversation: create one with it")
        return self, messages


class MetadataRequest(msgspec.Struct):
    metadata: dict[str, str] | None = None

    def validated(self) -> dict[str, str]:
        check_metadata(self.metadata or {})
        return self.metadata or {}


@dataclass(frozen=True, slots=True)
class _ShownItem:
    """An item of the history and the output items it is shown as: an answer may be several."""

    item: Item
    documents: list[dict[str, Any]]


async def create(request: Request) -> Response:
    door = HttpDoor.from_request(request)
    body, messages, labels = await door.bodies.read(
        request, ConversationRequest, ConversationRequest.validated
    )
    call = Call.from_request(request, body)
    first = next((n for n, one in enumerate(messages) if one.role is not Role.SYSTEM), len(messages))
    async with door.callers.for_request(request) as caller:
        plan = await call.claim_plan(caller.client, CallPlan(new_session_id("conv-")))
        async with call.undo_on_refusal(caller.client, plan):
            session = await caller.client.create_session(
                session_id=plan.own,
                system_prompt="\n\n".join(one.text for one in messages[:first] if not one.is_summary) or None,
                summary=next((one.text for one in messages[:first] if one.is_summary), None),
                initial_items=[one.sdk_input for one in messages[first:]],
                labels=labels,
                subject=body.subject,
                request_id=str(uuid.uuid5(call.id, "session")),
            )
    assert session.info is not None
    return door.answer(_document(session.info), request)


async def retrieve(request: Request) -> Response:
    async with _conversation(request) as (door, _, session):
        info = await session.refresh()
    return door.answer(_document(info), request)


async def update(request: Request) -> Response:
    door = HttpDoor.from_request(request)
    labels = await door.bodies.read(request, MetadataRequest, MetadataRequest.validated)
    async with _conversation(request) as (_, _, session):
        info = await session.update(labels=labels)
    return door.answer(_document(info), request)


async def delete(request: Request) -> Response:
    async with _conversation(request) as (door, _, session):
        await session.delete()
    gone = {"id": conversation_id(session.id), "object": "conversation.deleted", "deleted": True}
    return door.answer(gone, request)


async def items(request: Request) -> Response:
    """Return a page of the items, newest first unless ``order=asc``."""
    async with _conversation(request) as (door, caller, session):
        shown = await _shown_items(session, await session.items(), await door.server_info(caller))
    return door.answer(page(_documents(shown), request), request)


async def item(request: Request) -> Response:
    async with _conversation(request) as (door, caller, session):
        shown = await _shown_items(session, await session.items(), await door.server_info(caller))
        found, index = _find_item(request, session, shown)
    return door.answer(found.documents[index], request)


async def add(request: Request) -> Response:
    door = HttpDoor.from_request(request)
    body, messages = await door.bodies.read(request, ItemsRequest, ItemsRequest.validated)
    call = Call.from_request(request, body)
    async with _conversation(request) as (_, caller, session):
        plan = await call.claim_plan(caller.client, CallPlan(session=session.id))
        async with call.undo_on_refusal(caller.client, plan):
            added = await session.append([one.sdk_input for one in messages], request_id=str(call.id))
        shown = await _shown_items(session, added, await door.server_info(caller))
    return door.answer(list_page(_documents(shown)), request)


async def remove(request: Request) -> Response:
    """Erase the newest item and return the conversation. Earlier items cannot be removed."""
    async with _conversation(request) as (door, caller, session):
        assert session.info is not None
        revision = session.info.revision
        shown = await _shown_items(session, await session.items(), await door.server_info(caller))
        found, index = _find_item(request, session, shown)
        if found is not shown[-1]:
            raise _not_removable(
                "only the newest item can be removed: the conversation continues from the others"
            )
        if index:
            first = found.documents[0]["id"]
            raise _not_removable(
                f"the item is a part of an answer, which is removed as a whole, by its first item: {first}"
            )
        to_item = shown[-2].item.item if len(shown) > 1 else 0
        info = await session.rewind(to_item=to_item, erase=True, expected_revision=revision)
    return door.answer(_document(info), request)


def _find_item(request: Request, session: AsyncSession, shown: list[_ShownItem]) -> tuple[_ShownItem, int]:
    """Return the item that the request names, and the index in its output items. A part of an answer is named
    by its own id or by its id in the response's output. Raises HttpFailure (404)."""
    wanted = request.path_params["item"]
    suffix, _, number = wanted.partition("_")[2].partition("-")
    answer = ResponseId.parse(f"resp_{suffix}")
    if answer is not None and answer.session_id == session.id and (not number or number.isdecimal()):
        index = int(number or 0)
        for one in shown:
            is_answer = one.item.role is Role.ASSISTANT and one.item.request_id == answer.turn_id
            if is_answer and index < len(one.documents):
                return one, index
    for one in shown:
        for index, document in enumerate(one.documents):
            if document["id"] == wanted:
                return one, index
    raise HttpFailure(404, f"no such item: {wanted}", param="item_id")


@asynccontextmanager
async def _conversation(request: Request) -> AsyncIterator[tuple[HttpDoor, Caller, AsyncSession]]:
    """Yield the door, the caller and the session that the path names. Raises HttpFailure (404)."""
    door = HttpDoor.from_request(request)
    async with door.callers.for_request(request) as caller:
        name = request.path_params["conversation"]
        yield door, caller, await find_conversation(caller.client, name, "conversation_id")


async def _shown_items(session: AsyncSession, items: Iterable[Item], info: ServerInfo) -> list[_ShownItem]:
    """Return items as their responses showed them: an answer has calls only where its response offered tools."""
    assert session.info is not None
    words = replace(info.speech, calls=None)
    found = []
    for one in items:
        form = words
        if info.speech.calls and one.role is Role.ASSISTANT and read(one.text, info.speech).calls:
            form = await _form(session, one, info)
        found.append(_ShownItem(one, history_items(session.id, one, form)))
    for number, shown in enumerate(found):
        _name_calls(shown, itertools.takewhile(_is_result, found[number + 1 :]))
    return found


def _is_result(one: _ShownItem) -> bool:
    return one.item.role is Role.TOOL


def _name_calls(answer: _ShownItem, results: Iterable[_ShownItem]) -> None:
    """Give the calls of an answer the ids of the results that follow it, if none of them is known. The history
    does not keep the ids of added calls. The results belong to them by their order, as the model reads them."""
    calls = [one for one in answer.documents if one["type"] == "function_call"]
    named = [one.item.call_id for one in results] if calls else []
    if len(named) == len(calls) and not set(named) & {one["call_id"] for one in calls}:
        for call, name in zip(calls, named, strict=True):
            call["call_id"] = name


async def _form(session: AsyncSession, answer: Item, info: ServerInfo) -> SpeechForm:
    kept = None
    if answer.request_id:
        with contextlib.suppress(NotFound):  # the item was added without a turn
            kept = KeptResponse.from_turn(await session.get_turn(answer.request_id))
    if kept is None:
        return info.speech
    assert session.info is not None
    offered = bool(kept.asked.tools or session.info.tools) and kept.asked.tool_choice != "none"
    return info.speech if offered else replace(info.speech, calls=None)


def _documents(shown: Iterable[_ShownItem]) -> list[dict[str, Any]]:
    return [document for one in shown for document in one.documents]


def _not_removable(problem: str) -> HttpFailure:
    return HttpFailure(400, problem, param="item_id", code="unsupported_operation")


def _document(info: SessionInfo) -> dict[str, Any]:
    created = int(info.create_time.timestamp()) if info.create_time is not None else 0
    return {
        "id": conversation_id(info.id),
        "object": "conversation",
        "created_at": created,
        "metadata": dict(info.labels),
    }
