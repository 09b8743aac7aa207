"""Forms of answers through the door: which names ask for one, what reaches the engine, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest
from openai import BadRequestError

from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door
from support.http.tool_rig import ROME, spoken, tool_door
from support.tool_templates import WEATHER

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "x", "schema": SCHEMA, "strict": True}
TEXT_FORMAT = {"type": "json_schema", **NAMED}
CHOICE = ["yes", "no"]
LARK = 'start: "a" | "b"'
HONOURED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, "schema"),
    (CHAT, {"response_format": {"type": "json_object"}}, "object"),
    (RESPONSES, {"text": {"format": TEXT_FORMAT}}, "schema"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "object"),
    *((path, {"guided_json": SCHEMA}, "schema") for path in (CHAT, COMPLETIONS)),
    *((path, {"guided_json": json.dumps(SCHEMA)}, "schema") for path in (CHAT, COMPLETIONS)),
    *((path, {"guided_regex": "[ab]+"}, "regex") for path in (CHAT, COMPLETIONS)),
    *((path, {"guided_choice": CHOICE}, "choice") for path in (CHAT, COMPLETIONS)),
    *((path, {"guided_grammar": LARK}, "lark") for path in (CHAT, COMPLETIONS)),
    *((path, {"structured_outputs": {"json": SCHEMA}}, "schema") for path in (CHAT, COMPLETIONS)),
    (COMPLETIONS, {"structured_outputs": {"json_object": True}}, "object"),
    (CHAT, {"structured_outputs": {"regex": "[ab]+"}}, "regex"),
    (CHAT, {"structured_outputs": {"choice": CHOICE}}, "choice"),
    (CHAT, {"structured_outputs": {"grammar": LARK}}, "lark"),
]
FREE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"response_format": {"type": "text"}}),
    (CHAT, {"response_format": None, "guided_json": None, "structured_outputs": None}),
    (RESPONSES, {"text": {"format": {"type": "text"}}}),
]


def answer_part(rig: HttpRig) -> tuple[str, Any]:
    """The kind and the text of the grammar that the last turn's answer follows."""
    grammar = rig.service.link.generations[-1].sampling.grammar
    assert grammar is not None
    (part,) = (one for one in json.loads(grammar.text)["grammars"] if one["name"] == "answer")
    assert grammar.step_items == (2000 if "json_schema" in part or '"yes"' in part["lark_grammar"] else 500)
    if "json_schema" not in part:
        return "lark", part["lark_grammar"]
    assert part["json_schema"].pop("x-guidance") == {"whitespace_pattern": "[ \\t\\r\\n]{1,8}"}
    return "schema", part["json_schema"]


EXPECTED: dict[str, tuple[str, Any]] = {
    "schema": ("schema", SCHEMA), "object": ("schema", {"type": "object"}), "regex": ("lark", "start: /[ab]+/"),
    "choice": ("lark", 'start: "yes" | "no"'), "lark": ("lark", LARK),
}  # fmt: skip


async def test_each_name_asks_for_the_form() -> None:
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        for path, fields, wanted in HONOURED:
            answer = await http.post(path, json={**BODIES[path], **fields})
            assert answer.status_code == 200, (path, fields, answer.text)
            assert answer_part(rig) == EXPECTED[wanted], (path, fields)
            if path == RESPONSES:
                shown = (await http.get(f"{path}/{answer.json()['id']}")).json()
                assert shown["text"] == answer.json()["text"]
                told = {name: one for name, one in shown["text"]["format"].items() if one is not None}
                assert told == fields["text"]["format"]
        for path, fields in FREE:
            answer = await http.post(path, json={**BODIES[path], **fields})
            assert answer.status_code == 200, answer.text
            assert rig.service.link.generations[-1].sampling.grammar is None


def with_schema(schema: Any, path: str = CHAT) -> dict[str, Any]:
    named = {"name": "x", "schema": schema}
    if path == RESPONSES:
        return {"text": {"format": {"type": "json_schema", **named}}}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


DEEP: Any = {}
for _ in range(120):
    DEEP = {"items": DEEP}
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    *(
        (path, with_schema({"properties": {"a": {"not": {}}}}, path), param, "/properties/a: the keyword 'not'")
        for path, param in ((CHAT, "response_format"), (RESPONSES, "text.format"))
    ),
    (CHAT, {"guided_json": {"uniqueItems": True}}, "guided_json", "'uniqueItems' is not supported"),
    (COMPLETIONS, {"structured_outputs": {"json": {"if": {}}}}, "structured_outputs.json", "'if'"),
    (CHAT, with_schema({"$ref": "#/$defs/x"}), "response_format", "does not exist"),
    (CHAT, with_schema({"type": "string", "pattern": "("}), "response_format", "unclosed group"),
    (CHAT, with_schema({"type": "wat"}), "response_format", "wat"),
    (CHAT, with_schema(DEEP), "response_format", "deeper than 100"),
    (CHAT, with_schema({"title": "x" * 70_000}), "response_format", "larger than 65536"),
    (CHAT, with_schema({"x-guidance": {}}), "response_format", "x-guidance"),
    (CHAT, {"guided_json": "{"}, "guided_json", "is not JSON"),
    (CHAT, {"guided_json": "3"}, "guided_json", "must be a JSON object"),
    (CHAT, {"guided_regex": "("}, "guided_regex", "unclosed group"),
    (CHAT, {"guided_regex": "a\\"}, "guided_regex", "backslash"),
    (COMPLETIONS, {"guided_grammar": "start: b"}, "guided_grammar", "unknown name"),
    (CHAT, {"guided_grammar": "start: <|im_end|>"}, "guided_grammar", "names tokens"),
    (CHAT, {"guided_choice": []}, "guided_choice", "1 to 4096"),
    (CHAT, {"guided_choice": [""]}, "guided_choice", "empty text"),
    (CHAT, {"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "one form"),
    (CHAT, {**with_schema(SCHEMA), "guided_json": SCHEMA}, "guided_json", "does not go with response_format"),
    (CHAT, {"structured_outputs": {}}, "structured_outputs", "one of json"),
    (CHAT, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "one of json"),
    (CHAT, {"structured_outputs": {"regex": "x", "structural_tag": "x"}}, "structured_outputs.structural_tag", "tools"),
    (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema", "json_schema"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
    (CHAT, {"response_format": {"type": "text", "json_schema": NAMED}}, "response_format.json_schema", "needs"),
    (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format.type", "structural_tag"),
    (CHAT, {"grammar": "root ::= x"}, "grammar", "response_format"),
    (CHAT, {"format": "json"}, "format", "response_format"),
    (CHAT, {"text": {"format": TEXT_FORMAT}}, "text", "belongs to responses"),
    (RESPONSES, {"response_format": {"type": "json_object"}}, "response_format", "text.format"),
    (RESPONSES, {"guided_json": SCHEMA}, "guided_json", "text.format"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name", "is missing"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "is missing"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "json_schema": NAMED}}}, "text.format.name", "is missing"),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}, "response_format", "structured_outputs"),
]  # fmt: skip


async def test_a_form_that_cannot_be_followed_is_refused_by_name_and_place() -> None:
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        for path, fields, param, problem in BAD:
            answer = await http.post(path, json={**BODIES[path], **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (path, fields, answer.text)
            assert problem in error["message"], (path, fields, error)
        assert not rig.service.link.generations
        assert not (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions


FUNCTION = WEATHER["function"]
TOOL: Any = {"type": "function", "strict": True, **FUNCTION}
OTHER: Any = {"type": "function", "name": "traffic", "parameters": {"type": "object", "not": {}}}


def functions_of(rig: HttpRig) -> dict[str, Any]:
    """The schemas of arguments in the last turn's grammar."""
    grammar = rig.service.link.generations[-1].sampling.grammar
    assert grammar is not None
    return {
        one["name"]: one["json_schema"]
        for one in json.loads(grammar.text)["grammars"]
        if "json_schema" in one
    }


async def test_strict_tools_and_choices_are_part_of_the_grammar() -> None:
    async with tool_door(ROME) as rig:
        asked: Any = {"model": "tiny", "input": "hi", "tools": [TOOL, OTHER]}
        await rig.client.responses.create(**asked)
        strict: dict[str, Any] = {"whitespace_pattern": "[ \\t\\r\\n]{1,8}"}
        assert functions_of(rig) == {
            "arguments0": {**FUNCTION["parameters"], "x-guidance": strict},
            "arguments1": {"type": "object", "not": {}, "x-guidance": {**strict, "lenient": True}},
        }
        named = {"type": "function", "name": "traffic"}
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
        response = await rig.client.responses.create(**asked, tool_choice=allowed)
        assert list(functions_of(rig)) == ["arguments0"] and "not" in functions_of(rig)["arguments0"]
        assert response.model_dump()["tool_choice"] == allowed
        await rig.client.responses.create(**{**asked, "tools": [OTHER]})
        assert rig.service.link.generations[-1].sampling.grammar is None, "nothing binds it"
        await rig.client.responses.create(**asked, tool_choice="none")
        assert rig.service.link.generations[-1].sampling.grammar is None
        await rig.client.responses.create(**asked, tool_choice="none", text={"format": TEXT_FORMAT})
        assert list(functions_of(rig)) == ["answer"]
        with pytest.raises(BadRequestError) as caught:
            await rig.client.responses.create(**{**asked, "tools": [{**OTHER, "strict": True}]})
        assert caught.value.param == "tools" and "the keyword 'not' is not supported" in caught.value.message


async def test_json_that_looks_like_a_call_of_llama_is_an_answer() -> None:
    said = '{"name": "weather", "parameters": {"town": "Rome"}}'
    schema: dict[str, Any] = {"type": "object", "properties": {"name": {}, "parameters": {}}}
    async with tool_door(said, style="llama") as rig:
        asked: Any = {"model": "tiny", "input": "hi", "tools": [TOOL], "parallel_tool_calls": False}
        assert (await rig.client.responses.create(**asked)).output[0].type == "function_call"
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        response = await rig.client.responses.create(**asked, text=form)
        assert response.output_text == said
        assert (await rig.client.responses.retrieve(response.id)).output_text == said
        rig.service.link.answer = lambda _: spoken(f"<|python_tag|>{said}", "llama")
        response = await rig.client.responses.create(**asked, text=form)
        assert [one.type for one in response.output] == ["function_call"]
