"""Backup, restore and move: whatever was in a store, everything a client could see of it is there again."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given, settings

from pensieve.errors import PensieveError
from pensieve.store import Began, CalledOff, HistoryStore, Key, Replay, open_store
from pensieve.store.maintenance import Mode, backup, check, move, open_backup, restore
from pensieve.store.maintenance.copying import content
from pensieve.store.memory_store import MemoryStore
from support.store.population import SESSIONS, Made, populate
from support.store.redis_groups import cluster_group
from support.store.redis_server import RedisServer
from support.store.store_bench import raw, request

pytestmark = pytest.mark.redis

TENANTS = ("acme", "b/{ü}%", "c")


@contextlib.asynccontextmanager
async def served(url: str) -> AsyncIterator[HistoryStore]:
    store = open_store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def everything(url: str) -> dict[Key, object]:
    async with raw(url, Mode.READ) as store:
        found = {}
        for key in await store.keys():
            session = await store.session(key)
            assert session is not None
            found[key] = content(session)
        return found


async def seen(store: HistoryStore, made: list[Made]) -> list[object]:
    """All that a client can see, but for times that are the store's own."""
    answers: list[object] = []
    for one in made:
        for ask in (
            lambda key: store.load(key),
            lambda key: store.read(key),
            lambda key: store.find_request(key, "q0"),
            lambda key: store.find_request(key, "q3"),
        ):
            try:
                answers.append(await ask(one.key))
            except PensieveError as error:
                answers.append((type(error).__name__, error.reason))
    for tenant in TENANTS:
        answers.append(await store.usage(tenant))
        answers.append((await store.list_sessions(tenant, limit=3)).rows)
        answers.append((await store.list_sessions(tenant, limit=10, labels={"updated": "1"})).rows)
    return answers


async def replays(store: HistoryStore, made: list[Made]) -> None:
    """A retry of what was committed is answered by it, one of what was pending gets its seed."""
    for one in made:
        if one.end in ("damaged", "deleted"):
            continue
        for request_id, revision in one.request_ids().items():
            outcome = await store.begin(one.key, request(request_id, "late"))
            assert isinstance(outcome, Replay) and outcome.revision == revision
        if one.end == "called off":
            met = await store.begin(one.key, request("waiting", "follower", follows=True))
            assert isinstance(met, CalledOff)
        if one.end in ("pending", "ordered", "called off"):
            began = await store.begin(one.key, request("waiting", "again", seed=1))
            assert isinstance(began, Began) and began.seed == 41


@given(SESSIONS)
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_whatever_is_stored_comes_back(
    shared_redis: RedisServer, client: redis.Redis, made: list[Made]
) -> None:
    """SQLite → backup → Redis → SQLite: each the same as a client sees it, and as it is stored."""
    with tempfile.TemporaryDirectory() as folder:
        client.flushall()
        asyncio.run(_there_and_back(Path(folder), shared_redis.url, made))


def test_turns_that_were_not_committed(
    shared_redis: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    """What is known of them is known elsewhere: begun, told how to end, called off."""
    ends = ("pending", "ordered", "called off")
    asyncio.run(
        _there_and_back(tmp_path, shared_redis.url, [Made(Key("acme", end), ("turn",), end) for end in ends])
    )


async def _there_and_back(folder: Path, middle: str, made: list[Made]) -> None:
    first, last = f"sqlite:///{folder}/first.db", f"sqlite:///{folder}/last.db"
    async with served(first) as store:
        await populate(store, made)
        await asyncio.sleep(0.002)  # the pending turns' leases lapse
        views = [await seen(store, made)]
    async with raw(first, Mode.SNAPSHOT) as source:
        total = await backup(source, folder / "b.jsonl.gz")
    async with raw(middle, Mode.WRITE) as target:
        copied = await restore(open_backup(folder / "b.jsonl.gz"), target)
    assert copied.written == len(made) == total.sessions + total.tombstones
    async with served(middle) as store:
        views.append(await seen(store, made))
    async with raw(middle, Mode.EXCLUSIVE) as source, raw(last, Mode.WRITE) as target:
        assert (await move(source, target)).written == len(made)
    for url in (middle, last):
        assert await everything(url) == await everything(first)
        async with raw(url, Mode.READ) as store:
            wrong = [one for one in (await check(store)).findings if one.problem != "marked"]
            assert wrong == []
        async with served(url) as store:
            views.append(await seen(store, made))
            await replays(store, made)
    assert views[0] == views[1] == views[2] == views[3]
    reference = MemoryStore()
    await populate(reference, made)
    async with served(last) as store:
        for one in made:
            if one.end != "deleted":
                assert await store.read(one.key) == await reference.read(one.key)


async def test_a_cluster_is_moved_to_a_file_and_back(tmp_path: Path) -> None:
    """Sessions of all its servers."""
    made = [Made(Key(f"t{number % 3}", f"s{number}"), ("turn",), end="pending") for number in range(12)]
    made.append(Made(Key("t0", "gone"), end="deleted"))
    file = f"sqlite:///{tmp_path}/h.db"
    async with served(file) as store:
        await populate(store, made)
    with cluster_group() as group:
        async with raw(file, Mode.EXCLUSIVE) as source, raw(group.url, Mode.WRITE) as target:
            assert (await move(source, target)).written == len(made)
        assert await everything(group.url) == await everything(file)
        async with raw(group.url, Mode.READ) as store:
            assert (await check(store)).findings == []
        back = f"sqlite:///{tmp_path}/back.db"
        async with raw(group.url, Mode.EXCLUSIVE) as source, raw(back, Mode.WRITE) as target:
            assert (await move(source, target)).written == len(made)
        assert await everything(back) == await everything(file)
