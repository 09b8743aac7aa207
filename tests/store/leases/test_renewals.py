"""Many leases renewed together: one change or one round trip, and each lease answered by itself, on every store."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import NotFound, PensieveError, TurnFenced, TurnInProgress
from pensieve.store import Began, EndOrder, HeldLease, HistoryStore, Renewed, redis_store
from pensieve.store._sqlite.rows import Rows
from pensieve.store.redis_store import RedisStore
from pensieve.store.sqlite_store import SqliteStore
from support.store.store_bench import (
    LEASE_MS,
    Bench,
    SqliteBench,
    first_record,
    key,
    opened,
    request,
    row,
)


async def begun(store: HistoryStore, *names: str) -> list[HeldLease]:
    """A session of each name, with a turn that holds its lease."""
    for name in names:
        await store.create(row(key(name)), first_record(), "fp")
        assert isinstance(await store.begin(key(name), request("r1", f"t-{name}")), Began)
    return [HeldLease(key(name), f"t-{name}") for name in names]


async def test_each_lease_is_answered_by_itself_and_in_order(bench: Bench) -> None:
    store = bench.store
    taken, first, gone, last = await begun(bench.store, "taken", "first", "gone", "last")
    for name in ("taken", "first", "last"):
        bench.lapse_lease(key(name))
    assert isinstance(await store.begin(taken.key, request("r2", "t-new")), Began)
    await store.delete(gone.key)
    nowhere = HeldLease(key("nowhere"), "t")
    order = EndOrder(keep=True)
    answers = await store.renew_leases([taken, first, gone, nowhere, last], LEASE_MS)
    assert [type(answer) for answer in answers] == [TurnFenced, Renewed, NotFound, NotFound, Renewed]
    assert [answer.reason for answer in answers if isinstance(answer, PensieveError)] == [
        *("TURN_FENCED", "SESSION_DELETED", "SESSION_NOT_FOUND"),
    ]
    for lease in (first, last):  # they hold again
        with pytest.raises(TurnInProgress):
            await store.begin(lease.key, request("r3", "t3"))
        assert await store.ask_to_end(lease.key, "r1", order)
    assert await store.renew(taken.key, "t-new", LEASE_MS) == Renewed(), "whoever took it over holds it"
    answers = await store.renew_leases([last, first], LEASE_MS)
    assert answers == [Renewed(order), Renewed(order)]
    assert await store.renew_leases([], LEASE_MS) == []


async def test_many_leases_are_one_change_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(SqliteBench(tmp_path / "history.db")) as bench:
        assert isinstance(bench.store, SqliteStore)
        leases = await begun(bench.store, *(f"s{number}" for number in range(40)))
        changes = 0
        change = bench.store._database._change

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal changes
            changes += 1
            return change(*args, **kwargs)

        monkeypatch.setattr(bench.store._database, "_change", counted)
        assert await bench.store.renew_leases(leases, LEASE_MS) == [Renewed()] * 40
        assert changes == 1


async def test_leases_do_not_wait_with_the_changes_that_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(SqliteBench(tmp_path / "history.db")) as bench:
        assert isinstance(bench.store, SqliteStore)
        leases = await begun(bench.store, "a", "b")
        database, order, disk = bench.store._database, list[str](), threading.Event()

        def noted(what: str, patience_s: float = 0) -> Callable[[Rows], None]:
            def work(_: Rows) -> None:
                order.append(what)
                assert patience_s == 0 or disk.wait(patience_s)

            return work

        waiting = [asyncio.create_task(database.write(noted("first", 30)))]
        while not order:
            await asyncio.sleep(0.001)
        waiting += [asyncio.create_task(database.write(noted("later"))) for _ in range(5)]
        await asyncio.sleep(0)
        renewal = asyncio.create_task(bench.store.renew_leases(leases, LEASE_MS))
        await asyncio.sleep(0)
        change = database._change

        def seen(work: Any, *, flush: bool) -> Any:
            order.append("flushed" if flush else "lease")
            return change(work, flush=flush)

        monkeypatch.setattr(database, "_change", seen)
        disk.set()
        await asyncio.gather(*waiting)
        assert await renewal == [Renewed()] * 2
        assert order.index("lease") < order.index("later")


async def test_a_session_that_cannot_be_read_costs_no_other_its_lease(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    async with opened(SqliteBench(path)) as bench:
        leases = await begun(bench.store, "a", "b", "c")
        with sqlite3.connect(path) as beside:
            beside.execute("UPDATE sessions SET meta = x'00' WHERE session_id = 'b'")
        beside.close()
        bench.lapse_lease(key("a"))
        answers = await bench.store.renew_leases(leases, LEASE_MS)
        assert [type(answer) for answer in answers] == [Renewed, TurnFenced, Renewed]
        with pytest.raises(TurnInProgress):
            await bench.store.begin(key("c"), request("r2", "t2"))
        assert (await bench.store.load(key("b"))).state.name == "ACTIVE", (
            "its records are whole, only the lease is lost"
        )


@pytest.mark.redis
async def test_many_leases_are_few_round_trips_to_redis(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "RENEW_BATCH", 16)
    leases = await begun(store, *(f"s{number}" for number in range(40)))
    client, sizes = store._link._client, list[int]()
    together = client.batch_on_one_server

    async def counted(commands: Any) -> list[Any]:
        sizes.append(len(commands))
        return await together(commands)

    monkeypatch.setattr(client, "batch_on_one_server", counted)
    assert await store.renew_leases(leases, LEASE_MS) == [Renewed()] * 40
    assert sizes == [16, 16, 8]


@pytest.mark.redis
async def test_a_redis_that_does_not_know_the_script_is_told(store: RedisStore, client: Any) -> None:
    leases = await begun(store, "a", "b")
    client.script_flush()
    assert await store.renew_leases(leases, LEASE_MS) == [Renewed()] * 2
