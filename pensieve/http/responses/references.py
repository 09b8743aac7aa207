"""Items of a request that only name items which the service keeps: they are read from their sessions."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pensieve.client import ServerInfo, Turn
from pensieve.errors import NotFound
from pensieve.http.common.callers import Caller
from pensieve.http.common.failures import HttpFailure, bad
from pensieve.http.responses.chain import answer_item
from pensieve.http.responses.ids import ResponseId, item_place
from pensieve.http.responses.objects import Response, input_message
from pensieve.http.responses.requests import REFERENCE, AskedResponse, InputItem

_MOST: Final = 1024
"""References in one request. Each may cost a read of a session."""


async def resolved(asked: AskedResponse, caller: Caller, info: ServerInfo) -> AskedResponse:
    """The request with the items that it names in place of their names.

    Raises HttpFailure: 404 for an item that is not there for this caller.
    """
    items = asked.body.input
    if not asked.refers or not isinstance(items, list):
        return asked
    if sum(one.type == REFERENCE for one in items) > _MOST:
        raise bad("input", f"has more than {_MOST} items of the type {REFERENCE}")
    reader = _References(caller, info)
    found = [
        await reader.read(one.id or "", f"input[{number}]") if one.type == REFERENCE else one
        for number, one in enumerate(items)
    ]
    return msgspec.structs.replace(asked.body, input=found).asked()


class _References:
    """Reads named items; each turn once."""

    def __init__(self, caller: Caller, info: ServerInfo) -> None:
        self._caller = caller
        self._info = info
        self._outputs: dict[tuple[str, str], list[dict[str, Any]]] = {}

    async def read(self, name: str, param: str) -> InputItem:
        try:
            document = await self._document(name)
        except NotFound:
            document = None
        if document is None:
            raise HttpFailure(
                404,
                f"{param}: no such item: {name[:200]}",
                kind="not_found_error",
                param=param,
                code="item_not_found",
            )
        return msgspec.convert(document, InputItem)

    async def _document(self, name: str) -> dict[str, Any] | None:
        place = item_place(name)
        if place is not None:
            session_id, number = place
            items = await self._caller.client.session(session_id).items(after_item=number - 1)
            here = items and items[0].item == number
            return input_message(session_id, items[0]) if here else None
        suffix = name.partition("_")[2].partition("-")[0]
        answer = ResponseId.parse(f"resp_{suffix}")
        if answer is None:
            return None
        key = answer.session_id, answer.turn_id
        if key not in self._outputs:
            session = self._caller.client.session(answer.session_id)
            turn: Turn = await session.get_turn(answer.turn_id)
            gone = turn.output is None or await answer_item(session, turn) is None
            told = Response.read(answer, self._info, turn).ended(turn)["output"]
            self._outputs[key] = [] if gone else told
        return next((one for one in self._outputs[key] if one["id"] == name), None)
