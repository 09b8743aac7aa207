"""Anthropic's threads: a message names the conversation that the next one continues, and only new messages travel."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door
from support.http.tool_rig import ROME, context_of, tool_door
from support.lazily import lazily
from support.service.service_rig import ANSWER

anthropic = lazily("anthropic")
HI: Any = [{"role": "user", "content": "hi"}]


def client_of(rig: HttpRig) -> Any:
    return anthropic.AsyncAnthropic(
        base_url=rig.url, api_key="acme", max_retries=0, _strict_response_validation=True
    )


async def say(rig: HttpRig, text: str, after: Any = None, **options: Any) -> Any:
    thread: Any = {"type": "create"}
    if after is not None:
        thread = {"type": "continue", "previous_message_id": after.id}
    async with client_of(rig) as client:
        return await client.beta.messages.create(
            model="tiny",
            max_tokens=50,
            messages=[{"role": "user", "content": text}],
            thread=thread,
            **options,
        )


async def said_in(rig: HttpRig, turn: int = -1) -> list[str]:
    session = rig.service.link.generations[turn].session.partition("/")[2]
    return [item.text for item in await rig.service.items(f"sessions/{session}")]


async def test_a_thread_and_a_branch() -> None:
    async with door() as rig:
        first = await say(rig, "hi", system="Be brief.")
        second = await say(rig, "again", first)
        assert await said_in(rig) == ["Be brief.", "hi", ANSWER, "again", ANSWER]
        third = await say(rig, "more", second)
        branch = await say(rig, "or else", first)
        assert await said_in(rig) == ["Be brief.", "hi", ANSWER, "or else", ANSWER]
        sessions = [turn.session for turn in rig.service.link.generations]
        assert len(set(sessions[:3])) == 1 and sessions[3] != sessions[0]
        assert len({one.id for one in (first, second, third, branch)}) == 4
        # Any message can be continued, and any branch.
        async with client_of(rig) as client:
            plain = await client.messages.create(model="tiny", max_tokens=50, messages=HI)
        await say(rig, "more", plain)
        await say(rig, "last", branch)
        assert (await said_in(rig))[3:] == ["or else", ANSWER, "last", ANSWER]


async def test_a_branch_has_the_tools_of_its_thread() -> None:
    tool = {"name": "weather", "description": "Tells the weather.", "input_schema": {"type": "object"}}
    async with tool_door(ROME, "Blue.") as rig:
        first = await say(rig, "hi", tools=[tool])
        assert first.content[0].type == "tool_use"
        await say(rig, "again", first)
        continued = context_of(rig)
        await say(rig, "again", first)
        assert context_of(rig) == continued and "Tells the weather." in continued
        assert len({turn.session for turn in rig.service.link.generations}) == 2


async def test_a_repeated_key_is_one_turn() -> None:
    async with door() as rig:
        first = await say(rig, "hi")
        headers = {"Idempotency-Key": "one"}
        second, again = [await say(rig, "again", first, extra_headers=headers) for _ in range(2)]
        assert second.id == again.id and len(rig.service.link.generations) == 2


async def weather(town: str) -> str:
    """Tells the weather.

    Args:
        town: its name
    """
    return f"blue skies in {town}"


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_tool_runner(streamed: bool) -> None:
    """As it is, it keeps its conversation in a thread: a request has only what is new."""
    async with tool_door(ROME, ROME, "Blue.") as rig, client_of(rig) as client:
        asked: Any = [{"role": "user", "content": "How is it in Rome?"}]
        if streamed:
            runner: Any = client.beta.messages.tool_runner(
                model="tiny",
                max_tokens=50,
                tools=[anthropic.beta_async_tool(weather)],
                messages=asked,
                stream=True,
            )
            async for stream in runner:
                message = await stream.get_final_message()
        else:
            runner = client.beta.messages.tool_runner(
                model="tiny", max_tokens=50, tools=[anthropic.beta_async_tool(weather)], messages=asked
            )
            message = await runner.until_done()
        assert message.content[0].text == "Blue." and message.stop_reason == "end_turn"
        turns = rig.service.link.generations
        assert len(turns) == 3 and len({turn.session for turn in turns}) == 1
        for before, after in itertools.pairwise(turns):
            assert after.tokens[: len(before.tokens)] == before.tokens
        assert context_of(rig).count("blue skies in Rome") == 2


async def test_a_lost_thread_is_sent_again() -> None:
    """The SDK is told in its own words, and resends the conversation."""
    async with door() as rig, client_of(rig) as client:
        thread = client.beta.messages.thread(model="tiny", max_tokens=50, system="Be brief.")
        await thread.send(*HI)
        session = rig.service.link.generations[0].session.partition("/")[2]
        await rig.service.api.DeleteSession(pb.DeleteSessionRequest(name=f"sessions/{session}"))
        await thread.send({"role": "user", "content": "again"})
        assert await said_in(rig) == ["Be brief.", "hi", ANSWER, "again", ANSWER]
        assert len({turn.session for turn in rig.service.link.generations}) == 2


async def test_what_a_thread_cannot_do() -> None:
    async with door() as rig:
        first = await say(rig, "hi")
        strange = first.model_copy(update={"id": "msg_nothing"})
        with pytest.raises(anthropic.NotFoundError) as missing:
            await say(rig, "again", strange)
        assert missing.value.body["error"]["details"] == {"error_code": "thread_not_found"}  # type: ignore[index]
        with pytest.raises(anthropic.NotFoundError):  # another tenant's
            await say(rig, "again", first, extra_headers={"authorization": "Bearer other"})
        with pytest.raises(anthropic.BadRequestError) as unsupported:
            await say(rig, "again", first, tool_choice={"type": "any"})
        details = unsupported.value.body["error"]["details"]  # type: ignore[index]
        assert details["error_code"] == "thread_unsupported_request"
        async with client_of(rig) as client:
            with pytest.raises(anthropic.BadRequestError, match="thread"):
                await client.messages.count_tokens(
                    model="tiny", messages=HI, extra_body={"thread": {"type": "create"}}
                )
        assert len(rig.service.link.generations) == 1
