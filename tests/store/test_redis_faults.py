"""A Redis that dies, comes back, comes back empty or changed, refuses, or is set up wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from pensieve.errors import DataLoss, FailedPrecondition, NotFound, TurnInProgress, Unavailable
from pensieve.store import Began
from pensieve.store._redis import link
from pensieve.store._redis.rows import session_keys
from pensieve.store.records import State
from pensieve.store.redis_store import RedisStore
from support.store.redis_server import RedisServer, before_scan, free_port, redis_server
from support.store.store_bench import (
    TENANT,
    counts,
    first_record,
    flipped,
    key,
    opened_redis,
    request,
    row,
    turn_record,
    whole_turn,
)

pytestmark = pytest.mark.redis

KEY = key()
META, REQUESTS, LOG = session_keys(KEY)
LIMIT_S = 20.0


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server for one test, which may break it."""
    with redis_server() as server:
        yield server


def reason(caught: pytest.ExceptionInfo[Unavailable] | pytest.ExceptionInfo[FailedPrecondition]) -> str:
    return caught.value.reason


# ---- death and return


@pytest.mark.fault(41)
async def test_all_sessions_are_found_when_redis_is_killed_meanwhile(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process has them in another order. A backup, or an export of a person, would lack some."""
    names = {f"s{number}" for number in range(3000)}
    with contextlib.closing(own_redis.client()) as plain:
        filling = plain.pipeline(transaction=False)
        for name in names:
            filling.hset(session_keys(key(name))[0], "state", "active")
        filling.execute()

    async def restart() -> None:
        own_redis.kill()
        own_redis.start()

    async with opened_redis(own_redis.url) as store:
        has_happened = before_scan(monkeypatch, 3, restart)
        found = await store.dump().keys()
        assert has_happened() and {one.session_id for one in found} == names


@pytest.mark.fault(41)
async def test_no_acknowledged_commit_is_lost_when_redis_is_killed(own_redis: RedisServer) -> None:
    """Append-only file, fsync every second: what is acknowledged is in the kernel, which outlives the process."""
    async with opened_redis(own_redis.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        revision = 1
        for _ in range(3):
            last = revision + 8
            with pytest.raises(Unavailable) as caught:
                while True:
                    await whole_turn(store, KEY, revision, "x" * 500)
                    revision += 1
                    if revision == last:  # somewhere in one of the next turns
                        asyncio.get_running_loop().call_later(0.005, own_redis.kill)
            assert reason(caught) == "STORE_UNAVAILABLE"
            own_redis.start()
            log = await store.read(KEY)
            assert len(log) in (revision, revision + 1), "one commit may have been made and not acknowledged"
            if len(log) == revision:
                with contextlib.suppress(TurnInProgress):
                    await store.abort(KEY, f"t{revision}")
            revision = len(log)
        assert revision > 20


@pytest.mark.fault(47)
async def test_an_emptied_redis_is_not_a_store_without_sessions(own_redis: RedisServer) -> None:
    async with opened_redis(own_redis.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        own_redis.kill()
        shutil.rmtree(own_redis.append_only_folder)
        own_redis.start()
        for attempt in (
            store.ping(),
            store.load(KEY),
            store.read(KEY),
            store.find_request(KEY, "r1"),
            store.list_sessions(TENANT, limit=5),
            store.create(row(KEY), first_record(), "fp"),
            store.begin(KEY, request("r1", "t1")),
            store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2)),
            store.delete(KEY, allow_missing=True),
            store.forget(KEY, ""),
            store.open(),
        ):
            with pytest.raises(Unavailable) as caught:
                await attempt
            assert reason(caught) == "STORE_REPLACED"
    async with opened_redis(own_redis.url) as anew:  # a new server process accepts it
        with pytest.raises(NotFound):
            await anew.load(KEY)


async def test_a_redis_that_was_started_again_with_fewer_databases_is_unavailable(
    own_redis: RedisServer,
) -> None:
    async with opened_redis(f"redis://127.0.0.1:{own_redis.port}/3") as store:
        own_redis.stop()
        own_redis._options += ("--databases", "1")
        own_redis.start()
        with pytest.raises(Unavailable, match="DB index is out of range"):
            await store.ping()


@pytest.mark.fault(43)
async def test_a_flipped_byte_in_the_append_only_file_is_found(own_redis: RedisServer) -> None:
    """Redis loads such a file without a word."""
    async with opened_redis(own_redis.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        await whole_turn(store, KEY, 1, "CANARY")
    own_redis.stop()
    changed = 0
    for path in own_redis.append_only_folder.glob("*.incr.aof"):
        data = path.read_bytes()
        path.write_bytes(data.replace(b"CANARY", flipped(b"CANARY")))
        changed += data.count(b"CANARY")
    assert changed
    own_redis.start()
    async with opened_redis(own_redis.url) as store:
        with pytest.raises(DataLoss) as caught:
            await store.read(KEY)
        assert caught.value.metadata["revision"] == "2"
        assert (await store.load(KEY)).state is State.DAMAGED


async def test_opening_without_a_server_says_where_it_looked() -> None:
    port = free_port()
    store = RedisStore.from_url(f"redis://:secret@127.0.0.1:{port}/0")
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}") as caught:
        await store.open()
    assert "secret" not in str(caught.value)
    assert store.durability == "unknown"
    await store.close()


# ---- refusals


@pytest.mark.fault(49)
async def test_a_redis_that_may_evict_is_refused(shared_redis: RedisServer, client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(FailedPrecondition, match="set maxmemory-policy noeviction"):
            async with opened_redis(shared_redis.url):
                pass
    finally:
        client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.fault(49)
async def test_memory_that_is_full(store: RedisStore, client: redis.Redis) -> None:
    await store.create(row(KEY), first_record(), "fp")
    await store.begin(KEY, request("r1", "t1"))
    client.config_set("maxmemory", "1")
    try:
        with pytest.raises(Unavailable) as caught:
            await store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
        assert reason(caught) == "STORE_FULL"
        assert (await store.load(KEY)).revision == 1
        assert len(await store.read(KEY)) == 1
    finally:
        client.config_set("maxmemory", "0")
    assert (await store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))).revision == 2


@pytest.mark.fault(44)
async def test_a_disk_that_takes_no_snapshot(own_redis: RedisServer) -> None:
    """MISCONF: Redis refuses writes while its persistence fails."""
    async with opened_redis(own_redis.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        with contextlib.closing(own_redis.client()) as plain:
            plain.config_set("save", "3600 1")
            shutil.rmtree(own_redis.append_only_folder.parent)
            with contextlib.suppress(redis.ResponseError):
                plain.bgsave()
            while plain.info("persistence")["rdb_bgsave_in_progress"]:
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="MISCONF") as caught:
            await store.begin(KEY, request("r1", "t1"))
        assert reason(caught) == "STORE_FULL"
        assert (await store.load(KEY)).revision == 1
    own_redis.kill()  # it refuses to stop while it cannot save


@pytest.mark.fault(50)
async def test_a_replica_is_read_only(store: RedisStore, client: redis.Redis) -> None:
    await store.create(row(KEY), first_record(), "fp")
    client.replicaof("127.0.0.1", str(free_port()))
    try:
        with pytest.raises(Unavailable) as caught:
            await store.begin(KEY, request("r1", "t1"))
        assert reason(caught) == "STORE_UNAVAILABLE"
        assert (await store.load(KEY)).revision == 1
    finally:
        client.replicaof("NO", "ONE")
    assert isinstance(await store.begin(KEY, request("r1", "t1")), Began)


@pytest.mark.fault(53)
async def test_a_newer_schema_is_refused(shared_redis: RedisServer, client: redis.Redis) -> None:
    client.hset("pv1:store", mapping={"store_id": "x", "schema": "99"})
    with pytest.raises(FailedPrecondition) as caught:
        async with opened_redis(shared_redis.url):
            pass
    assert reason(caught) == "STORE_VERSION"


async def test_few_rights_are_enough(shared_redis: RedisServer, client: redis.Redis) -> None:
    """Only keys of ours, no administration: then the durability is not known."""
    plain: Any = client
    plain.execute_command(
        *("ACL", "SETUSER", "pensieve", "reset", "on", ">pw", "~pv1:*"),
        *("+@read", "+@write", "+@scripting", "+@transaction", "+@connection", "+time", "-@dangerous"),
    )
    try:
        url = f"redis://pensieve:pw@127.0.0.1:{shared_redis.port}/0"
        async with opened_redis(url) as store:
            assert store.durability == "unknown"
            await store.create(row(KEY), first_record(), "fp")
            await whole_turn(store, KEY, 1)
            assert len(await store.read(KEY)) == 2
            assert len((await store.list_sessions(TENANT, limit=5)).rows) == 1
            await store.purge_expired()
            await store.delete(KEY)
    finally:
        client.acl_deluser("pensieve")


async def test_settings_that_were_secret_for_a_while_count_again(
    shared_redis: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = client
    plain.execute_command("ACL", "SETUSER", "pensieve", "reset", "on", ">pw", "~pv1:*", "+@all")
    monkeypatch.setattr(link, "SECRET_S", 0.0)
    try:
        async with opened_redis(f"redis://pensieve:pw@127.0.0.1:{shared_redis.port}/0") as store:
            assert store.durability == "local"
            plain.execute_command("ACL", "SETUSER", "pensieve", "-config")
            await store.ping()
            assert store.durability == "unknown"
            plain.execute_command("ACL", "SETUSER", "pensieve", "+config")
            client.config_set("maxmemory-policy", "allkeys-lru")
            with pytest.raises(FailedPrecondition, match="set maxmemory-policy noeviction"):
                await store.ping()
            client.config_set("maxmemory-policy", "noeviction")
            await store.ping()
            assert store.durability == "local"
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.acl_deluser("pensieve")


async def test_durability_is_what_redis_is_set_to(shared_redis: RedisServer, client: redis.Redis) -> None:
    for setting, rewrite, level in (
        *(("everysec", "no", "local"), ("always", "no", "fsync"), ("always", "yes", "local")),
        *(("no", "yes", "none"), ("everysec", "no", "local")),
    ):
        client.config_set("appendfsync", setting)
        client.config_set("no-appendfsync-on-rewrite", rewrite)
        async with opened_redis(shared_redis.url) as store:
            assert store.durability == level
    client.config_set("appendonly", "no")
    try:
        async with opened_redis(shared_redis.url) as store:
            assert store.durability == "none"
    finally:
        client.config_set("appendonly", "yes")


async def test_without_the_right_to_look_at_its_buffer_the_durability_is_unknown(
    shared_redis: RedisServer, client: redis.Redis
) -> None:
    plain: Any = client
    plain.execute_command(
        *("ACL", "SETUSER", "pensieve", "reset", "on", ">pw", "~pv1:*", "+@all", "-info"),
    )
    try:
        async with opened_redis(f"redis://pensieve:pw@127.0.0.1:{shared_redis.port}/0") as store:
            assert store.durability == "unknown"
            await store.create(row(KEY), first_record(), "fp")
            assert (await whole_turn(store, KEY, 1)).revision == 2
    finally:
        client.acl_deluser("pensieve")
