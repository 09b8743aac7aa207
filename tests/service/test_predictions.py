"""Guesses at an answer that reach the engine: a caller's prediction, and what a dead engine had given."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pensieve.core import MAX_PREDICTION_CHARS, FinishReason
from pensieve.server.failures import restarting
from pensieve.server.turns import runner
from support.service.scripted_link import ScriptedLink
from support.service.service_rig import encode, refusal, serving, spec


def speculate(link: ScriptedLink) -> None:
    link.info = msgspec.structs.replace(link.info, speculates=True)


async def test_a_prediction_is_not_part_of_the_turn() -> None:
    async with serving() as rig:
        speculate(rig.link)
        name = await rig.create()
        turn = spec("hi", prediction="the cat sat")
        first = await rig.run(name, turn)
        assert rig.link.generations[-1].predicted == encode("the cat sat")
        turn.prediction = "another"
        assert (await rig.run(name, turn)).revision == first.revision
        assert len(rig.link.generations) == 1


async def test_without_speculation_no_prediction_is_tokenised() -> None:
    async with serving() as rig:
        name = await rig.create()
        await rig.run(name, spec("hi", prediction="the cat sat"))
        assert rig.link.generations[-1].predicted == []


async def test_predictions_that_are_no_text_of_an_answer() -> None:
    async with serving() as rig:
        speculate(rig.link)
        name = await rig.create()
        error = await refusal(rig.call(name, spec("hi", prediction="x" * (MAX_PREDICTION_CHARS + 1))))
        assert error.code == "INVALID_ARGUMENT" and "turn.prediction" in error.message
        await rig.run(name, spec("hi", prediction="\0\U0001f9a9 <|im_end|>"))


@pytest.mark.fault(27)
async def test_the_next_attempt_drafts_what_a_dead_engine_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_GIVEN", 1)
    async with serving(answer=None) as rig:
        speculate(rig.link)
        names = [await rig.create() for _ in range(2)]
        turns = [spec("hi", prediction="no"), spec("hi")]
        given = encode("the cat sat")
        for name, turn in zip(names, turns, strict=True):
            call = asyncio.ensure_future(refusal(rig.call(name, turn)))
            generation = await rig.link.next_generation()
            generation.admit()
            generation.emit(*given)
            generation.fail(restarting())
            assert (await call).reason == "ENGINE_RESTARTING"
        for name, turn, drafts in zip(names, turns, [encode("no"), given], strict=True):
            tried = asyncio.ensure_future(rig.run(name, turn))
            generation = await rig.link.next_generation()
            assert generation.predicted == drafts  # only the latest turn is remembered here
            generation.admit()
            generation.emit(*given)
            generation.finish(FinishReason.LENGTH, len(given))
            assert (await tried).output.text == "the cat sat"


@pytest.mark.fault(27)
async def test_an_attempt_before_the_next_engine_is_ready_forgets_nothing() -> None:
    async with serving(answer=None) as rig:
        speculate(rig.link)
        name, turn, given = await rig.create(), spec("hi"), encode("the cat sat")
        for tokens in (given, []):
            call = asyncio.ensure_future(refusal(rig.call(name, turn)))
            generation = await rig.link.next_generation()
            if tokens:
                generation.admit()
                generation.emit(*tokens)
            generation.fail(restarting())
            assert (await call).reason == "ENGINE_RESTARTING"
        tried = asyncio.ensure_future(rig.run(name, turn))
        generation = await rig.link.next_generation()
        assert generation.predicted == given
        generation.admit()
        generation.emit(*given)
        generation.finish(FinishReason.LENGTH, len(given))
        assert (await tried).output.text == "the cat sat"
