"""What goes wrong around a turn: the store, the lease, hundreds of callers who leave, and our own bugs."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import grpc
import pytest

from pensieve import debug
from pensieve.errors import Unavailable
from pensieve.store import BeginOutcome, BeginRequest, Key
from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Streamed, refusal, says, serving, spec, user


class BrokenStore(MemoryStore):
    """Fails the named methods as many times as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.fail: dict[str, int] = {}
        self.text = "".join(("SEC", "RET"))
        self.after_effect = False
        """The work is done, only the reply is lost."""

    async def _maybe(self, name: str, call: Any) -> Any:
        if self.fail.get(name, 0) > 0:
            self.fail[name] -= 1
            if self.after_effect:
                await call
            else:
                call.close()
            raise Unavailable("the store is down")
        return await call

    async def begin(self, *args: Any, **kwargs: Any) -> Any:
        return await self._maybe("begin", super().begin(*args, **kwargs))

    async def commit(self, *args: Any, **kwargs: Any) -> Any:
        return await self._maybe("commit", super().commit(*args, **kwargs))

    async def renew_leases(self, *args: Any, **kwargs: Any) -> Any:
        return await self._maybe("renew_leases", super().renew_leases(*args, **kwargs))

    async def load(self, *args: Any, **kwargs: Any) -> Any:
        if self.fail.get("bug"):
            raise KeyError(self.text)  # a message as exceptions have them, with content in it
        return await super().load(*args, **kwargs)


@pytest.mark.parametrize("after_effect", [False, True], ids=["not done", "reply lost"])
async def test_a_commit_waits_for_the_store(after_effect: bool) -> None:
    store = BrokenStore()
    async with serving(store=store) as rig:
        name = await rig.create()
        store.fail["commit"], store.after_effect = 2, after_effect
        got = await rig.stream(name, "hi")
        assert got.completed.revision == 2
        assert any(event.progress.phase == pb.TurnProgress.PHASE_COMMIT for event in got.events)
        assert len(await rig.items(name)) == 2


@pytest.mark.parametrize("after_effect", [False, True], ids=["not done", "reply lost"])
async def test_a_commit_that_never_succeeds_has_an_unknown_outcome(after_effect: bool) -> None:
    store = BrokenStore()
    async with serving(store=store, commit_retry_s=0.1) as rig:
        name, turn = await rig.create(), spec("hi")
        store.fail["commit"], store.after_effect = 1000, after_effect
        error = await refusal(rig.call(name, turn))
        assert (error.code, error.reason) == ("UNAVAILABLE", "STORE_UNAVAILABLE")
        store.fail.clear()
        got = await rig.stream(name, turn)  # the retry tells
        assert got.completed.revision == 2 and got.accepted.replayed is after_effect
        assert len(await rig.items(name)) == 2


@pytest.mark.parametrize("after_effect", [False, True], ids=["not done", "reply lost"])
async def test_begin_fails_at_once_and_leaves_no_lease(after_effect: bool) -> None:
    store = BrokenStore()
    async with serving(store=store) as rig:
        name, turn = await rig.create(), spec("hi")
        store.fail["begin"], store.after_effect = 1, after_effect
        assert (await refusal(rig.call(name, turn))).reason == "STORE_UNAVAILABLE"
        assert (await rig.stream(name, "another")).completed.revision == 2


async def test_a_turn_whose_lease_was_taken_over_is_fenced() -> None:
    async with serving(answer=None, lease_s=0.3) as rig:
        name, turn = await rig.create(), spec("hi")
        call = rig.call(name, turn)
        generation = await rig.link.next_generation()
        session = rig.store._sessions[Key("acme", name.removeprefix("sessions/"))]
        import msgspec

        stolen = msgspec.structs.replace(session.meta.lease, token="stolen")
        session.meta = msgspec.structs.replace(session.meta, lease=stolen)
        error = await refusal(call)
        assert (error.code, error.reason) == ("ABORTED", "TURN_FENCED")
        assert generation.cancelled and (await rig.session(name)).revision == 1


async def test_failed_renewals_stop_the_turn_before_the_lease_ends() -> None:
    store = BrokenStore()
    async with serving(answer=None, store=store, lease_s=0.3) as rig:
        name = await rig.create()
        store.fail["renew_leases"] = 1000
        call = rig.call(name, spec("hi"))
        generation = await rig.link.next_generation()
        assert (await refusal(call)).reason == "TURN_FENCED"
        assert generation.cancelled


async def test_renewals_keep_a_long_turn_alive() -> None:
    async with serving(answer=None, lease_s=0.15) as rig:
        name = await rig.create()
        call = rig.call(name, spec("hi"))
        generation = await rig.link.next_generation()
        generation.admit()
        renewed = 0
        renew = rig.store.renew_leases

        async def counted(*args: Any) -> Any:
            nonlocal renewed
            news = await renew(*args)
            renewed += 1
            return news

        rig.store.renew_leases = counted
        while renewed < 8:  # several leases long
            await asyncio.sleep(0.01)
        generation.finish()
        assert Streamed([event async for event in call]).completed.revision == 2


async def test_a_silent_engine_gets_heartbeats() -> None:
    async with serving(answer=None, heartbeat_s=0.02) as rig:
        name = await rig.create()
        call = rig.call(name, spec("hi"))
        generation = await rig.link.next_generation()
        beats = 0
        async for event in call:
            if event.HasField("accepted"):
                assert event.accepted.heartbeat_interval.ToMilliseconds() == 20
            beats += event.HasField("progress")
            if beats == 4:
                generation.finish()
        assert beats >= 4


@pytest.mark.fault(56)
async def test_an_exception_of_ours_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = BrokenStore()
    async with serving(store=store) as rig:
        name = await rig.create()
        store.fail["bug"] = 1
        with caplog.at_level(logging.DEBUG):
            calls = (
                rig.api.GetSession(pb.GetSessionRequest(name=name)),
                rig.api.CountTokens(pb.CountTokensRequest(session=name, input=[user("CANARY")])),
            )
            for call in calls:
                error = await refusal(call)
                assert (error.code, error.reason) == ("INTERNAL", "BUG")
                assert set(error.metadata) == {"error_id"} and error.message == "internal error"
                assert error.metadata["error_id"] in caplog.text  # the operator finds it
        assert "SECRET" not in caplog.text and "CANARY" not in caplog.text
        assert "KeyError" in caplog.text and "test_faults.py" in caplog.text


async def test_a_bug_inside_a_turn_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as rig:
        name = await rig.create()
        debug.arm("mid_decode=raise")
        try:
            error = await refusal(rig.call(name, spec("CANARY")))
        finally:
            debug.arm("")
        assert (error.reason, error.message) == ("BUG", "internal error")
        assert "CANARY" not in caplog.text and error.metadata["error_id"] in caplog.text


@pytest.mark.fault(3, 7)
async def test_a_storm_of_disconnects_leaks_nothing() -> None:
    """Hundreds of streams cut at every phase; afterwards no task, turn, timer or generation is left."""
    async with serving(answer=None, disconnect_grace_s=0.01, heartbeat_s=0.01) as rig:
        names = [await rig.create() for _ in range(20)]

        async def cut(number: int) -> None:
            call = rig.call(names[number % 20], spec(f"storm {number}"))
            try:
                for _ in range(number % 4):
                    await anext(aiter(call))
            except grpc.RpcError:
                return  # TURN_IN_PROGRESS is as good an end as any here
            call.cancel()

        tasks = asyncio.all_tasks()
        for start in range(0, 400, 100):
            await asyncio.gather(*(cut(n) for n in range(start, start + 100)))
        while rig.conversations.turns.running:
            await asyncio.sleep(0.01)
        assert all(generation.cancelled for generation in rig.link.generations)
        await asyncio.sleep(0.05)
        gc.collect()
        left = [t for t in asyncio.all_tasks() - tasks if t.get_name().startswith(("turn", "lease"))]
        assert not left
        for name in names:
            session = await rig.session(name)
            assert session.revision == 1 and not session.HasField("active_turn")
        rig.link.answer = lambda _: says("fine")
        assert (await rig.run(names[0], "hi")).output.text == "fine"


class LeavingStore(MemoryStore):
    """Does what begins a turn, is away before it can say so, and comes back after some calls."""

    away = 0
    """Calls that are refused still."""
    lost = True

    async def begin(self, key: Key, request: BeginRequest) -> BeginOutcome:
        outcome = await super().begin(key, request)
        if self.lost:
            self.lost, self.away = False, 3
            raise Unavailable("the reply is lost", reason="STORE_UNAVAILABLE")
        return outcome

    async def abort(self, key: Key, token: str, *, called_off: bool = False) -> None:
        if self.away:
            self.away -= 1
            raise Unavailable("away", reason="STORE_UNAVAILABLE")
        await super().abort(key, token, called_off=called_off)


@pytest.mark.fault(46, 48)
async def test_a_begin_whose_reply_is_lost_holds_its_session_no_longer_than_the_store_is_away() -> None:
    """Not until the lease lapses: that is long after a store has failed over."""
    async with serving(store=LeavingStore(), lease_s=600.0) as rig:
        name, turn = await rig.create(), spec("hi")
        assert (await refusal(rig.call(name, turn))).reason == "STORE_UNAVAILABLE"
        async with asyncio.timeout(60):
            assert (await rig.stream(name, turn)).completed.revision == 2


@pytest.mark.fault(35)
async def test_calls_in_flight_are_bounded_and_health_is_not_counted() -> None:
    async with serving(answer=None, max_in_flight=2) as rig:
        names = [await rig.create() for _ in range(3)]
        calls = [rig.call(name, spec("hi")) for name in names[:2]]
        for call in calls:
            await anext(aiter(call))
        error = await refusal(rig.call(names[2], spec("hi")))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "SERVER_OVERLOADED")
        assert error.retry_after_s
        for generation in rig.link.generations:
            generation.finish()
        for call in calls:
            async for _ in call:
                pass
        assert await rig.session(names[2])


@pytest.mark.fault(55)
async def test_unauthenticated_bodies_are_never_decoded() -> None:
    from pensieve.errors import Unauthenticated

    class Nobody:
        def check(self, method: str, metadata: Any, shown: Any) -> Any:
            raise Unauthenticated("no credential")

    async with serving(authorizer=Nobody()) as rig:
        call = rig.channel.unary_unary("/pensieve.v1.ConversationService/GetSession")(b"\xff" * 1000)
        assert (await refusal(call)).code == "UNAUTHENTICATED"
        assert (await refusal(rig.call("sessions/abc", spec("hi")))).code == "UNAUTHENTICATED"
