"""What operators do to a Redis that is in use: policies, passwords, rights, and keys of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from pensieve.errors import FailedPrecondition, PensieveError, Unavailable
from pensieve.store._redis import clients
from pensieve.store._redis.rows import tenant_keys
from pensieve.store.redis_store import RedisStore
from support.store.redis_server import RedisServer, redis_server
from support.store.store_bench import TENANT, first_record, key, opened_redis, request, row, whole_turn

pytestmark = pytest.mark.redis

KEY = key()


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server for one test, which may spoil it."""
    with redis_server() as server:
        yield server


async def refusal(store: RedisStore) -> str:
    """Why a ping says that the store cannot serve; "" when it can."""
    try:
        await store.ping()
    except PensieveError as error:
        return error.reason
    return ""


@pytest.mark.fault(49, 64)
async def test_a_redis_that_may_evict_from_now_on_does_not_serve(
    shared_redis: RedisServer, client: redis.Redis
) -> None:
    async with opened_redis(shared_redis.url) as store:
        try:
            for policy in ("allkeys-lru", "volatile-ttl"):
                client.config_set("maxmemory-policy", policy)
                assert [await refusal(store), await refusal(store)] == ["STORE_UNSAFE"] * 2
        finally:
            client.config_set("maxmemory-policy", "noeviction")
        assert not await refusal(store)


async def test_what_a_redis_does_not_keep_is_said_once_and_again_when_it_has_changed(
    shared_redis: RedisServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Each ping looks at the settings; the log is for what is new."""
    client.config_set("appendonly", "no")
    try:
        async with opened_redis(shared_redis.url) as store:
            for _ in range(3):
                await store.ping()
            assert caplog.text.count("Conversations WILL be lost") == 1
            client.config_set("appendonly", "yes")
            await store.ping()
            client.config_set("appendonly", "no")
            for _ in range(3):
                await store.ping()
            assert caplog.text.count("Conversations WILL be lost") == 2
    finally:
        client.config_set("appendonly", "yes")


async def test_the_durability_that_is_shown_is_the_present_one(
    shared_redis: RedisServer, client: redis.Redis
) -> None:
    async with opened_redis(shared_redis.url) as store:
        assert store.durability == "local"
        try:
            for setting, level in (("always", "fsync"), ("no", "none"), ("everysec", "local")):
                client.config_set("appendfsync", setting)
                await store.ping()
                assert store.durability == level
        finally:
            client.config_set("appendfsync", "everysec")


@pytest.mark.fault(64)
async def test_a_password_that_is_set_while_it_serves(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections made before stay; the next ones cannot say who they are, and are not made without end."""
    monkeypatch.setattr(clients, "HEALTH_CHECK_S", 0.001)
    async with opened_redis(own_redis.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        with contextlib.closing(own_redis.client()) as plain:
            plain.config_set("requirepass", "secret")
            plain.execute_command("AUTH", "secret")
            plain.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            for _ in range(2):
                with pytest.raises(Unavailable) as caught:
                    await store.begin(KEY, request("r1", "t1"))
                assert caught.value.reason == "STORE_UNAVAILABLE"
            assert plain.info("stats")["total_connections_received"] < 30
            assert await refusal(store) == "STORE_UNAVAILABLE"
            plain.config_set("requirepass", "")
        assert (await whole_turn(store, KEY, 1)).revision == 2
        assert not await refusal(store)


@pytest.mark.fault(64)
@pytest.mark.parametrize("command", ["xadd", "evalsha", "hset", "pexpireat"])
async def test_a_right_that_is_taken_away(
    shared_redis: RedisServer, client: redis.Redis, command: str
) -> None:
    """No turn can be kept: neither is that an error of ours, nor does the store serve."""
    plain: Any = client
    plain.execute_command("ACL", "SETUSER", "pensieve", "reset", "on", ">pw", "~pv1:*", "+@all")
    try:
        async with opened_redis(f"redis://pensieve:pw@127.0.0.1:{shared_redis.port}/0") as store:
            await store.create(row(KEY, ttl_s=3600), first_record(), "fp")
            plain.execute_command("ACL", "SETUSER", "pensieve", f"-{command}")
            with pytest.raises(FailedPrecondition) as caught:
                await whole_turn(store, KEY, 1)
            assert caught.value.reason == "STORE_FORBIDDEN"
            assert await refusal(store) == "STORE_FORBIDDEN"
            plain.execute_command("ACL", "SETUSER", "pensieve", f"+{command}")
            assert not await refusal(store)
    finally:
        client.acl_deluser("pensieve")


@pytest.mark.fault(64)
@pytest.mark.parametrize("number", range(3), ids=["listing", "usage", "ends"])
async def test_a_turn_is_kept_when_the_listing_cannot_be(
    store: RedisStore, client: redis.Redis, number: int
) -> None:
    """Another program has taken its key; the turn itself is safe, and its session is not called damaged."""
    await store.create(row(KEY, ttl_s=3600), first_record(), "fp")
    name = tenant_keys(TENANT)[number]
    kept = client.dump(name)
    client.delete(name)
    client.set(name, "of somebody else")
    assert (await whole_turn(store, KEY, 1)).revision == 2
    client.delete(name)
    if kept:
        client.restore(name, 0, kept)
    assert (await whole_turn(store, KEY, 2)).revision == 3
    (listed,) = (await store.list_sessions(TENANT, limit=5)).rows
    assert listed.revision == 3


@pytest.mark.fault(64)
async def test_a_turn_is_kept_when_the_right_to_the_listing_is_taken_away(
    shared_redis: RedisServer, client: redis.Redis
) -> None:
    plain: Any = client
    plain.execute_command("ACL", "SETUSER", "pensieve", "reset", "on", ">pw", "~pv1:*", "+@all")
    try:
        async with opened_redis(f"redis://pensieve:pw@127.0.0.1:{shared_redis.port}/0") as store:
            await store.create(row(KEY), first_record(), "fp")
            plain.execute_command(
                "ACL", "SETUSER", "pensieve", "resetkeys", *("~pv1:{*", "~pv1:store", "~pv1:mark:*")
            )
            assert (await whole_turn(store, KEY, 1)).revision == 2
            assert await refusal(store) == "STORE_FORBIDDEN"
    finally:
        client.acl_deluser("pensieve")
