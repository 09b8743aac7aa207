"""Real Sentinels, a primary and two replicas: what was acknowledged at ``replicated(1)`` survives a fail-over."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from pensieve.errors import PensieveError, TurnFenced, TurnInProgress, Unavailable
from pensieve.store import Began, HistoryStore, Replay
from pensieve.store._redis import link
from pensieve.store.redis_store import RedisStore
from support.store.redis_groups import SERVICE, SentinelGroup, sentinel_group, until
from support.store.redis_server import RedisServer
from support.store.store_bench import counts, first_record, key, opened_redis, request, row, turn_record

pytestmark = pytest.mark.redis

KEY = key()
TURNS = 30
"""Acknowledged before, and again after a fail-over."""
LIMIT_S = 60.0
LARGE = 1 << 20
LARGE_TURNS = 24
LAG_S = 1.5


@dataclass
class Load:
    """What the committing servers do now."""

    acknowledged: dict[str, int]
    text: str = "small"
    ended: bool = False


@pytest.fixture
def group() -> Iterator[SentinelGroup]:
    with sentinel_group() as one:
        yield one


@contextlib.asynccontextmanager
async def committing(stores: list[HistoryStore], acknowledged: dict[str, int]) -> AsyncIterator[Load]:
    """Turns of several servers in one session, one after another and as fast as they go, while the body runs."""
    load = Load(acknowledged)

    async def work(number: int, store: HistoryStore) -> None:
        turn = 0
        while not load.ended:
            turn += 1
            await one_turn(store, f"r{number}-{turn}", load.text, load)

    async with asyncio.TaskGroup() as tasks:
        for number, store in enumerate(stores):
            tasks.create_task(work(number, store))
        try:
            yield load
        finally:
            load.ended = True


async def one_turn(store: HistoryStore, name: str, text: str, load: Load) -> None:
    """Tries again, as a client does, until there is an answer or nobody asks any more."""
    attempt = 0
    while not load.ended:
        attempt += 1
        token = f"t-{name}-{attempt}"
        try:
            outcome = await store.begin(KEY, request(name, token, lease_ms=2000))
            if isinstance(outcome, Replay):
                load.acknowledged[name] = outcome.revision
                return
            if not isinstance(outcome, Began):
                raise TurnInProgress("its own earlier attempt")
            base = outcome.row.revision
            await store.commit(KEY, token, f"fp-{name}", turn_record(base, name, text), counts(base + 1))
            load.acknowledged[name] = base + 1
            return
        except (Unavailable, TurnInProgress, TurnFenced):
            await asyncio.sleep(0.02)


async def until_more(acknowledged: dict[str, int], count: int, *, limit_s: float = LIMIT_S) -> None:
    wanted = len(acknowledged) + count
    async with asyncio.timeout(limit_s):
        while len(acknowledged) < wanted:
            await asyncio.sleep(0.02)


@pytest.mark.fault(48)
@pytest.mark.parametrize("how", ["hung", "lagging"])
async def test_a_fail_over_loses_and_doubles_no_acknowledged_turn(group: SentinelGroup, how: str) -> None:
    """hung: the old primary comes back, takes itself for the primary still, and our connections to it are open.
    lagging: no replica takes anything for a while before the primary is killed; more than sockets hold is under way.
    """
    acknowledged: dict[str, int] = {}
    async with opened_redis(group.url(replicas=1)) as one, opened_redis(group.url(replicas=1)) as other:
        assert one.durability == "replicated(1)"
        await one.create(row(KEY), first_record(), "fp")
        async with committing([one, other], acknowledged) as load:
            await until_more(acknowledged, TURNS)
            old = group.primary()
            if how == "hung":
                old.pause()
            else:
                load.text = "x" * LARGE
                for server in group.servers[1:]:
                    server.pause()
                with contextlib.suppress(TimeoutError):
                    await until_more(acknowledged, LARGE_TURNS, limit_s=LAG_S)
                old.kill()
                load.text = "small"
                for server in group.servers[1:]:
                    server.resume()
            await until_more(acknowledged, TURNS)
            assert group.primary() is not old
            old.resume()
            await until_more(acknowledged, TURNS)
        log = await one.read(KEY)
        await one.ping()
    found = {logged.record.request_id: logged.record.revision for logged in log[1:]}
    assert len(found) == len(log) - 1, "a turn is there twice"
    assert acknowledged.items() <= found.items()
    assert len(found) <= len(acknowledged) + 2, "more than what was under way at the end"


@pytest.mark.fault(48)
async def test_what_no_replica_has_is_not_acknowledged(
    group: SentinelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "WAIT_MS", 100)
    monkeypatch.setattr(link, "CALL_LIMIT_S", LIMIT_S)
    async with (
        opened_redis(group.url(replicas=1)) as store,
        opened_redis(group.url(replicas=1)) as again,  # the retry comes to another server
        opened_redis(group.url()) as fresh,
    ):
        await store.create(row(KEY), first_record(), "fp")
        await store.create(row(key("sure")), first_record(), "fp")
        await store.begin(KEY, request("r1", "t1"))
        for server in group.servers[1:]:
            server.pause()
        turn = turn_record(1, "r1")
        for attempt in (
            store.commit(KEY, "t1", "fp-r1", turn, counts(2)),
            store.commit(KEY, "t1", "fp-r1", turn, counts(2)),
            again.commit(KEY, "t1", "fp-r1", turn, counts(2)),
            again.begin(KEY, request("r1", "t2")),
            again.find_request(KEY, "r1"),
            again.load(KEY),
            again.read(KEY),
            again.delete(KEY),
            store.ping(),
        ):
            with pytest.raises(Unavailable, match="0 of 1 replicas"):
                await attempt
            if attempt.__name__ == "find_request":
                assert await fresh.find_request(KEY, "r1") == 2, "it is there, and might be lost yet"
        assert (await again.load(key("sure"))).revision == len(await again.read(key("sure"))) == 1
        for server in group.servers[1:]:
            server.resume()
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await store.ping()
                    break
                except PensieveError:
                    await asyncio.sleep(0.05)


async def replace_primary(group: SentinelGroup, stores: list[RedisStore]) -> RedisServer:
    """A planned fail-over, of which the old primary has not heard yet; its replicas have left it, the stores not."""
    old = group.primary()
    with contextlib.closing(redis.Redis(port=group.sentinel_ports[0], socket_timeout=5)) as sentinel:
        sentinel.execute_command("SENTINEL", "FAILOVER", SERVICE)
    await asyncio.to_thread(until, lambda: group.primary() is not old, "another primary is named")
    with contextlib.closing(old.client()) as plain:
        await asyncio.to_thread(
            until, lambda: not plain.info("replication").get("connected_slaves"), "its replicas have left"
        )
    for store in stores:
        # As if its connections had been in use when the pool heard of the other one.
        pool(store).master_address = ("127.0.0.1", group.primary().port)
    return old


def pool(store: RedisStore) -> Any:
    client: Any = store._link._client
    return client._client.connection_pool


@pytest.mark.fault(48)
async def test_connections_to_a_primary_that_was_replaced_are_given_up(group: SentinelGroup) -> None:
    """Of what is written to it no replica hears."""
    async with opened_redis(group.url(replicas=1)) as store:
        await store.create(row(KEY), first_record(), "fp")
        old = await replace_primary(group, [store])
        with pytest.raises(Unavailable):
            await store.apply(KEY, "fp-r1", turn_record(1, "r1"), counts(2))
        left = [one.port for one in pool(store)._available_connections if one.is_connected]
        assert old.port not in left, "the next call would go to it, too"
        load = Load({})
        await asyncio.wait_for(one_turn(store, "r2", "hello", load), LIMIT_S)
        assert load.acknowledged == {"r2": 2}, "what was written to the old one is not there"


@pytest.mark.fault(48)
async def test_a_primary_that_was_replaced_is_no_store_that_went_back(group: SentinelGroup) -> None:
    """It has an older state than was acknowledged: by the one that took its place."""
    async with opened_redis(group.url(replicas=1)) as store, opened_redis(group.url()) as late:
        await store.create(row(KEY), first_record(), "fp")
        await late.load(KEY)
        await replace_primary(group, [late])
        load = Load({})
        async with asyncio.timeout(LIMIT_S):
            for name in ("r1", "r2"):  # the first of them may have reached the old one, too
                await one_turn(store, name, "hello", load)
            wanted = dataclasses.replace(request("r3", "t3"), known_revision=3)
            while True:
                try:
                    outcome = await late.begin(KEY, wanted)
                    break
                except Unavailable:  # the old one has heard of it by now
                    await asyncio.sleep(0.02)
        assert isinstance(outcome, Began) and outcome.row.revision == 3
