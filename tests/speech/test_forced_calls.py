"""Calls that are forced, on a real engine: the answer is what the model goes on with behind the opening."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pensieve.client import AsyncClient, AsyncSession, FinishReason
from pensieve.errors import InvalidArgument
from pensieve.tokenizer import ChatTokenizer
from support.engine.checkpoints import tiny_checkpoint
from support.engine.hf_oracle import HfOracle
from support.service.real_engine import TinyModel, really_serving
from support.tool_templates import STYLES, WEATHER, write_model

TRAFFIC = {"type": "function", "function": {"name": "traffic", "parameters": {"type": "object"}}}
OPENING = '<tool_call>\n{"name": "weather", "arguments":'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder: Path = tiny_checkpoint("llama3", tmp_path_factory.mktemp("models"), vocab_size=480)
    write_model(folder, *STYLES["qwen"])
    return TinyModel(folder, HfOracle(folder))


async def check_greedy(model: TinyModel, session: AsyncSession, opening: int, output: int) -> list[int]:
    """The newest answer, ``output`` tokens: behind its opening all are the likeliest. Returns the whole context."""
    tokens = [token for item in await session.items(include_tokens=True) for token in item.token_ids]
    rows = model.expected(tokens)[len(tokens) - output + opening - 1 : -1]
    assert tokens[len(tokens) - output + opening :] == rows.argmax(dim=-1).tolist()
    return tokens


async def test_the_model_goes_on_behind_the_opening(model: TinyModel) -> None:
    # Room for less than what two sessions hold: what is evicted between turns is computed once more.
    async with (
        really_serving(model, device="640tokens") as rig,
        AsyncClient(rig.target) as client,
    ):
        session = await client.create_session(tools=[WEATHER, TRAFFIC])
        length = len(ChatTokenizer.from_folder(model.folder).call_opening("weather"))
        options: Any = {"temperature": 0.0, "ignore_eos": True}
        turn = await session.send("Rome?", must_call="weather", max_output_tokens=length + 12, **options)
        assert turn.text.startswith(OPENING) and turn.usage.output_tokens == length + 12
        before = await check_greedy(model, session, length, length + 12)
        for _ in range(3):
            other = await client.create_session(system_prompt="x" * 300)
            await other.send("y" * 100, max_output_tokens=8, **options)
        turn = await session.send("and?", max_output_tokens=8, **options)
        after = await check_greedy(model, session, 0, 8)
        assert after[: len(before)] == before
        # However wildly the rest is drawn, and in whichever of several answers.
        wild: Any = {"temperature": 5.0, "repetition_penalty": 2.0, "logit_bias": {7: 100.0}, "top_p": 0.5}
        turn = await session.send(
            "more?", must_call="weather", candidates=2, max_output_tokens=length + 3, **wild
        )
        assert all(one.text.startswith(OPENING) for one in turn.candidates)


async def test_with_one_function_its_name_is_given(model: TinyModel) -> None:
    async with really_serving(model) as rig, AsyncClient(rig.target) as client:
        session = await client.create_session(tools=[WEATHER])
        turn = await session.send("Rome?", must_call="", max_output_tokens=40)
        assert turn.text.startswith(OPENING)
        several = await client.create_session(tools=[WEATHER, TRAFFIC])
        turn = await several.send("Rome?", must_call="", max_output_tokens=40, ignore_eos=True)
        assert turn.text.startswith('<tool_call>\n{"name": "') and turn.finish_reason is FinishReason.LENGTH
        bare = await client.create_session()
        for asked, options in (
            (bare, {"must_call": ""}),
            (several, {"must_call": "fly"}),
            (several, {"must_call": "", "beam_width": 2, "max_output_tokens": 40}),
            (several, {"must_call": "weather", "max_output_tokens": 5}),
        ):
            revision = (await asked.refresh()).revision
            with pytest.raises(InvalidArgument):
                await asked.send("Rome?", **options)  # type: ignore[arg-type]
            assert (await asked.refresh()).revision == revision
        assert rig.link.state.name == "SERVING"
