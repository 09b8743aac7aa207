"""A turn with a form: the same answer alone, beside others, suspended, and across an engine's death. A real engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pensieve import AsyncClient
from pensieve.client import Turn
from support.service.real_engine import TinyModel, really_serving

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "fox": {"enum": ["red", "arctic"]}},
    "required": ["name", "fox"],
    "additionalProperties": False,
}
STRUCTURED: dict[str, Any] = {"schema": SCHEMA, "seed": 7, "temperature": 1.0, "max_output_tokens": 90}
PLAIN: dict[str, Any] = {"seed": 7, "temperature": 1.0, "max_output_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.make(tmp_path_factory.mktemp("model"))


async def answers(target: str, *asked: dict[str, Any], rounds: int = 2) -> list[Turn]:
    """The turns of sessions of their own, all at once, round by round."""
    turns: list[Turn] = []
    async with AsyncClient(target) as client:
        sessions = [await client.create_session(system_prompt="Be brief.") for _ in asked]
        for text in ("the fox", "and now?")[:rounds]:
            pairs = zip(sessions, asked, strict=True)
            turns += await asyncio.gather(*(one.send(text, **values) for one, values in pairs))
    return turns


async def test_the_same_answer_whatever_happens_to_the_turn(model: TinyModel) -> None:
    async with really_serving(model) as rig:
        structured = await answers(rig.target, STRUCTURED)
        plain = await answers(rig.target, PLAIN)
        beside = await answers(rig.target, STRUCTURED, PLAIN, STRUCTURED, PLAIN)
    for turn in structured:
        if turn.finish_reason.name != "LENGTH":
            jsonschema.validate(json.loads(turn.text), SCHEMA)
    assert any(turn.finish_reason.name == "EOS" for turn in structured)
    alone = [one for pair in zip(structured, plain, strict=True) for one in 2 * pair]
    assert [turn.text for turn in beside] == [turn.text for turn in alone]
    async with really_serving(model, device="160tokens") as rig:
        suspended = await answers(rig.target, STRUCTURED, PLAIN, STRUCTURED, PLAIN, rounds=1)
        assert rig.link.stats.suspensions_total > 0, "no turn was suspended: the test shows nothing"
    assert [turn.text for turn in suspended] == [turn.text for turn in alone[:4]]
    async with really_serving(model, dies_after=25) as rig, AsyncClient(rig.target) as client:
        session = await client.create_session(system_prompt="Be brief.")
        stream = session.stream("the fox", **STRUCTURED)
        async for _ in stream:
            pass
        assert stream.resumes, "the engine did not die: the test shows nothing"
        assert stream.turn.text == structured[0].text


async def test_candidates_follow_the_form(model: TinyModel) -> None:
    async with really_serving(model) as rig, AsyncClient(rig.target) as client:
        session = await client.create_session()
        drawn = await session.send("the fox", candidates=4, **STRUCTURED)
        assert len({one.text for one in drawn.candidates}) > 1
        for one in drawn.candidates:
            if one.finish_reason.name == "EOS":
                jsonschema.validate(json.loads(one.text), SCHEMA)
        alone = await (await client.create_session()).send("the fox", **STRUCTURED)
        assert drawn.candidates[0].text == alone.text


async def test_a_model_in_a_gguf_file(model: TinyModel, tmp_path: Path) -> None:
    from support.gguf_files import write_gguf

    tokenizer = (model.folder / "tokenizer.json").read_text()
    path = write_gguf(
        tmp_path / "model.gguf", model.folder, tokenizer=tokenizer, tokenizer__ggml__eos_token_id=4
    )
    async with really_serving(TinyModel(path)) as rig:
        (turn, _) = await answers(rig.target, {**STRUCTURED, "max_output_tokens": 200})
    if turn.finish_reason.name == "EOS":
        jsonschema.validate(json.loads(turn.text), SCHEMA)
    assert turn.text.lstrip().startswith("{")
