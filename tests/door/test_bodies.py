"""Places for request bodies: divided among the callers, and nobody's for having sent headers."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise
from typing import Any

import grpc
import pytest
from grpc import aio

from pensieve.errors import PensieveError, ResourceExhausted
from pensieve.rpc_status import MESSAGE_TOO_LARGE, from_rpc_error
from pensieve.server.rpc.auth import ANONYMOUS, Authenticator
from pensieve.server.rpc.calls import (
    BURST,
    MAX_TRACKED_CALLERS,
    BodyGate,
    BodyRateLimiter,
    RunningCall,
    RunningCalls,
)
from pensieve.server.rpc.interceptor import Interceptor
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, refusal, serving, user

CREATE = "/pensieve.v1.ConversationService/CreateSession"
LONG_S = 60.0


class Body:
    """A body that is being received until the test says that it has come."""

    def __init__(self, gate: BodyGate, caller: str, connection: str = "") -> None:
        self._gate = gate
        self._caller = caller
        self._connection = connection
        self._come = asyncio.Event()
        self.held = asyncio.Event()
        self.task = asyncio.create_task(self._receive())

    async def _receive(self) -> str:
        call = RunningCall(ANONYMOUS, self._caller, self._connection)
        try:
            with call.interruptible():
                async with self._gate.admit(call):
                    self.held.set()
                    await self._come.wait()
        except PensieveError as error:
            return error.reason
        return "received"

    async def comes(self) -> str:
        self._come.set()
        return await asyncio.wait_for(self.task, 10)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_free_place_is_anybodys() -> None:
    gate = BodyGate(4)
    alone = [Body(gate, "a") for _ in range(4)]
    await settled()
    assert all(body.held.is_set() for body in alone)
    assert [await body.comes() for body in alone] == ["received"] * 4


async def test_who_comes_new_takes_a_place_from_who_holds_too_many() -> None:
    gate = BodyGate(4, patience_s=LONG_S, haste_s=0.01)
    greedy = [Body(gate, "a") for _ in range(50)]
    await settled()
    other = Body(gate, "b")
    await asyncio.wait_for(other.held.wait(), 10)
    assert await other.comes() == "received"
    ended = [body for body in greedy if body.task.done()]
    assert ended and all(body.task.result() == "SERVER_OVERLOADED" for body in ended)
    for body in greedy:
        body.task.cancel()


@pytest.mark.fault(36)
async def test_connections_of_one_caller_divide_its_places() -> None:
    """Behind one address may be many programs: the calls of one connection do not hold up another's."""
    gate = BodyGate(4, patience_s=LONG_S, haste_s=0.01)
    greedy = [Body(gate, "a", "1") for _ in range(50)]
    await settled()
    for connection in "23":
        other = Body(gate, "a", connection)
        await asyncio.wait_for(other.held.wait(), 10)
        assert await other.comes() == "received"
    assert any(body.held.is_set() and not body.task.done() for body in greedy), "it keeps its own share"
    for body in greedy:
        body.task.cancel()


async def test_a_caller_within_its_share_keeps_its_places() -> None:
    gate = BodyGate(4, patience_s=0.01, haste_s=0.01)
    modest = [Body(gate, "b") for _ in range(2)]
    await settled()
    greedy = [Body(gate, "a") for _ in range(50)]
    async with asyncio.timeout(10):
        while not all(body.task.done() for body in greedy):
            await asyncio.sleep(0.01)
            # What is left of the greedy one's calls goes by; it never holds fewer than the modest one.
            if len([body for body in greedy if not body.task.done()]) <= 2:
                break
    assert [await body.comes() for body in modest] == ["received"] * 2
    for body in greedy:
        body.task.cancel()


async def test_a_callers_slow_bodies_give_way_to_its_own_others() -> None:
    gate = BodyGate(1, patience_s=0.01)
    slow = Body(gate, "a")
    await settled()
    quick = Body(gate, "a")
    await asyncio.wait_for(quick.held.wait(), 10)
    assert await quick.comes() == "received"
    assert slow.task.result() == "SERVER_OVERLOADED"


async def test_no_body_may_take_for_ever() -> None:
    body = Body(BodyGate(1, limit_s=0.01), "a")
    assert await asyncio.wait_for(body.task, 10) == "REQUEST_TOO_SLOW"


async def test_callers_that_leave_the_queue_leave_no_place_behind() -> None:
    gate = BodyGate(2, patience_s=LONG_S, haste_s=LONG_S)
    for _ in range(30):
        bodies_ = [Body(gate, name) for name in "aabbcc"]
        await settled()
        for body in bodies_[::2]:
            body.task.cancel()
        bodies_[1]._come.set()
        await settled()
        for body in bodies_:
            body.task.cancel()
        await asyncio.gather(*(body.task for body in bodies_), return_exceptions=True)
    last = [Body(gate, "d") for _ in range(2)]
    await settled()
    assert all(body.held.is_set() for body in last)
    for body in last:
        await body.comes()


async def test_one_caller_leaves_calls_for_others() -> None:
    calls = RunningCalls(100)

    def fill(caller: str) -> int:
        entered = 0
        with contextlib.suppress(ResourceExhausted):
            while True:
                stack.enter_context(calls.admit(RunningCall(ANONYMOUS, caller)))
                entered += 1
        return entered

    with contextlib.ExitStack() as stack:
        assert [fill(name) for name in "abcd"] == [80, 16, 4, 0]
        assert len(calls) <= 100
    assert len(calls) == 0


async def _headers_alone(rig: Rig, count: int, metadata: Any) -> list[Any]:
    """Calls that never send their message, spread over a few connections."""
    channels = [
        aio.insecure_channel(rig.target, options=(("grpc.use_local_subchannel_pool", 1),)) for _ in range(4)
    ]
    calls = []
    for number in range(count):
        call = channels[number % 4].stream_unary(CREATE)(metadata=metadata)
        calls.append(call)
    await asyncio.gather(*(call.wait_for_connection() for call in calls[:4]))
    rig.channels = channels  # type: ignore[attr-defined]  # closed by the test
    return calls


async def test_headers_without_a_body_delay_nobody_else() -> None:
    """No body ever loses its place for having waited long: only for being beyond its caller's share."""
    async with serving(bodies=BodyGate(patience_s=LONG_S)) as rig:
        calls = await _headers_alone(rig, 256, (("tenant", "greedy"),))
        try:
            for _ in range(20):
                await asyncio.wait_for(rig.create(), 10)
        finally:
            for call in calls:
                call.cancel()
            for channel in rig.channels:  # type: ignore[attr-defined]
                await channel.close()


async def test_a_body_that_comes_in_pieces_is_taken() -> None:
    """The message is one; the network may bring it in as many parts as it likes."""
    async with serving() as rig:
        text = "x" * 300_000
        error = await refusal(rig.create(initial_items=[user(text)] * 10))
        assert error.reason == "FIELD_INVALID"
        assert await rig.session(await rig.create())


async def test_a_call_without_a_message_is_refused() -> None:
    async with serving() as rig:
        call = rig.channel.stream_unary(CREATE)(iter(()))
        error = await refusal(call)
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", "REQUEST_MALFORMED")
        big = pb.CreateSessionRequest(session_id="x" * (5 << 20)).SerializeToString()
        with pytest.raises(aio.AioRpcError) as caught:
            await rig.channel.unary_unary(CREATE)(big)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        told = from_rpc_error(caught.value)
        assert (told.reason, told.metadata["limit"]) == (MESSAGE_TOO_LARGE, str(4 << 20))


async def test_a_caller_who_has_been_quiet_does_not_wait() -> None:
    pace = BodyRateLimiter(rate=1e6, burst=3e6)
    for _ in range(3):
        pace.settle("a", 1_000_000, await asyncio.wait_for(pace.reserve("a"), 0.5))


async def test_large_bodies_of_one_caller_come_at_its_pace_and_nobody_elses() -> None:
    pace = BodyRateLimiter(rate=1e6, burst=100_000)
    pace.settle("a", 100_000, await pace.reserve("a"))
    at: list[float] = []

    async def send() -> None:
        expected = await pace.reserve("a")
        at.append(asyncio.get_running_loop().time())
        pace.settle("a", 100_000, expected)

    async with asyncio.TaskGroup() as group:
        sending = [group.create_task(send()) for _ in range(4)]
        await asyncio.sleep(0)
        await asyncio.wait_for(pace.reserve("b"), 0.05)
        assert not all(task.done() for task in sending)
    spaces = [later - earlier for earlier, later in pairwise(at)]
    assert min(spaces) > 0.05, "each waits for those before it, though nobody knew their sizes"


async def test_small_bodies_behind_a_large_one_do_not_wait_as_if_they_were_large() -> None:
    pace = BodyRateLimiter(rate=1e6, burst=3e6)
    pace.settle("a", 2_000_000, await pace.reserve("a"))
    await asyncio.wait_for(asyncio.gather(*(pace.reserve("a") for _ in range(100))), 0.5)


async def test_what_was_taken_for_a_body_that_never_came_is_given_back() -> None:
    pace = BodyRateLimiter(rate=1e6, burst=100_000)
    for _ in range(2):  # the second one waits for the first, and is taken to be as large
        pace.settle("a", 200_000, await pace.reserve("a"))
    pace.settle("a", 0, await pace.reserve("a"))
    await asyncio.wait_for(pace.reserve("a"), 0.1)


async def test_callers_who_have_been_quiet_are_forgotten() -> None:
    pace = BodyRateLimiter(rate=1e9, burst=1.0)
    for number in range(3 * MAX_TRACKED_CALLERS):
        await pace.reserve(f"caller {number}")
    assert len(pace._paid_until) <= MAX_TRACKED_CALLERS


@pytest.mark.fault(36)
async def test_a_connection_without_a_key_waits_for_its_own_bodies_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One connection is in debt for what it sent; another of the same address sends at once."""
    waited: list[float] = []

    async def noted(seconds: float) -> None:
        waited.append(seconds)
        raise AssertionError("it waits for another connection's bodies")

    guard = Interceptor(Authenticator())
    first, second = (RunningCall(ANONYMOUS, "@::1", f"ipv6:[::1]:{port}") for port in (1, 2))
    for pace, name in guard._paces(first):
        pace.settle(name, int(1.5 * BURST), 0)
    monkeypatch.setattr(asyncio, "sleep", noted)
    for pace, name in guard._paces(second):
        await pace.reserve(name)
    with pytest.raises(AssertionError):
        for pace, name in guard._paces(first):
            await pace.reserve(name)
    assert len(waited) == 1
