"""Two servers on one Redis: a session has one running turn, whoever is asked, and stale KV is never used."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from pensieve.v1 import pensieve_pb2 as pb
from support.faults.fault_client import (
    SERVING,
    Caller,
    Refused,
    Talk,
    audit,
    calling,
    check_history,
    check_idle,
)
from support.faults.fault_server import FaultServer, fault_server
from support.lengths import at_length
from support.store.redis_server import redis_server

pytestmark = pytest.mark.redis
TALKS = 6
TURNS_OF_A_TALK = 10
RACES = at_length(120, 300)


Pair = tuple[FaultServer, FaultServer]
DEAF = "in_renew=stall(30)"
"""A server that hears from its lease too late: only the store stands between its answer and the history."""


@contextmanager
def _pair(folder: Path, failpoints: str = "") -> Iterator[Pair]:
    """Two running servers on one store; the failpoints are the first one's."""
    with ExitStack() as stack:
        store = stack.enter_context(redis_server()).url
        first, second = (stack.enter_context(fault_server(folder / name, store)) for name in "ab")
        with ThreadPoolExecutor() as threads:
            starts = [threads.submit(first.start, failpoints), threads.submit(second.start)]
            for start in starts:
                start.result()
        yield first, second


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two servers for several tests, which have sessions of their own."""
    with _pair(tmp_path_factory.mktemp("pair")) as servers:
        yield servers


@pytest.fixture(scope="module")
def deaf_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The same; the first one is deaf."""
    with _pair(tmp_path_factory.mktemp("deaf"), DEAF) as servers:
        yield servers


@asynccontextmanager
async def callers_of(servers: Pair) -> AsyncIterator[tuple[Caller, Caller]]:
    """A client of each."""
    first, second = servers
    async with calling(first.grpc, first.admin) as one, calling(second.grpc, second.admin) as other:
        yield one, other


async def _race(callers: list[Caller], talk: Talk, specs: list[pb.TurnSpec]) -> None:
    """Both at once. Two different turns on one revision: exactly one may win, the other is told why it did not."""
    tries = (caller.turn(talk, spec) for caller, spec in zip(callers, specs, strict=True))
    ended = await asyncio.gather(*tries, return_exceptions=True)
    won = [turn for turn in ended if isinstance(turn, pb.Turn)]
    lost = [error for error in ended if isinstance(error, Refused)]
    assert len(won) + len(lost) == 2, ended
    reasons = {error.error.reason for error in lost}
    if specs[0] is specs[1]:
        assert len(won) == 2 and won[0] == won[1], ended
        answers = [await caller.until_done(talk, specs[0]) for caller in callers]
        assert answers[0] == answers[1] == won[0]
    else:
        assert len(won) == 1 and reasons <= {"TURN_IN_PROGRESS", "REVISION_MISMATCH"}, ended


async def _changes_its_mind(caller: Caller, talk: Talk) -> None:
    """A turn that is cancelled and discarded: this server's cache then holds what never became history."""
    spec = talk.spec("no, wait", 24)
    call = caller.call(talk, spec)
    async for event in call:
        if event.HasField("delta"):
            break
    nothing = pb.CancelTurnRequest.KEEP_NOTHING
    request = pb.CancelTurnRequest(session=talk.name, request_id=spec.request_id, keep=nothing)
    await caller.data.CancelTurn(request, timeout=20)
    call.cancel()


async def _races(callers: list[Caller], talks: list[Talk], rounds: int) -> None:
    talk, revision = await callers[0].talk(), 1
    talks.append(talk)
    for number in range(rounds):
        if number % 3 == 2:
            await _changes_its_mind(callers[number % 2], talk)
            revision = (await callers[0].session(talk)).revision  # it may have been too late
        if number % 2:
            spec = talk.spec(f"same {number}", 4)
            specs = [spec, spec]
        else:
            specs = [talk.spec(f"{side} {number}", 4, expected_revision=revision) for side in "ab"]
        # The side that is asked first takes turns, or one server would win almost always.
        order = slice(None, None, -1 if number % 4 < 2 else 1)
        await _race(callers[order], talk, specs)
        revision += 1
    for caller in callers:
        assert (await caller.session(talk)).revision == revision
        await check_history(caller, talk)


@pytest.mark.fault(8, 52)
async def test_races(pair: Pair) -> None:
    """Some hundred of them. Each server meets sessions whose last turns ran on the other one."""
    async with callers_of(pair) as both:
        callers = list(both)
        talks: list[Talk] = []
        for _ in range(RACES // (TALKS * TURNS_OF_A_TALK)):
            await asyncio.gather(*(_races(callers, talks, TURNS_OF_A_TALK) for _ in range(TALKS)))
        winners = [await _known(caller, talks) for caller in callers]
        assert all(winners), "one server did all the work"
        await audit(callers[0], talks[-TALKS:])
        await check_idle(callers[1])


async def _known(caller: Caller, talks: list[Talk]) -> int:
    """Tokens of all sessions that this server's engine has seen: 0 when it never ran."""
    total = 0
    for talk in talks:
        request = pb.GetSessionRequest(name=talk.name, view=pb.SESSION_VIEW_FULL)
        where = (await caller.data.GetSession(request, timeout=10)).session.residency
        total += int(where.gpu_tokens + where.host_tokens)
    return total


async def _held_by(caller: Caller, talk: Talk, spec: pb.TurnSpec) -> None:
    """Returns when this turn runs somewhere."""
    async with asyncio.timeout(20):
        while (await caller.session(talk)).active_turn.request_id != spec.request_id:
            await asyncio.sleep(0.01)


@contextmanager
def _frozen(server: FaultServer) -> Iterator[None]:
    """The front end stands still, as a paused machine does, and goes on at the end."""
    server.send(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send(signal.SIGCONT)


@pytest.mark.fault(26)
@pytest.mark.parametrize("wakes", ["in mid-decode", "with an answer", "with an answer while the other runs"])
async def test_a_paused_server_is_fenced(pair: Pair, deaf_pair: Pair, wakes: str) -> None:
    """SIGSTOP past the lease: another turn runs elsewhere; the paused one may not append when it wakes up."""
    answer = wakes != "in mid-decode"
    servers = paused, awake = deaf_pair if answer else pair
    async with callers_of(servers) as (slow, other):
        talk = await slow.talk()
        await slow.say(talk, "one")
        paused.hold()
        fenced = talk.spec("never to be seen", 8)
        turn = asyncio.create_task(slow.turn(talk, fenced))
        await _held_by(other, talk, fenced)
        with _frozen(paused):
            if answer:
                paused.release()  # its engine goes on, and the answer waits for the front end to wake up
            if wakes.endswith("runs"):
                awake.hold()
            two = talk.spec("two")
            stands = asyncio.create_task(other.until_done(talk, two))
            await _held_by(other, talk, two) if wakes.endswith("runs") else await stands
        with pytest.raises(Refused, match="TURN_FENCED"):
            await turn
        paused.release()
        awake.release()
        assert (await stands).revision == 3, "a turn that held its lease was overtaken"
        await slow.becomes(SERVING)
        assert (await slow.say(talk, "three")).revision == 4
        assert (await slow.until_done(talk, fenced)).revision == 5, "a fenced turn may be tried again"
        for caller in (slow, other):
            await audit(caller, [talk])


@pytest.mark.fault(26)
async def test_a_paused_server_tells_the_turn_that_was_committed_elsewhere(deaf_pair: Pair) -> None:
    """The *same* request taken over and committed by another server: its record counts, not the paused one's."""
    paused, _ = deaf_pair
    async with callers_of(deaf_pair) as (slow, other):
        talk = await slow.talk()
        await slow.say(talk, "one")
        paused.hold()
        spec = talk.spec("twice begun", 12)
        turn = asyncio.create_task(slow.turn(talk, spec))
        await _held_by(other, talk, spec)
        with _frozen(paused):
            paused.release()
            stands = await other.until_done(talk, spec)
        (ended,) = await asyncio.gather(turn, return_exceptions=True)
        assert ended == stands or (isinstance(ended, Refused) and ended.error.reason == "TURN_FENCED"), ended
        assert await slow.until_done(talk, spec) == stands
        for caller in (slow, other):
            await audit(caller, [talk])


async def test_a_listing_goes_on_at_the_other_server(pair: Pair) -> None:
    """Requests without a session name have nothing to route on: any replica may get the next page."""
    async with callers_of(pair) as callers:
        names = {(await callers[0].talk()).name for _ in range(3)}
        request, seen = pb.ListSessionsRequest(page_size=1), []
        while request.page_token or not seen:
            page = await callers[len(seen) % 2].data.ListSessions(request, timeout=20)
            seen += [session.name for session in page.sessions]
            request.page_token = page.next_page_token
        assert names <= set(seen) and len(seen) == len(set(seen))
