"""What was asked for with a response is told again by any door, as it was told to whoever made it."""

from __future__ import annotations

import base64
import tracemalloc
import zlib
from typing import Any

import pytest
from openai import ConflictError, NotFoundError

from pensieve.client import Turn, TurnState, Usage
from pensieve.http.responses.ids import ResponseId
from pensieve.http.responses.objects import KeptResponse
from pensieve.http.responses.requests import ResponseRequest
from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door, opened

ASKED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.75,
    "max_output_tokens": 99,
    "metadata": {"topic": "hares", "naïve": "\N{ELEPHANT}", "long": "x" * 512, "longer": "yz" * 256},
    "instructions": "Be brief.",
    "truncation": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit", "ttl": "12h"},
    "safety_identifier": "someone",
    "max_tool_calls": 3,
    "parallel_tool_calls": False,
    "text": {"format": {"type": "text"}},
    "store": True,
}


async def respond(rig: HttpRig, said: str, **options: Any) -> Any:
    return await rig.client.responses.create(model="tiny", input=said, **options)


async def told_elsewhere(rig: HttpRig, response: Any) -> Any:
    """The response as a door tells it that has just been opened."""
    async with opened(rig.service.target) as (_, client):
        return await client.responses.retrieve(response.id)


async def test_another_door_tells_what_was_asked() -> None:
    async with door() as rig:
        first = await respond(rig, "hi", **ASKED)
        assert first.prompt_cache_options.ttl == "12h"
        assert (first.metadata, first.temperature, first.truncation) == (ASKED["metadata"], 0.5, "auto")
        second = await respond(
            rig, "again", previous_response_id=first.id, extra_body={"frequency_penalty": 0.25}
        )
        made = await rig.client.conversations.create()
        third = await respond(rig, "more", conversation=made.id, background=True)
        stream = await respond(rig, "last", conversation=made.id, metadata={"a": "b"}, stream=True)
        events = [event async for event in stream]
        async for _ in await rig.client.responses.retrieve(third.id, stream=True):
            pass  # to its end
        third = await rig.client.responses.retrieve(third.id)
        for response in (first, second, third, events[-1].response):
            assert await told_elsewhere(rig, response) == response
        assert third.background and third.conversation.id == made.id


async def test_a_response_under_way_tells_what_was_asked() -> None:
    async with door(answer=None) as rig:
        begun = await respond(rig, "hi", background=True, metadata={"a": "b"})
        assert await told_elsewhere(rig, begun) == begun
        await rig.client.responses.cancel(begun.id)


async def test_a_retry_is_told_what_the_first_try_was_told() -> None:
    async with door() as rig:
        headers = {"Idempotency-Key": "one"}
        first = await respond(rig, "hi", metadata={"a": "b"}, extra_headers=headers)
        assert await respond(rig, "hi", metadata={"a": "b"}, extra_headers=headers) == first


async def test_the_model_sees_nothing_of_it_and_other_tenants_neither() -> None:
    async with door() as rig:
        await respond(rig, "hi", metadata={"a": "b"})
        await respond(rig, "hi")
        first, second = rig.service.link.generations
        assert first.tokens == second.tokens


async def test_a_turn_of_before_is_told_as_well_as_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async with door() as rig:
        monkeypatch.setattr(KeptResponse, "annotations", {})
        plain = await respond(rig, "hi", truncation="auto", metadata={"a": "b"})
        monkeypatch.setattr(KeptResponse, "annotations", {"http.response": "{"})
        newer = await respond(rig, "hi", truncation="auto")
        for response in (plain, newer):
            found = await rig.client.responses.retrieve(response.id)
            assert (found.output_text, found.truncation, found.metadata) == (response.output_text, "auto", {})
            assert abs(found.created_at - response.created_at) < 60


def test_little_that_would_become_much_is_not_read() -> None:
    """Any caller may write the annotation over gRPC."""

    def read(annotations: dict[str, str]) -> KeptResponse | None:
        state, usage = TurnState.COMMITTED, Usage()
        turn = Turn("s", "r", state, "", None, usage, 1, 0, 0, "", (), None, annotations=annotations)
        return KeptResponse.from_turn(turn)

    largest = KeptResponse(1, "tiny", ResponseRequest(instructions="a" * 1_000_000))
    assert read(largest.annotations) == largest
    bomb = zlib.compress(b'{"created": 1, "model": "' + b"a" * 100_000_000 + b'"}', 9)
    value = "zlib:" + base64.b85encode(bomb).decode()
    tracemalloc.start()
    try:
        assert read({"http.response": value}) is None
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


async def test_a_retry_of_what_was_not_stored_is_told_so() -> None:
    async with door() as rig:
        kept = await respond(rig, "hi")
        for number, previous in enumerate((None, kept.id)):
            options = {"store": False, "previous_response_id": previous}
            headers = {"Idempotency-Key": f"key {number}"}
            await respond(rig, "again", extra_headers=headers, **options)
            with pytest.raises(ConflictError) as caught:
                await respond(rig, "again", extra_headers=headers, **options)
            assert (caught.value.code, caught.value.param) == ("response_not_stored", "Idempotency-Key")
            await respond(rig, "again", extra_headers={"Idempotency-Key": f"new {number}"}, **options)
        sessions = (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions
        assert len(sessions) == 1
        # One that was stored and erased is not there, and is not made again.
        headers = {"Idempotency-Key": "erased"}
        erased = await respond(rig, "hi", extra_headers=headers)
        await rig.client.responses.delete(erased.id)
        with pytest.raises(NotFoundError):
            await respond(rig, "hi", extra_headers=headers)


async def test_how_long_cached_state_is_wanted_is_a_hint() -> None:
    async with door() as rig:
        cases: list[tuple[dict[str, Any], float | None, bool]] = [
            ({}, None, False),
            ({"prompt_cache_retention": "in_memory"}, None, False),
            ({"prompt_cache_retention": "24h"}, 4.0, False),
            ({"extra_body": {"prompt_cache_options": {"ttl": "12h"}}}, 4.0, False),
            ({"store": False}, None, False),
            ({"store": False, "previous_response_id": ""}, None, True),
        ]
        first = await respond(rig, "hi")
        for asked, importance, finished in cases:
            if "previous_response_id" in asked:
                asked["previous_response_id"] = first.id
            response = await respond(rig, "hi", **asked)
            hints = rig.service.link.generations[-1].hints
            given = (None, False) if hints is None else (hints.importance, hints.finished)
            assert given == (importance if importance or not finished else 1.0, finished), asked
            if "prompt_cache_retention" in asked:
                found = await rig.client.responses.retrieve(response.id)
                assert found.prompt_cache_retention == asked["prompt_cache_retention"]
        assert ResponseId.parse(response.id) is not None
