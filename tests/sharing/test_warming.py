"""WarmSession: what the engine is asked for, when it is not, and that it costs little and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
from prometheus_client import generate_latest

from pensieve.errors import Unavailable
from pensieve.server.failures import restarting
from pensieve.server.operations.metrics import Metrics
from pensieve.server.sessions.warming import SessionWarmer, WarmAnswer
from pensieve.store import Key
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, refusal, serving, spec, uid


async def warm(rig: Rig, name: str) -> pb.WarmSessionResponse:
    answer: pb.WarmSessionResponse = await rig.api.WarmSession(pb.WarmSessionRequest(session=name))
    return answer


async def talk(rig: Rig) -> str:
    name = await rig.create("Be brief.")
    await rig.run(name, "question")
    return name


async def test_the_engine_gets_the_history_as_the_next_turn_will_begin() -> None:
    async with serving() as rig:
        name = await talk(rig)
        answer = await warm(rig, name)
        assert answer.accepted and not answer.refused
        ((session, tokens, scope),) = rig.link.warmed
        await rig.run(name, "next")
        turn = rig.link.generations[-1]
        assert (session, scope) == (turn.session, turn.scope)
        assert turn.tokens[: len(tokens)] == tokens and 0 < len(tokens) < len(turn.tokens)
        cached = answer.residency
        assert (cached.gpu_tokens, cached.host_tokens, cached.replica) == (5, 1, "r1")
        assert cached.as_of_revision == 2
        assert cached.gpu_tokens + cached.host_tokens + cached.dropped_tokens == len(tokens)


async def test_nothing_is_changed_and_no_lease_is_taken() -> None:
    async with serving() as rig:
        name = await talk(rig)
        before = await rig.session(name)
        rig.link.warm_gate.clear()
        waiting = asyncio.ensure_future(warm(rig, name))
        while not rig.link.warmed:
            await asyncio.sleep(0.001)
        assert await rig.session(name) == before
        assert (await rig.run(name, "meanwhile")).state == pb.Turn.STATE_COMMITTED
        rig.link.warm_gate.set()
        assert (await waiting).accepted


async def test_calls_that_come_meanwhile_share_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, warmed = list[Key](), SessionWarmer.warm

    def arrive(self: SessionWarmer, key: Key) -> Awaitable[WarmAnswer]:
        arrived.append(key)
        return warmed(self, key)

    monkeypatch.setattr(SessionWarmer, "warm", arrive)
    async with serving() as rig:
        name, other = await talk(rig), await talk(rig)
        rig.link.warm_gate.clear()
        waiting = [asyncio.ensure_future(warm(rig, name)) for _ in range(20)]
        while len(arrived) < len(waiting) or not rig.link.warmed:
            await asyncio.sleep(0.001)
        waiting[0].cancel()
        await asyncio.sleep(0.05)  # the one that asked first has left
        waiting.append(asyncio.ensure_future(warm(rig, other)))
        rig.link.warm_gate.set()
        assert all(answer.accepted for answer in await asyncio.gather(*waiting[1:]))
        assert len(rig.link.warmed) == 2
        await warm(rig, name)
        assert len(rig.link.warmed) == 3, "an answer is not kept"


async def test_a_refusal_of_the_engine_is_passed_on() -> None:
    async with serving() as rig:
        name = await talk(rig)
        rig.link.warm_refusal = "no_room"
        answer = await warm(rig, name)
        assert (answer.accepted, answer.refused, answer.residency.gpu_tokens) == (False, "no_room", 5)


async def test_what_the_engine_need_not_be_asked() -> None:
    async with serving(answer=None, context_limit=64) as rig:
        assert (await warm(rig, await rig.create())).refused == "nothing_to_do"
        long = [pb.InputItem(role=pb.ROLE_USER, text="word " * 100)]
        drops = pb.SessionConfig(overflow_policy=pb.OVERFLOW_POLICY_DROP_OLDEST_TURNS)
        too_long = await rig.create(config=drops, initial_items=long)
        assert (await warm(rig, too_long)).refused == "no_room"
        name = await rig.create("Be brief.")
        call = rig.call(name, spec("hi"))
        generation = await rig.link.next_generation()
        answer = await warm(rig, name)
        assert (answer.accepted, answer.refused, answer.residency.gpu_tokens) == (False, "running", 3)
        generation.admit()
        generation.finish()
        assert [event async for event in call]
        assert not rig.link.warmed


async def test_a_turn_on_another_server_counts_as_running() -> None:
    async with serving(answer=None) as one, serving(store=one.store) as other:
        name = await one.create("Be brief.")
        call = one.call(name, spec("hi"))
        generation = await one.link.next_generation()
        assert (await warm(other, name)).refused == "running"
        generation.admit()
        generation.finish()
        assert [event async for event in call]
        assert (await warm(other, name)).accepted


async def test_errors_are_those_of_other_calls() -> None:
    async with serving() as rig:
        name = await talk(rig)
        nowhere = pb.WarmSessionRequest(session="sessions/nowhere")
        assert (await refusal(rig.api.WarmSession(nowhere))).reason == "SESSION_NOT_FOUND"
        foreign = rig.api.WarmSession(pb.WarmSessionRequest(session=name), metadata=(("tenant", "other"),))
        assert (await refusal(foreign)).reason == "SESSION_NOT_FOUND"
        bad = rig.api.WarmSession(pb.WarmSessionRequest(session="x"))
        assert (await refusal(bad)).reason == "FIELD_INVALID"
        rig.link.refuse = restarting()
        both = await asyncio.gather(
            *(refusal(rig.api.WarmSession(pb.WarmSessionRequest(session=name))) for _ in range(2))
        )
        assert [error.reason for error in both] == ["ENGINE_RESTARTING"] * 2
        rig.link.refuse = None
        assert (await warm(rig, name)).accepted
        await rig.conversations.drain(0.0)
        draining = await refusal(rig.api.WarmSession(pb.WarmSessionRequest(session=name)))
        assert isinstance(draining, Unavailable) and draining.reason == "DRAINING"


async def test_the_history_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as rig:
        name = await talk(rig)
        reads = []
        original = rig.store.read

        async def read(*arguments: object, **options: object) -> object:
            reads.append(arguments)
            return await original(*arguments, **options)

        monkeypatch.setattr(rig.store, "read", read)
        await warm(rig, name)
        assert rig.link.warmed and not reads


async def test_an_opted_out_session_is_warmed_alone() -> None:
    async with serving() as rig:
        config = pb.SessionConfig(system_prompt="s", prefix_sharing=pb.PREFIX_SHARING_NONE)
        await warm(rig, await rig.create(config=config))
        assert [scope for _, _, scope in rig.link.warmed] == [""]


async def test_outcomes_are_counted() -> None:
    metrics = Metrics()
    async with serving() as rig:
        rig.conversations.warmer._on_warmed = metrics.warm_ended
        name = await talk(rig)
        await warm(rig, name)
        rig.link.warm_refusal = "busy"
        await warm(rig, name)
        await refusal(rig.api.WarmSession(pb.WarmSessionRequest(session=f"sessions/{uid()}")))
    text = generate_latest(metrics.registry).decode()
    for outcome in ("accepted", "busy", "session_not_found"):
        assert f'pensieve_warm_calls_total{{outcome="{outcome}"}} 1.0' in text
