"""Every way a turn can end early, and what the history says afterwards: cancelled, abandoned, out of time, failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pensieve.core import FinishReason
from pensieve.errors import Internal, Unavailable
from pensieve.v1 import pensieve_pb2 as pb
from support.service.scripted_link import ScriptedGeneration
from support.service.service_rig import Rig, Streamed, encode, refusal, says, serving, spec


async def running(rig: Rig, name: str, turn: pb.TurnSpec, text: str = "the fox", **fields: object) -> tuple[
    object, ScriptedGeneration
]:  # fmt: skip
    """A turn that has produced ``text``, and has been seen to."""
    call = rig.call(name, turn, **fields)
    generation = await rig.link.next_generation()
    generation.admit()
    if text:
        generation.emit(*encode(text))
        seen = ""
        async for event in call:
            seen += event.delta.text
            if seen == text:
                break
    return call, generation


async def left(rig: Rig, call: Any, listeners: int) -> None:
    """Drop the connection, and wait until the server has noticed."""
    (run,) = rig.conversations.turns._runs.values()
    call.cancel()
    while run._listeners != listeners:
        await asyncio.sleep(0)


async def state(rig: Rig, name: str, turn: pb.TurnSpec) -> pb.Turn:
    """How the turn ended, once it has."""
    while (view := await rig.get_turn(name, turn.request_id)).state == pb.Turn.STATE_RUNNING:
        await asyncio.sleep(0.005)
    return view


async def test_cancel_keeping_the_partial_answer() -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        call, generation = await running(rig, name, turn)
        view = await rig.cancel(name, turn.request_id)
        assert (view.state, view.revision, view.finish_reason) == (
            pb.Turn.STATE_COMMITTED,
            2,
            pb.FINISH_REASON_CANCELLED,
        )
        assert view.output.text == "the fox" and generation.cancelled
        rest = Streamed([event async for event in call])  # type: ignore[attr-defined]
        assert rest.completed == view
        assert (await rig.session(name)).revision == 2


@pytest.mark.parametrize("keep", [0, 1, 2, 10_000])
async def test_cancel_keeping_the_first_tokens(keep: int) -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        await running(rig, name, turn)
        tokens = encode("the fox")
        view = await rig.cancel(name, turn.request_id, keep_output_tokens=keep)
        assert view.usage.output_tokens == min(keep, len(tokens))
        stored = (await rig.items(name, tokens=True))[-1]
        from support.service.service_rig import tokenizer

        assert stored.text == tokenizer().decode(tokens[:keep])
        replay = await rig.stream(name, turn)
        assert (replay.text, replay.tokens) == (stored.text, min(keep, len(tokens)))


@pytest.mark.fault(12)
async def test_cancel_keeping_nothing() -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        call, generation = await running(rig, name, turn)
        view = await rig.cancel(name, turn.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING)
        assert view.state == pb.Turn.STATE_DISCARDED and generation.cancelled
        assert (await refusal(call)).code == "CANCELLED"
        assert (await rig.session(name)).revision == 1
        assert (await rig.get_turn(name, turn.request_id)).discard_reason == "TURN_CANCELLED"
        rig.link.answer = lambda _: says("again")
        assert (await rig.run(name, turn)).output.text == "again"


@pytest.mark.fault(12)
async def test_cancel_in_the_queue_keeps_the_input() -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        rig.call(name, turn)
        await rig.link.next_generation()
        view = await rig.cancel(name, turn.request_id)
        assert view.state == pb.Turn.STATE_COMMITTED and view.output.text == ""
        assert [item.text for item in await rig.items(name)] == ["hi", ""]
        rig.link.answer = lambda _: says("go on")
        assert (await rig.run(name, "next")).output.text == "go on"


async def test_cancel_of_an_ended_or_unknown_turn() -> None:
    async with serving() as rig:
        name, turn = await rig.create(), spec("hi")
        done = await rig.run(name, turn)
        assert await rig.cancel(name, turn.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING) == done
        request = pb.CancelTurnRequest(session=name, request_id=spec("x").request_id)
        assert (await refusal(rig.api.CancelTurn(request))).reason == "TURN_NOT_FOUND"


@pytest.mark.fault(1)
async def test_disconnect_discards_after_the_grace_time() -> None:
    async with serving(answer=None, disconnect_grace_s=0.05) as rig:
        name, turn = await rig.create(), spec("hi")
        call, generation = await running(rig, name, turn)
        call.cancel()  # type: ignore[attr-defined]
        view = await state(rig, name, turn)
        assert (view.state, view.discard_reason) == (pb.Turn.STATE_DISCARDED, "CLIENT_DISCONNECTED")
        assert generation.cancelled and (await rig.session(name)).revision == 1
        # The next turn, at once, starts from the same context.
        before = rig.link.generations[-1].tokens
        rig.link.answer = lambda _: says("ok")
        await rig.run(name, "hi")
        assert rig.link.generations[-1].tokens == before


@pytest.mark.fault(2)
async def test_reattach_in_the_grace_time_goes_on() -> None:
    async with serving(answer=None, disconnect_grace_s=30.0) as rig:
        name, turn = await rig.create(), spec("hi")
        call, generation = await running(rig, name, turn)
        call.cancel()  # type: ignore[attr-defined]
        again = rig.call(name, turn)
        first = await anext(aiter(again))
        generation.finish()
        got = Streamed([first, *[event async for event in again]])
        assert first.accepted.replayed and got.text == "the fox" and got.completed.revision == 2


async def test_disconnect_with_finish_runs_to_the_end() -> None:
    async with serving(answer=None, disconnect_grace_s=0.0) as rig:
        name, turn = await rig.create(), spec("hi")
        call, generation = await running(rig, name, turn, on_disconnect=pb.DISCONNECT_POLICY_FINISH)
        await left(rig, call, 0)
        generation.emit(*encode(" jumps"))
        generation.finish()
        view = await state(rig, name, turn)
        assert view.state == pb.Turn.STATE_COMMITTED and view.output.text == "the fox jumps"


@pytest.mark.fault(11)
async def test_deadline_discards_without_grace() -> None:
    async with serving(answer=None, disconnect_grace_s=3600.0) as rig:
        name, turn = await rig.create(), spec("hi")
        request = pb.StreamTurnRequest(session=name, turn=turn)
        error = await refusal(rig.api.StreamTurn(request, timeout=0.3))
        assert error.code == "DEADLINE_EXCEEDED"
        assert (await state(rig, name, turn)).state == pb.Turn.STATE_DISCARDED
        assert (await rig.session(name)).revision == 1


async def test_one_of_two_listeners_leaves() -> None:
    async with serving(answer=None, disconnect_grace_s=0.0) as rig:
        name, turn = await rig.create(), spec("hi")
        call, generation = await running(rig, name, turn)
        other = rig.call(name, turn)
        first = await anext(aiter(other))
        await left(rig, call, 1)
        generation.finish()
        assert Streamed([first, *[event async for event in other]]).completed.revision == 2


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTEXT_FULL, FinishReason.STOP_TOKEN])
async def test_limits_commit(reason: FinishReason) -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        call, generation = await running(rig, name, turn)
        generation.finish(reason)
        got = Streamed([event async for event in call])  # type: ignore[attr-defined]
        assert (got.completed.finish_reason, got.completed.revision) == (reason.value, 2)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("restarting", reason="ENGINE_RESTARTING"), "UNAVAILABLE"),
        (Internal("engine", reason="ENGINE_FAILED"), "INTERNAL"),
    ],
)
async def test_engine_failure_discards_and_the_same_id_starts_again(error: Exception, code: str) -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        call, generation = await running(rig, name, turn)
        generation.fail(error)  # type: ignore[arg-type]
        got = await refusal(call)
        assert (got.code, got.reason) == (code, error.reason)  # type: ignore[attr-defined]
        assert (await rig.get_turn(name, turn.request_id)).state == pb.Turn.STATE_DISCARDED
        assert (await rig.session(name)).revision == 1
        rig.link.answer = lambda _: says("better")
        assert (await rig.run(name, turn)).output.text == "better"


async def test_delete_ends_the_running_turn() -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        call, generation = await running(rig, name, turn)
        await rig.api.DeleteSession(pb.DeleteSessionRequest(name=name))
        assert (await refusal(call)).reason == "SESSION_DELETED"
        assert generation.cancelled and rig.link.evicted
        assert (await refusal(rig.call(name, turn))).reason == "SESSION_DELETED"


async def test_drain_refuses_new_turns_and_lets_running_ones_finish() -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        call, generation = await running(rig, name, turn)
        drain = asyncio.ensure_future(rig.conversations.drain(30.0))
        await asyncio.sleep(0)
        error = await refusal(rig.call(await rig.create(), spec("new")))
        assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING")
        generation.finish()
        assert Streamed([event async for event in call]).completed.revision == 2  # type: ignore[attr-defined]
        assert await drain == 0
        assert (await rig.stream(name, turn)).accepted.replayed


async def test_drain_discards_what_is_left() -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        call, _ = await running(rig, name, turn)
        request = pb.DrainRequest()
        request.deadline.FromMilliseconds(10)
        assert (await rig.admin.Drain(request)).turns_left == 1
        assert (await refusal(call)).reason == "DRAINING"
        assert (await rig.session(name)).revision == 1
