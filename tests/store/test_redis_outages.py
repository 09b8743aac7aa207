"""A Redis that hangs, refuses writes, is busy, or has gone back in time; and where a store's URL leads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
import redis
from redis import exceptions

from pensieve.errors import DataLoss, FailedPrecondition, Unavailable
from pensieve.store import Began, open_store
from pensieve.store._redis import link
from pensieve.store._redis.address import parse_address
from pensieve.store._redis.link import MARKER, translate_errors
from pensieve.store._redis.rows import session_keys
from pensieve.store.records import State
from pensieve.store.redis_store import RedisStore
from support.store.redis_server import RedisServer, free_port, redis_server
from support.store.store_bench import (
    counts,
    first_record,
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
LIMIT_S = 30.0


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server for one test, which may break it."""
    with redis_server() as server:
        yield server


async def until_served(call: Callable[[], Awaitable[object]]) -> int:
    """How often the store said that it is unavailable before it served."""
    refused = 0
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await call()
                return refused
            except Unavailable as error:
                assert error.reason in ("STORE_UNAVAILABLE", "STORE_FULL")
                refused += 1
                await asyncio.sleep(0.02)


# ---- back in time


@pytest.mark.fault(42)
async def test_a_redis_that_went_back_in_time_begins_no_turn(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Restarted on the first part of its append-only file: a sound store, and not the one that acknowledged turns."""
    async with opened_redis(own_redis.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        await whole_turn(store, KEY, 1)
        (file,) = own_redis.append_only_folder.glob("*.incr.aof")
        async with asyncio.timeout(LIMIT_S):
            while b"r1" not in file.read_bytes():
                await asyncio.sleep(0.01)
        early = file.stat().st_size
        seen = await whole_turn(store, KEY, 2)
        own_redis.kill()
        with file.open("r+b") as data:
            data.truncate(early)
        own_redis.start()
        assert (await store.load(KEY)).revision == 2
        with pytest.raises(DataLoss) as caught:
            await store.begin(KEY, request("r3", "t3", known=seen))
        assert caught.value.reason == "HISTORY_REGRESSED"
        with pytest.raises(DataLoss):
            await store.read(KEY, after_revision=seen.revision, head_hash=seen.head_hash)
        assert (await store.load(KEY)).state is State.ACTIVE, "what is there is sound"
        # Another server, which knows nothing, goes on from there. Then the store is ahead, on another branch.
        await whole_turn(store, KEY, 2, "another")
        await whole_turn(store, KEY, 3)
        with pytest.raises(DataLoss) as diverged:
            await store.begin(KEY, request("r5", "t5", known=seen))
        assert diverged.value.reason == "HISTORY_REGRESSED"
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 2
    assert "is behind revision 3" in told[0] and "has another record at revision 3" in told[1]


@pytest.mark.fault(47)
async def test_an_emptied_redis_that_others_fill_again_is_noticed(own_redis: RedisServer) -> None:
    """The session is there, so no answer says "there is nothing"; but it is in another store."""
    async with opened_redis(own_redis.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        own_redis.kill()
        shutil.rmtree(own_redis.append_only_folder)
        own_redis.start()
        async with opened_redis(own_redis.url) as anew:
            await anew.create(row(KEY), first_record(), "fp")
        for attempt in (store.load(KEY), store.begin(KEY, request("r1", "t1")), store.ping()):
            with pytest.raises(Unavailable) as caught:
                await attempt
            assert caught.value.reason == "STORE_REPLACED"


@pytest.mark.fault(47)
async def test_a_redis_that_is_emptied_and_filled_under_open_connections_serves_nothing(
    own_redis: RedisServer,
) -> None:
    """As by FLUSHALL and a restored backup: once it is noticed, also sessions that are there are refused."""
    async with opened_redis(own_redis.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        keys = own_redis.client()
        marker = keys.hgetall(MARKER)
        keys.flushall()
        async with opened_redis(own_redis.url) as anew:
            await anew.create(row(KEY), first_record(), "fp")
        attempts: list[Callable[[], Awaitable[object]]] = [
            store.ping,
            lambda: store.load(KEY),
            lambda: store.begin(KEY, request("r1", "t1")),
        ]
        for attempt in attempts:
            with pytest.raises(Unavailable) as caught:
                await attempt()
            assert caught.value.reason == "STORE_REPLACED"
        keys.hset(MARKER, mapping=marker)  # its own data are back
        await store.ping()
        await store.begin(KEY, request("r1", "t1"))


# ---- no answer


@pytest.mark.fault(46)
async def test_a_redis_that_hangs_is_waited_for_once_and_shortly(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_redis(own_redis.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        own_redis.pause()
        monkeypatch.setattr(link, "CALL_LIMIT_S", 0.4)
        monkeypatch.setattr(link, "SUSPECT_LIMIT_S", 0.1)
        problems = []
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.begin(KEY, request("r1", "t1")),
            lambda: store.abort(KEY, "t1"),
            lambda: store.load(KEY),
            store.ping,
        ]
        for call in calls:
            with pytest.raises(Unavailable) as caught:
                await call()
            problems.append(caught.value.message.rpartition(": ")[2])
        assert problems == ["no answer in 0.4 s", *["no answer in 0.1 s"] * 3]
        monkeypatch.undo()
        own_redis.resume()
        await until_served(lambda: store.load(KEY))
        assert isinstance(await store.begin(KEY, request("r1", "t1")), Began)


def test_a_call_is_bounded_below_what_health_allows() -> None:
    """Told within 5 s: the interval between two looks and one call's time."""
    assert link.SUSPECT_LIMIT_S < link.CALL_LIMIT_S <= 3.0
    assert link.WAIT_MS / 1000 < link.SOCKET_TIMEOUT_S < link.CALL_LIMIT_S


@pytest.mark.fault(50)
async def test_a_redis_that_is_busy_with_a_script(own_redis: RedisServer) -> None:
    async with opened_redis(own_redis.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        with contextlib.closing(own_redis.client()) as plain, contextlib.closing(own_redis.client()) as other:
            plain.config_set("busy-reply-threshold", "50")

            def endless() -> None:
                with contextlib.suppress(redis.ResponseError):
                    other.eval("while true do end", 0)

            thread = threading.Thread(target=endless)
            thread.start()
            with pytest.raises(Unavailable, match="BUSY") as caught:
                async with asyncio.timeout(LIMIT_S):
                    while True:
                        await store.begin(KEY, request("r1", "t1"))
            assert caught.value.reason == "STORE_UNAVAILABLE"
            plain.script_kill()
            thread.join(LIMIT_S)
        await until_served(lambda: store.begin(KEY, request("r1", "t1")))
        await store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))


@pytest.mark.fault(50)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "STORE_UNAVAILABLE"),
        (exceptions.ResponseError("MASTERDOWN Link with MASTER is down"), "STORE_UNAVAILABLE"),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."), "STORE_UNAVAILABLE"),
        (exceptions.ResponseError("WAIT cannot be used with replica instances."), "STORE_UNAVAILABLE"),
        (exceptions.ResponseError("UNBLOCKED force unblock, instance state changed"), "STORE_UNAVAILABLE"),
        (exceptions.TryAgainError("Multiple keys request during rehashing"), "STORE_UNAVAILABLE"),
        (exceptions.ClusterDownError("CLUSTERDOWN The cluster is down"), "STORE_UNAVAILABLE"),
        (exceptions.SlotNotCoveredError("Slot 7 not covered"), "STORE_UNAVAILABLE"),
        (exceptions.AskError("7 127.0.0.1:7000"), "STORE_UNAVAILABLE"),
        (exceptions.ResponseError("MISCONF Errors writing to the AOF file"), "STORE_FULL"),
        (exceptions.MovedError("7 127.0.0.1:7000"), "STORE_UNSAFE"),
        (exceptions.ResponseError("unknown command 'WAIT'"), "STORE_FORBIDDEN"),
    ],
)
def test_what_redis_says_when_it_cannot_serve(error: Exception, reason: str) -> None:
    with pytest.raises((Unavailable, FailedPrecondition)) as caught, translate_errors("here"):
        raise error
    assert caught.value.reason == reason


# ---- writes that are refused


@pytest.mark.fault(44, 49)
@pytest.mark.parametrize(
    ("setting", "reason"), [("maxmemory", "STORE_FULL"), ("replicaof", "STORE_UNAVAILABLE")]
)
async def test_a_ping_notices_that_writes_are_refused(
    own_redis: RedisServer, setting: str, reason: str
) -> None:
    async with opened_redis(own_redis.url) as store:
        await store.create(row(KEY), first_record(), "fp")
        await store.ping()
        with contextlib.closing(own_redis.client()) as plain:
            if setting == "maxmemory":
                plain.config_set("maxmemory", "1")
            else:
                plain.replicaof("127.0.0.1", str(free_port()))
            with pytest.raises(Unavailable) as caught:
                await store.ping()
            assert caught.value.reason == reason
            assert (await store.load(KEY)).revision == 1
            plain.config_set("maxmemory", "0")
            plain.replicaof("NO", "ONE")
        await until_served(store.ping)
        await whole_turn(store, KEY, 1)


@pytest.mark.fault(44)
@pytest.mark.parametrize("ends", [False, True], ids=["goes_on", "ends"])
async def test_a_full_disk_acknowledges_nothing_that_is_in_memory_alone(
    own_redis: RedisServer, ends: bool
) -> None:
    """Append-only file, fsync every second: the first write that meets the full disk is answered as if it were kept.

    Redis mostly goes on then and refuses writes. It may end as well, and on a busy machine it has.
    """
    errors: list[None] = []
    async with opened_redis(own_redis.url, lambda: errors.append(None)) as store:
        await store.create(row(KEY), first_record(), "fp")
        await whole_turn(store, KEY, 1)
        await store.begin(KEY, request("r2", "t2"))
        own_redis.fill_disk()
        if ends:
            own_redis.kill()
        turn = turn_record(2, "r2")
        reasons = list[str]()
        for attempt in (
            store.commit(KEY, "t2", "fp-r2", turn, counts(3)),
            store.commit(KEY, "t2", "fp-r2", turn, counts(3)),
            store.begin(KEY, request("r2", "t3")),
            store.find_request(KEY, "r2"),
            store.ping(),
        ):
            with pytest.raises(Unavailable) as caught:
                await attempt
            reasons.append(caught.value.reason)
            assert ("MISCONF" in str(caught.value)) is (caught.value.reason == "STORE_FULL")
        assert len(errors) >= 4, "each is counted, with what it asked of Redis beside"
        if reasons == ["STORE_FULL"] * 5:
            assert not ends and len(await store.read(KEY)) == 3, "it is there, and gone if Redis ends now"
            own_redis.free_disk()
        else:
            assert set(reasons) <= {"STORE_FULL", "STORE_UNAVAILABLE"}
            await has_ended(own_redis)
            own_redis.stop()
            own_redis.start()
            await until_served(lambda: store.read(KEY))
            assert len(await store.read(KEY)) == 2, "nobody was told that it was kept"
            await store.begin(KEY, request("r2", "t2"))
        await until_served(lambda: store.commit(KEY, "t2", "fp-r2", turn, counts(3)))
        own_redis.kill()
        counted = len(errors)
        for attempt, counts_as in ((store.ping(), 0), (store.load(KEY), 1)):
            with pytest.raises(Unavailable):
                await attempt
            assert len(errors) == counted + counts_as
        own_redis.start()
        assert len(await store.read(KEY)) == 3


async def has_ended(server: RedisServer) -> None:
    """Returns when Redis has ended by itself."""
    async with asyncio.timeout(LIMIT_S):
        while not server.has_ended():
            await asyncio.sleep(0.02)


@pytest.mark.fault(45)
async def test_a_full_disk_ends_a_redis_that_syncs_each_write() -> None:
    with redis_server(appendfsync="always") as server:
        async with opened_redis(server.url) as store:
            assert store.durability == "fsync"
            await store.create(row(KEY), first_record(), "fp")
            await whole_turn(store, KEY, 1)
            await store.begin(KEY, request("r2", "t2"))
            server.fill_disk()
            with pytest.raises(Unavailable) as caught:
                await store.commit(KEY, "t2", "fp-r2", turn_record(2, "r2"), counts(3))
            assert caught.value.reason == "STORE_UNAVAILABLE"
            await has_ended(server)
            server.stop()
            server.start()
            assert len(await store.read(KEY)) == 2
            await store.commit(KEY, "t2", "fp-r2", turn_record(2, "r2"), counts(3))


async def test_a_redis_that_keeps_nothing_is_told_of(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(own_redis.client()) as plain:
        for append, save, words in (
            ("yes", "", None),
            ("no", "", "keeps nothing"),
            ("no", "3600 1", "keeps only snapshots"),
        ):
            plain.config_set("appendonly", append)
            plain.config_set("save", save)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                async with opened_redis(own_redis.url) as store:
                    assert store.durability == ("none" if words else "local")
            assert (words in caplog.text) if words else not caplog.records


# ---- where a URL leads


def test_the_forms_of_a_url() -> None:
    one = parse_address("redis://user:s3cret@db")
    assert (one.kind, one.nodes, one.options, one.replicas) == (
        *("server", (("db", 6379),)),
        *({"username": "user", "password": "s3cret", "db": 0}, 0),
    )
    sentinel = parse_address(
        "rediss+sentinel://:s3cret@a:1,[::1],c/history/3?replicas=2&sentinel_password=s3cret&ssl_ca_certs=/ca"
    )
    assert sentinel.nodes == (("a", 1), ("::1", 26379), ("c", 26379))
    assert (sentinel.kind, sentinel.service, sentinel.replicas) == ("sentinel", "history", 2)
    assert sentinel.options == {"password": "s3cret", "db": 3, "ssl": True, "ssl_ca_certs": "/ca"}
    assert sentinel.sentinel_options == {"password": "s3cret", "ssl": True, "ssl_ca_certs": "/ca"}
    cluster = parse_address("redis+cluster://a,b:7000")
    assert (cluster.kind, cluster.nodes) == ("cluster", (("a", 6379), ("b", 7000)))
    for place in (one, sentinel, cluster):
        assert "s3cret" not in str(place)
    assert str(sentinel).endswith("/history")


@pytest.mark.parametrize(
    "url",
    [
        *("redis+sentinel://a,b", "redis+sentinel:///history", "redis+cluster://a/1", "redis://a,b/0"),
        *("redis://a/0/1", "redis://a/x", "redis+other://a/0", "redis://a/0?replicas=-1", "redis://a:x/0"),
        *("redis://a/0?replicas=99", "redis://a/0?replicas=two"),
        *("redis://a/0?unknown=1", "redis://a/0?max_connections=9", "redis://a/0?ssl_ca_certs=/ca"),
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError):
        open_store(url)


async def test_every_kind_of_url_opens_a_redis_store() -> None:
    for url in ("redis://a/0", "rediss://a/0", "redis+sentinel://a/history", "rediss+cluster://a,b"):
        store = open_store(url)
        assert isinstance(store, RedisStore)
        await store.close()
