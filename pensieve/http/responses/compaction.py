"""Compaction over HTTP: ``/v1/responses/compact``, and ``context_management`` of a response.

A conversation that was compacted begins with a compaction item, which holds the summary. Responses before it stay
as they are and can be continued: the summary is written in a fork.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pensieve.client import Usage
from pensieve.errors import ContextLimitExceeded, FailedPrecondition
from pensieve.http.common.calls import Call, compact_ahead, compact_session, count_ahead
from pensieve.http.common.contents import HashedHistory, Message, MessageHistory
from pensieve.http.common.door import HttpDoor
from pensieve.http.responses.chain import ResponseStarter, find_conversation
from pensieve.http.responses.ids import ResponseId
from pensieve.http.responses.objects import KeptResponse, usage_of
from pensieve.http.responses.requests import CompactedContext, compaction_item

log = logging.getLogger(__name__)


async def compacted(door: HttpDoor, starter: ResponseStarter) -> dict[str, Any]:
    """Return the conversation as a compaction item."""
    ttl_s = door.settings.completion_ttl_s
    look = partial(replace(starter, keeps_settings=True).look_ahead, door.heads, ttl_s)
    info, done, _ = await compact_ahead(starter.caller.client, look, ttl_s, with_new=True)
    context = CompactedContext.from_prompt(info.system_prompt, await _instructions(starter), info.summary)
    name = str(ResponseId(info.id, str(starter.call.id), info.revision))
    return {
        "id": name,
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [compaction_item(name.removeprefix("resp_"), context.content)],
        "usage": usage_of(done.usage or Usage()),
    }


async def _instructions(starter: ResponseStarter) -> str | None:
    """Return the instructions that the context began with. They do not belong to the conversation."""
    head = ResponseId.parse(starter.body.previous_response_id or "")
    if head is None:
        return starter.body.instructions
    kept = KeptResponse.from_turn(await starter.caller.client.session(head.session_id).get_turn(head.turn_id))
    return kept.asked.instructions if kept is not None else None


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
