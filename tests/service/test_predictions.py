"""Guesses at an answer that reach the engine: a caller's prediction, and what a dead engine had given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from pensieve.core import MAX_PREDICTION_CHARS, FinishReason
from pensieve.errors import ContextLimitExceeded, Internal, PensieveError, ResourceExhausted, Unavailable
from pensieve.server.failures import restarting
from pensieve.server.turns import runner
from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.scripted_link import ScriptedLink
from support.service.service_rig import Rig, encode, refusal, says, serving, spec


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
    monkeypatch.setattr(runner, "MOST_LOST", 1)
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


async def lost(rig: Rig, name: str, turn: pb.TurnSpec) -> list[int]:
    """Let an engine die in the turn's answer; return the tokens that it gave."""
    call = asyncio.ensure_future(refusal(rig.call(name, turn)))
    generation = await rig.link.next_generation()
    generation.admit()
    generation.emit(*encode("the cat sat"))
    generation.fail(restarting())
    assert (await call).reason == "ENGINE_RESTARTING"
    return encode("the cat sat")


def kept(rig: Rig) -> list[list[int]]:
    """The tokens that are kept for other attempts."""
    return [list(tokens) for tokens in rig.conversations.turns._runner.lost._tokens.values()]


async def cancel_between(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    view = await rig.cancel(name, turn.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING)
    assert view.state == pb.Turn.STATE_DISCARDED


async def cancel_while_tried_again(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    call = asyncio.ensure_future(refusal(rig.call(name, turn)))
    await rig.link.next_generation()
    await cancel_between(rig, name, turn)
    assert (await call).reason == "TURN_CANCELLED"


async def cancel_as_the_next_engine_dies(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    call = asyncio.ensure_future(refusal(rig.call(name, turn)))
    generation = await rig.link.next_generation()
    generation.admit()
    generation.emit(*encode("the"))
    (run,) = rig.conversations.turns._runs.values()
    ended = asyncio.ensure_future(
        rig.conversations.turns.cancel(run.key, turn.request_id, keep=False, keep_tokens=None)
    )
    generation.fail(restarting())  # the order is given before the turn's task sees it
    assert (await call).reason == "ENGINE_RESTARTING"
    with pytest.raises(Unavailable):
        await ended
    assert run.cancelled_by_caller


async def delete_session(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    await rig.api.DeleteSession(pb.DeleteSessionRequest(name=name))


async def refused(rig: Rig, name: str, turn: pb.TurnSpec, error: PensieveError) -> None:
    rig.link.refuse = error
    assert (await refusal(rig.call(name, turn))).reason == error.reason


async def refuse(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    await refused(rig, name, turn, ContextLimitExceeded("too long"))


async def fail_in_the_engine(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    """Perhaps it failed of the drafts."""
    await refused(rig, name, turn, Internal("failed", reason="ENGINE_FAILED"))


async def commit(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    rig.link.answer = lambda _: says("the cat sat")
    assert (await rig.run(name, turn)).output.text == "the cat sat"


ENDS = (
    cancel_between, cancel_while_tried_again, cancel_as_the_next_engine_dies, delete_session, refuse,
    fail_in_the_engine, commit,
)  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
async def test_nothing_is_kept_of_a_turn_that_has_ended(
    end: Callable[[Rig, str, pb.TurnSpec], Awaitable[None]],
) -> None:
    async with serving(answer=None) as rig:
        speculate(rig.link)
        (name, other), (turn, another) = [await rig.create() for _ in range(2)], (spec("hi"), spec("hi"))
        given = await lost(rig, other, another)
        await lost(rig, name, turn)
        await end(rig, name, turn)
        assert kept(rig) == [given]  # the other session's


@pytest.mark.fault(27)
async def test_an_attempt_that_is_refused_for_a_while_forgets_nothing() -> None:
    """All turns come again after an engine's death: the next one may have no room for them yet."""
    async with serving(answer=None) as rig:
        speculate(rig.link)
        name, turn = await rig.create(), spec("hi")
        given = await lost(rig, name, turn)
        await refused(rig, name, turn, ResourceExhausted("the queue is full"))
        assert kept(rig) == [given]


async def test_an_answer_that_the_store_did_not_take_is_drafted_by_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def down(*_: object, **__: object) -> None:
        raise Unavailable("the store is down")

    store = MemoryStore()
    async with serving(answer="the cat sat", store=store, commit_retry_s=0.0) as rig:
        speculate(rig.link)
        name, turn = await rig.create(), spec("hi")
        with monkeypatch.context() as patch:
            patch.setattr(store, "commit", down)
            assert (await refusal(rig.call(name, turn))).reason == "STORE_UNAVAILABLE"
        assert (await rig.run(name, turn)).output.text == "the cat sat"
        assert rig.link.generations[-1].predicted == says("the cat sat")
