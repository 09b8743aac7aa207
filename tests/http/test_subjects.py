"""``subject`` in the bodies of HTTP calls: the person whom the sessions are about."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from openai import BadRequestError

from pensieve import AsyncClient
from support.http.http_rig import HttpRig, door
from support.lazily import lazily
from support.service.service_rig import ANSWER

ADA: Any = {"subject": "ada"}
BOB: Any = {"subject": "bob"}
anthropic = lazily("anthropic")


async def test_sessions_are_about_the_subject_of_their_first_call() -> None:
    async with door() as rig, AsyncClient(rig.service.target, api_key="acme") as client:
        await _talk(rig, ADA)
        await _talk(rig, BOB)
        await _talk(rig, {})
        found = Counter(info.subject for info in await client.sessions())
        assert found == {"": 6, "ada": 6, "bob": 6}, "the same words, but sessions of their own"
        done = await client.erase_subject("ada")
        assert len(done.sessions) == 6
        assert all(info.subject != "ada" for info in await client.sessions())


async def _talk(rig: HttpRig, body: Any) -> None:
    """Two turns each: a resent chat, resent messages, a named session, a chain and a conversation."""
    chat, responses = rig.client.chat.completions.create, rig.client.responses.create
    talk: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "again"},
    ]
    first = await responses(model="tiny", input="hi", extra_body=body)
    named = {**body, "session": f"named-{body.get('subject', 'none')}"}
    conversation = await rig.client.conversations.create(extra_body=body)
    async with anthropic.AsyncAnthropic(base_url=rig.url, api_key="acme") as claude:
        for said in (talk[:1], talk):
            await chat(model="tiny", messages=said, extra_body=body)
            await chat(model="tiny", messages=said, extra_body=named)
            await claude.messages.create(
                model="tiny", max_tokens=50, system="Be brief.", messages=said, extra_body=body
            )
    await responses(model="tiny", input="again", previous_response_id=first.id, extra_body=body)
    await responses(model="tiny", input="again", previous_response_id=first.id)
    await responses(model="tiny", input="hi", conversation=conversation.id, extra_body=body)


async def test_a_conversation_keeps_its_subject() -> None:
    async with door() as rig:
        responses, chat = rig.client.responses, rig.client.chat.completions
        first = await responses.create(model="tiny", input="hi", extra_body=ADA)
        conversation = await rig.client.conversations.create()
        said: Any = [{"role": "user", "content": "hi"}]
        await chat.create(model="tiny", messages=said, extra_body={"session": "named"})
        for call in (
            responses.create(model="tiny", input="so", previous_response_id=first.id, extra_body=BOB),
            responses.create(model="tiny", input="so", conversation=conversation.id, extra_body=BOB),
            responses.compact(model="tiny", previous_response_id=first.id, extra_body=BOB),
            chat.create(model="tiny", messages=said, extra_body={"session": "named", **BOB}),
            responses.create(model="tiny", input="hi", extra_body={"subject": "x" * 257}),
        ):
            with pytest.raises(BadRequestError) as refused:
                await call
            assert refused.value.param == "subject"


async def test_a_resent_history_is_found_for_its_subject_only() -> None:
    async with door() as rig, AsyncClient(rig.service.target, api_key="acme") as client:
        said: Any = [{"role": "user", "content": "hi"}]
        again = [*said, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "again"}]
        for messages, body in ((said, ADA), (again, BOB), (again, {}), (again, ADA)):
            await rig.client.chat.completions.create(model="tiny", messages=messages, extra_body=body)
        assert sorted(info.subject for info in await client.sessions()) == ["", "ada", "bob"]
