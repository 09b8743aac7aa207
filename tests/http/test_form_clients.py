"""OpenAI's SDK and LangChain get structured output from a real engine, unchanged."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, LengthFinishReasonError, pydantic_function_tool
from pydantic import BaseModel, Field, SecretStr

from support.engine.checkpoints import tiny_checkpoint
from support.http.http_rig import opened
from support.service.real_engine import TinyModel, really_serving
from support.tool_templates import STYLES, write_model


class Town(StrEnum):
    ROME = "Rome"
    OSLO = "Oslo"


class Forecast(BaseModel):
    """A forecast. Bounded, so that a model that knows nothing comes to its end."""

    town: Town
    degrees: int = Field(ge=-9, le=9)
    rain: bool | None
    wind: list[Literal["north", "south"]] = Field(max_length=2)


class Ask(BaseModel):
    """Asks for the weather of a town."""

    town: Town


QUESTION: Any = [{"role": "user", "content": "How is it?"}]
OPTIONS: Any = {"model": "tiny", "temperature": 3.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder: Path = tiny_checkpoint(
        "llama3", tmp_path_factory.mktemp("models"), vocab_size=480, max_position_embeddings=2048
    )
    write_model(folder, *STYLES["qwen"])
    return TinyModel(folder)


@pytest.fixture
async def doors(model: TinyModel) -> AsyncIterator[tuple[str, AsyncOpenAI]]:
    async with really_serving(model, device="4096tokens") as rig, opened(rig.target) as found:
        yield found


async def test_openai_parses_completions_and_responses(doors: tuple[str, AsyncOpenAI]) -> None:
    _, client = doors
    completion = await client.chat.completions.parse(
        messages=QUESTION, response_format=Forecast, n=3, seed=1, max_tokens=250, **OPTIONS
    )
    assert len(completion.choices) == 3
    for choice in completion.choices:
        assert isinstance(choice.message.parsed, Forecast) and choice.finish_reason == "stop"
    async with client.chat.completions.stream(
        messages=QUESTION, response_format=Forecast, seed=2, max_tokens=250, **OPTIONS
    ) as stream:
        parsed = (await stream.get_final_completion()).choices[0].message.parsed
    assert isinstance(parsed, Forecast)
    response = await client.responses.parse(
        input="How is it?", text_format=Forecast, max_output_tokens=250, **OPTIONS
    )
    assert isinstance(response.output_parsed, Forecast)
    async with client.responses.stream(
        input="And now?",
        text_format=Forecast,
        max_output_tokens=250,
        previous_response_id=response.id,
        **OPTIONS,
    ) as events:
        assert isinstance((await events.get_final_response()).output_parsed, Forecast)
    with pytest.raises(LengthFinishReasonError):
        await client.chat.completions.parse(
            messages=QUESTION, response_format=Forecast, max_tokens=5, **OPTIONS
        )


async def test_openai_parses_strict_calls(doors: tuple[str, AsyncOpenAI]) -> None:
    _, client = doors
    completion = await client.chat.completions.parse(
        messages=QUESTION,
        tools=[pydantic_function_tool(Ask), pydantic_function_tool(Forecast)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        seed=3,
        **OPTIONS,
    )
    (call,) = completion.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Ask | Forecast)
    assert completion.choices[0].finish_reason == "tool_calls"


def look(town: Literal["Rome", "Oslo"]) -> str:
    """Looks at the sky."""
    return town


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_langchain_has_structured_output(doors: tuple[str, AsyncOpenAI], method: Any) -> None:
    from langchain_openai import ChatOpenAI  # two seconds, which only the worker of this file needs to spend

    url, _ = doors
    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        model="tiny",
        temperature=3.0,
        max_completion_tokens=300,
        seed=5,
    )
    if method == "json_mode":
        # Any object: only its form is the server's.
        said = await chat.bind(response_format={"type": "json_object"}, max_completion_tokens=400).ainvoke(
            "Go"
        )
        if said.response_metadata["finish_reason"] == "stop":
            assert isinstance(json.loads(str(said.content)), dict)
        return
    found = await chat.with_structured_output(Forecast, method=method, strict=True).ainvoke("How is it?")
    assert isinstance(found, Forecast)
    if method == "function_calling":
        called = await chat.bind_tools([look], tool_choice="look", strict=True).ainvoke("Look.")
        assert called.tool_calls and called.tool_calls[0]["args"]["town"] in ("Rome", "Oslo")
