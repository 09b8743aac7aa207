"""Calls that are forced, on a real engine: whatever the model would say, it calls with valid arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pensieve.client import AsyncClient
from pensieve.errors import InvalidArgument
from pensieve.speech import FunctionCall, read
from support.engine.checkpoints import tiny_checkpoint
from support.service.real_engine import TinyModel, really_serving
from support.tool_templates import STYLES, write_model

TOWNS = {"type": "string", "enum": ["Rome", "Oslo"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": TOWNS, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
TRAFFIC = {"type": "function", "function": {"name": "traffic"}}
WILD: Any = {"temperature": 5.0, "repetition_penalty": 2.0, "logit_bias": {7: 100.0}}


@pytest.fixture(scope="module", params=["qwen", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder: Path = tiny_checkpoint("llama3", tmp_path_factory.mktemp("models"), vocab_size=480)
    write_model(folder, *STYLES[request.param])
    return TinyModel(folder)


def check_call(call: FunctionCall) -> None:
    arguments = json.loads(call.arguments)
    if call.name == "traffic":
        assert arguments == {}
    else:
        assert call.name == "weather" and arguments["town"] in TOWNS["enum"]
        assert 1 <= arguments.pop("days", 1) <= 9 and list(arguments) == ["town"]


async def test_a_forced_call_is_one_with_valid_arguments(model: TinyModel) -> None:
    async with really_serving(model) as rig, AsyncClient(rig.target) as client:
        form = (await client.server_info()).speech
        for number, name in enumerate(("weather", "", "traffic")):
            session = await client.create_session(tools=[WEATHER, TRAFFIC])
            options: Any = {**WILD, "seed": number, "must_call": name, "single_call": True}
            if number == 2:
                options["candidates"] = 3
            turn = await session.send("Rome?", max_output_tokens=300, **options)
            texts = [one.text for one in turn.candidates] or [turn.text]
            for text in texts:
                answer = read(text, form)
                (call,) = answer.calls
                check_call(call)
                assert (not name or call.name == name) and not answer.words


async def test_a_call_that_cannot_be_forced(model: TinyModel) -> None:
    async with really_serving(model) as rig, AsyncClient(rig.target) as client:
        several = await client.create_session(tools=[WEATHER, TRAFFIC])
        bare = await client.create_session()
        for asked, options in (
            (bare, {"must_call": ""}),
            (bare, {"strict_calls": ["weather"]}),
            (several, {"must_call": "fly"}),
            (several, {"allowed_calls": ["fly"]}),
            (several, {"must_call": "weather", "allowed_calls": ["traffic"]}),
            (several, {"must_call": "weather", "no_calls": True}),
            (several, {"must_call": "", "beam_width": 2, "max_output_tokens": 40}),
        ):
            revision = (await asked.refresh()).revision
            with pytest.raises(InvalidArgument):
                await asked.send("Rome?", **options)  # type: ignore[arg-type]
            assert (await asked.refresh()).revision == revision
        assert rig.link.state.name == "SERVING"
