"""Many servers on one Redis: races for a session, and replies that are lost on the way."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from pensieve.errors import TurnFenced, TurnInProgress, Unavailable
from pensieve.store import Began, BeginOutcome, HistoryStore
from pensieve.store._redis.link import RedisLink
from pensieve.store.records import SessionRow
from pensieve.store.redis_store import RedisStore
from support.faults.proxies import FaultyProxy, running
from support.store.redis_server import RedisServer
from support.store.store_bench import RedisBench, counts, first_record, key, opened, request, row, turn_record

pytestmark = pytest.mark.redis

KEY = key()
RACES = 320
WORKERS = 4
TURNS = 25
T = TypeVar("T")


async def attempt(store: HistoryStore, request_id: str, token: str) -> BeginOutcome | None:
    """None: someone else was first."""
    try:
        return await store.begin(KEY, request(request_id, token))
    except TurnInProgress:
        return None


async def commit(store: HistoryStore, request_id: str, token: str, base: int) -> bool:
    """False: fenced."""
    record = turn_record(base, request_id)
    try:
        await store.commit(KEY, token, f"fp-{request_id}", record, counts(base + 1))
    except TurnFenced:
        return False
    return True


@pytest.mark.fault(52)
async def test_two_servers_race_for_one_session(shared_redis: RedisServer) -> None:
    """Each race has one winner; when it stalls past its lease, the other takes over and the winner is fenced."""
    chance = random.Random(5)
    acknowledged: list[str] = []
    stale = 0
    async with contextlib.AsyncExitStack() as stack:
        client = stack.enter_context(contextlib.closing(shared_redis.client()))
        client.flushall()
        benches = [
            await stack.enter_async_context(opened(RedisBench(shared_redis.url, client))) for _ in range(2)
        ]
        stores = [bench.store for bench in benches]
        await stores[0].create(row(KEY), first_record(), "fp")
        for race in range(RACES):
            names = [f"r{race}-{side}" for side in (0, 1)]
            begun = await asyncio.gather(
                *(attempt(store, name, f"t-{name}") for store, name in zip(stores, names, strict=True))
            )
            assert sum(isinstance(outcome, Began) for outcome in begun) == 1, begun
            winner = 0 if isinstance(begun[0], Began) else 1
            base = race + 1
            if chance.random() < 0.4:
                benches[0].lapse_lease(KEY)
                loser = 1 - winner
                assert isinstance(await attempt(stores[loser], names[loser], f"t-{names[loser]}"), Began)
                done = await asyncio.gather(
                    *(
                        commit(store, name, f"t-{name}", base)
                        for store, name in zip(stores, names, strict=True)
                    )
                )
                assert done[loser] and not done[winner]
                stale += 1
                acknowledged.append(names[loser])
            else:
                assert await commit(stores[winner], names[winner], f"t-{names[winner]}", base)
                acknowledged.append(names[winner])
        log = await stores[1].read(KEY)
    assert stale > RACES // 4
    assert [logged.record.request_id for logged in log] == ["", *acknowledged]
    assert [logged.record.revision for logged in log] == list(range(1, RACES + 2))


async def test_a_cancelled_call_leaves_no_reply_for_the_next(shared_redis: RedisServer) -> None:
    """Callers go away in the middle of a command; whoever gets the connection next must get its own answer."""
    chance = random.Random(11)
    names = [f"s{number}" for number in range(20)]
    cancelled = 0
    async with contextlib.AsyncExitStack() as stack:
        client = stack.enter_context(contextlib.closing(shared_redis.client()))
        client.flushall()
        store = (await stack.enter_async_context(opened(RedisBench(shared_redis.url, client)))).store
        for name in names:
            await store.create(row(key(name)), first_record(), "fp")
        for _ in range(40):
            loads = {name: asyncio.create_task(store.load(key(name))) for name in names}
            for _ in range(chance.randrange(8)):
                await asyncio.sleep(0)
            for task in loads.values():
                if chance.random() < 0.5:
                    task.cancel()
            answers = await asyncio.gather(*loads.values(), return_exceptions=True)
            for name, answer in zip(loads, answers, strict=True):
                cancelled += isinstance(answer, asyncio.CancelledError)
                if not isinstance(answer, asyncio.CancelledError):
                    assert isinstance(answer, SessionRow), answer
                    assert answer.session_id == name
    assert cancelled > 20, "most were too late"


async def until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Ask again, with the very same arguments, until there is an answer."""
    for _ in range(200):
        try:
            return await call()
        except Unavailable as error:
            assert error.reason == "STORE_UNAVAILABLE"
    raise AssertionError("no answer in 200 attempts")


async def one_turn(store: HistoryStore, worker: int, number: int) -> int:
    """One turn by a worker that competes with others; its revision."""
    request_id = f"r{worker}-{number}"
    tries = 0
    while True:
        tries += 1
        asked = request(request_id, f"t-{request_id}-{tries}")
        try:
            outcome = await until_answered(functools.partial(store.begin, KEY, asked))
        except TurnInProgress:
            await asyncio.sleep(0.001)
            continue
        assert isinstance(outcome, Began), f"met its own lease or commit: {outcome}"
        break
    base = outcome.row.revision
    record = turn_record(base, request_id)
    after = await until_answered(
        lambda: store.commit(KEY, asked.token, asked.fingerprint, record, counts(base + 1))
    )
    # The row may be newer than this turn: a lost reply is answered after others went on.
    assert after.revision >= base + 1
    return base + 1


@pytest.mark.fault(46)
@pytest.mark.parametrize("retries", [0, 3])
async def test_a_lost_reply_never_repeats_or_loses_a_turn(shared_redis: RedisServer, retries: int) -> None:
    """The script ran, its reply was swallowed: the client library (3) or the caller (0) sends it again."""
    with contextlib.closing(shared_redis.client()) as client:
        client.flushall()
    async with (
        running(FaultyProxy(shared_redis.port, seed=retries)) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        stores: list[RedisStore] = []
        for _ in range(WORKERS):
            store = RedisStore(RedisLink(f"redis://127.0.0.1:{proxy.port}/0", retries=retries))
            await store.open()
            stack.push_async_callback(store.close)
            stores.append(store)
        await stores[0].create(row(KEY), first_record(), "fp")
        proxy.loss = 0.15

        async def work(worker: int) -> dict[str, int]:
            return {
                f"r{worker}-{number}": await one_turn(stores[worker], worker, number)
                for number in range(TURNS)
            }

        results = await asyncio.gather(*(work(worker) for worker in range(WORKERS)))
        proxy.loss = 0.0
        log = await stores[0].read(KEY)
    acknowledged = {name: revision for result in results for name, revision in result.items()}
    stored = {logged.record.request_id: logged.record.revision for logged in log[1:]}
    assert proxy.lost > TURNS
    assert stored == acknowledged
    assert len(log) == 1 + WORKERS * TURNS
