"""Redis lost sessions that were acknowledged: told from those that were erased, have expired or never were."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from pensieve.errors import DataLoss, NotFound
from pensieve.store import Key
from pensieve.store._redis import acknowledged
from pensieve.store._redis.rows import session_keys
from pensieve.store.records import Record, RecordKind, SessionConfig
from pensieve.store.redis_store import RedisStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import refusal, serving, spec
from support.store.redis_server import RedisServer, redis_server
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

LIMIT_S = 30.0
OLD, NEW = key("old"), key("new")


class Past:
    """A Redis, and a copy of what it had on its disk at some moment."""

    def __init__(self, redis: RedisServer, folder: Path) -> None:
        self.redis = redis
        self._folder = folder

    def keep(self) -> None:
        self.redis.kill()
        shutil.copytree(self.redis.append_only_folder, self._folder, dirs_exist_ok=True)
        self.redis.start()

    def return_to(self) -> None:
        self.redis.kill()
        shutil.rmtree(self.redis.append_only_folder)
        shutil.copytree(self._folder, self.redis.append_only_folder)
        self.redis.start()


@pytest.fixture
def past(tmp_path: Path) -> Iterator[Past]:
    with redis_server(appendfsync="always") as redis:
        yield Past(redis, tmp_path / "past")


class Told:
    times = 0

    def went_back(self) -> None:
        self.times += 1


@contextlib.asynccontextmanager
async def opened(redis: RedisServer) -> AsyncIterator[tuple[RedisStore, Told]]:
    told = Told()
    store = RedisStore.from_url(redis.url, on_regression=told.went_back)
    await store.open()
    try:
        yield store, told
    finally:
        await store.close()


async def create(store: RedisStore, at: Key, ttl_s: float = 0.0) -> None:
    await store.create(row(at, ttl_s=ttl_s), first_record(), "fp")


async def reason(call: Awaitable[object]) -> str:
    with pytest.raises((NotFound, DataLoss)) as caught:
        await call
    return caught.value.reason


@pytest.mark.fault(42)
async def test_a_lost_session_is_told_from_others_that_are_not_there(
    past: Past, caplog: pytest.LogCaptureFixture
) -> None:
    erased, again, expires = key("erased"), key("again"), key("expires")
    async with opened(past.redis) as (store, told), opened_redis(past.redis.url) as another:
        await create(store, OLD)
        await create(store, erased)
        past.keep()
        await whole_turn(store, OLD, 1)
        for at in (NEW, again, expires):
            await create(store, at, ttl_s=0.5 if at == expires else 0)
        await create(another, key("of another"))
        past.return_to()
        await another.delete(erased)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.load(NEW),
            lambda: store.read(NEW),
            lambda: store.begin(NEW, request("r1", "t1")),
            lambda: store.find_request(NEW, "r1"),
            lambda: store.delete(NEW),
        ]
        for call in calls:
            assert await reason(call()) == "HISTORY_REGRESSED"
        for name, expected in {
            "erased": "SESSION_DELETED",
            "of another": "SESSION_NOT_FOUND",
            "invented": "SESSION_NOT_FOUND",
        }.items():
            assert await reason(store.load(key(name))) == expected
        assert await reason(another.load(NEW)) == "SESSION_NOT_FOUND", "it was not acknowledged there"
        assert (await store.load(OLD)).revision == 1
        await create(store, again)
        assert (await whole_turn(store, again, 1)).revision == 2, "made anew it is another session"
        async with asyncio.timeout(LIMIT_S):
            while await reason(store.load(expires)) != "SESSION_NOT_FOUND":  # its time is over
                await asyncio.sleep(0.02)
        await store.delete(NEW, allow_missing=True)
        assert await reason(store.load(NEW)) == "SESSION_NOT_FOUND", "it was erased since"
    assert told.times == 1
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert line.endswith("4 changes of 4 sessions that this server had acknowledged are lost")


async def test_a_change_that_another_overtakes_counts_from_when_it_is_made(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(past.redis) as (store, told):
        overtaken, call = asyncio.Event(), store._link.call_durably

        async def late(script: str, keys: list[str], args: list[object]) -> list[object]:
            await overtaken.wait()
            return await call(script, keys, args)

        monkeypatch.setattr(store._link, "call_durably", late)
        slow = asyncio.create_task(create(store, NEW))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(store._link, "call_durably", call)
        await create(store, OLD)
        past.keep()
        overtaken.set()
        await slow
        past.return_to()
        assert await reason(store.load(NEW)) == "HISTORY_REGRESSED" and told.times == 1
        await store.load(OLD)


@pytest.mark.fault(42)
async def test_what_is_changed_before_anybody_looks_hides_nothing(past: Past) -> None:
    async with opened(past.redis) as (store, told):
        await create(store, OLD)
        past.keep()
        for number in range(3):
            await create(store, key(f"new{number}"))
        past.return_to()
        for revision in range(1, 6):
            await whole_turn(store, OLD, revision)
        assert not told.times
        await asyncio.gather(*(store.ping() for _ in range(4)))
        assert told.times == 1
        for number in range(3):
            assert await reason(store.load(key(f"new{number}"))) == "HISTORY_REGRESSED"
        # And once more, from what was written since.
        past.keep()
        await create(store, NEW)
        past.return_to()
        assert await reason(store.load(NEW)) == "HISTORY_REGRESSED"
        await store.ping()
        assert told.times == 2
        await create(store, NEW)
        assert (await store.load(NEW)).revision == 1


async def test_a_session_that_another_server_let_expire_or_erased_long_ago_is_not_lost(past: Past) -> None:
    """Also where other sessions are: only what is behind the mark was lost."""
    short = Record(2, RecordKind.UPDATE, time_ms=2, config=SessionConfig(model="tiny", ttl_s=3600))
    async with opened(past.redis) as (store, told), opened_redis(past.redis.url) as another:
        for at in (OLD, key("erased")):
            await create(store, at)
        await another.apply(OLD, "fp", short, counts(2))
        await another.delete(key("erased"))
        with contextlib.closing(past.redis.client()) as plain:
            for name in (*session_keys(OLD)[::2], session_keys(key("erased"))[0]):
                assert plain.pttl(name) > 0 and plain.pexpire(name, 0)  # as when the time of both is over
        past.keep()
        for _ in range(2):
            for at in (OLD, key("erased")):
                assert await reason(store.load(at)) == "SESSION_NOT_FOUND"
            await store.ping()
            await create(store, key(f"after {told.times}"))
            if not told.times:
                past.return_to()
                assert await reason(store.load(key("after 0"))) == "HISTORY_REGRESSED"
        assert told.times == 1


async def test_a_mark_whose_time_is_over_proves_nothing(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(past.redis) as (store, told):
        await create(store, OLD)
        monkeypatch.setattr(acknowledged, "MARK_MS", -(10**9))  # as if long ago
        with contextlib.closing(past.redis.client()) as plain:
            (mark,) = plain.keys("pv1:mark:*")
            assert 0 < plain.pttl(mark) <= 30 * 24 * 3600 * 1000
            plain.delete(mark, session_keys(OLD)[0], session_keys(OLD)[2])
        assert await reason(store.load(OLD)) == "SESSION_NOT_FOUND" and not told.times
        monkeypatch.undo()
        past.keep()
        await create(store, NEW)
        past.return_to()
        assert await reason(store.load(NEW)) == "HISTORY_REGRESSED", "the next mark counts"


async def test_a_primary_that_was_replaced_is_not_believed(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers over connections of before, and has not what its successor has."""
    async with opened(past.redis) as (store, told):
        await create(store, OLD)
        asked: list[object] = []

        async def command(*words: object, count_errors: bool = True) -> object:
            asked.append(words)
            return b"0" if len(asked) == 1 else await ask(*words, count_errors=count_errors)

        async def moved(before: object) -> bool:
            return True

        ask = store._link.command
        monkeypatch.setattr(store._link, "command", command)
        monkeypatch.setattr(store._link, "has_moved", moved)
        await store._acknowledged.check_for_regression()
        assert len(asked) == 2 and not told.times


async def test_a_full_redis_still_answers_what_it_has(past: Past) -> None:
    """The mark takes no room then, and what is repeated is acknowledged without it."""
    async with opened(past.redis) as (store, told):
        await create(store, OLD)
        done = await whole_turn(store, OLD, 1)
        with contextlib.closing(past.redis.client()) as plain:
            plain.config_set("maxmemory", 1)
        record = turn_record(1, "r1")
        assert await store.commit(OLD, "t1", "fp-r1", record, counts(2)) == done
        assert not told.times


async def test_what_is_remembered_is_bounded(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(past.redis) as (store, _):
        store._acknowledged._max_sessions = 2
        past.keep()
        for number in range(3):
            await create(store, key(str(number)))
        past.return_to()
        assert await reason(store.load(key("0"))) == "SESSION_NOT_FOUND"
        assert await reason(store.load(key("2"))) == "HISTORY_REGRESSED"


@pytest.mark.fault(42)
async def test_clients_are_told_that_the_session_was_lost(past: Past) -> None:
    async with opened(past.redis) as (store, told), serving(store=store) as rig:
        past.keep()
        name = await rig.create()
        await rig.run(name, "first")
        past.return_to()
        for call in (
            rig.call(name, spec("second")),
            rig.api.GetSession(pb.GetSessionRequest(name=name)),
            rig.api.ListItems(pb.ListItemsRequest(name=name)),
        ):
            error = await refusal(call)
            assert (error.code, error.reason) == ("DATA_LOSS", "HISTORY_REGRESSED")
            assert error.metadata["current_revision"] == "0"
        assert told.times == 1
        assert (await refusal(rig.call("sessions/invented", spec("hi")))).reason == "SESSION_NOT_FOUND"
        assert (await rig.run(await rig.create(), "hi")).revision == 2, "others go on"
