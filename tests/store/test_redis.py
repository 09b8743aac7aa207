"""What only the Redis store has: scripts, expiring keys, and a listing beside its sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from pensieve.errors import DataLoss, NotFound, TurnInProgress
from pensieve.store import Began
from pensieve.store._codec import encode_record
from pensieve.store._redis import scripts
from pensieve.store._redis.rows import BATCH, GRACE_MS, index_key, session_keys
from pensieve.store.records import State
from pensieve.store.redis_store import RedisStore
from support.store.redis_server import RedisServer
from support.store.store_bench import (
    TENANT,
    RedisBench,
    counts,
    first_record,
    key,
    listed,
    opened,
    request,
    row,
    turn_record,
    whole_turn,
)

pytestmark = pytest.mark.redis

KEY = key()
META, REQUESTS, LOG = session_keys(KEY)


@pytest.mark.fault(50)
async def test_forgotten_scripts_are_loaded_again(store: RedisStore, client: redis.Redis) -> None:
    await store.create(row(KEY), first_record(), "fp")
    for base in (1, 2):
        client.script_flush()
        await whole_turn(store, KEY, base)
    assert (await store.load(KEY)).revision == 3


async def test_a_commit_asks_for_the_head_only_if_another_server_began_the_turn(
    store: RedisStore, client: redis.Redis, shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    command = store._link.command

    async def heard(*words: Any, count_errors: bool = True) -> Any:
        asked.append(words)
        return await command(*words, count_errors=count_errors)

    await store.create(row(KEY), first_record(), "fp")
    monkeypatch.setattr(store._link, "command", heard)
    await whole_turn(store, KEY, 1)
    assert asked == []
    async with opened(RedisBench(shared_redis.url, client)) as other:
        await other.store.begin(KEY, request("r2", "t2"))
    await store.commit(KEY, "t2", "fp-r2", turn_record(2, "r2"), counts(3))
    assert asked == [("HGET", META, "head_hash")]
    assert len(await store.read(KEY)) == 3
    assert store._begun == {}


async def test_scripts_check_their_arguments_before_they_write(
    store: RedisStore, client: redis.Redis
) -> None:
    await store.create(row(KEY), first_record(), "fp")
    await store.begin(KEY, request("r1", "t1"))
    before = {name: client.dump(name) for name in (META, REQUESTS, LOG)}
    good = [
        "t1",
        "r1",
        "fp-r1",
        "2",
        (await store.load(KEY)).head_hash,
        b"d",
        "1",
        "h",
        "4",
        "2",
        "9",
        "",
        "",
        "0",
    ]
    bad_calls: list[tuple[str, list[Any]]] = [
        (scripts.COMMIT, [*good[:3], "x", *good[4:]]),
        (scripts.COMMIT, [*good[:10], "1.5", *good[11:]]),
        (scripts.COMMIT, good[:-1]),
        (scripts.RENEW, ["t1", "soon"]),
        (scripts.BEGIN, ["r2", "f", "", "t2", "o", "a", "-", "1", "1", "0", "", "0"]),
        (scripts.BEGIN, ["r2", "f", "", "t2", "o", "a", "1", "1", "1", "x", "", "0"]),
        (scripts.BEGIN, ["r2", "f", "", "t2", "o", "a", "1", "1", "1"]),
        (scripts.DELETE, ["", "x"]),
    ]
    for script, args in bad_calls:
        with pytest.raises(redis.ResponseError):
            await store._link.call(script, [META, REQUESTS, LOG], args)
    assert {name: client.dump(name) for name in (META, REQUESTS, LOG)} == before
    assert (await store._link.call(scripts.COMMIT, [META, REQUESTS, LOG], good))[0] == b"OK"


async def test_a_commit_computed_on_another_head_is_fenced(store: RedisStore) -> None:
    await store.create(row(KEY), first_record(), "fp")
    await store.begin(KEY, request("r1", "t1"))
    args = ["t1", "r1", "fp-r1", "2", "00" * 20, b"d", "1", "h", "4", "2", "9", "", "", "0"]
    assert await store._link.call(scripts.COMMIT, [META, REQUESTS, LOG], args) == [b"FENCED"]


async def test_a_log_ahead_of_its_row_is_damage(store: RedisStore, client: redis.Redis) -> None:
    await store.create(row(KEY), first_record(), "fp")
    await store.begin(KEY, request("r1", "t1"))
    client.xadd(LOG, {"d": b"x", "c": "1", "h": "y"}, id="2-0")
    with pytest.raises(DataLoss) as caught:
        await store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
    assert caught.value.reason == "HISTORY_CORRUPT"
    assert (await store.load(KEY)).state is State.DAMAGED


async def test_all_keys_of_a_session_expire_together(store: RedisStore, client: redis.Redis) -> None:
    await store.create(row(KEY, ttl_s=1000), first_record(), "fp")
    await whole_turn(store, KEY, 1)
    expire_ms = (await store.load(KEY)).expire_ms
    assert {client.pexpiretime(name) for name in (META, REQUESTS, LOG)} == {expire_ms}


@pytest.mark.fault(51)
async def test_leases_and_lives_end_by_the_servers_clock(store: RedisStore) -> None:
    await store.create(row(KEY, ttl_s=1.0), first_record(), "fp")
    await store.begin(KEY, request("r1", "t1", lease_ms=100))
    for _ in range(1000):
        try:
            assert isinstance(await store.begin(KEY, request("r2", "t2", lease_ms=100)), Began)
            break
        except TurnInProgress:
            await asyncio.sleep(0.01)
    else:
        pytest.fail("the lease never lapsed")
    for _ in range(1000):
        try:
            await store.load(KEY)
            await asyncio.sleep(0.01)
        except NotFound:
            break
    else:
        pytest.fail("the session never expired")


# ---- the listing


async def test_the_listing_repairs_itself(store: RedisStore, client: redis.Redis) -> None:
    index = index_key(TENANT)
    await store.create(row(KEY), first_record(), "fp")
    await store.create(row(key("s2")), first_record(), "fp")
    now = (await store.load(KEY)).update_ms
    client.zadd(index, {"s1": 5, "long-gone": now - 2 * GRACE_MS, "being-created": now})
    page = await store.list_sessions(TENANT, limit=10)
    assert {one.session_id for one in page.rows} == {"s1", "s2"}
    assert client.zscore(index, "s1") == now
    assert client.zscore(index, "long-gone") is None
    assert client.zscore(index, "being-created") == now

    client.delete(index)
    await whole_turn(store, KEY, 1)
    assert [one.session_id for one in (await store.list_sessions(TENANT, limit=10)).rows] == ["s1"]


@pytest.mark.fault(41)
async def test_a_session_that_the_listing_has_at_an_old_place_is_on_one_of_its_pages(
    store: RedisStore, client: redis.Redis
) -> None:
    """Redis was killed between a turn and its entry: the page before must not enter it before itself."""
    for name in ("a", "b", "c"):
        made = await store.create(row(key(name)), first_record(), "fp")
        while _ms(client) <= made.update_ms:
            pass
    old = client.zscore(index_key(TENANT), "b")
    newest = (await whole_turn(store, key("b"), 1)).update_ms
    client.zadd(index_key(TENANT), {"b": old})
    assert await listed(store, limit=1) == ["c", "b", "a"]
    assert client.zscore(index_key(TENANT), "b") == newest
    assert await listed(store, limit=1) == ["b", "c", "a"]


async def test_what_is_remembered_of_sessions_is_bounded(store: RedisStore) -> None:
    """The ones that were changed last: a server that runs for months has seen more than it can remember."""
    store._acknowledged._max_sessions = 2
    for number in range(4):
        await store.create(row(key(f"n{number}")), first_record(), "fp")
    await whole_turn(store, key("n2"), 1)
    assert list(store._acknowledged._numbers) == [key("n3"), key("n2")]


async def test_a_session_that_is_made_again_meanwhile_stays_listed(
    store: RedisStore, client: redis.Redis, shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server makes it between the removal of the one before and that of its entry in the listing."""
    made = await store.create(row(KEY), first_record(), "fp")
    async with opened(RedisBench(shared_redis.url, client)) as other:
        remove_old = store._index.remove_old

        async def later(*args: Any) -> None:
            while _ms(client) <= made.update_ms:
                pass
            await other.store.create(row(KEY, ttl_s=1000), first_record(), "another")
            await remove_old(*args)

        monkeypatch.setattr(store._index, "remove_old", later)
        await store.forget(KEY, made.head_hash)
        for one in (store, other.store):
            assert [found.session_id for found in (await one.list_sessions(TENANT, limit=10)).rows] == ["s1"]
            usage = await one.usage(TENANT)
            assert (usage.sessions, usage.bytes) == (1, len(encode_record(first_record())))


def _ms(client: Any) -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


async def test_many_updates_in_one_millisecond_are_all_listed(store: RedisStore, client: redis.Redis) -> None:
    """More entries of one time than a page of the index takes, and young, so that none is tidied away."""
    names = [f"s{number}" for number in range(5)]
    for name in names:
        await store.create(row(key(name)), first_record(), "fp")
    now = (await store.load(key("s4"))).update_ms
    for name in names:
        client.hset(session_keys(key(name))[0], "update_ms", str(now))
    client.zadd(index_key(TENANT), {name: now for name in [*names, *(f"z{n}" for n in range(3 * BATCH))]})
    assert await listed(store, limit=2) == ["s4", "s3", "s2", "s1", "s0"]
