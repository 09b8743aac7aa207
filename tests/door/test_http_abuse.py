"""Clients of the HTTP door that mean no good, or know no better: keys used twice, odd numbers, objects in use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest

from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door
from support.service.service_rig import encode

RESPONSES = "/v1/responses"


async def test_the_key_of_a_stored_response_does_not_erase_it() -> None:
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        key = {"Idempotency-Key": "one"}
        stored = (await http.post(RESPONSES, json={"input": "hi"}, headers=key)).json()
        again = await http.post(RESPONSES, json={"input": "hi", "store": False}, headers=key)
        assert again.status_code == 200 and again.json()["id"] != stored["id"]
        assert (await http.get(f"{RESPONSES}/{stored['id']}")).json() == stored
        assert (await http.get(f"{RESPONSES}/{again.json()['id']}")).status_code == 404
        other = await http.post(RESPONSES, json={"input": "ho"}, headers=key)
        assert (other.status_code, other.json()["error"]["param"]) == (409, "Idempotency-Key")
        assert (await http.post(RESPONSES, json={"input": "hi"}, headers=key)).json() == stored


async def test_numbers_in_queries() -> None:
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        made = (await http.post(RESPONSES, json={"input": "hi", "background": True})).json()["id"]
        for wrong in ("-1", "9" * 5000, "%D9%A3", "1e3", "", "+1", "%C2%B2"):
            for query in (f"?stream=true&starting_after={wrong}", f"/input_items?limit={wrong}"):
                answer = await http.get(f"{RESPONSES}/{made}{query}")
                assert answer.status_code == 400, query[:60]
                assert answer.json()["error"]["param"] in ("starting_after", "limit")
        beyond = await http.get(f"{RESPONSES}/{made}?stream=true&starting_after=100000")
        assert beyond.text == "data: [DONE]\n\n"


@asynccontextmanager
async def streaming(rig: HttpRig, **asked: Any) -> AsyncIterator[tuple[str, asyncio.Task[str]]]:
    """A response that has begun to stream: its id, and the task that reads it to the end."""
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def listen() -> str:
        text = ""
        async with http.stream("POST", RESPONSES, json={"input": "hi", "stream": True, **asked}) as answer:
            async for part in answer.aiter_text():
                text += part
                if "response.output_text.delta" in text and not begun.done():
                    line = next(line for line in text.splitlines() if line.startswith("data: "))
                    begun.set_result(json.loads(line.removeprefix("data: "))["response"]["id"])
        return text

    async with httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        listening = asyncio.create_task(listen())
        generation = await rig.service.link.next_generation()
        generation.admit()
        generation.emit(*encode("hello"))
        async with asyncio.timeout(60):
            yield await begun, listening


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_that_is_deleted_while_it_streams_is_gone(background: bool) -> None:
    async with door(answer=None) as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        async with streaming(rig, background=background) as (made, listening):
            gone = await http.delete(f"{RESPONSES}/{made}")
            assert gone.json() == {"id": made, "object": "response", "deleted": True}
            text = await listening
            assert "event: error" in text and text.endswith("data: [DONE]\n\n")
        assert (await http.get(f"{RESPONSES}/{made}")).status_code == 404
        assert (await http.delete(f"{RESPONSES}/{made}")).status_code == 404
        after = await http.post(RESPONSES, json={"input": "x", "previous_response_id": made})
        assert after.status_code == 400
        assert not rig.service.conversations.turns.running
        assert not (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions


async def test_a_conversation_outlives_a_response_that_is_deleted_while_it_streams() -> None:
    async with door(answer=None) as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        conversation = (await http.post("/v1/conversations", json={})).json()["id"]
        async with streaming(rig, conversation=conversation) as (made, listening):
            busy = await http.post(RESPONSES, json={"input": "x", "conversation": conversation})
            assert (busy.status_code, busy.json()["error"]["code"]) == (409, "turn_in_progress")
            assert (await http.delete(f"{RESPONSES}/{made}")).status_code == 200
            await listening
        assert (await http.get(f"{RESPONSES}/{made}")).status_code == 404
        assert (await http.get(f"/v1/conversations/{conversation}")).status_code == 200
        async with streaming(rig, conversation=conversation) as (made, listening):
            assert (await http.delete(f"/v1/conversations/{conversation}")).json()["deleted"] is True
            assert "event: error" in await listening
        assert (await http.get(f"{RESPONSES}/{made}")).status_code == 404
        assert not rig.service.conversations.turns.running


async def test_two_clients_take_up_one_stream() -> None:
    async with (
        door(answer=None) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=60) as http,
        streaming(rig, background=True) as (made, listening),
    ):
        others = [
            asyncio.create_task(http.get(f"{RESPONSES}/{made}?stream=true&starting_after={after}"))
            for after in (0, 3)
        ]
        generation = rig.service.link.generations[-1]
        generation.emit(*encode(" world"))
        generation.finish()
        whole = (await listening).split("\n\n")
        for other, after in zip(others, (0, 3), strict=True):
            assert (await other).text.split("\n\n") == whole[after + 1 :]


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        (RESPONSES, {"input": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ],
)
async def test_who_leaves_at_any_event_leaves_no_turn(route: str, asked: dict[str, Any]) -> None:
    events = 5 if route == RESPONSES else 1
    async with door(answer=None) as rig:
        for leaving in range(events + 1):
            async with (
                httpx.AsyncClient(base_url=rig.url, timeout=60) as http,
                http.stream("POST", route, json={**asked, "stream": True}) as answer,
            ):
                generation = await rig.service.link.next_generation()
                generation.admit()
                generation.emit(*encode("hello"))
                seen = 0
                async for line in answer.aiter_lines():
                    seen += line.startswith("data: ")
                    if seen >= leaving:
                        break
            async with asyncio.timeout(60):
                while rig.service.conversations.turns.running or not generation.cancelled:
                    await asyncio.sleep(0.01)
        sessions = (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions
        assert all(not one.HasField("active_turn") and one.revision <= 1 for one in sessions)
