"""Turns that a busy server does not take are refused before anything is done for them, and told when to come back."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import msgspec
import pytest
from google.rpc import error_details_pb2, status_pb2

from pensieve.engine.messages import Stats
from pensieve.server.keys import TenantLimits, TenantTable
from pensieve.server.values import NewTurn
from pensieve.store import BeginRequest, Key
from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, refusal, says, serving, spec, uid


class Watched(MemoryStore):
    """Counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []

    async def begin(self, key: Key, request: BeginRequest) -> Any:
        self.begun.append(request.request_id)
        return await super().begin(key, request)


def overload(rig: Rig, wait_s: float = 60.0) -> None:
    """An engine that has served one unit of work a second, and has a queue of so many seconds."""
    gate = rig.conversations.gate
    rig.link.stats = Stats(steps_total=1, queued=9)
    gate.admit("acme", NewTurn("other"))
    gate._tick()
    for window in gate._speed._windows:
        window.seconds, window.work = 10.0, 10.0 * gate._backlog.work / wait_s


@pytest.mark.fault(35)
async def test_a_turn_that_would_wait_too_long_costs_nothing() -> None:
    store = Watched()
    async with serving(store=store, max_wait_s=2.0) as rig:
        name = await rig.create()
        before = await rig.session(name)
        overload(rig, wait_s=10.0)
        error = await refusal(rig.call(name, spec("hello")))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "SERVER_OVERLOADED")
        assert error.retry_after_s is not None and 8 <= error.retry_after_s <= 30 * 1.25
        assert store.begun == [] and rig.link.generations == []
        assert await rig.session(name) == before
        rig.link.stats = Stats(steps_total=2)
        assert (await rig.stream(name, "hello")).text  # the engine takes what comes


async def test_a_turn_that_is_in_history_is_replayed_however_busy_the_server_is() -> None:
    async with serving(max_wait_s=2.0) as rig:
        name, turn = await rig.create(), spec("hello")
        first = await rig.run(name, turn)
        overload(rig)
        assert await rig.run(name, turn) == first
        assert len(rig.link.generations) == 1


async def test_a_running_turn_can_be_joined_however_busy_the_server_is() -> None:
    async with serving(answer=None, max_wait_s=2.0) as rig:
        name, turn = await rig.create(), spec("hello")
        running = asyncio.create_task(rig.stream(name, turn))
        generation = await rig.link.next_generation()
        overload(rig)
        second = asyncio.create_task(rig.stream(name, turn))
        while len(rig.conversations.turns._runs) != 1 or not await _listeners(rig, 2):
            await asyncio.sleep(0.01)
        assert rig.conversations.gate.waiting == 2
        generation.admit()
        assert rig.conversations.gate.waiting == 1  # what begins waits no more
        generation.emit(*says("yes"))
        generation.finish()
        assert (await running).text == (await second).text == "yes"


async def _listeners(rig: Rig, count: int) -> bool:
    (run,) = rig.conversations.turns._runs.values()
    return run._listeners == count


@pytest.mark.fault(11)
async def test_a_deadline_that_would_pass_in_the_queue_is_told_at_once() -> None:
    store = Watched()
    async with serving(store=store, max_wait_s=0.0) as rig:
        name = await rig.create()
        overload(rig, wait_s=60.0)
        call = rig.api.RunTurn(pb.RunTurnRequest(session=name, turn=spec("hello")), timeout=30.0)
        error = await refusal(call)
        assert (error.code, error.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_TOO_SHORT")
        assert 59 < float(error.metadata["estimate"]) < 61
        assert store.begun == []
        assert (await rig.run(name, "hello")).state == pb.Turn.STATE_COMMITTED  # whoever has the time waits


@pytest.mark.fault(11)
async def test_a_deadline_that_passes_in_the_queue_leaves_no_trace() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        call = rig.api.RunTurn(pb.RunTurnRequest(session=name, turn=spec("hello")), timeout=0.5)
        generation = await rig.link.next_generation()  # the engine has it, and has not begun
        error = await refusal(call)
        assert error.code == "DEADLINE_EXCEEDED"
        async with asyncio.timeout(10):
            while not generation.cancelled or rig.conversations.turns.running:
                await asyncio.sleep(0.01)
        session = await rig.session(name)
        assert session.revision == 1 and not session.HasField("active_turn")
        assert rig.conversations.gate.waiting == 0


async def test_a_tenants_limit_is_its_own() -> None:
    table = TenantTable({"acme": TenantLimits(turns_at_once=1)})
    async with serving(answer=None, tenants=table) as rig:
        name = await rig.create()
        running = asyncio.create_task(rig.stream(name, "hello"))
        await rig.link.next_generation()
        with pytest.raises(grpc.RpcError) as caught:
            await rig.run(await rig.create(), "hello")
        trailers = dict(caught.value.trailing_metadata() or ())
        details = status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details
        quota, info = error_details_pb2.QuotaFailure(), error_details_pb2.ErrorInfo()
        assert any(detail.Unpack(quota) for detail in details)
        assert any(detail.Unpack(info) for detail in details)
        assert [violation.subject for violation in quota.violations] == ["acme"]
        assert (info.reason, info.metadata["limit"]) == ("QUOTA_EXCEEDED", "turns_at_once")
        other = pb.CreateSessionRequest(request_id=uid())
        theirs = await rig.api.CreateSession(other, metadata=(("tenant", "other"),))
        request = pb.RunTurnRequest(session=theirs.session.name, turn=spec("hello"))
        beside = asyncio.ensure_future(rig.api.RunTurn(request, metadata=(("tenant", "other"),)))
        generation = await rig.link.next_generation()
        assert generation.standing.tenant == "other"
        table.replace({})  # in force at once
        third = asyncio.create_task(rig.stream(await rig.create(), "hello"))
        assert (await rig.link.next_generation()).standing.tenant == "acme"
        for task in (running, beside, third):
            task.cancel()


async def test_the_engine_hears_whose_a_turn_is() -> None:
    table = TenantTable({"acme": TenantLimits(weight=2.5, cache_share=0.25)})
    async with serving(tenants=table) as rig:
        name = await rig.create()
        await rig.stream(name, spec("hello", priority=7))
        standing = rig.link.generations[0].standing
        assert msgspec.structs.astuple(standing) == ("acme", 2.5, 7, 0.25)
        error = await refusal(rig.call(name, spec("hello", priority=11)))
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", "FIELD_INVALID")


async def test_refusals_are_told_to_whoever_counts_them() -> None:
    async with serving(max_wait_s=1.0) as rig:
        told: list[tuple[str, str]] = []
        rig.conversations.turns._on_turn_refused = lambda tenant, reason: told.append((tenant, reason))
        name = await rig.create()
        overload(rig)
        await refusal(rig.call(name, spec("hello")))
        assert told == [("acme", "SERVER_OVERLOADED")]


@pytest.mark.fault(35)
async def test_a_turn_that_was_let_in_and_not_begun_in_time_is_refused_and_leaves_no_trace() -> None:
    async with serving(answer=None, max_wait_s=0.05) as rig:
        name = await rig.create()
        rig.link.stats = Stats(steps_total=1, queued=9)
        for _ in range(5):
            rig.conversations.gate.admit("acme", NewTurn("other"))
        turn = spec("hello")
        error = await refusal(rig.call(name, turn))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "SERVER_OVERLOADED")
        assert error.retry_after_s is not None
        assert all(generation.cancelled for generation in rig.link.generations)
        session = await rig.session(name)
        assert session.revision == 1 and not session.HasField("active_turn")
        assert rig.conversations.gate.waiting == 5


async def test_a_turn_that_has_begun_is_not_refused_however_long_it_takes() -> None:
    async with serving(answer=None, max_wait_s=0.02) as rig:
        name = await rig.create()
        rig.link.stats = Stats(steps_total=1, queued=9)
        call = rig.call(name, spec("hello"))
        generation = await rig.link.next_generation()
        generation.admit()
        for _ in range(5):
            rig.conversations.gate.admit("acme", NewTurn("other"))
        await asyncio.sleep(0.1)
        generation.emit(*says("hi"))
        generation.finish()
        assert [event async for event in call][-1].completed.output.text == "hi"
