"""Calls that are forced, and answers with no more than one, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import BadRequestError
from tokenizers import Tokenizer

from support.http.http_rig import HttpRig
from support.http.tool_rig import OSLO, ROME, context_of, spoken, tool_door
from support.service.scripted_link import ScriptedGeneration
from support.tool_templates import WEATHER, tokenizer_json

FUNCTION = WEATHER["function"]
TOOL: Any = {"type": "function", "strict": True, **FUNCTION}
OTHER: Any = {**TOOL, "name": "traffic"}
HOW = "How is it in Rome?"
ARGUMENTS = '{"town": "Rome"}'
BEGINNINGS = {
    "qwen": ('<tool_call>\n{"name": "weather", "arguments":', f" {ARGUMENTS}}}\n</tool_call>"),
    "llama": ('{"name": "weather", "parameters":', f" {ARGUMENTS}}}"),
    "mistral": ('[TOOL_CALLS][{"name": "weather", "arguments":', f" {ARGUMENTS}}}]"),
}
"""The opening of a call, and how the model goes on."""
NAMED: Any = {"type": "function", "name": "weather"}
ALLOWED: Any = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
FORCED: list[tuple[Any, list[Any]]] = [
    (NAMED, [TOOL, OTHER]),
    (ALLOWED, [TOOL, OTHER]),
    ("required", [TOOL]),
]


def chat_tool(tool: Any) -> Any:
    return {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters")}}


def chat_choice(choice: Any) -> Any:
    """As chat completions say it."""
    if choice == "required":
        return choice
    named = {"type": "function", "function": {"name": "weather"}}
    if choice["type"] == "function":
        return named
    return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}


async def chat(rig: HttpRig, tools: list[Any], choice: Any = "auto", **options: Any) -> Any:
    return await rig.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": HOW}],
        tools=[chat_tool(tool) for tool in tools],
        tool_choice=choice,
        **options,
    )


@asynccontextmanager
async def forcing(style: str, rest: str) -> AsyncIterator[HttpRig]:
    """A model that begins as it is made to, and goes on with ``rest``."""
    async with tool_door("", style=style) as rig:

        def script(generation: ScriptedGeneration) -> list[int]:
            return [*generation.sampling.opening, *spoken(rest, style)]

        rig.service.link.answer = script
        yield rig


def opening_of(rig: HttpRig) -> str:
    return Tokenizer.from_str(tokenizer_json()).decode(
        rig.service.link.generations[-1].sampling.opening, skip_special_tokens=False
    )


@pytest.mark.parametrize("style", list(BEGINNINGS))
async def test_a_forced_call_begins_with_its_opening(style: str) -> None:
    begin, rest = BEGINNINGS[style]
    async with forcing(style, rest) as rig:
        for choice, tools in FORCED:
            asked: Any = {"model": "tiny", "input": HOW, "tools": tools, "tool_choice": choice}
            response = await rig.client.responses.create(**asked)
            assert opening_of(rig) == begin
            (call,) = response.output
            assert (call.type, call.name, call.arguments) == ("function_call", "weather", ARGUMENTS)
            assert response.model_dump()["tool_choice"] == choice
            again = await rig.client.responses.retrieve(response.id)
            assert (again.output, again.tool_choice) == (response.output, response.tool_choice)
            events = [one async for one in await rig.client.responses.create(stream=True, **asked)]
            assert events[-1].response.output[0].arguments == ARGUMENTS
            whole = (await chat(rig, tools, chat_choice(choice))).choices[0]
            assert whole.message.tool_calls[0].function.arguments == ARGUMENTS
            assert whole.finish_reason == "tool_calls"
            chunks = [one async for one in await chat(rig, tools, chat_choice(choice), stream=True)]
            told = [call for one in chunks for call in one.choices[0].delta.tool_calls or ()]
            assert "".join(call.function.arguments for call in told) == ARGUMENTS
        # The opening is part of the answer, in the history as in what the model saw.
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
        await rig.client.responses.create(
            model="tiny", input=[result], tools=tools, previous_response_id=response.id
        )
        assert begin + rest in context_of(rig)


async def test_any_function_leaves_the_name_to_the_model() -> None:
    async with forcing("qwen", f'weather", "arguments": {ARGUMENTS}}}\n</tool_call>') as rig:
        every = {**ALLOWED, "tools": [NAMED, {"type": "function", "name": "traffic"}]}
        for choice in ("required", every):
            response = await rig.client.responses.create(
                model="tiny", input=HOW, tools=[TOOL, OTHER], tool_choice=choice
            )
            assert opening_of(rig) == '<tool_call>\n{"name": "'
            assert [item.type for item in response.output] == ["function_call"]
        auto = {**every, "mode": "auto"}
        await rig.client.responses.create(model="tiny", input=HOW, tools=[TOOL, OTHER], tool_choice=auto)
        assert opening_of(rig) == ""


@pytest.mark.parametrize("stop", ["weather", "\n", '"'])
async def test_a_stop_string_in_the_opening_is_no_end(stop: str) -> None:
    begin, rest = BEGINNINGS["qwen"]
    async with forcing("qwen", rest) as rig:
        completion = await chat(rig, [TOOL], "required", stop=[stop])
        generation = rig.service.link.generations[-1]
        assert generation.sampling.min_output_tokens == len(generation.sampling.opening)
        message = completion.choices[0].message
        if stop != '"':
            assert message.tool_calls[0].function.arguments == ARGUMENTS
        else:  # a call that is cut is words
            assert message.content == begin + rest.partition(stop)[0]


LISTED = [{"name": "weather", "arguments": {"town": town}} for town in ("Rome", "Oslo")]
PAIRS = {
    "qwen": f"Let me see.\n{ROME}\n{OSLO} And so on.",
    "llama": "; ".join(json.dumps({"name": one["name"], "parameters": one["arguments"]}) for one in LISTED),
    "mistral": f"[TOOL_CALLS]{json.dumps(LISTED)}",
}


@pytest.mark.parametrize("style", list(PAIRS))
async def test_one_call_at_a_time(style: str) -> None:
    async with tool_door(PAIRS[style], style=style) as rig:
        asked: Any = {"model": "tiny", "input": HOW, "tools": [TOOL]}
        assert len((await rig.client.responses.create(**asked)).output) == 2 + 2 * (style == "qwen")
        single = {**asked, "parallel_tool_calls": False}
        response = await rig.client.responses.create(**single)
        call = response.output[-1]
        assert [item.type for item in response.output if item.type != "message"] == ["function_call"]
        assert (json.loads(call.arguments), response.status) == ({"town": "Rome"}, "completed")
        assert response.parallel_tool_calls is False
        assert (await rig.client.responses.retrieve(response.id)).output == response.output
        events = [one async for one in await rig.client.responses.create(stream=True, **single)]
        kinds = [one.item.type for one in events if one.type == "response.output_item.done"]
        assert kinds == [item.type for item in response.output] and "Oslo" not in str(events)
        (choice,) = (await chat(rig, [TOOL], parallel_tool_calls=False)).choices
        assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
        # The model goes on behind what was kept, and never sees the rest.
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
        await rig.client.responses.create(**{**single, "input": [result]}, previous_response_id=response.id)
        assert "Rome" in context_of(rig) and '"Oslo"' not in context_of(rig).partition("blue")[0]
        assert rig.service.link.generations[-1].cancelled, "nobody generates what nobody wants"


async def test_a_function_that_is_not_offered_cannot_be_forced() -> None:
    async with tool_door(ROME) as rig:
        for choice in (NAMED, ALLOWED):
            with pytest.raises(BadRequestError) as caught:
                await rig.client.responses.create(model="tiny", input=HOW, tools=[OTHER], tool_choice=choice)
            assert caught.value.param == "tool_choice"
            assert "there is no function 'weather' in tools" in caught.value.message
            with pytest.raises(BadRequestError) as caught:
                await chat(rig, [OTHER], chat_choice(choice))
            assert caught.value.param == "tool_choice"
        assert not rig.service.link.generations


async def test_words_are_not_bound() -> None:
    async with tool_door(f"I would say {ROME[:30]}, no.") as rig:
        for fields in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {}):
            response = await rig.client.responses.create(
                model="tiny", input=HOW, parallel_tool_calls=False, **fields
            )
            assert response.output_text.endswith(", no.")
    async with tool_door(f"{ROME} {OSLO}") as rig:
        response = await rig.client.responses.create(model="tiny", input=HOW, parallel_tool_calls=False)
        assert "Oslo" in response.output_text


INCLUDE: Any = ["message.output_text.logprobs"]


@pytest.mark.parametrize("answer", [f"Let me s\U0001f600e.\n{ROME}\nÜber.", "Only words."])
async def test_words_beside_calls_have_log_probabilities(answer: str) -> None:
    async with tool_door(answer) as rig:
        asked: Any = {"model": "tiny", "input": HOW, "tools": [TOOL], "include": INCLUDE, "top_logprobs": 1}
        response = await rig.client.responses.create(**asked)
        parts = [item.content[0] for item in response.output if item.type == "message"]
        assert len(parts) == 1 + (ROME in answer)
        for part in parts:
            told = b"".join(bytes(one.bytes) for one in part.logprobs).decode()
            assert told.strip() == part.text and len(part.logprobs) >= len(part.text) // 4
        assert parts[-1].logprobs[-1].token == "<|im_end|>"
        events = [one async for one in await rig.client.responses.create(stream=True, **asked)]
        for number, item in enumerate(events[-1].response.output):
            if item.type != "message":
                continue
            at = [one for one in events if getattr(one, "output_index", None) == number]
            deltas = [one for one in at if one.type == "response.output_text.delta"]
            told = [score.model_dump() for one in deltas for score in one.logprobs]
            (done,) = (one for one in at if one.type == "response.output_text.done")
            assert told == [score.model_dump(exclude_unset=True) for score in done.logprobs]
            assert [one["token"] for one in told] == [one.token for one in item.content[0].logprobs]
        assert [part.logprobs for part in parts] == [
            item.content[0].logprobs for item in events[-1].response.output if item.type == "message"
        ]
