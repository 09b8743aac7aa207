"""Sessions that HTTP made and that are then changed over gRPC: a resent history is answered as if they were not."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.client import AsyncClient
from pensieve.client.arguments import SessionChanges
from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door
from support.http.tool_rig import context_of, tool_door
from support.service.service_rig import ANSWER
from support.tool_templates import WEATHER

SETTINGS: SessionChanges = {"overflow": "drop_oldest_turns", "default_sampling": {"temperature": 0.9}}


async def say(rig: HttpRig, *texts: str, **options: Any) -> Any:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    for number, text in enumerate(texts):
        messages += [{"role": "assistant", "content": ANSWER}] if number else []
        messages.append({"role": "user", "content": text})
    return await rig.client.chat.completions.create(model="tiny", messages=messages, **options)


async def change(rig: HttpRig, kind: str, session: str) -> None:
    async with AsyncClient(rig.service.target) as client:
        changed = client.session(session)
        if kind == "prompt":
            await changed.update(system_prompt="Be rude.")
        elif kind == "rewind":
            await changed.rewind(to_item=0)
        else:
            await changed.compact(keep_turns=0)


def last_session(rig: HttpRig) -> str:
    return rig.service.link.generations[-1].session.partition("/")[2]


@pytest.mark.parametrize("kind", ["prompt", "rewind", "compaction"])
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "one"}])
async def test_a_history_that_its_session_no_longer_has(kind: str, headers: dict[str, str]) -> None:
    async with door() as rig:
        first = await say(rig, "hi")
        await change(rig, kind, first.session)
        second = await say(rig, "hi", "again", extra_headers=headers)
        assert second.session != first.session
        items = await rig.service.items(f"sessions/{second.session}")
        assert [item.text for item in items] == ["Be brief.", "hi", ANSWER, "again", ANSWER]
        if headers:
            again = await say(rig, "hi", "again", extra_headers=headers)
            assert (again.id, again.session) == (second.id, second.session)


async def check_settings(rig: HttpRig, session: str) -> None:
    config = (await rig.service.session(f"sessions/{session}")).config
    assert config.overflow_policy == pb.OVERFLOW_POLICY_REJECT
    assert not config.default_sampling.ListFields()


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "one"}])
async def test_a_branch_has_the_settings_of_its_conversation(headers: dict[str, str]) -> None:
    async with door() as rig:
        first = await say(rig, "hi")
        async with AsyncClient(rig.service.target) as client:
            await client.session(first.session).update(**SETTINGS)
        second = await say(rig, "hi", "again", extra_headers=headers)
        assert second.session != first.session
        await check_settings(rig, second.session)


@pytest.mark.parametrize("instructions", ["Be brief.", "Be kind."])
async def test_a_branch_after_a_response_has_its_settings(instructions: str) -> None:
    async with door() as rig:
        first = await rig.client.responses.create(model="tiny", input="hi", instructions="Be brief.")
        source = last_session(rig)
        async with AsyncClient(rig.service.target) as client:
            await client.session(source).update(**SETTINGS)
        await rig.client.responses.create(
            model="tiny", input="again", instructions=instructions, previous_response_id=first.id
        )
        assert last_session(rig) != source
        await check_settings(rig, last_session(rig))


async def test_a_response_has_its_own_instructions_and_tools() -> None:
    """They are those of the response before, and the session was given others over gRPC since."""
    asked: Any = {
        "model": "tiny",
        "instructions": "Be brief.",
        "tools": [{"type": "function", **WEATHER["function"]}],
    }
    async with tool_door("Hello.") as rig:
        first = await rig.client.responses.create(input="hi", **asked)
        async with AsyncClient(rig.service.target) as client:
            changed = client.session(last_session(rig))
            await changed.update(tools=[{"type": "function", "function": {"name": "traffic"}}])
            await changed.update(system_prompt="Be rude.")
        await rig.client.responses.create(input="and?", previous_response_id=first.id, **asked)
        # The prompt that the session was given counts as a system message of the conversation.
        assert context_of(rig).startswith("<|im_start|>system\nBe brief.\n\nBe rude.")
        assert "Tells the weather" in context_of(rig) and "traffic" not in context_of(rig)
