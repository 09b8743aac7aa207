"""What is wrong with a request is said with its status, its field and its code, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest

from pensieve.http.common.requests import SamplingFields
from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door

RESPONSES, CHAT, CONVERSATIONS = "/v1/responses", "/v1/chat/completions", "/v1/conversations"
PICTURE = {"url": "data:image/png;base64,AAAA"}
SOUND = {"data": "", "format": "wav"}
LONG = "word " * 2000
"""More than the context holds."""
NOWHERE = f"conv_{'0' * 32}"


def asks(**fields: Any) -> dict[str, Any]:
    """A response."""
    return {"input": "hi", **fields}


def part(kind: str, **fields: Any) -> dict[str, Any]:
    """A response whose input is one message of one part."""
    return {"input": [{"role": "user", "content": [{"type": kind, **fields}]}]}


def says(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    """A chat completion."""
    return {"messages": [{"role": role, "content": content}], **fields}


def chat_part(kind: str, **fields: Any) -> dict[str, Any]:
    return says([{"type": kind, **fields}])


TYPE, JSON, GONE = "invalid_type", "invalid_json", "missing_required_parameter"
NOT_DONE, FIELD, LENGTH = "unsupported_parameter", "field_invalid", "context_length_exceeded"
BAD: tuple[tuple[str, dict[str, Any] | bytes, int, str | None, str | None], ...] = (
    # What is no JSON, or not an object.
    (RESPONSES, b"", 400, None, JSON),
    (RESPONSES, b"{", 400, None, JSON),
    (RESPONSES, b"hi", 400, None, JSON),
    (RESPONSES, b"\xff\xfe", 400, None, JSON),
    (RESPONSES, b'{"input": "\xff"}', 400, None, JSON),
    (RESPONSES, b'{"input": "\\ud800"}', 400, None, JSON),
    (RESPONSES, b'{"input": "hi"} and more', 400, None, JSON),
    (RESPONSES, b'{"input": "hi", "temperature": NaN}', 400, None, JSON),
    (RESPONSES, b'{"input": "hi", "top_p": -Infinity}', 400, None, JSON),
    (RESPONSES, b'{"input": "hi", "temperature": 1e999}', 400, "temperature", TYPE),
    (RESPONSES, b"[" * 100_000, 400, None, TYPE),
    (RESPONSES, b'{"input": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "input[0]", TYPE),
    (RESPONSES, b"null", 400, None, TYPE),
    (RESPONSES, b'"hi"', 400, None, TYPE),
    (CHAT, b"{", 400, None, JSON),
    (CHAT, b"[]", 400, None, TYPE),
    (CONVERSATIONS, b"{", 400, None, JSON),
    (RESPONSES, b"\xef\xbb\xbf{}", 400, None, JSON),
    (RESPONSES, '{"input": "hi"}'.encode("utf-16"), 400, None, JSON),
    (RESPONSES, b'{"input": "hi", "metadata": {"a": "\\udc00"}}', 400, None, JSON),
    # Fields of the wrong type.
    (RESPONSES, asks(input=7), 400, "input", TYPE),
    (RESPONSES, asks(input=["hi"]), 400, "input[0]", TYPE),
    (RESPONSES, asks(model=5), 400, "model", TYPE),
    (RESPONSES, asks(previous_response_id=5), 400, "previous_response_id", TYPE),
    (RESPONSES, asks(conversation={"id": 5}), 400, "conversation.id", TYPE),
    (RESPONSES, asks(max_output_tokens=1.5), 400, "max_output_tokens", TYPE),
    (RESPONSES, asks(metadata=[]), 400, "metadata", TYPE),
    (RESPONSES, asks(metadata={"a": 1}), 400, "metadata", TYPE),
    (RESPONSES, asks(stream="yes"), 400, "stream", TYPE),
    (RESPONSES, asks(store="no"), 400, "store", TYPE),
    (RESPONSES, asks(instructions=["x"]), 400, "instructions", TYPE),
    (RESPONSES, part("input_text", text=5), 400, "input[0].content[0].text", TYPE),
    (CHAT, {"messages": "hi"}, 400, "messages", TYPE),
    (CHAT, says({"a": 1}), 400, "messages[0].content", TYPE),
    (CHAT, says("x", n="2"), 400, "n", TYPE),
    (CHAT, says("x", seed=1.5), 400, "seed", TYPE),
    (CHAT, says("x", stop=[5]), 400, "stop[0]", TYPE),
    (CHAT, says("x", stream_options={"include_usage": "x"}), 400, "stream_options.include_usage", TYPE),
    (CONVERSATIONS, {"items": "x"}, 400, "items", TYPE),
    (CONVERSATIONS, {"metadata": {"a": 5}}, 400, "metadata", TYPE),
    # Numbers that no float holds, in fields that are refused.
    (RESPONSES, b'{"input": "hi", "session": 1e400}', 400, "session", NOT_DONE),
    (CHAT, says("x", options={"a": 10**400}), 400, "options", NOT_DONE),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "best_of": -1e400}', 400, "best_of", NOT_DONE),
    # Fields that are missing.
    (RESPONSES, {}, 400, "input", None),
    (RESPONSES, asks(conversation={}), 400, "conversation.id", GONE),
    (RESPONSES, {"input": [{"content": "x"}]}, 400, "input[0].role", None),
    (RESPONSES, {"input": [{"role": "user"}]}, 400, "input[0].content", GONE),
    (RESPONSES, part("input_text"), 400, "input[0].content[0].text", GONE),
    (CHAT, {}, 400, "messages", GONE),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages[0].role", GONE),
    (CHAT, says(None), 400, "messages[0].content", GONE),
    (CHAT, chat_part("text"), 400, "messages[0].content[0].text", GONE),
    # What is not text.
    (RESPONSES, part("input_image", image_url=PICTURE["url"]), 400, "input[0].content[0]", NOT_DONE),
    (RESPONSES, part("input_file", file_id="file-1"), 400, "input[0].content[0]", NOT_DONE),
    (RESPONSES, part("input_audio", input_audio=SOUND), 400, "input[0].content[0]", NOT_DONE),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, 404, "input[0]", "item_not_found"),
    (RESPONSES, {"input": [{"type": "item_reference"}]}, 404, "input[0]", "item_not_found"),
    (CONVERSATIONS, {"items": [{"type": "item_reference", "id": "x"}]}, 400, "items[0]", NOT_DONE),
    (CHAT, chat_part("image_url", image_url=PICTURE), 400, "messages[0].content[0]", NOT_DONE),
    (CHAT, chat_part("input_audio", input_audio=SOUND), 400, "messages[0].content[0]", NOT_DONE),
    (CHAT, chat_part("file", file={"file_id": "x"}), 400, "messages[0].content[0]", NOT_DONE),
    (CHAT, says("x", modalities=["text", "audio"]), 400, "modalities", NOT_DONE),
    (CONVERSATIONS, {"items": part("input_image")["input"]}, 400, "items[0].content[0]", NOT_DONE),
    # Roles, models, ids.
    (RESPONSES, {"input": [{"role": "king", "content": "x"}]}, 400, "input[0].role", NOT_DONE),
    (RESPONSES, {"input": [{"role": "assistant", "content": "x"}]}, 400, "input", None),
    (RESPONSES, asks(model="huge"), 404, "model", "model_not_found"),
    (RESPONSES, asks(previous_response_id="resp_x"), 400, "previous_response_id", "previous_response_not_found"),
    (RESPONSES, asks(conversation=NOWHERE), 404, "conversation", None),
    (RESPONSES, asks(conversation=NOWHERE, previous_response_id="resp_x"), 400, "previous_response_id",
     "mutually_exclusive"),
    (RESPONSES, asks(prompt={"id": "p"}), 400, "prompt", NOT_DONE),
    (CHAT, says("x", role="king"), 400, "messages[0].role", NOT_DONE),
    (CHAT, says("x", model="huge"), 404, "model", "model_not_found"),
    (CHAT, says("x", session="a/b c"), 400, "session", FIELD),
    # Values out of their range, by the door and by the service.
    (RESPONSES, asks(max_output_tokens=0), 400, "max_output_tokens", TYPE),
    (RESPONSES, asks(max_output_tokens=10**30), 400, "max_output_tokens", FIELD),
    (RESPONSES, asks(max_output_tokens=10**400), 400, "max_output_tokens", FIELD),
    (RESPONSES, b'{"input": "hi", "seed": 1' + b"0" * 5000 + b"}", 400, "seed", TYPE),
    (RESPONSES, {"input": [{"role": "user", "content": "x"}] * 20_000}, 400, "input", None),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 20_000}, 400, "messages", None),
    (CHAT, says("x", logit_bias={"9" * 5000: 1}), 400, "logit_bias", None),
    (CHAT, says("x", logit_bias={"\u0663": 1}), 400, "logit_bias", None),
    (CHAT, says("x", session="a\0b"), 400, "session", FIELD),
    (CHAT, says("x", session="\u00e9"), 400, "session", FIELD),
    (CHAT, says("x", session="a" * 20_000), 400, "session", FIELD),
    (RESPONSES, asks(temperature=-1), 400, "temperature", FIELD),
    (RESPONSES, asks(top_p=2), 400, "top_p", FIELD),
    (RESPONSES, asks(truncation="x"), 400, "truncation", None),
    (RESPONSES, asks(metadata={str(n): "x" for n in range(17)}), 400, "metadata", None),
    (RESPONSES, asks(metadata={"k": "x" * 513}), 400, "metadata", None),
    (RESPONSES, asks(input=LONG), 400, None, LENGTH),
    (CHAT, {"messages": []}, 400, "messages", None),
    (CHAT, says("x", n=0), 400, "n", TYPE),
    (CHAT, says("x", n=10**6), 400, "n", FIELD),
    (CHAT, says("x", max_tokens=0), 400, "max_tokens", TYPE),
    (CHAT, says("x", min_tokens=-1), 400, "min_tokens", TYPE),
    (CHAT, says("x", min_tokens=10**30), 400, "min_tokens", FIELD),
    (CHAT, says("x", top_k=-2), 400, "top_k", TYPE),
    (CHAT, says("x", stop=[""]), 400, "stop", FIELD),
    (CHAT, says("x", logit_bias={"1": 1000}), 400, "logit_bias", FIELD),
    (CHAT, says("x", frequency_penalty=9), 400, "frequency_penalty", FIELD),
    (CHAT, says(LONG), 400, None, LENGTH),
    (CONVERSATIONS, {"items": [{"role": "user", "content": "x"}] * 21}, 400, "items", None),
    (CONVERSATIONS, {"metadata": {"k" * 65: "x"}}, 400, "metadata", None),
)  # fmt: skip


async def left_behind(rig: HttpRig) -> int:
    """Sessions that there are."""
    return len((await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions)


async def test_every_one_has_its_status_and_leaves_nothing_behind() -> None:
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        for route, body, status, param, code in BAD:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await http.post(route, content=content)
            case = (route, content[:120], answer.text[:300])
            assert answer.status_code == status, case
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == (param, code), case
            assert error["message"] and error["type"], case
            assert "sampling." not in error["message"], "a path of the service's own"
            assert await left_behind(rig) == 0, case


async def test_a_refused_branch_leaves_nothing_behind() -> None:
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        first = (await http.post(RESPONSES, json=asks())).json()["id"]
        await http.post(RESPONSES, json=asks(previous_response_id=first))
        answer = await http.post(RESPONSES, json=asks(previous_response_id=first, temperature=-1))
        assert answer.status_code == 400
        assert await left_behind(rig) == 1
        # Under a key that was used already it is another call, and what the first one made stays.
        kept = {"Idempotency-Key": "one"}
        assert (await http.post(RESPONSES, json=asks(), headers=kept)).status_code == 200
        assert (await http.post(RESPONSES, json=asks(temperature=-1), headers=kept)).status_code == 409
        assert await left_behind(rig) == 2


PATHS: tuple[tuple[str, str, int], ...] = (
    ("GET", "/v1/nothing", 404),
    ("POST", "/v1/embeddings", 404),
    ("PUT", "/v1/responses", 405),
    ("OPTIONS", "/v1/responses", 405),
    ("GET", "/v1/models/huge", 404),
    ("GET", f"/v1/responses/{'a' * 3000}", 404),
    ("GET", "/v1/responses/%ff%00", 404),
    ("GET", "/v1/responses/resp_x%2f..%2fy", 404),
    ("GET", "/v1/responses/resp_%0d%0aX:y", 404),
    ("DELETE", "/v1/responses/resp_x", 404),
    ("POST", "/v1/responses/resp_x/cancel", 404),
    ("GET", "/v1/responses/resp_x/input_items", 404),
    ("GET", "/v1/conversations/x", 404),
    ("POST", f"/v1/conversations/{NOWHERE}", 404),
    ("DELETE", f"/v1/conversations/{NOWHERE}", 404),
    ("GET", f"/v1/conversations/{NOWHERE}/items", 404),
    ("GET", f"/v1/conversations/{NOWHERE}/items/msg_x", 404),
)


async def test_paths_and_ids_that_are_not_there() -> None:
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        for method, path, status in PATHS:
            answer = await http.request(method, path, content=b"{}" if method == "POST" else None)
            assert answer.status_code == status, (method, path, answer.text)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_body_without_a_length_is_cut_where_it_gets_too_large() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1000:  # bounded, so that a door which reads on fails here and not by a timeout
            sent += 1
            yield b" " * 1000
            await asyncio.sleep(0)

    async with (
        door(max_body_bytes=10_000) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=60) as http,
    ):
        try:
            answer = await http.post(RESPONSES, content=endless())
        except httpx.WriteError:
            pass  # refused while it was still being sent
        else:
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
        assert await left_behind(rig) == 0
        counted = 'pensieve_http_calls_total{route="/v1/responses",status="413"} 1.0'
        assert counted in (await http.get("/metrics")).text


@pytest.mark.parametrize("route", [RESPONSES, CHAT])
async def test_who_leaves_in_the_middle_of_a_stream_leaves_no_turn(route: str) -> None:
    body = asks(stream=True) if route == RESPONSES else says("hi", stream=True)
    async with door(answer=None) as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:

        async def listen() -> None:
            async with http.stream("POST", route, json=body) as answer:
                async for _ in answer.aiter_lines():
                    pass

        listening = asyncio.create_task(listen())
        async with asyncio.timeout(60):
            while not rig.service.link.generations:
                await asyncio.sleep(0.01)
            listening.cancel()
            while rig.service.conversations.turns.running:
                await asyncio.sleep(0.01)
        sessions = (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions
        assert [one.item_count for one in sessions] == [0]


async def test_another_tenants_key_finds_none_of_it() -> None:
    async with (
        door() as rig,
        httpx.AsyncClient(base_url=rig.url, headers={"authorization": "Bearer acme"}) as ours,
        httpx.AsyncClient(base_url=rig.url, headers={"authorization": "Bearer other"}) as theirs,
    ):
        made = {"items": [{"role": "user", "content": "secret"}]}
        conversation = (await ours.post(CONVERSATIONS, json=made)).json()["id"]
        response = (await ours.post(RESPONSES, json=asks(background=True))).json()["id"]
        item = (await ours.get(f"{CONVERSATIONS}/{conversation}/items")).json()["data"][0]["id"]
        in_it, after = asks(conversation=conversation), asks(previous_response_id=response)
        for method, path, body, status in (
            ("GET", f"{RESPONSES}/{response}", None, 404),
            ("GET", f"{RESPONSES}/{response}?stream=true&starting_after=0", None, 404),
            ("GET", f"{RESPONSES}/{response}/input_items", None, 404),
            ("POST", f"{RESPONSES}/{response}/cancel", None, 404),
            ("DELETE", f"{RESPONSES}/{response}", None, 404),
            ("GET", f"{CONVERSATIONS}/{conversation}", None, 404),
            ("POST", f"{CONVERSATIONS}/{conversation}", {"metadata": {}}, 404),
            ("DELETE", f"{CONVERSATIONS}/{conversation}", None, 404),
            ("GET", f"{CONVERSATIONS}/{conversation}/items", None, 404),
            ("GET", f"{CONVERSATIONS}/{conversation}/items/{item}", None, 404),
            ("POST", RESPONSES, in_it, 404),
            ("POST", RESPONSES, after, 400),
        ):
            answer = await theirs.request(method, path, json=body)
            assert answer.status_code == status, (method, path, answer.text)
            assert "secret" not in answer.text
        assert (await ours.get(f"{RESPONSES}/{response}")).status_code == 200
        assert (await ours.get(f"{CONVERSATIONS}/{conversation}/items/{item}")).status_code == 200


def test_minus_one_is_off_as_in_vllm() -> None:
    assert SamplingFields(top_k=-1).options() == {"top_k": 0}
