"""A real Redis Cluster under the store: the whole contract, sessions in all slots, slots that move."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from redis import exceptions

from pensieve.errors import FailedPrecondition, Unavailable
from pensieve.store import Began, Renewed
from pensieve.store._redis import link
from pensieve.store._redis.link import MARKER
from pensieve.store._redis.rows import session_keys
from pensieve.store.redis_store import RedisStore
from support.store.redis_groups import ClusterGroup, cluster_group, until
from support.store.redis_server import before_scan, free_port, redis_server
from support.store.store_bench import (
    LEASE_MS,
    TENANT,
    RedisBench,
    first_record,
    key,
    opened,
    opened_redis,
    request,
    row,
    whole_turn,
)
from tests.store import test_sessions, test_turns
from tests.store.leases import test_renewals
from tests.store.leases.test_renewals import begun

pytestmark = pytest.mark.redis

Promise = Callable[[RedisBench], Coroutine[Any, Any, None]]
PROMISES: dict[str, Promise] = {
    name: function
    for module in (test_turns, test_renewals, test_sessions)
    for name, function in vars(module).items()
    if name.startswith("test_") and list(inspect.signature(function).parameters) == ["bench"]
}
"""What all stores are tested for, and takes no more than a store."""
SESSIONS = 30


@pytest.fixture(scope="module")
def group() -> Iterator[ClusterGroup]:
    with cluster_group() as one:
        yield one


async def test_a_cluster_keeps_every_promise_of_a_store(group: ClusterGroup) -> None:
    assert len(PROMISES) > 30
    with contextlib.closing(group.client()) as plain:
        bench = RedisBench(group.url, plain)
        async with opened(bench):
            for name, promise in PROMISES.items():
                keys = [one for one in plain.scan_iter(count=1000) if one != MARKER.encode()]
                for one in keys:
                    plain.delete(one)
                try:
                    await promise(bench)
                except BaseException as error:
                    error.add_note(f"in {name}")
                    raise


@pytest.mark.fault(50)
async def test_sessions_lie_on_all_servers_and_follow_their_slots(group: ClusterGroup) -> None:
    names = [f"s{number}" for number in range(SESSIONS)]
    async with opened_redis(group.url) as store:
        for name in names:
            await store.create(row(key(name, "spread")), first_record(), "fp")
        sizes = []
        for server in group.servers:
            with contextlib.closing(server.client()) as client:
                sizes.append(client.dbsize())
                client.script_flush()
        assert all(size > SESSIONS / 5 for size in sizes)  # type: ignore[operator]
        await store.ping()
        assert len((await store.list_sessions("spread", limit=SESSIONS)).rows) == SESSIONS
        moved = key("s7", "spread")
        assert isinstance(await store.begin(moved, request("r1", "t1")), Began)
        with contextlib.closing(group.client()) as plain:
            group.move_slot(plain.keyslot(session_keys(moved)[0]))
        await store.abort(moved, "t1")
        assert (await whole_turn(store, moved, 1)).revision == 2
        assert len(await store.read(moved)) == 2
        assert (await store.usage("spread")).sessions == SESSIONS
        await store.purge_expired()


@pytest.mark.fault(50)
async def test_all_sessions_are_found_while_slots_move(
    group: ClusterGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes to a server that was looked through already, from one that was not yet, is on none."""
    names = [f"s{number}" for number in range(6000)]
    with contextlib.closing(group.client()) as plain:
        for one in plain.scan_iter(match="pv1:{moving/*", count=1000):
            plain.delete(one)
        filling = plain.pipeline()
        for name in names:
            filling.hset(session_keys(key(name, "moving"))[0], "state", "active")
        filling.execute()

        async def moved() -> None:
            for name in names[:60]:
                group.move_slot(plain.keyslot(session_keys(key(name, "moving"))[0]))

        async with opened_redis(group.url) as store:
            has_happened = before_scan(monkeypatch, 4, moved)
            found = await store._index.stored_keys("moving")
        assert has_happened() and {one.session_id for one in found} == set(names)
        for name in names:
            filling.delete(session_keys(key(name, "moving"))[0])
        filling.execute()


async def test_many_leases_are_a_round_trip_to_each_server(
    group: ClusterGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_redis(group.url) as store:
        leases = await begun(store, *(f"many{number}" for number in range(12)))
        servers = await store._link.servers_of([session_keys(lease.key)[0] for lease in leases])
        await store.renew_leases(leases, LEASE_MS)  # each server knows the script now
        asked, piped = list[str](), store._link._client._piped

        async def counted(host: str, port: int, commands: Any) -> list[Any]:
            asked.append(f"{host}:{port}")
            return await piped(host, port, commands)

        monkeypatch.setattr(store._link._client, "_piped", counted)
        assert await store.renew_leases(leases, LEASE_MS) == [Renewed()] * len(leases)
        assert sorted(asked) == sorted(set(servers))
        with contextlib.closing(group.client()) as plain:
            group.move_slot(plain.keyslot(session_keys(leases[7].key)[0]))
        assert await store.renew_leases(leases, LEASE_MS) == [Renewed()] * len(leases)


async def test_a_server_that_is_away_costs_no_lease_of_another_server(
    group: ClusterGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "CALL_LIMIT_S", 30.0)
    async with opened_redis(group.url) as store:
        leases = await begun(store, *(f"away{number}" for number in range(12)))
        servers = await store._link.servers_of([session_keys(lease.key)[0] for lease in leases])
        away = group.servers[0]
        here = [not server.endswith(f":{away.port}") for server in servers]
        assert len(set(here)) == 2
        assert await store.renew_leases(leases, LEASE_MS) == [Renewed()] * len(leases)
        away.pause()
        try:
            answers = await store.renew_leases(leases, LEASE_MS)
        finally:
            away.resume()
        assert [isinstance(answer, Renewed) for answer in answers] == here
        assert all(isinstance(answer, Renewed | Unavailable) for answer in answers)


async def test_a_cluster_without_replicas_has_none(
    group: ClusterGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "WAIT_MS", 50)
    monkeypatch.setattr(link, "CALL_LIMIT_S", 30.0)
    async with opened_redis(f"{group.url}?replicas=1") as store:
        assert store.durability == "replicated(1)"
        with pytest.raises(Unavailable, match="0 of 1 replicas"):
            await store.create(row(key("alone", TENANT)), first_record(), "fp")
        with pytest.raises(Unavailable):
            await store.ping()


async def test_a_change_is_on_every_replica_that_the_cluster_may_promote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One replica of two stands still and may be promoted when it goes on: what it lacks is not acknowledged, until the
    Cluster takes it for failed."""
    monkeypatch.setattr(link, "WAIT_MS", 50)
    monkeypatch.setattr(link, "CALL_LIMIT_S", 30.0)
    with cluster_group(replicas=2, node_timeout_ms=4000) as group:
        async with opened_redis(f"{group.url}?replicas=1") as store:
            names = [key(f"s{number}", TENANT) for number in range(SESSIONS)]
            servers = await store._link.servers_of([session_keys(name)[0] for name in names])
            mine = [
                name
                for name, server in zip(names, servers, strict=True)
                if server.endswith(f":{group.servers[0].port}")
            ]
            await store.create(row(mine[0]), first_record(), "fp")
            group.replicas[0].pause()
            with pytest.raises(Unavailable, match="1 of 2 replicas"):
                await store.create(row(mine[1]), first_record(), "fp")
            async with asyncio.timeout(30):
                while True:
                    try:
                        await store.create(row(mine[1]), first_record(), "fp")
                        break
                    except Unavailable:
                        await asyncio.sleep(0.1)
            group.replicas[0].resume()


async def test_nothing_of_a_ping_goes_on_behind_its_answer(
    group: ClusterGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the store is closed it would open connections that nobody closes."""
    async with opened_redis(group.url) as store:
        asked = list[str]()

        async def beat(key: str) -> None:
            asked.append(key)
            if len(asked) == 1:
                raise exceptions.ConnectionError("away")
            await asyncio.sleep(0.1)

        monkeypatch.setattr(store._link, "_beat", beat)
        with pytest.raises(Unavailable):
            await store.ping()
        assert len(asked) == len(group.servers)
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_one_server_of_a_cluster_is_no_store(group: ClusterGroup) -> None:
    for server in group.servers:
        store = RedisStore.from_url(server.url)
        with contextlib.suppress(FailedPrecondition):  # one of the three holds the marker itself
            await store.open()
            with pytest.raises(FailedPrecondition, match=r"redis\+cluster"):
                for number in range(SESSIONS):
                    await store.load(key(f"s{number}", "spread"))
        await store.close()


async def test_the_only_server_of_a_cluster_is_told_as_one() -> None:
    """It has all keys and refuses what touches two slots: a turn."""
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with redis_server(options=options) as server, contextlib.closing(server.client()) as plain:
        plain.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        until(lambda: bool(plain.set("mine", 1)), "it serves")
        store = RedisStore.from_url(server.url)
        with pytest.raises(FailedPrecondition, match=r"redis\+cluster"):
            await store.open()
        (name,) = plain.hmget(MARKER, "store_id")
        assert name is not None
        store._link.store_id = name.decode()  # as if it had become one since
        for attempt in (store.ping(), store.create(row(key("only")), first_record(), "fp")):
            with pytest.raises(FailedPrecondition, match=r"redis\+cluster"):
                await attempt
        await store.close()
