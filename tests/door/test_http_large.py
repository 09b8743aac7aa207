"""Large bodies: what takes long with one is done beside the event loop, so that other callers' streams go on."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from starlette.requests import Request

from pensieve.client import FunctionCall, Role
from pensieve.http import chat
from pensieve.http.common import bodies
from pensieve.http.common.bodies import BodyReader
from pensieve.http.common.contents import HashedHistory, Message, MessageHistory
from pensieve.http.common.failures import HttpFailure
from pensieve.http.responses import endpoint as responses
from pensieve.http.responses import objects
from pensieve.http.responses.requests import InputItem, ResponseRequest, messages_of
from support.http.http_rig import door
from support.http.tool_rig import ROME, tool_door
from support.tool_templates import WEATHER

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FILLING = {"user": "x" * 2 * bodies.SMALL_BYTES}
"""A field without effect makes a body large."""
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [WEATHER]
LONG = {"instructions": "Be brief. " * 20_000}


class Gate:
    """Lets the first call of a function wait, in whatever thread it is, until ``opened``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.in_time = False
        """Whether it was opened while the call waited."""
        self._function = function

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self.entered.is_set():
            self.entered.set()
            self.in_time = self.opened.wait(10)
        return self._function(*args, **options)


STAGES: tuple[tuple[Any, str, str, dict[str, Any]], ...] = (
    (bodies, "_decode", CHAT, SAID),
    (chat, "tool_use", CHAT, {**SAID, "tools": TOOLS}),
    (chat, "HashedHistory", CHAT, SAID),
    (bodies, "_decode", "/v1/completions", {"prompt": "hi"}),
    (bodies, "_decode", "/v1/conversations", {}),
    (bodies, "_decode", RESPONSES, {"input": "hi"}),
    (responses, "tool_use", RESPONSES, {"input": "hi"}),
    (responses, "first_history", RESPONSES, {"input": "hi"}),
    (objects.zlib, "compress", RESPONSES, {"input": "hi", **LONG}),
)


@pytest.mark.parametrize(("place", "name", "route", "body"), STAGES)
async def test_others_stream_while_a_large_body_is_read(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, route: str, body: dict[str, Any]
) -> None:
    gate = Gate(getattr(place, name))
    async with tool_door(ROME) as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        assert (await http.post(CHAT, json=SAID)).status_code == 200
        monkeypatch.setattr(place, name, gate)
        large = asyncio.create_task(http.post(route, json={**body, **FILLING}))
        async with asyncio.timeout(60):
            while not gate.entered.is_set():
                await asyncio.sleep(0.01)
            async with http.stream("POST", CHAT, json={**SAID, "stream": True}) as answer:
                assert "data: [DONE]" in [line async for line in answer.aiter_lines()]
            assert not large.done()
            gate.opened.set()
            assert (await large).status_code in (200, 400)
    assert gate.in_time, "the event loop waited for it"


async def test_small_bodies_are_read_at_once() -> None:
    read_by = BodyReader(1 << 20)

    def made(_: ResponseRequest) -> int:
        return threading.get_ident()

    for filling, is_aside in ((10, False), (bodies.SMALL_BYTES - 100, False), (bodies.SMALL_BYTES, True)):
        request = request_with(json.dumps({"input": "x" * filling}).encode())
        read_in = await read_by.read(request, ResponseRequest, made)
        assert (read_in != threading.get_ident()) is is_aside
        assert (await read_by.offload(request, threading.get_ident) == read_in) is True
    read_by.close()


async def test_a_thread_that_the_system_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    data = json.dumps({"input": "hi", **FILLING}).encode()
    read_by = BodyReader(len(data))

    async def read() -> str:
        return await read_by.read(request_with(data), ResponseRequest, lambda body: str(body.input))

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        with pytest.raises(HttpFailure) as refused:
            await read()
        assert refused.value.code == "server_overloaded"
    assert await read() == "hi"
    read_by.close()


async def test_what_is_wrong_with_a_large_body_is_told() -> None:
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        for route, body, param in (
            (CHAT, {**SAID, "n": "two"}, "n"),
            (CHAT, {"messages": [{"role": "user", "content": "x"}] * 20_000}, "messages"),
            (CHAT, {**SAID, "logit_bias": {str(number): 1 for number in range(20_000)}}, "logit_bias"),
            (CHAT, {**SAID, "stop": ["x"] * 20_000}, "stop"),
            ("/v1/completions", {"prompt": "x", "stop": ["x"] * 20_000}, "stop"),
            ("/v1/completions", {"prompt": [1] * 50_000 + ["x"]}, "prompt"),
            (RESPONSES, {"input": "hi", "metadata": {"k": "x" * 600}}, "metadata"),
        ):
            answer = await http.post(route, json={**body, **FILLING})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        broken = await http.post(CHAT, content=json.dumps({**SAID, **FILLING})[:-1])
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")


def request_with(data: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


async def test_a_body_that_waits_for_the_thread_takes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(bodies._decode)
    monkeypatch.setattr(bodies, "_decode", gate)
    monkeypatch.setattr(bodies, "MAX_LARGE_BODIES", 2)
    data = json.dumps({"input": "hi", **FILLING}).encode()
    read_by = BodyReader(len(data))

    async def read() -> ResponseRequest:
        return await read_by.read(request_with(data), ResponseRequest, lambda body: body)

    two = [asyncio.create_task(read()) for _ in range(2)]
    async with asyncio.timeout(60):
        while not gate.entered.is_set():
            await asyncio.sleep(0.01)
        assert read_by.free_bytes == 0
        with pytest.raises(HttpFailure) as refused:
            await read()
        assert refused.value.code == "server_overloaded"
        gate.opened.set()
        assert [one.input for one in await asyncio.gather(*two)] == ["hi", "hi"]
    assert read_by.free_bytes == 2 * len(data)
    read_by.close()


def test_the_collector_rests_only_while_a_large_body_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(data: bytes, **_: Any) -> Any:
        if _.get("type") is ResponseRequest:  # what looks for unknown fields makes no objects
            seen.append(gc.isenabled())
        return decode(data, **_)

    seen: list[bool] = []
    decode = bodies.msgspec.json.decode
    monkeypatch.setattr(bodies.msgspec.json, "decode", asked)
    gc.enable()  # commands that an earlier test called in this process may have left it off
    for data in (b'{"input": "hi"}', json.dumps({"input": "hi", **FILLING}).encode()):
        bodies._decode(data, ResponseRequest, ResponseRequest.validated)
        assert gc.isenabled()
    with pytest.raises(HttpFailure):
        bodies._decode(b'{"input":' * bodies.SMALL_BYTES, ResponseRequest, ResponseRequest.validated)
    assert gc.isenabled() and seen == [True, False, False]


def test_two_large_bodies_at_once_leave_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread looks while the first one has it off, and switches it off when the first has it on again."""
    data, decode = json.dumps({"input": "hi", **FILLING}).encode(), bodies.msgspec.json.decode
    looked, ended = threading.Event(), threading.Event()

    def is_enabled() -> bool:
        if threading.current_thread() is second:
            looked.set()
        return gc.isenabled()

    def disable() -> None:
        assert threading.current_thread() is not second or ended.wait(20)
        gc.disable()

    def decode_first(data: bytes, **options: Any) -> Any:
        if threading.current_thread() is not second:
            second.start()
            looked.wait(0.2)
        return decode(data, **options)

    second = threading.Thread(target=bodies._decode_without_gc, args=(data, ResponseRequest))
    monkeypatch.setattr(
        bodies, "gc", SimpleNamespace(isenabled=is_enabled, disable=disable, enable=gc.enable)
    )
    monkeypatch.setattr(bodies.msgspec.json, "decode", decode_first)
    gc.enable()
    bodies._decode_without_gc(data, ResponseRequest)
    ended.set()
    second.join(20)
    assert gc.isenabled()


def test_names_are_those_that_stand_in_histories() -> None:
    call = FunctionCall("f", '{"b": 1,"a":2}', "call_1")
    history = (
        Message(Role.USER, "Grüß dich"),
        Message(Role.ASSISTANT, "", (call,)),
        Message(Role.TOOL, "3", call_id="call_1"),
        Message(Role.ASSISTANT, "It is 3."),
    )
    talk = MessageHistory("Be brief.", history, (Message(Role.USER, "\ud800?"),), '[{"type":"function"}]')
    named = HashedHistory(talk, b"scope")
    assert named.mark == "fddb80df2511cd17c2adc340f719d40a"
    assert named.last_answer == ("eebb0b1974cb6b0c81fbd72f54342d97", history[-1])
    assert named.history_key.hex() == "3e2ecfbdf2d6291e65a5c888c60c6614"
    assert named.key_after("x").hex() == named.key_after("x").hex() == "69c4666a16cb670176506eb18b7a528d"
    first = HashedHistory(replace(talk, drops_oldest=True, history=(), tools=""), b"scope")
    assert (first.mark, first.last_answer) == ("50034f577737ca1ed687c8b3f135be44", None)


def test_which_items_are_one_answer() -> None:
    told = {
        "w": InputItem(role="assistant", content="w"),
        "c": InputItem(type="function_call", name="f", arguments="{}", call_id="c"),
        "r": InputItem(type="reasoning"),
        "u": InputItem(role="user", content="u"),
        "o": InputItem(type="function_call_output", call_id="c", output="o"),
    }

    def read(items: str) -> list[str]:
        found = messages_of([told[one] for one in items], "input")
        return [one.text + "c" * len(one.calls) for one in found]

    assert read("uwwu") == ["u", "w", "w", "u"]
    assert read("uwcrcwoou") == ["u", "wwcc", "o", "o", "u"]
    assert read("wwcw") == ["w", "wwc"]
    assert read("rcrc") == ["cc"]
    assert read("cuc") == ["c", "u", "c"]
