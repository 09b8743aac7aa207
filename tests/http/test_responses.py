"""Responses through OpenAI's own client: chains, branches, streams, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import pytest
from openai import APIStatusError, BadRequestError, ConflictError, NotFoundError

from pensieve.http.common import bodies
from pensieve.http.responses.ids import ResponseId, instructions_digest
from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door
from support.service.service_rig import ANSWER

FIELDS = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "max_output_tokens",
    "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
"""Of every snapshot."""
ORDER = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "response.completed",
]  # fmt: skip


async def respond(rig: HttpRig, text: str, **options: Any) -> Any:
    return await rig.client.responses.create(model="tiny", input=text, **options)


async def said_in(rig: HttpRig, response: Any) -> list[str]:
    """The items of the session that a response is in."""
    found = ResponseId.parse(response.id)
    assert found is not None
    return [item.text for item in await rig.service.items(f"sessions/{found.session_id}")]


async def test_a_chain_lies_in_one_session() -> None:
    async with door() as rig:
        first = await respond(rig, "hi")
        assert first.output_text == ANSWER and first.status == "completed"
        assert set(first.model_dump()) >= FIELDS
        second = await respond(rig, "again", previous_response_id=first.id)
        third = await respond(rig, "more", previous_response_id=second.id)
        assert await said_in(rig, third) == ["hi", ANSWER, "again", ANSWER, "more", ANSWER]
        assert third.usage.input_tokens > second.usage.input_tokens
        assert third.usage.input_tokens_details.cached_tokens is not None


async def test_an_earlier_response_can_be_gone_on_from() -> None:
    async with door() as rig:
        first = await respond(rig, "hi")
        second = await respond(rig, "again", previous_response_id=first.id)
        branch = await respond(rig, "or else", previous_response_id=first.id)
        assert await said_in(rig, branch) == ["hi", ANSWER, "or else", ANSWER]
        assert await said_in(rig, second) == ["hi", ANSWER, "again", ANSWER]
        both = [respond(rig, text, previous_response_id=second.id) for text in ("left", "right")]
        left, right = await asyncio.gather(*both)
        assert (await said_in(rig, left))[4] == "left" and (await said_in(rig, right))[4] == "right"


async def test_instructions_are_of_one_response() -> None:
    async with door() as rig:
        first = await respond(rig, "hi", instructions="Be brief.")
        same = await respond(rig, "again", previous_response_id=first.id, instructions="Be brief.")
        assert (await said_in(rig, same))[0] == "Be brief."
        without = await respond(rig, "more", previous_response_id=same.id)
        assert (await said_in(rig, without))[0] == "hi" and without.instructions is None
        other = await respond(rig, "last", previous_response_id=without.id, instructions="Be rude.")
        assert (await said_in(rig, other))[0] == "Be rude."
        branch = await respond(rig, "else", previous_response_id=first.id)
        assert await said_in(rig, branch) == ["hi", ANSWER, "else", ANSWER]


async def test_system_messages_of_an_input_stay_when_instructions_change() -> None:
    system: list[Any] = [{"role": "system", "content": "\n\nBe kind."}, {"role": "user", "content": "hi"}]
    async with door() as rig:
        for given in (None, "", "Be brief."):
            first = await respond(rig, system, instructions=given)
            past = [*system, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "more"}]
            for now in (None, "", "Be rude.", "Be brief."):
                left = await respond(rig, "more", previous_response_id=first.id, instructions=now)
                prompt = "\n\n".join(part for part in (now, "\n\nBe kind.") if part)
                assert await said_in(rig, left) == [prompt, "hi", ANSWER, "more", ANSWER]
                seen = rig.service.link.generations[-1].tokens
                await respond(rig, past, instructions=now, store=False)
                assert rig.service.link.generations[-1].tokens == seen, "as with the history resent"
                further = await respond(rig, "again", previous_response_id=left.id)
                assert (await said_in(rig, further))[0] == "\n\nBe kind."


async def test_instructions_are_told_apart_by_more_than_four_bytes() -> None:
    one, other = (f"Answer in style {number}." for number in (23961, 83668))
    assert instructions_digest(one, size=4) == instructions_digest(other, size=4)
    assert instructions_digest("x\0False\0[]") != instructions_digest("x", "[]")
    async with door() as rig:
        first = await respond(rig, "hi", instructions=one)
        second = await respond(rig, "again", previous_response_id=first.id, instructions=other)
        assert (await said_in(rig, second))[0] == other
        # An id of an earlier release is valid.
        found = ResponseId.parse(first.id)
        assert found is not None and ResponseId.parse(str(found)) == found
        old = replace(found, instructions=instructions_digest(one, size=4))
        assert ResponseId.parse(str(old)) == old
        same = await respond(rig, "more", previous_response_id=str(old), instructions=one)
        assert await said_in(rig, same) == await said_in(rig, first) == [one, "hi", ANSWER, "more", ANSWER]


async def test_a_response_behind_one_in_a_conversation_has_its_instructions() -> None:
    """The conversation's own system messages stay, and the instructions before it are not carried over."""
    system: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    async with door() as rig:
        for now in (None, "Be brief.", "Be rude."):
            conversation = (await rig.client.conversations.create(items=system)).id
            first = await respond(rig, "so", conversation=conversation, instructions="Be brief.")
            await respond(rig, "more", previous_response_id=first.id, instructions=now)
            seen = rig.service.link.generations[-1].tokens
            past = [*system, *({"role": role, "content": text} for role, text in (
                ("user", "so"), ("assistant", ANSWER), ("user", "more")
            ))]  # fmt: skip
            await respond(rig, past, instructions=now, store=False)
            assert rig.service.link.generations[-1].tokens == seen


async def test_a_resent_history_with_instructions_is_gone_on_with() -> None:
    """As agents send it. With others, or without, it is another conversation."""
    async with door() as rig:
        said: list[Any] = [{"role": "user", "content": "hi"}]
        first = await respond(rig, said, instructions="Be brief.")
        said += [*(item.model_dump() for item in first.output), {"role": "user", "content": "again"}]
        second = await respond(rig, said, instructions="Be brief.")
        other = await respond(rig, said, instructions="Be rude.")
        without = await respond(rig, said)
        sessions = [turn.session for turn in rig.service.link.generations]
        assert sessions[0] == sessions[1] and len(set(sessions)) == 3
        past = ["hi", ANSWER, "again", ANSWER]
        assert await said_in(rig, second) == ["Be brief.", *past]
        assert await said_in(rig, other) == ["Be rude.", *past] and await said_in(rig, without) == past
        # The instructions stay those of their responses.
        third = await respond(rig, "more", previous_response_id=second.id)
        assert await said_in(rig, third) == [*past, "more", ANSWER]


async def test_a_stream_has_every_event_in_order() -> None:
    async with door() as rig:
        stream = await respond(rig, "hi", stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = list(dict.fromkeys(event.type for event in events))
        assert kinds == ORDER
        assert "".join(event.delta for event in events if event.type == ORDER[4]) == ANSWER
        assert events[0].response.output == [] and events[0].response.usage is None
        assert {event.response.id for event in (*events[:2], events[-1])} == {events[0].response.id}
        assert events[2].item.id == events[-1].response.output[0].id
        assert set(events[0].response.model_dump()) >= FIELDS
        again = await respond(rig, "again", previous_response_id=events[0].response.id)
        assert (await said_in(rig, again))[:2] == ["hi", ANSWER]


async def test_the_bytes_of_a_stream() -> None:
    async with door() as rig, httpx.AsyncClient() as http:
        body = {"model": "tiny", "input": "hi", "stream": True}
        answer = await http.post(f"{rig.url}/v1/responses", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "\r" not in answer.text
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        for event in events:
            name, data = event.split("\n")
            assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


async def test_a_response_is_fetched_and_erased() -> None:
    async with door() as rig:
        first = await respond(rig, "hi")
        second = await respond(rig, "again", previous_response_id=first.id)
        found = await rig.client.responses.retrieve(second.id)
        assert found.output_text == ANSWER and found.id == second.id
        items = await rig.client.responses.input_items.list(second.id)
        assert [item.content[0].text for item in items.data] == ["again"]  # type: ignore[union-attr]
        with pytest.raises(ConflictError):
            await rig.client.responses.delete(first.id)
        await rig.client.responses.delete(second.id)
        with pytest.raises(NotFoundError):
            await rig.client.responses.retrieve(second.id)
        assert (await rig.client.responses.retrieve(first.id)).output_text == ANSWER
        await rig.client.responses.delete(first.id)
        for gone in (first, second):
            with pytest.raises(BadRequestError) as caught:
                await respond(rig, "more", previous_response_id=gone.id)
            assert caught.value.code == "previous_response_not_found"


async def test_what_is_not_stored_leaves_nothing_behind() -> None:
    async with door() as rig:
        kept = await respond(rig, "hi")
        for previous in (None, kept.id):
            gone = await respond(rig, "again", store=False, previous_response_id=previous)
            assert gone.output_text == ANSWER and gone.store is False
            # A client that resends its history finds it cached; the end of a branch is never asked for again.
            assert bool(rig.service.link.evicted) is (previous is not None)
            with pytest.raises(NotFoundError):
                await rig.client.responses.retrieve(gone.id)
        sessions = (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions
        assert len(sessions) == 1
        assert await said_in(rig, kept) == ["hi", ANSWER]


async def test_a_named_session_leads_nobody_into_it() -> None:
    async with door() as rig:
        said = [{"role": "user", "content": "hi"}]
        await rig.client.chat.completions.create(model="tiny", messages=said, extra_body={"session": "mine"})  # type: ignore[arg-type]
        resent: Any = [*said, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "again"}]
        answer = await rig.client.responses.create(model="tiny", input=resent)
        assert await said_in(rig, answer) == ["hi", ANSWER, "again", ANSWER]
        assert len(await rig.service.items("sessions/mine")) == 2


async def test_in_the_background() -> None:
    async with door(answer=None) as rig:
        begun = await respond(rig, "hi", background=True)
        assert begun.status == "in_progress"
        assert (await rig.client.responses.retrieve(begun.id)).status == "in_progress"
        cancelled = await rig.client.responses.cancel(begun.id)
        assert cancelled.status == "cancelled"


async def test_a_cut_stream_is_resumed_event_by_event() -> None:
    async with door() as rig:
        stream = await respond(rig, "hi", background=True, stream=True)
        whole = [event async for event in stream]
        response = whole[0].response.id
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        texts = [event.delta for event in whole if event.type == ORDER[4]]
        assert "".join(texts) == ANSWER and len(texts) > 3
        for after in (0, 3, 5, len(whole) - 2):
            stream = await rig.client.responses.retrieve(response, stream=True, starting_after=after)
            rest = [event async for event in stream]
            assert [(event.type, event.sequence_number) for event in rest] == [
                (event.type, event.sequence_number) for event in whole[after + 1 :]
            ]
            assert [event.delta for event in rest if event.type == ORDER[4]] == texts[max(0, after - 3) :]
        usual = await respond(rig, "hi")
        with pytest.raises(BadRequestError):
            await rig.client.responses.retrieve(usual.id, stream=True)


async def test_a_response_that_is_not_there_yet_is_not_gone_on_from() -> None:
    async with door(answer=None) as rig:
        begun = await respond(rig, "hi", background=True)
        with pytest.raises(ConflictError) as caught:
            await respond(rig, "again", previous_response_id=begun.id)
        assert caught.value.code == "response_in_progress"


async def test_a_repeated_key_is_one_turn() -> None:
    async with door() as rig:
        first = await respond(rig, "hi")
        headers = {"Idempotency-Key": "one"}
        tries = [
            await respond(rig, "again", previous_response_id=first.id, extra_headers=headers)
            for _ in range(2)
        ]
        assert tries[0].id == tries[1].id
        assert await said_in(rig, tries[0]) == ["hi", ANSWER, "again", ANSWER]
        # Also when the first try had to branch off, and when it changed the instructions.
        for number, options in enumerate(({}, {"instructions": "Be brief."})):
            headers = {"Idempotency-Key": f"branch {number}"}
            ids = {
                (
                    await respond(
                        rig, "more", previous_response_id=first.id, extra_headers=headers, **options
                    )
                ).id
                for _ in range(3)
            }
            assert len(ids) == 1
        headers = {"Idempotency-Key": "changed"}
        ids = {
            (
                await respond(
                    rig, "x", previous_response_id=tries[0].id, instructions="Be rude.", extra_headers=headers
                )
            ).id
            for _ in range(3)
        }
        assert len(ids) == 1


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "two histories": (
        {"conversation": "conv_x", "previous_response_id": "resp_x"},
        400,
        "previous_response_id",
    ),
    "an unknown response": ({"previous_response_id": "resp_x"}, 400, "previous_response_id"),
    "an unknown conversation": ({"conversation": f"conv_{'0' * 32}"}, 404, ""),
    "a conversation without store": (
        {"conversation": f"conv_{'0' * 32}", "store": False},
        400,
        "store",
    ),
    "background without store": ({"background": True, "store": False}, 400, "background"),
    "truncation": ({"truncation": "much"}, 400, "truncation"),
    "tools": ({"tools": [{"type": "function", "name": "f"}]}, 400, "tools"),
    "a form": ({"text": {"format": {"type": "yaml"}}}, 400, "text.format.type"),
    "long metadata": ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
    "nothing": ({"input": []}, 400, "input"),
    "a call": ({"input": [{"type": "computer_call"}]}, 400, "input[0]"),
    "no number": ({"max_output_tokens": "all"}, 400, "max_output_tokens"),
    "a model": ({"model": "huge"}, 404, "model"),
}


async def test_bad_input_is_refused_by_name() -> None:
    async with door() as rig:
        for name, (fields, status, param) in BAD.items():
            with pytest.raises(APIStatusError) as caught:
                await respond(rig, "hi", extra_body=fields)
            assert caught.value.status_code == status, (name, caught.value.body)
            assert not param or caught.value.param == param, (name, caught.value.body)
            assert caught.value.body["message"], name  # type: ignore[index]


async def test_every_refusal_has_the_same_form() -> None:
    async with door(max_body_bytes=1000) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        answers = {
            404: await http.get("/v1/nothing"),
            405: await http.get("/v1/chat/completions"),
            400: await http.post("/v1/responses", content=b"{"),
            413: await http.post("/v1/responses", content=b" " * 1001),
        }
        for status, answer in answers.items():
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["x-request-id"]
        assert answers[405].headers["allow"] == "POST"
        both = await http.put("/v1/responses/resp_x")
        assert both.headers["allow"] == "DELETE, GET, HEAD"


async def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.1)

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    async with door() as rig, httpx.AsyncClient(base_url=rig.url) as http:
        calling = asyncio.create_task(http.post("/v1/responses", content=slowly()))
        line = 'pensieve_http_calls_total{route="/v1/responses",status="408"} 1.0'
        async with asyncio.timeout(20):
            while line not in (await http.get("/metrics")).text:
                await asyncio.sleep(0.02)
        calling.cancel()


async def test_another_tenants_response_is_not_there() -> None:
    async with door() as rig:
        first = await respond(rig, "hi")
        other = rig.client.with_options(api_key="other").responses
        for call in (other.retrieve, other.delete, other.cancel):
            with pytest.raises(NotFoundError):
                await call(first.id)
        with pytest.raises(BadRequestError):
            await other.create(model="tiny", input="again", previous_response_id=first.id)
