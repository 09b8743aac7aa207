"""Chat completions through OpenAI's own client."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import msgspec
import pytest
from openai import APIStatusError, BadRequestError

from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door
from support.service.service_rig import ANSWER

Messages = list[Any]


def asks(*texts: str, system: str = "Be brief.") -> Messages:
    """A history of turns that were all answered with ``ANSWER``, but the last."""
    messages: Messages = [{"role": "system", "content": system}]
    for number, text in enumerate(texts):
        if number:
            messages.append({"role": "assistant", "content": ANSWER})
        messages.append({"role": "user", "content": text})
    return messages


async def say(rig: HttpRig, messages: Messages, **options: Any) -> Any:
    return await rig.client.chat.completions.create(model="tiny", messages=messages, **options)


async def test_a_resent_history_is_gone_on_with() -> None:
    async with door() as rig:
        first = await say(rig, asks("hi"))
        assert first.choices[0].message.content == ANSWER
        assert first.choices[0].finish_reason == "stop"
        second = await say(rig, asks("hi", "again"))
        assert second.session == first.session
        assert second.usage.prompt_tokens > first.usage.prompt_tokens
        assert second.usage.prompt_tokens_details is not None
        # The same history with another end: the session has gone on, so this is a branch of it.
        third = await say(rig, asks("hi", "or else"))
        assert third.session != first.session
        assert third.choices[0].message.content == ANSWER
        items = await rig.service.items(f"sessions/{third.session}")
        assert [item.text for item in items] == ["Be brief.", "hi", ANSWER, "or else", ANSWER]


async def test_a_prompt_with_a_nul_is_no_prompt_with_a_subject() -> None:
    async with door() as rig:
        user: Any = {"role": "user", "content": "hi"}
        odd: Any = {"role": "system", "content": "Be kind.\0subject\0ada"}
        first = await say(rig, [odd, user])
        talk: list[Any] = [user, {"role": "assistant", "content": ANSWER}, user]
        kind: Any = {"role": "system", "content": "Be kind."}
        second = await say(rig, [kind, *talk], extra_body={"subject": "ada"})
        assert second.session != first.session
        third = await say(rig, [odd, *talk])
        assert third.session == first.session


@pytest.mark.fault(42)
async def test_a_resent_history_that_the_store_has_lost_is_gone_on_with_in_a_new_session() -> None:
    async with door() as rig:
        store = rig.service.store
        assert isinstance(store, MemoryStore)
        first = await say(rig, asks("hi"))
        earlier = copy.deepcopy(store._sessions)
        await say(rig, asks("hi", "again"))
        store._sessions = earlier
        third = await say(rig, asks("hi", "again", "and again"))
        assert third.session != first.session
        items = await rig.service.items(f"sessions/{third.session}")
        assert [item.text for item in items] == [
            "Be brief.",
            "hi",
            ANSWER,
            "again",
            ANSWER,
            "and again",
            ANSWER,
        ]


async def test_what_another_says_is_not_found() -> None:
    async with door() as rig:
        first = await say(rig, asks("hi"))
        for messages in (asks("hi", "again", system="Be rude."), asks("ho", "again")):
            other = await say(rig, messages)
            assert other.session != first.session
        items = await rig.service.items(f"sessions/{other.session}")
        assert [item.text for item in items] == ["Be brief.", "ho", ANSWER, "again", ANSWER]
        other = rig.client.with_options(api_key="another")
        answer = await other.chat.completions.create(model="tiny", messages=asks("hi", "again"))
        assert answer.session != first.session  # type: ignore[attr-defined]


async def test_a_stream_says_the_same() -> None:
    async with door() as rig:
        stream = await say(rig, asks("hi"), stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices) == ANSWER
        reasons = [one.finish_reason for chunk in chunks for one in chunk.choices if one.finish_reason]
        assert reasons == ["stop"]
        assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens > 0
        # OpenAI's documentation: "All other chunks will also include a usage field, but with a null value."
        assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
        again = await say(rig, asks("hi", "again"))
        assert again.session == chunks[0].session


async def test_several_answers_and_any_of_them_gone_on_with() -> None:
    async with door() as rig:
        first = await say(rig, asks("hi"), n=3, temperature=1.0)
        assert [choice.index for choice in first.choices] == [0, 1, 2]
        second = await say(rig, asks("hi", "again"))
        assert second.session == first.session


async def test_a_repeated_key_is_one_turn() -> None:
    async with door() as rig:
        headers = {"Idempotency-Key": "one"}
        first, second = [await say(rig, asks("hi"), extra_headers=headers) for _ in range(2)]
        assert first.id == second.id and first.session == second.session
        assert len(await rig.service.items(f"sessions/{first.session}")) == 3
        with pytest.raises(APIStatusError) as caught:
            await say(rig, asks("ho"), extra_headers=headers)
        assert caught.value.status_code == 409


async def test_a_session_may_be_named() -> None:
    async with door() as rig:
        for text in ("hi", "again"):
            await say(rig, [{"role": "user", "content": text}], extra_body={"session": "mine"})
        items = await rig.service.items("sessions/mine")
        assert [item.text for item in items] == ["hi", ANSWER, "again", ANSWER]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing said": ({"messages": []}, "messages"),
    "nothing to answer": ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    "a role": ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    "a hot temperature": ({"temperature": 1e9}, "temperature"),
    "no number": ({"temperature": "warm"}, "temperature"),
    "no answers": ({"n": 0}, "n"),
    "too many answers": ({"n": 1000}, "n"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "a form": ({"response_format": {"type": "yaml"}}, "response_format.type"),
    "a word as token": ({"logit_bias": {"word": 1}}, "logit_bias"),
    "many stops": ({"stop": ["x"] * 1000}, "stop"),
    "likely tokens alone": ({"top_logprobs": 2}, "top_logprobs"),
    "21 likely tokens": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "a voice": ({"modalities": ["text", "audio"], "audio": {"voice": "x"}}, "modalities"),
    "a search": ({"web_search_options": {}}, "web_search_options"),
    "a large token": ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
    "a token that there is not": ({"logit_bias": {"9999": 1}}, "logit_bias"),
    "a great bias": ({"logit_bias": {"5": 101}}, "logit_bias"),
    "no room to answer": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "a schema without a name": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
}


async def test_bad_input_is_refused_by_name() -> None:
    async with door() as rig:
        for name, (fields, param) in BAD.items():
            with pytest.raises(BadRequestError) as caught:
                await say(rig, asks("hi"), extra_body=fields)
            assert caught.value.param == param, (name, caught.value.body)
            assert caught.value.body["message"], name  # type: ignore[index]


async def test_who_leaves_discards_the_turn() -> None:
    async with door(answer=None) as rig:
        waiting = asyncio.create_task(say(rig, asks("hi"), stream=True))
        while not rig.service.link.generations:
            await asyncio.sleep(0.01)
        stream = await asyncio.wait_for(waiting, 5)
        await stream.close()
        while rig.service.conversations.turns.running:
            await asyncio.sleep(0.01)
        answer = await rig.service.api.ListSessions(pb.ListSessionsRequest())
        assert [one.item_count for one in answer.sessions] == [1], "more than the system prompt"


async def test_a_prediction_changes_nothing_but_must_be_text() -> None:
    async with door() as rig:
        link = rig.service.link
        link.info = msgspec.structs.replace(link.info, speculates=True)
        for content in (ANSWER, [{"type": "text", "text": ANSWER}]):
            said = await say(rig, asks("hi"), prediction={"type": "content", "content": content})
            assert said.choices[0].message.content == ANSWER
            assert link.generations[-1].predicted
            assert said.usage.completion_tokens_details.accepted_prediction_tokens == 0
            assert said.usage.completion_tokens_details.rejected_prediction_tokens == 0
        image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        for wrong in ("x" * 65_537, image, 7):
            with pytest.raises(BadRequestError, match="prediction"):
                await say(rig, asks("hi"), prediction={"type": "content", "content": wrong})
        with pytest.raises(BadRequestError, match="prediction"):
            await say(rig, asks("hi"), prediction={"type": "tokens", "content": ANSWER})
