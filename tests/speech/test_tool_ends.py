"""Conversations with calls and thoughts are gone on with by doors that never saw them, and kept as others are."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError

from pensieve.store.sqlite_store import SqliteStore
from support.http.http_rig import HttpRig, opened
from support.http.tool_rig import OSLO, ROME, context_of, tool_door
from support.tool_templates import WEATHER

FUNCTION = WEATHER["function"]
TOOL: Any = {"type": "function", "strict": True, **FUNCTION}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
ASKED: Any = {"role": "user", "content": "How is it in Rome?"}


async def say(client: AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    options = {"tools": [CHAT_TOOL], **options}
    return await client.chat.completions.create(model="tiny", messages=messages, **options)


async def respond(client: AsyncOpenAI, said: Any, **options: Any) -> Any:
    return await client.responses.create(model="tiny", input=said, **{"tools": [TOOL], **options})


@asynccontextmanager
async def elsewhere(rig: HttpRig) -> AsyncIterator[AsyncOpenAI]:
    """A client of a door that has just been opened, and so remembers nothing."""
    async with opened(rig.service.target) as (_, client):
        yield client


def resent(completion: Any) -> list[Any]:
    """The answer with results of its calls, as clients resend them that parse arguments and write them again."""
    message = completion.choices[0].message.model_dump(exclude_none=True)
    calls = message.get("tool_calls", ())
    for one in calls:
        one["function"]["arguments"] = json.dumps(json.loads(one["function"]["arguments"]), indent=1)
    return [message, *({"role": "tool", "tool_call_id": one["id"], "content": "blue"} for one in calls)]


def result(call: Any) -> dict[str, str]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}


def assert_went_on(turns: list[Any]) -> None:
    """In one session, and with the very tokens."""
    assert len({turn.session for turn in turns}) == 1
    for before, after in itertools.pairwise(turns):
        assert after.tokens[: len(before.tokens)] == before.tokens


@pytest.mark.parametrize(
    ("style", "thought"), [("qwen", ""), ("thinking", "<think>\nHm, Rome.\n</think>\n\n")]
)
async def test_chat_goes_on_after_a_restart(tmp_path: Path, style: str, thought: str) -> None:
    # White space that no template would write: the tokens are found, not made again.
    called = f"{thought}Let me see.\n\n{ROME}\n\n{OSLO}"
    answers, history, turns = (called, f"{thought}Blue.", "Bye."), [ASKED], []
    for answer in answers:
        store = SqliteStore(tmp_path / "history.db")
        await store.open()
        async with tool_door(answer, style=style, store=store) as rig:
            history += resent(await say(rig.client, history))
            if history[-1]["role"] == "assistant":
                history.append({"role": "user", "content": "Thanks"})
            turns += rig.service.link.generations
            shown = context_of(rig)
        await store.close()
    assert_went_on(turns)
    assert called in shown and shown.count("Tells the weather") == 1


async def test_only_what_was_answered_is_found() -> None:
    async with tool_door(ROME, OSLO, "Blue.") as rig:
        first = resent(await say(rig.client, [ASKED]))
        newer = resent(await say(rig.client, [ASKED]))
        sessions = [turn.session for turn in rig.service.link.generations]
        for said in (newer, first):
            async with elsewhere(rig) as client:
                await say(client, [ASKED, *said])
        newer_again, first_again = rig.service.link.generations[2:]
        assert newer_again.session == sessions[1]
        # Of the same question's other answers the newest is known: this history begins anew, and is what was said.
        assert first_again.session not in sessions
        assert "Rome" in context_of(rig) and "Oslo" not in context_of(rig)


async def test_without_its_tools_it_is_another_talk() -> None:
    async with tool_door("Blue.") as rig:
        said = [ASKED, *resent(await say(rig.client, [ASKED])), {"role": "user", "content": "Thanks"}]
        for tools in ([], [CHAT_TOOL]):
            async with elsewhere(rig) as client:
                await say(client, said, tools=tools)
        first, without, same = (turn.session for turn in rig.service.link.generations)
        assert same == first != without


async def test_a_resent_response_is_found_elsewhere() -> None:
    async with tool_door(f"<think>\nHm.\n</think>\n\n{ROME}", "Blue.", style="thinking") as rig:
        first = await respond(rig.client, [ASKED])
        told = [item.model_dump(exclude_none=True) for item in first.output]
        async with elsewhere(rig) as client:
            await respond(client, [ASKED, *told, result(first.output[1])])
            again = await client.responses.retrieve(first.id)
            assert again == first and again.tools[0].name == "weather"  # type: ignore[union-attr]
        assert_went_on(rig.service.link.generations)


async def test_a_retry_with_calls_in_its_history() -> None:
    async with tool_door("Blue.") as rig:
        call = {"name": "weather", "arguments": '{ "town" :"Rome"}'}
        calls = [{"id": "c1", "type": "function", "function": call}]
        history: list[Any] = [
            ASKED,
            {"role": "assistant", "content": "Let me see. ", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        ]
        headers = {"Idempotency-Key": "one"}
        first = await say(rig.client, history, extra_headers=headers)
        async with elsewhere(rig) as client:
            again = await say(client, history, extra_headers=headers)
            assert (again.id, again.session) == (first.id, first.session)
            traffic = {**CHAT_TOOL, "function": {**FUNCTION, "name": "traffic"}}
            oslo = [{**calls[0], "function": {**call, "arguments": '{"town": "Oslo"}'}}]
            for tools, called in (([traffic], calls), ([CHAT_TOOL], oslo)):
                changed = [history[0], {**history[1], "tool_calls": called}, history[2]]
                with pytest.raises(APIStatusError) as caught:
                    await say(client, changed, tools=tools, extra_headers=headers)
                assert (caught.value.status_code, caught.value.code) == (409, "request_id_reused")
        assert len(rig.service.link.generations) == 1


async def test_calls_are_items_of_a_conversation() -> None:
    async with tool_door(f"Let me see.\n{ROME}", "Blue.") as rig:
        conversations = rig.client.conversations
        made = await conversations.create()
        first = await respond(rig.client, [ASKED], conversation=made.id)
        words, call = first.output
        added = await conversations.items.create(made.id, items=[result(call)])  # type: ignore[list-item]
        assert [(one.type, one.call_id) for one in added.data] == [  # type: ignore[union-attr]
            ("function_call_output", call.call_id)
        ]
        second = await respond(rig.client, "Well?", conversation=made.id)
        assert second.output_text == "Blue." and "<tool_response>\nblue" in context_of(rig)
        page = (await conversations.items.list(made.id, order="asc")).data
        kinds = ["message", "message", "function_call", "function_call_output", "message", "message"]
        assert [one.type for one in page] == kinds
        # By its own id, and by that which it had in its response.
        for name, one in ((str(page[2].id), page[2]), (call.id, page[2]), (words.id, page[1])):
            assert await conversations.items.retrieve(name, conversation_id=made.id) == one
        for one in page[:2:-1]:
            await conversations.items.delete(str(one.id), conversation_id=made.id)
        for name in (page[2].id, call.id):
            with pytest.raises(BadRequestError, match=str(page[1].id)) as caught:
                await conversations.items.delete(str(name), conversation_id=made.id)
            assert caught.value.code == "unsupported_operation"
        await conversations.items.delete(str(page[1].id), conversation_id=made.id)
        with pytest.raises(NotFoundError):
            await conversations.items.retrieve(str(call.id), conversation_id=made.id)
        assert len((await conversations.items.list(made.id)).data) == 1


@pytest.mark.parametrize("answer", [ROME, f"Let me see.\n{ROME}", "<tool_call>", "Blue."])
async def test_log_probabilities_beside_calls(answer: str) -> None:
    """Each token is told once, whether its text is told as words, as a call, or not yet."""
    async with tool_door(answer) as rig:
        (whole,) = (await say(rig.client, [ASKED], logprobs=True)).choices
        stream = await say(rig.client, [ASKED], logprobs=True, stream=True)
        choices = [one async for chunk in stream for one in (chunk.choices[0],)]
        parts = [one.logprobs.content for one in choices if one.logprobs]
        assert [score for part in parts for score in part] == whole.logprobs.content
        assert b"".join(bytes(score.bytes) for score in whole.logprobs.content).decode() == answer
        assert choices[0].delta.role == "assistant" and not any(one.delta.role for one in choices[1:])
        assert "".join(one.delta.content or "" for one in choices) == (whole.message.content or "")
