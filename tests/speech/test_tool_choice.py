"""Calls that are forced, and answers with no more than one, through OpenAI's own client."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from openai import BadRequestError

from pensieve.tokenizer.matching import read_grammar_tokenizer
from support.http.http_rig import HttpRig
from support.http.tool_rig import OSLO, ROME, context_of, speaker, spoken, tool_door
from support.tool_templates import STYLES, WEATHER, write_model

FUNCTION = WEATHER["function"]
TOOL: Any = {"type": "function", "strict": True, **FUNCTION}
OTHER: Any = {**TOOL, "name": "traffic"}
LOOSE: Any = {key: one for key, one in TOOL.items() if key != "strict"}
HOW = "How is it in Rome?"
ARGUMENTS = '{"town": "Rome"}'
CALLS = {
    "qwen": ROME,
    "llama": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]',
}
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


def allowed_by(rig: HttpRig, style: str, text: str) -> bool:
    """Whether the grammar of the last turn lets this answer through, to its end."""
    grammar = rig.service.link.generations[-1].sampling.grammar
    assert grammar is not None
    matcher = LLMatcher(vocabulary(style), grammar.text)
    return bool(matcher.consume_tokens(spoken(text, style)))


@functools.cache
def vocabulary(style: str) -> LLTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", *STYLES[style])
        return read_grammar_tokenizer(model, speaker(style).eos_token_ids)


@pytest.mark.parametrize("style", list(CALLS))
async def test_a_forced_call_is_all_that_the_answer_may_be(style: str) -> None:
    said = CALLS[style]
    async with tool_door(said, style=style) as rig:
        for choice, tools in FORCED:
            asked: Any = {"model": "tiny", "input": HOW, "tools": tools, "tool_choice": choice}
            response = await rig.client.responses.create(**asked)
            assert allowed_by(rig, style, said)
            for other in (
                "Hello.",
                said.replace("weather", "traffic"),
                said.replace('"Rome"', "3"),
            ):
                assert not allowed_by(rig, style, other)
            (call,) = response.output
            assert (call.type, call.name, call.arguments) == ("function_call", "weather", ARGUMENTS)
            assert response.model_dump()["tool_choice"] == choice
            again = await rig.client.responses.retrieve(response.id)
            assert (again.output, again.tool_choice) == (response.output, response.tool_choice)
            events = [one async for one in await rig.client.responses.create(stream=True, **asked)]
            assert events[-1].response.output[0].arguments == ARGUMENTS
            whole = (await chat(rig, tools, chat_choice(choice))).choices[0]
            assert whole.message.tool_calls[0].function.arguments == ARGUMENTS
            assert whole.finish_reason == "tool_calls" and allowed_by(rig, style, said)
            chunks = [one async for one in await chat(rig, tools, chat_choice(choice), stream=True)]
            told = [call for one in chunks for call in one.choices[0].delta.tool_calls or ()]
            assert "".join(call.function.arguments for call in told) == ARGUMENTS


async def test_any_function_leaves_the_name_to_the_model() -> None:
    traffic = {"type": "function", "name": "traffic"}
    both, other = {**ALLOWED, "tools": [NAMED, traffic]}, {**ALLOWED, "tools": [traffic]}
    async with tool_door(ROME) as rig:
        asked: Any = {"model": "tiny", "input": HOW, "tools": [TOOL, OTHER, {**TOOL, "name": "fly"}]}
        allowed = [CALLS["qwen"].replace("weather", name) for name in ("weather", "traffic", "fly")]
        for choice, expected in (
            ("required", [True, True, True]),
            (both, [True, True, False]),
            (other, [False, True, False]),
            ({**both, "mode": "auto"}, [True, True, False]),
        ):
            await rig.client.responses.create(**asked, tool_choice=choice)
            assert [allowed_by(rig, "qwen", text) for text in allowed] == expected, choice
            is_auto = isinstance(choice, dict) and choice["mode"] == "auto"
            assert allowed_by(rig, "qwen", "Hello.") is is_auto
        await rig.client.responses.create(**{**asked, "tools": [LOOSE]}, tool_choice="auto")
        assert rig.service.link.generations[-1].sampling.grammar is None, "nothing binds it"


@pytest.mark.parametrize("stop", ["weather", "\n", '"'])
async def test_a_stop_string_in_the_opening_is_no_end(stop: str) -> None:
    async with tool_door(CALLS["qwen"]) as rig:
        message = (await chat(rig, [TOOL], "required", stop=[stop])).choices[0].message
        if stop != '"':
            assert message.tool_calls[0].function.arguments == ARGUMENTS
        else:  # a call that is cut is words
            begin = '<tool_call>\n{"name": "weather", "arguments":'
            assert message.content == begin + CALLS["qwen"].removeprefix(begin).partition(stop)[0]


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
