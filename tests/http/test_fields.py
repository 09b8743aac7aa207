"""Every field of a request is honoured, refused by name, or listed in the documentation as one without effect."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import pytest

from pensieve.http.chat import ChatRequest
from pensieve.http.common import requests as fields
from pensieve.http.completions import CompletionRequest
from pensieve.http.messages import MessagesRequest
from pensieve.http.responses.requests import ResponseRequest
from support.http.http_rig import door
from support.service.service_rig import says

HI = [{"role": "user", "content": "hi"}]
ENDPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": HI}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi"}),
    "/v1/messages": (MessagesRequest, {"messages": HI, "max_tokens": 100}),
    "/v1/responses": (ResponseRequest, {"input": "hi"}),
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_what_would_change_the_answer_is_refused_by_name(path: str) -> None:
    kind, body = ENDPOINTS[path]
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        for name in (*kind.REFUSED, "whatever"):
            answer = await http.post(path, json={**body, name: SCHEMA})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name), answer.text
            code = "unknown_parameter" if name == "whatever" else "unsupported_parameter"
            assert error["code"] == code and name in error["message"]
        assert not rig.service.link.generations
        nothing: dict[str, Any] = dict.fromkeys((*kind.REFUSED, "whatever"))
        for name, values in fields.ACCEPTED_VALUES.items():
            if name in kind.REFUSED:
                nothing[name] = values[0]
        anything = dict.fromkeys(kind.WITHOUT_EFFECT.keys() - set(names(kind)), "x")
        answer = await http.post(path, json={**body, **nothing, **anything})
        assert answer.status_code == 200, answer.text


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "name", "value", "at"),
    [
        ("/v1/chat/completions", "stream_options", {"include_usage": True}, ""),
        ("/v1/chat/completions", "tools", [FUNCTION], "[0]"),
        ("/v1/chat/completions", "tools", [FUNCTION], "[0].function"),
        ("/v1/completions", "stream_options", {}, ""),
        ("/v1/messages", "output_config", {}, ""),
        ("/v1/messages", "thinking", {"type": "adaptive"}, ""),
        ("/v1/messages", "tool_choice", {"type": "auto"}, ""),
        ("/v1/messages", "tools", [{"name": "f", "input_schema": {}}], "[0]"),
        ("/v1/responses", "text", {}, ""),
        ("/v1/responses", "prompt_cache_options", {}, ""),
        ("/v1/responses", "tools", [{"type": "function", "name": "f"}], "[0]"),
    ],
)
async def test_what_options_and_tools_have_not_is_refused_by_name(
    path: str, name: str, value: Any, at: str
) -> None:
    _, body = ENDPOINTS[path]
    body = {**body, name: copy.deepcopy(value)}
    if name == "tools":
        body["tool_choice"] = {"type": "none"} if path == "/v1/messages" else "none"
    place = body[name][0] if at else body[name]
    place = place["function"] if at == "[0].function" else place
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        place["whatever"] = None  # a field that was left out
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        place["whatever"] = 1
        answer = await http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unknown_parameter"), answer.text
        assert error["param"] == f"{name}{at}.whatever"


async def test_a_tool_may_ask_for_what_holds_anyway() -> None:
    tool = {"type": "function", "name": "f", "async": False, "allowed_callers": ["direct"]}
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        for deferred, status in ((False, 200), (True, 400)):
            body = {"input": "hi", "tool_choice": "none", "tools": [{**tool, "defer_loading": deferred}]}
            answer = await http.post("/v1/responses", json=body)
            assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("tools[0].defer_loading", "unsupported_parameter")


def names(kind: type[msgspec.Struct]) -> list[str]:
    return [one.encode_name for one in msgspec.structs.fields(kind)]


def test_the_documentation_lists_the_fields_without_effect() -> None:
    text = (Path(__file__).parents[2] / "docs/http.md").read_text()
    for path, (kind, _) in ENDPOINTS.items():
        (row,) = re.findall(rf"^\| `{path}` \| (.*) \|$", text, re.M)
        assert sorted(re.findall(r"`(\w+)`", row)) == sorted(kind.WITHOUT_EFFECT), path
        assert set(kind.REFUSED) & set(names(kind)) <= {"response_format"}
        assert not set(kind.REFUSED) & set(kind.WITHOUT_EFFECT)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_stop_tokens(path: str) -> None:
    _, body = ENDPOINTS[path]
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        rig.service.link.answer = lambda _: says("hello")
        answer = await http.post(path, json={**body, "stop_token_ids": [5, 6]})
        assert answer.status_code == 200, answer.text
        assert rig.service.link.generations[-1].sampling.stop_token_ids == (5, 6)
        refused = await http.post(path, json={**body, "stop_token_ids": [10**6]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_token_ids")


async def test_deprecated_calls_in_a_history_are_not_dropped() -> None:
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
        answer = await http.post("/v1/chat/completions", json={"messages": [*HI, call, *HI]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].function_call")
