"""A log is read slice by slice: as sound as at once, and from where it is asked for."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from pensieve.errors import DataLoss
from pensieve.store import _codec, contract, redis_store
from pensieve.store._sqlite.rows import Rows
from pensieve.store.contract import HistoryStore
from pensieve.store.records import State
from support.store.store_bench import (
    Bench,
    counts,
    first_record,
    key,
    opened_sqlite,
    request,
    row,
    turn_record,
)

KEY = key()
TURNS = 20


async def talk(store: HistoryStore, turns: int = TURNS, text: str = "hello") -> None:
    await store.create(row(KEY), first_record(), "fp")
    await commit(store, turns, text)


async def commit(store: HistoryStore, turns: int, text: str = "hello") -> None:
    for base in range(1, turns + 1):
        await store.begin(KEY, request(f"r{base}", f"t{base}"))
        await store.commit(KEY, f"t{base}", "fp", turn_record(base, f"r{base}", text), counts(base + 1))


async def test_slices_are_the_log(bench: Bench) -> None:
    await talk(bench.store)
    whole = await bench.store.read(KEY)
    assert [one.record.revision for one in whole] == list(range(1, TURNS + 2))
    for after, limit in ((0, 1), (0, 7), (5, 3), (TURNS, 5), (TURNS + 1, 5)):
        known = whole[after - 1].head_hash if after else ""
        piece = await bench.store.read_slice(KEY, after_revision=after, head_hash=known, limit=limit)
        assert piece.row.revision == TURNS + 1
        assert list(piece.records) == whole[after : after + limit]
    with pytest.raises(DataLoss) as refused:
        await bench.store.read_slice(KEY, after_revision=TURNS + 2)
    assert refused.value.reason == "HISTORY_REGRESSED"


async def test_large_records_make_short_slices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * (_codec.SLICE_BYTES // 4)
    await talk(bench.store, 6, text)
    piece = await bench.store.read_slice(KEY)
    assert len(piece.records) == 1 + 2, "the turn that exceeds the size is the last one"
    assert len(await bench.store.read(KEY)) == 7
    monkeypatch.setattr(_codec, "SLICE_BYTES", 1)
    monkeypatch.setattr(redis_store, "SLICE_BYTES", 1)
    assert len(await bench.store.read(KEY, after_revision=2)) == 5


async def test_damage_is_found_where_it_is_read(bench: Bench) -> None:
    await talk(bench.store)
    bench.damage(KEY, 15)
    assert (await bench.store.read_slice(KEY, after_revision=2, limit=2)).records[0].record.revision == 3
    with pytest.raises(DataLoss, match="record 15 fails its checksum"):
        await bench.store.read_slice(KEY, after_revision=13, limit=2)


async def test_a_log_that_ends_early_is_no_slice(bench: Bench) -> None:
    await talk(bench.store)
    bench.drop_record(KEY, TURNS + 1)
    with pytest.raises(DataLoss, match=f"record {TURNS + 1} is missing"):
        await bench.store.read_slice(KEY, after_revision=TURNS - 2, limit=contract.SLICE_RECORDS)


async def test_a_session_that_is_replaced_while_it_is_read_is_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first slice there is another session under the id: the answer is that session, not damage."""
    monkeypatch.setattr(_codec, "SLICE_BYTES", 1)
    monkeypatch.setattr(redis_store, "SLICE_BYTES", 1)
    await bench.store.create(row(KEY, ttl_s=3600.0), first_record(), "fp")
    await commit(bench.store, 3)
    sleep, replaced = asyncio.sleep, False

    async def between(seconds: float) -> None:
        nonlocal replaced
        if not replaced and seconds == 0:
            replaced = True
            bench.expire(KEY)
            await sleep(0.01)
            await bench.store.create(row(KEY), first_record(), "again")
        await sleep(seconds)

    monkeypatch.setattr("pensieve.store._codec.asyncio.sleep", between)
    assert [one.record.revision for one in await bench.store.read(KEY)] == [1]
    assert replaced and (await bench.store.load(KEY)).state is State.ACTIVE


async def test_a_tenant_with_many_reads_makes_another_wait_for_one(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path / "history.db") as store:
        await talk(store, 1)
        begun, go, order = threading.Event(), threading.Event(), list[str]()

        def first(rows: Rows) -> None:
            begun.set()
            assert go.wait(60)

        def told(name: str) -> None:
            order.append(name)

        blocking = asyncio.create_task(store._database.read_log(first, "many"))
        await asyncio.to_thread(begun.wait, 60)
        waiting = [
            asyncio.create_task(store._database.read_log(lambda _, n=n: told(f"many {n}"), "many"))  # type: ignore[misc]
            for n in range(5)
        ]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(store._database.read_log(lambda _: told("other"), "other")))
        left = asyncio.create_task(store._database.read_log(lambda _: told("left"), "left"))
        await asyncio.sleep(0)
        left.cancel()
        assert (await store.load(KEY)).revision == 2, "a row is read beside logs"
        go.set()
        await asyncio.gather(blocking, *waiting)
        assert order.index("other") <= 1 and "left" not in order
        assert [name for name in order if name != "other"] == [f"many {n}" for n in range(5)]
