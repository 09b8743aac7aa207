"""Every event that is sent is one of the SDK's types, in its order, however the stream ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest
from openai import APIError
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from pensieve.core import FinishReason
from pensieve.errors import Internal
from pensieve.server.failures import restarting
from support.http.http_rig import HttpRig, door
from support.service.scripted_link import ScriptedGeneration
from support.service.service_rig import encode, says

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BEGIN = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta",
]  # fmt: skip
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
Play = Callable[[ScriptedGeneration], None]


async def streamed(rig: HttpRig, path: str, body: dict[str, Any], *plays: Play) -> list[str]:
    """The lines of a stream while the engine ``plays``, one generation each."""
    async with httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        asking = asyncio.create_task(http.post(path, json={**body, "stream": True}))
        for number, play in enumerate(plays):
            async with asyncio.timeout(60):
                while len(rig.service.link.generations) <= number:
                    await asyncio.sleep(0.005)
            play(rig.service.link.generations[number])
        answer = await asking
        assert answer.status_code == 200, answer.text
        return answer.text.split("\n\n")


async def events(rig: HttpRig, *plays: Play) -> list[dict[str, Any]]:
    """The events of a response, each held against the SDK's types."""
    *lines, done, rest = await streamed(rig, "/v1/responses", {"input": "hi"}, *plays)
    assert (done, rest) == ("data: [DONE]", "")
    found = []
    for line in lines:
        name, _, data = line.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert EVENT.validate_python(event).type == event["type"]
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(event["type"] for event in found))


def plays(text: str, reason: FinishReason = FinishReason.EOS) -> Play:
    def play(generation: ScriptedGeneration) -> None:
        generation.admit()
        tokens = says(text) if reason is FinishReason.EOS else encode(text)
        for token in tokens:
            generation.emit(token)
        generation.finish(reason, len(tokens))

    return play


def breaks(text: str, error: Exception) -> Play:
    """Says ``text``, and then the engine fails."""

    def play(generation: ScriptedGeneration) -> None:
        generation.admit()
        for token in encode(text):
            generation.emit(token)
        generation.fail(error)  # type: ignore[arg-type]

    return play


async def test_an_answer_that_ends_by_itself() -> None:
    async with door(answer=None) as rig:
        found = await events(rig, plays("the fox"))
        assert kinds(found) == [*BEGIN, *END, "response.completed"]
        assert found[-1]["response"]["output"][0]["content"][0]["text"] == "the fox"


async def test_an_answer_that_is_cut() -> None:
    async with door(answer=None) as rig:
        found = await events(rig, plays("the fox", FinishReason.LENGTH))
        assert kinds(found) == [*BEGIN, *END, "response.incomplete"]
        assert found[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert found[-2]["item"]["status"] == "incomplete"


async def test_an_error_in_the_middle() -> None:
    broken = Internal("the engine could not serve this request", reason="REQUEST_QUARANTINED")
    async with door(answer=None) as rig:
        found = await events(rig, breaks("the fox", broken))
        assert kinds(found) == [*BEGIN, "error", "response.failed"]
        error, failed = found[-2:]
        # The specification has the parts under ``error``, the SDK looks for them at the top.
        for parts in (error, error["error"]):
            assert parts["code"] == "request_quarantined" and parts["message"]
        assert failed["response"]["status"] == "failed" and failed["response"]["error"]["message"]
        assert failed["response"]["id"] == found[0]["response"]["id"]


async def test_an_answer_that_is_lost_and_comes_again() -> None:
    async with door(answer=None) as rig:
        found = await events(rig, breaks("the fox", restarting()), plays("the fox jumps"))
        assert kinds(found) == [*BEGIN, *END, "response.completed"]
        assert "".join(event["delta"] for event in found if event["type"] == BEGIN[-1]) == "the fox jumps"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_chunks_of_an_answer_that_comes_again_are_told_once(path: str, body: dict[str, Any]) -> None:
    async with door(answer=None) as rig:
        *lines, _, _ = await streamed(
            rig, path, body, breaks("the fox", restarting()), plays("the fox jumps")
        )
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        told = [one.get("text") or one.get("delta", {}).get("content") for one in chunks]
        assert "".join(filter(None, told)) == "the fox jumps"
        first = 0 if path == "/v1/completions" else 1  # a chat begins with the role
        assert all(told[first:-1]), "no chunk says nothing"


async def test_an_answer_that_is_lost_and_comes_as_another() -> None:
    async with door(answer=None) as rig:
        found = await events(rig, breaks("the fox", restarting()), plays("a dog"))
        assert kinds(found) == [*BEGIN, "error", "response.failed"]
        assert found[-2]["code"] == "stream_inconsistent"


async def test_a_chat_completion_that_breaks() -> None:
    broken = Internal("the engine could not serve this request", reason="REQUEST_QUARANTINED")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with door(answer=None) as rig:
        *chunks, last, rest = await streamed(rig, "/v1/chat/completions", body, breaks("the fox", broken))
        assert (
            rest == "" and json.loads(last.removeprefix("data: "))["error"]["code"] == "request_quarantined"
        )
        for chunk in chunks:
            ChatCompletionChunk.model_validate_json(chunk.removeprefix("data: "), strict=True)
        # What the SDK makes of it: not an answer that is merely short.
        rig.service.link.answer = None
        stream = await rig.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "ho"}], stream=True
        )
        breaks("the fox", broken)(rig.service.link.generations[1])
        try:
            async for _ in stream:
                pass
        except APIError as error:
            assert error.code == "request_quarantined"
        else:
            raise AssertionError("the stream ended as if it were whole")
