"""Turns are found by their mark and an answer, on every store, for as long as their session is there."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import msgspec
import pytest
import redis

from pensieve.core import FinishReason
from pensieve.store import HistoryStore, Key, MarkedTurn, open_store
from pensieve.store._redis import rows
from pensieve.store._redis.rows import tenant_keys
from pensieve.store.maintenance import Mode, backup, check, move, open_backup, open_raw, repair, restore
from pensieve.store.records import CandidateAnswer, Record
from support.store.redis_server import RedisServer
from support.store.store_bench import TENANT, Bench, counts, first_record, key, request, row, turn_record

HERE = MarkedTurn("here", 2)


def marked_record(base: int, request_id: str, mark: str, *answers: str, time_ms: int = 2) -> Record:
    """A turn with a mark; its answer is the first of ``answers``, all of which it drew if there are several."""
    plain = turn_record(base, request_id)
    assert plain.turn is not None
    drawn = tuple(CandidateAnswer(text, b"", FinishReason.EOS) for text in answers)
    result = msgspec.structs.replace(
        plain.turn, mark=mark, annotations={"k": "v"}, candidates=drawn if len(drawn) > 1 else ()
    )
    answer = msgspec.structs.replace(plain.items[-1], text=answers[0])
    return msgspec.structs.replace(plain, turn=result, items=(plain.items[0], answer), time_ms=time_ms)


async def say(
    store: HistoryStore, at: Key, base: int, mark: str, *answers: str, time_ms: int = 2, ttl_s: float = 0.0
) -> None:
    if base == 1:
        await store.create(row(at, ttl_s=ttl_s), first_record(), "fp")
    record = marked_record(base, f"r{base}", mark, *answers, time_ms=time_ms)
    await store.begin(at, request(f"r{base}", f"t{base}"))
    await store.commit(at, f"t{base}", f"fp-r{base}", record, counts(base + 1))


async def found(store: HistoryStore, mark: str, answer: str | None, tenant: str = TENANT) -> list[MarkedTurn]:
    return await store.find_marked(tenant, mark, answer, limit=8)


async def test_a_turn_is_found_by_its_mark_and_any_of_its_answers(bench: Bench) -> None:
    store = bench.store
    await say(store, key("here"), 1, "m", "one", "two", "one")
    await say(store, key("here"), 2, "m2", "")
    for answer in ("one", "two"):
        assert await found(store, "m", answer) == [HERE]
    assert await found(store, "m2", "") == await found(store, "m2", None) == [MarkedTurn("here", 3)]
    assert await found(store, "m", None) == [HERE]
    for mark, answer in (("m", "three"), ("m2", "one"), ("", "one"), ("mo", "ne")):
        assert await found(store, mark, answer) == []
    assert await found(store, "m", "one", "other") == []
    log = await store.read(key("here"))
    assert log[1].record.turn is not None and log[1].record.turn.annotations == {"k": "v"}


async def test_the_newest_comes_first(bench: Bench) -> None:
    for number, name in enumerate(("b", "}:m", "a", "c;")):
        await say(bench.store, key(name), 1, "m", "x", time_ms=10 + number)
    names = [one.session_id for one in await found(bench.store, "m", "x")]
    assert names == ["c;", "a", "}:m", "b"]
    few = await bench.store.find_marked(TENANT, "m", "x", limit=2)
    assert [one.session_id for one in few] == ["c;", "a"]


async def test_nothing_is_found_of_a_session_that_is_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "GRACE_MS", -1)  # Redis spares what may be of a session in the making
    for name in ("gone", "here", "gone-too"):
        await say(bench.store, key(name), 1, "m", "x")
    await bench.store.delete(key("gone"))
    await bench.store.delete(key("gone-too"))
    assert await found(bench.store, "m", "x") == [HERE]
    await say(bench.store, key("idle"), 1, "m", "x", ttl_s=60.0)
    bench.expire(key("idle"))
    await bench.store.purge_expired()
    assert await found(bench.store, "m", "x") == [HERE]


@pytest.mark.redis
async def test_nothing_of_it_is_left_in_redis(shared_redis: RedisServer, client: redis.Redis) -> None:
    store = open_store(shared_redis.url)
    await store.open()
    try:
        await say(store, key("a:b;c"), 1, "m", "x", "y")
        assert client.zcard(tenant_keys(TENANT)[4]) == 6
        await store.delete(key("a:b;c"))
        assert client.zcard(tenant_keys(TENANT)[4]) == 0
    finally:
        await store.close()


@pytest.mark.redis
async def test_marks_are_moved_and_restored_with_their_session(
    tmp_path: Path, shared_redis: RedisServer, client: redis.Redis
) -> None:
    """And made anew where they are lost."""
    first, last = f"sqlite:///{tmp_path / 'first.db'}", f"sqlite:///{tmp_path / 'last.db'}"
    store = open_store(first)
    await store.open()
    await say(store, key("here"), 1, "m", "x", "y")
    await store.close()
    source, target = open_raw(first), open_raw(shared_redis.url)
    await source.open(Mode.SNAPSHOT)
    await target.open(Mode.WRITE)
    await backup(source, tmp_path / "b.jsonl.gz")
    await restore(open_backup(tmp_path / "b.jsonl.gz"), target)
    await source.close()
    source, target = target, open_raw(last)
    await target.open(Mode.WRITE)
    await move(source, target)
    await source.close()
    await target.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "last.db")) as connection, connection:
        connection.execute("DELETE FROM marks")
    client.delete(tenant_keys(TENANT)[4])
    for url in (last, shared_redis.url):
        raw = open_raw(url)
        await raw.open(Mode.WRITE)
        problems = [one.problem for one in (await check(raw)).findings]
        assert problems == ([] if url == last else ["listing"]), "SQLite makes them anew as it opens"
        await repair(raw, apply=True)
        assert (await check(raw)).findings == []
        await raw.close()
        store = open_store(url)
        await store.open()
        assert await found(store, "m", "y") == [HERE], url
        await store.close()
