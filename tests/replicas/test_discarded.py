"""What was said to be discarded stays so, whatever of its stream comes late; what is in history stays there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from pensieve.errors import Cancelled, TurnFenced, Unavailable
from pensieve.server.rpc.convert import turn_spec
from pensieve.server.turns.run import Order, TurnRun
from pensieve.server.turns.turns import CancelledStreams
from pensieve.store import Counts, EndOrder, HeldLease, Key, RenewalAnswer, Renewed
from pensieve.store.memory_store import MemoryStore
from pensieve.store.records import Record, SessionRow
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, Streamed, refusal, says, serving, spec

NOTHING = pb.CancelTurnRequest.KEEP_NOTHING
PARTIAL = pb.CancelTurnRequest.KEEP_PARTIAL


class HeldStore(MemoryStore):
    """Calls of it wait where a test wants them to."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, asyncio.Event] = {}
        self.passes: dict[str, int] = {}
        self.waiting = asyncio.Event()

    def hold(self, method: str, passes: int = 0) -> asyncio.Event:
        """The next call of this method, behind so many, waits for the event."""
        self.waiting.clear()
        self.passes[method] = passes
        gate = self.gates[method] = asyncio.Event()
        return gate

    async def _pass(self, method: str) -> None:
        if method in self.gates and self.passes[method]:
            self.passes[method] -= 1
            return
        gate = self.gates.pop(method, None)
        if gate is not None:
            self.waiting.set()
            await gate.wait()

    async def find_request(self, key: Key, request_id: str) -> int | None:
        await self._pass("find_request")
        return await super().find_request(key, request_id)

    async def abort(self, key: Key, token: str, *, called_off: bool = False) -> None:
        await self._pass("abort")
        await super().abort(key, token, called_off=called_off)

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        await self._pass("commit")
        return await super().commit(key, token, fingerprint, record, counts)


async def ends(rig: Rig) -> None:
    async with asyncio.timeout(10):
        while rig.conversations.turns.running:
            await asyncio.sleep(0.002)


async def history(rig: Rig, name: str) -> list[str]:
    await ends(rig)
    return [item.text for item in await rig.items(name)]


async def starts_again(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    """Another stream begins the turn, on purpose."""
    rig.link.answer = lambda _: says("again")
    assert (await rig.stream(name, turn, stream_id="another")).completed.output.text == "again"


async def test_a_stream_that_comes_after_its_discard_begins_nothing() -> None:
    async with serving() as rig:
        name, turn = await rig.create(), spec("hi")
        request = pb.CancelTurnRequest(
            session=name, request_id=turn.request_id, keep=NOTHING, stream_id="left"
        )
        assert (await refusal(rig.api.CancelTurn(request))).reason == "TURN_NOT_FOUND"
        error = await refusal(rig.call(name, turn, stream_id="left"))
        assert (error.code, error.reason) == ("CANCELLED", "TURN_CANCELLED")
        assert await history(rig, name) == []
        await starts_again(rig, name, turn)


@pytest.mark.parametrize("keep", [NOTHING, PARTIAL])
async def test_a_repetition_that_comes_after_its_discard_begins_nothing(keep: Any) -> None:
    """The first try ended with its engine; the client repeated it, and left before that was here."""
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        first = rig.call(name, turn, stream_id="left")
        (await rig.link.next_generation()).fail(Unavailable("restarting", reason="ENGINE_RESTARTING"))
        assert (await refusal(first)).reason == "ENGINE_RESTARTING"
        rig.link.answer = lambda _: says("late")
        view = await rig.cancel(name, turn.request_id, keep=keep, stream_id="left")
        assert (view.state, view.discard_reason) == (pb.Turn.STATE_DISCARDED, "ENGINE_RESTARTING")
        assert (await refusal(rig.call(name, turn, stream_id="left"))).reason == "TURN_CANCELLED"
        assert await history(rig, name) == []
        await starts_again(rig, name, turn)


@pytest.mark.parametrize("before", [False, True], ids=["unknown", "discarded before"])
@pytest.mark.parametrize("named", [False, True])
async def test_a_stream_that_comes_while_its_turn_is_looked_for_is_ended(before: bool, named: bool) -> None:
    """It begins behind the look at who runs. ``named``: by the discard."""
    store = HeldStore()
    async with serving(answer=None, store=store) as rig:
        name, turn = await rig.create(), spec("hi")
        if before:
            first = rig.call(name, turn, stream_id="left")
            (await rig.link.next_generation()).fail(Unavailable("restarting", reason="ENGINE_RESTARTING"))
            await refusal(first)
        gate = store.hold("find_request", passes=1)
        fields = {"stream_id": "left"} if named else {}
        cancel = asyncio.ensure_future(rig.cancel(name, turn.request_id, keep=NOTHING, **fields))
        await store.waiting.wait()
        late = rig.call(name, turn, stream_id="left")
        if named:
            assert (await refusal(late)).reason == "TURN_CANCELLED"
        else:
            await rig.link.next_generation()
        gate.set()
        if before or not named:
            assert (await cancel).state == pb.Turn.STATE_DISCARDED
        else:
            assert (await refusal(cancel)).reason == "TURN_NOT_FOUND"
        assert await history(rig, name) == []
        if not named:
            assert (await refusal(late)).reason == "TURN_CANCELLED"


@pytest.mark.parametrize("keep", [NOTHING, PARTIAL])
async def test_who_waits_behind_a_turn_that_nobody_heard_is_discarded_with_it(keep: Any) -> None:
    """The old attempt is being discarded, its client is back and waits to begin it anew: then it leaves for good."""
    store = HeldStore()
    async with serving(answer=None, store=store, disconnect_grace_s=0.0) as rig:
        name, turn = await rig.create(), spec("hi")
        gate = store.hold("abort")
        first = rig.call(name, turn)
        await rig.link.next_generation()
        first.cancel()
        await store.waiting.wait()
        back = rig.call(name, turn)
        turns = rig.conversations.turns
        (run,) = turns._runs.values()
        while not run.buffer._waiting_for_end:
            await asyncio.sleep(0.002)
        cancel = asyncio.ensure_future(rig.cancel(name, turn.request_id, keep=keep))
        while not run.cancelled_by_caller:
            await asyncio.sleep(0.002)
        rig.link.answer = lambda _: says("late")
        gate.set()
        assert (await cancel).state == pb.Turn.STATE_DISCARDED
        assert (await refusal(back)).reason == "TURN_CANCELLED"
        assert len(rig.link.generations) == 1 and await history(rig, name) == []


async def test_a_turn_that_is_being_committed_is_not_discarded() -> None:
    store = HeldStore()
    async with serving(answer=None, store=store) as rig:
        name, turn = await rig.create(), spec("hi")
        gate = store.hold("commit")
        call = rig.call(name, turn, stream_id="left")
        generation = await rig.link.next_generation()
        generation.admit()
        generation.emit(*says("whole"))
        generation.finish()
        await store.waiting.wait()
        cancel = asyncio.ensure_future(rig.cancel(name, turn.request_id, keep=NOTHING, stream_id="left"))
        await asyncio.sleep(0.01)
        gate.set()
        view = await cancel
        assert view.state == pb.Turn.STATE_COMMITTED
        assert Streamed([event async for event in call]).completed == view
        assert await history(rig, name) == ["hi", "whole"]


class StillStore(HeldStore):
    """For a server that stands still: it renews no lease, and its commit comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self._steady_clock = lambda: self.now
        self.asked = asyncio.Event()

    async def ask_to_end(self, key: Key, request_id: str, order: EndOrder) -> bool:
        waits = await super().ask_to_end(key, request_id, order)
        self.asked.set()
        return waits

    def lapse_leases(self) -> None:
        self.now += 1 << 40

    async def renew_leases(self, leases: Sequence[HeldLease], lease_ms: int) -> list[RenewalAnswer]:
        return [Renewed() for _ in leases]


@pytest.mark.parametrize("lapses", ["before it is asked", "while it is asked"])
async def test_a_commit_that_comes_after_the_discard_at_another_server_adds_nothing(lapses: str) -> None:
    store = StillStore()
    async with serving(store=store) as still, serving(store=store) as other:
        name, turn = await still.create(), spec("hi")
        gate = store.hold("commit")
        call = still.call(name, turn)
        await store.waiting.wait()
        if lapses == "before it is asked":
            store.lapse_leases()
            assert (
                await refusal(other.cancel(name, turn.request_id, keep=NOTHING))
            ).reason == "TURN_NOT_FOUND"
        else:
            cancel = asyncio.ensure_future(other.cancel(name, turn.request_id, keep=NOTHING))
            await store.asked.wait()
            store.lapse_leases()
            assert (await cancel).state == pb.Turn.STATE_DISCARDED
        gate.set()
        assert (await refusal(call)).reason == "TURN_FENCED"
        assert await history(still, name) == []


async def test_a_turn_whose_commit_may_be_on_its_way_is_not_called_discarded() -> None:
    class AwayStore(StillStore):
        async def commit(self, *args: Any) -> SessionRow:
            self.late = super().commit(*args)
            raise Unavailable("no answer in time", reason="STORE_UNAVAILABLE")

        async def abort(self, key: Key, token: str, *, called_off: bool = False) -> None:
            raise Unavailable("no answer in time", reason="STORE_UNAVAILABLE")

    store = AwayStore()
    async with serving(store=store, commit_retry_s=0.0) as rig:
        name, turn = await rig.create(), spec("hi")
        assert (await refusal(rig.call(name, turn))).reason == "STORE_UNAVAILABLE"
        store.lapse_leases()
        assert (await refusal(rig.get_turn(name, turn.request_id))).reason == "TURN_NOT_FOUND"
        assert (await refusal(rig.cancel(name, turn.request_id, keep=NOTHING))).reason == "TURN_NOT_FOUND"
        with pytest.raises(TurnFenced):
            await store.late


async def test_a_turn_in_history_outlives_its_discard_and_is_replayed_to_its_own_stream() -> None:
    async with serving() as rig:
        name, turn = await rig.create(), spec("hi")
        done = (await rig.stream(name, turn, stream_id="left")).completed
        assert await rig.cancel(name, turn.request_id, keep=NOTHING, stream_id="left") == done
        assert (await rig.stream(name, turn, stream_id="left")).completed == done


async def test_a_cancel_that_keeps_and_finds_nothing_changes_nothing() -> None:
    async with serving() as rig:
        name, turn = await rig.create(), spec("hi")
        request = pb.CancelTurnRequest(session=name, request_id=turn.request_id, stream_id="early")
        assert (await refusal(rig.api.CancelTurn(request))).reason == "TURN_NOT_FOUND"
        assert (await rig.stream(name, turn, stream_id="early")).completed.revision == 2


async def test_a_discarded_turn_that_a_caller_wanted_to_end_is_called_off_for_other_servers() -> None:
    """Whoever was first: the last listener's going, or the call."""
    run = TurnRun(Key("acme", "s"), turn_spec(spec("hi")), "")
    run.end_early(Order(error=Cancelled("nobody listened", reason="CLIENT_DISCONNECTED")))
    assert not run.cancelled_by_caller
    run.end_early(Order(error=Cancelled("the turn was cancelled"), by_caller=True))
    assert run.cancelled_by_caller
    kept = TurnRun(Key("acme", "s"), turn_spec(spec("hi")), "")
    kept.end_early(Order(by_caller=True))
    assert not kept.cancelled_by_caller


def test_the_newest_streams_are_remembered() -> None:
    streams, key = CancelledStreams(2), Key("acme", "s")
    for stream in ("a", "b", "a", "c", ""):
        streams.add(key, "turn", stream)
    assert [stream for stream in ("a", "b", "c", "") if streams.has(key, "turn", stream)] == ["a", "c"]
    assert not streams.has(key, "other", "a") and not streams.has(Key("other", "s"), "turn", "a")
    streams.forget(key, "turn", "a")
    streams.forget(key, "turn", "never")
    assert not streams.has(key, "turn", "a")
