"""Two servers on one store: a turn that runs at one of them is followed, fetched and ended by way of the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pensieve.core import FinishReason
from pensieve.server.rpc.convert import turn_spec
from pensieve.server.turns import lease
from pensieve.server.turns.run import RunState
from pensieve.store import BeginRequest, Key
from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.scripted_link import ScriptedGeneration
from support.service.service_rig import Rig, Streamed, encode, refusal, serving, spec

TEXT = "the quick brown fox jumps over the lazy dog"


@asynccontextmanager
async def pair(**settings: float) -> AsyncIterator[tuple[Rig, Rig]]:
    """Both engines are played by the test; leases are renewed often, so that orders are heard soon."""
    settings = {"lease_s": 0.3, "disconnect_grace_s": 30.0, **settings}
    store = MemoryStore()
    async with (
        serving(answer=None, store=store, replica="a", **settings) as here,
        serving(answer=None, store=store, replica="b", **settings) as there,
    ):
        yield here, there


async def begun(rig: Rig, name: str, turn: pb.TurnSpec) -> tuple[asyncio.Task[Streamed], ScriptedGeneration]:
    """A turn of this server that has produced ``TEXT`` and goes on."""
    task = asyncio.create_task(rig.stream(name, turn))
    generation = await rig.link.next_generation()
    generation.admit()
    generation.emit(*encode(TEXT))
    return task, generation


async def follows(rig: Rig, name: str, turn: pb.TurnSpec, **fields: object) -> asyncio.Task[Streamed]:
    """A stream of that turn at this server, which has found out that it runs elsewhere."""
    task = asyncio.create_task(rig.stream(name, turn, **fields))
    while not any(run.state is RunState.FOLLOWING for run in rig.conversations.turns._runs.values()):
        assert not task.done(), await task
        await asyncio.sleep(0.005)
    return task


def finish(generation: ScriptedGeneration) -> None:
    generation.finish(FinishReason.EOS, len(encode(TEXT)))


async def test_a_stream_at_the_other_server_gets_the_whole_turn() -> None:
    async with pair() as (here, there):
        name, turn = await here.create(), spec("hi")
        first, generation = await begun(here, name, turn)
        second = await follows(there, name, turn)
        finish(generation)
        one, two = await first, await second
        assert one.completed == two.completed
        assert two.accepted.replayed and two.accepted.attempt == one.accepted.attempt
        assert (two.text, two.tokens) == (TEXT, len(encode(TEXT)))
        assert not there.link.generations, "it was generated twice"


@pytest.mark.fault(2)
async def test_a_resumed_stream_goes_on_where_it_was_cut() -> None:
    async with pair() as (here, there):
        name, turn = await here.create(), spec("hi")
        call = here.call(name, turn)
        generation = await here.link.next_generation()
        generation.admit()
        generation.emit(*encode(TEXT))
        accepted = (await anext(aiter(call))).accepted
        call.cancel()
        second = await follows(there, name, turn, resume_attempt=accepted.attempt, resume_token_offset=4)
        finish(generation)
        rest = await second
        assert rest.deltas[0].token_offset == 4
        assert rest.text == TEXT[len(TEXT) - len(rest.text) :] != TEXT


async def test_the_grace_of_a_turn_starts_again_while_somebody_waits_elsewhere() -> None:
    """Its last listener here has left, and is a follower at the other server now."""
    async with pair() as (here, there):
        name, turn = await here.create(), spec("hi")
        call = here.call(name, turn)
        generation = await here.link.next_generation()
        generation.admit()
        generation.emit(*encode(TEXT))
        await anext(aiter(call))
        (run,) = here.conversations.turns._runs.values()
        call.cancel()
        while run._grace is None:
            await asyncio.sleep(0.005)
        ends = run._grace.when()
        second = await follows(there, name, turn)
        async with asyncio.timeout(60):
            for _ in range(3):
                while run._grace.when() == ends:
                    await asyncio.sleep(0.005)
                ends = run._grace.when()
        finish(generation)
        assert (await second).text == TEXT and not there.link.generations


async def test_unary_turns_wait_as_well() -> None:
    async with pair() as (here, there):
        name, turn = await here.create(), spec("hi")
        first, generation = await begun(here, name, turn)
        second = asyncio.create_task(there.run(name, turn))
        await asyncio.sleep(0.02)
        finish(generation)
        assert await second == (await first).completed


async def test_an_onlooker_waits_for_the_end_and_leaves_no_trace() -> None:
    async with pair(heartbeat_s=0.02) as (here, there):
        name, turn = await here.create(), spec("hi")
        first, generation = await begun(here, name, turn)
        known = pb.TurnSpec(request_id=turn.request_id)
        leaving = there.call(name, known, attach_only=True)
        assert (await anext(aiter(leaving))).HasField("progress")
        leaving.cancel()
        looking = there.call(name, known, attach_only=True, on_disconnect=pb.DISCONNECT_POLICY_FINISH)
        for _ in range(3):
            assert (await anext(aiter(looking))).HasField("progress"), (
                "nothing is heard of a turn that goes on"
            )
        finish(generation)
        events = [event async for event in looking]
        seen = Streamed([event for event in events if not event.HasField("progress")])
        assert seen.accepted.replayed and seen.text == TEXT
        assert seen.completed == (await first).completed


async def test_an_onlooker_is_told_of_an_end_without_trace() -> None:
    async with pair() as (here, there):
        name, turn = await here.create(), spec("hi")
        known = pb.TurnSpec(request_id=turn.request_id)
        assert (await refusal(there.call(name, known, attach_only=True))).reason == "TURN_NOT_FOUND"
        first, _ = await begun(here, name, turn)
        looking = asyncio.create_task(refusal(there.call(name, known, attach_only=True)))
        await asyncio.sleep(0.02)
        await here.cancel(name, turn.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING)
        assert (await looking).reason == "TURN_NOT_FOUND"
        with pytest.raises(Exception, match="cancelled and discarded"):
            await first


@pytest.mark.parametrize("keep_tokens", [None, 3])
async def test_a_cancel_at_the_other_server_keeps_what_there_is(keep_tokens: int | None) -> None:
    async with pair() as (here, there):
        name, turn = await here.create(), spec("hi")
        first, generation = await begun(here, name, turn)
        view = await there.cancel(name, turn.request_id, keep_output_tokens=keep_tokens)
        assert generation.cancelled
        assert (view.state, view.finish_reason) == (pb.Turn.STATE_COMMITTED, pb.FINISH_REASON_CANCELLED)
        assert view.usage.output_tokens == (keep_tokens or len(encode(TEXT)))
        ended = (await first).completed
        assert (ended.revision, ended.output) == (view.revision, view.output)
        assert (await there.session(name)).revision == 2


@pytest.mark.parametrize("asked", ["here", "there", "there, followed"])
async def test_a_discarded_turn_stays_discarded(asked: str) -> None:
    """Those who follow it are told; none of them starts it again."""
    async with pair() as (here, there):
        name, turn = await here.create(), spec("hi")
        call = asyncio.create_task(refusal(here.call(name, turn)))
        (await here.link.next_generation()).admit()
        streams = [call]
        if asked != "there":
            streams.append(asyncio.create_task(refusal(there.call(name, turn))))
            while not there.conversations.turns.running:
                await asyncio.sleep(0.005)
        side = here if asked == "here" else there
        view = await side.cancel(name, turn.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING)
        assert (view.state, view.discard_reason) == (pb.Turn.STATE_DISCARDED, "TURN_CANCELLED")
        assert [error.reason for error in await asyncio.gather(*streams)] == ["TURN_CANCELLED"] * len(streams)
        session = await there.session(name)
        assert session.revision == 1 and not session.HasField("active_turn")
        assert not there.link.generations
        again = asyncio.create_task(there.stream(name, turn))
        generation = await there.link.next_generation()
        generation.admit()
        generation.emit(*encode(TEXT))
        finish(generation)
        assert (await again).completed.revision == 2, "who really tries again may"


async def test_a_turn_whose_server_gave_it_up_is_taken_over() -> None:
    async with pair() as (here, there):
        name, turn = await here.create(), spec("hi")
        first, _ = await begun(here, name, turn)
        second = await follows(there, name, turn)
        await here.conversations.drain(0.0)
        with pytest.raises(Exception, match="shutting down"):
            await first
        generation = await there.link.next_generation()
        generation.admit()
        generation.emit(*encode(TEXT))
        finish(generation)
        assert (await second).completed.revision == 2


async def test_followers_of_a_draining_server_are_sent_away_at_once() -> None:
    async with pair() as (here, there):
        name, turn = await here.create(), spec("hi")
        first, generation = await begun(here, name, turn)
        second = await follows(there, name, turn)
        assert await there.conversations.drain(20.0) == 0
        with pytest.raises(Exception, match="shutting down"):
            await second
        finish(generation)
        assert (await first).completed.revision == 2


async def _held_by_the_dead(rig: Rig, name: str, turn: pb.TurnSpec, lease_ms: int) -> Key:
    """The lease of a server that is gone."""
    key = Key("acme", name.removeprefix("sessions/"))
    print_ = turn_spec(turn).fingerprint()
    await rig.store.begin(key, BeginRequest(turn.request_id, print_, "token", "dead", "attempt", lease_ms, 7))
    return key


async def test_a_turn_of_a_dead_server_is_cancelled_when_its_lease_lapses() -> None:
    async with pair() as (here, _):
        name, turn = await here.create(), spec("hi")
        await _held_by_the_dead(here, name, turn, 200)
        view = await here.cancel(name, turn.request_id)
        assert (view.state, view.discard_reason) == (pb.Turn.STATE_DISCARDED, "TURN_CANCELLED")
        assert (await here.session(name)).revision == 1


async def test_a_server_that_does_not_hear_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server would be that knows no orders yet."""
    monkeypatch.setattr(lease, "ORDER_GRACE_S", 0.1)
    async with pair() as (here, _):
        name, turn = await here.create(), spec("hi")
        await _held_by_the_dead(here, name, turn, 60_000)
        request = pb.CancelTurnRequest(session=name, request_id=turn.request_id)
        error = await refusal(here.api.CancelTurn(request))
        assert (error.code, error.reason) == ("UNAVAILABLE", "TURN_RUNNING_ELSEWHERE")


@pytest.mark.fault(8)
async def test_fifty_duplicates_at_both_servers_are_one_turn() -> None:
    async with pair() as (here, there):
        name, turn = await here.create(), spec("hi")
        first, generation = await begun(here, name, turn)
        streams = [asyncio.create_task((there, here)[n % 2].stream(name, turn)) for n in range(49)]
        await asyncio.sleep(0.05)
        finish(generation)
        answers = await asyncio.gather(first, *streams)
        assert all(one.completed == answers[0].completed and one.text == TEXT for one in answers)
        assert [item.text for item in await there.items(name)] == ["hi", TEXT]
        assert not there.link.generations
