"""Maintenance beside servers and after them: what is read is of one moment, and nothing newer is overwritten."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
import redis

from pensieve.errors import DataLoss, FailedPrecondition, Unavailable
from pensieve.store._redis import dump
from pensieve.store._redis.rows import index_key, session_keys
from pensieve.store._sqlite.dump import SqliteDump
from pensieve.store.maintenance import Mode, backup, open_backup, open_raw, restore
from support.store.patient import KEY, Patient, execute
from support.store.redis_server import RedisServer
from support.store.store_bench import counts, request, turn_record


@pytest.mark.fault(33)
@pytest.mark.parametrize("patient", ["sqlite"], indirect=True)
async def test_a_served_file_can_be_checked_and_not_repaired(patient: Patient) -> None:
    async with patient.served() as store:
        await store.begin(KEY, request("running", "t"))
        assert await patient.problems() == set()
        with pytest.raises(FailedPrecondition) as caught:
            await patient.repair()
        assert caught.value.reason == "STORE_LOCKED"


@pytest.mark.parametrize("patient", ["sqlite"], indirect=True)
async def test_a_session_in_a_file_is_read_at_one_moment(patient: Patient) -> None:
    """It is deleted between the reading of its row and that of its records, and still seen whole."""
    store = open_raw(patient.url)
    assert isinstance(store, SqliteDump)
    await store.open(Mode.READ)
    deleted = []

    def delete(statement: str) -> None:
        if "FROM records" in statement and not deleted:
            deleted.append(statement)
            execute(patient, "DELETE FROM records")
            execute(patient, "DELETE FROM sessions")

    store._sql.set_trace_callback(delete)
    session = await store.session(KEY)
    assert deleted and session is not None and len(session.log) == 6
    assert await store.session(KEY) is None
    await store.close()


@pytest.mark.parametrize("patient", ["sqlite"], indirect=True)
@pytest.mark.parametrize("mode", list(Mode))
async def test_a_file_that_is_closed_is_let_go(patient: Patient, mode: Mode) -> None:
    """Whoever holds the object still has no connection to the file, and a server can take it at once."""
    store = open_raw(patient.url)
    assert isinstance(store, SqliteDump)
    await store.open(mode)
    connection = store._sql
    await store.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    await store.close()
    async with patient.served() as server:
        assert (await server.load(KEY)).revision == 6


async def test_a_session_that_went_on_is_not_overwritten(patient: Patient) -> None:
    """What was read before a turn was committed must not take the place of what is there after it."""
    store = open_raw(patient.url)
    await store.open(Mode.READ)
    old = await store.session(KEY)
    await store.close()
    assert old is not None
    async with patient.served() as server:
        await server.begin(KEY, request("q9", "t9"))
        await server.commit(KEY, "t9", "fp-q9", turn_record(6, "q9"), counts(7))
    store = open_raw(patient.url)
    await store.open(Mode.EXCLUSIVE)
    assert await store.put(old, expected_stamp=old.stamp) is False
    assert await store.put(old, expected_stamp=None) is False
    await store.flush()
    await store.close()
    async with patient.served() as server:
        assert (await server.load(KEY)).revision == 7
        assert len(await server.read(KEY)) == 7
    assert {one.session for one in (await patient.check()).findings} <= {KEY.session_id}


@pytest.mark.parametrize("patient", ["sqlite"], indirect=True)
async def test_what_was_written_to_a_file_that_has_gone_meanwhile_is_not_told_to_be_kept(
    patient: Patient,
) -> None:
    store = open_raw(patient.url)
    assert isinstance(store, SqliteDump)
    await store.open(Mode.WRITE)
    session = await store.session(KEY)
    assert session is not None
    assert await store.put(session, expected_stamp=session.stamp)
    store._path.rename(store._path.with_name("moved"))
    with pytest.raises(Unavailable) as caught:
        await store.flush()
    assert caught.value.reason == "STORE_REPLACED"
    await store.close()


@pytest.mark.redis
@pytest.mark.parametrize("patient", ["redis"], indirect=True)
async def test_what_is_repaired_is_sealed_again(patient: Patient, client: redis.Redis) -> None:
    """Servers notice what happens to it afterwards, as they do with what they wrote themselves."""
    client.zrem(index_key(KEY.tenant), KEY.session_id)
    assert (await patient.repair()).remaining == []
    client.delete(session_keys(KEY)[1])
    async with patient.served() as store:
        with pytest.raises(DataLoss):
            await store.begin(KEY, request("q0", "t"))


@pytest.mark.redis
@pytest.mark.parametrize("patient", ["redis"], indirect=True)
async def test_two_programs_that_write_one_session_write_it_once(
    patient: Patient, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in the middle of what the other writes. What one that is killed there has written does not stay."""
    monkeypatch.setattr(dump, "BATCH", 1)
    first, second = open_raw(patient.url), open_raw(patient.url)
    await first.open(Mode.WRITE)
    await second.open(Mode.WRITE)
    session = await first.session(KEY)
    assert session is not None
    client.delete(*session_keys(KEY))
    assert sorted(
        await asyncio.gather(*(store.put(session, expected_stamp=None) for store in (first, second)))
    ) == [
        False,
        True,
    ]
    assert await patient.problems() == set()
    assert {name for name in client.keys("pv1:{*") if KEY.session_id.encode() in name} == {
        name.encode() for name in session_keys(KEY)
    }
    writing = asyncio.create_task(second.put(session, expected_stamp=session.stamp))
    async with asyncio.timeout(30):
        while not (begun := [name for name in client.keys("pv1:{*") if name.count(b":") > 2]):
            await asyncio.sleep(0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert all(client.ttl(name) > 0 for name in client.keys("pv1:{*") if name in begun)
    await first.close()
    await second.close()


@pytest.mark.redis
@pytest.mark.parametrize("patient", ["redis"], indirect=True)
@pytest.mark.parametrize(
    ("most", "most_bytes", "batches"), [(1000, 1 << 30, 1), (4, 1 << 30, 3), (1000, 1, 11)]
)
async def test_a_session_is_written_in_batches_of_bounded_size(
    patient: Patient,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    most_bytes: int,
    batches: int,
) -> None:
    """A row, four request ids and six records: neither a round trip for each of them, nor all of a long log at once."""
    monkeypatch.setattr(dump, "BATCH", most)
    monkeypatch.setattr(dump, "BATCH_BYTES", most_bytes)
    store = open_raw(patient.url)
    await store.open(Mode.WRITE)
    session = await store.session(KEY)
    assert session is not None
    assert len(session.requests) + len(session.log) == 10
    client.config_resetstat()
    assert await store.put(session, expected_stamp=session.stamp)
    stats: dict[str, dict[str, int]] = client.info("commandstats")  # type: ignore[assignment]
    assert stats["cmdstat_expire"]["calls"] == 3 * batches, "each batch prolongs the life of the three keys"
    await store.close()
    assert await patient.problems() == set()


@pytest.mark.redis
@pytest.mark.parametrize("patient", ["redis"], indirect=True)
async def test_a_session_in_which_a_turn_runs_is_not_merged_with(patient: Patient, tmp_path: Path) -> None:
    store = open_raw(patient.url)
    await store.open(Mode.WRITE)
    await backup(store, tmp_path / "b.jsonl")
    async with patient.served() as server:
        await server.begin(KEY, request("running", "t"))
        done = await restore(open_backup(tmp_path / "b.jsonl"), store, merge=True)
        assert done.conflicts == [f"{KEY.tenant}/{KEY.session_id}: a turn is running"]
        assert (done.written, done.kept) == (0, 0), "and without being told to skip it nothing is done"
        await server.renew(KEY, "t", 1000)
    await store.close()


@pytest.mark.redis
@pytest.mark.parametrize("mode", [Mode.READ, Mode.SNAPSHOT, Mode.EXCLUSIVE])
async def test_a_redis_without_a_history_or_with_a_newer_one_is_not_read(
    shared_redis: RedisServer, client: redis.Redis, mode: Mode
) -> None:
    store = open_raw(shared_redis.url)
    try:
        client.set("of another program", "x")
        with pytest.raises(FailedPrecondition, match="holds no history") as caught:
            await store.open(mode)
        assert caught.value.reason == "STORE_FOREIGN"
        assert client.keys("*") == [b"of another program"], "nothing is made of it"
        for schema in ("99", "?"):
            client.hset("pv1:store", mapping={"store_id": "x", "schema": schema})
            with pytest.raises(FailedPrecondition, match="upgrade Pensieve") as caught:
                await store.open(mode)
            assert caught.value.reason == "STORE_VERSION"
    finally:
        await store.close()
