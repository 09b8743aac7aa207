"""Every kind of damage is found, and made good as far as the records prove it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from pensieve.errors import DataLoss, FailedPrecondition
from pensieve.store import Replay, open_store
from pensieve.store._redis.rows import index_key, session_keys
from pensieve.store._sqlite import recovery
from pensieve.store.maintenance import Problem
from pensieve.store.maintenance.archive import read_sessions
from pensieve.store.records import State
from support.store.patient import KEY, MADE, Patient, execute
from support.store.store_bench import SqliteBench, first_record, request, row

# ---- damage to both kinds


@pytest.mark.fault(43)
async def test_a_flipped_bit_is_found_marked_and_cut_on_demand(patient: Patient, tmp_path: Path) -> None:
    patient.bench.damage(KEY, 4)
    assert await patient.problems() == {Problem.LOG}
    dry = await patient.repair(apply=False)
    assert len(dry.mended) == 1 and await patient.problems() == {Problem.LOG}
    await patient.repair()
    async with patient.served() as store:
        assert (await store.load(KEY)).state is State.DAMAGED
        with pytest.raises(DataLoss):
            await store.read(KEY)
        with pytest.raises(FailedPrecondition):
            await store.begin(KEY, request("new", "t"))
    assert (await patient.repair()).remaining != [], "what is lost stays a finding"

    kept = tmp_path / "cut.jsonl"
    done = await patient.repair(cut_to=kept)
    assert [one.records_cut for one in done.mended] == [3]
    assert done.remaining == [] and await patient.problems() == set()
    (whole,) = read_sessions(kept)
    assert [entry.revision for entry in whole.log] == [1, 2, 3, 4, 5, 6]
    async with patient.served() as store:
        row = await store.load(KEY)
        assert (row.revision, row.state) == (3, State.ACTIVE)
        assert len(await store.read(KEY)) == 3
        assert await store.find_request(KEY, "q4") is None
        outcome = await store.begin(KEY, request("q0", "t"))
        assert isinstance(outcome, Replay) and outcome.revision == 2
        await store.begin(KEY, request("q9", "t9"))


async def test_a_missing_record_is_found(patient: Patient) -> None:
    patient.bench.drop_record(KEY, 3)
    found = (await patient.check()).findings
    assert [(one.problem, one.detail) for one in found] == [(Problem.LOG, "record 3 is missing")]


@pytest.mark.fault(42)
async def test_records_missing_at_the_end_are_found(patient: Patient, tmp_path: Path) -> None:
    for revision in (6, 5):
        patient.bench.drop_record(KEY, revision)
    found = (await patient.check()).findings
    assert [one.detail for one in found] == ["record 5 is missing, its row says 6"]
    await patient.repair(cut_to=tmp_path / "cut.jsonl")
    assert await patient.problems() == set()
    async with patient.served() as store:
        with pytest.raises(DataLoss) as caught:
            await store.begin(KEY, request("new", "t", expected_revision=6))
        assert caught.value.reason == "HISTORY_REGRESSED"


async def test_a_session_without_records_stays_damaged(patient: Patient, tmp_path: Path) -> None:
    for revision in range(6, 0, -1):
        patient.bench.drop_record(KEY, revision)
    assert await patient.problems() == {Problem.LOG}
    done = await patient.repair(cut_to=tmp_path / "cut.jsonl")
    assert [one.records_cut for one in done.mended] == [0]
    async with patient.served() as store:
        assert (await store.load(KEY)).state is State.DAMAGED


async def test_a_mark_on_a_sound_session_is_taken_off(patient: Patient) -> None:
    async with patient.served() as store:
        await store.mark_damaged(KEY)
    assert await patient.problems() == {Problem.MARKED}
    await patient.repair()
    assert await patient.problems() == set()
    async with patient.served() as store:
        await store.begin(KEY, request("q9", "t9"))


# ---- damage that only one kind can have


def drop_requests(patient: Patient) -> None:
    execute(
        patient,
        "DELETE FROM requests WHERE request_id IN ('q0', 'q4')"
        " AND session = (SELECT id FROM sessions WHERE session_id = 's1')",
    )


def wrong_request(patient: Patient) -> None:
    execute(patient, "UPDATE requests SET revision = 2 WHERE request_id = 'q2'")


def stray_request(patient: Patient) -> None:
    execute(
        patient, "INSERT INTO requests SELECT id, 'never', 'fp', 3, 0 FROM sessions WHERE session_id = 's1'"
    )


def hidden_column(patient: Patient) -> None:
    execute(patient, "UPDATE sessions SET deleted = 1 WHERE session_id = 's1'")


def row_of_noise(patient: Patient) -> None:
    execute(patient, "UPDATE sessions SET meta = x'00ff' WHERE session_id = 's1'")


def row_of_another(patient: Patient) -> None:
    execute(
        patient,
        "UPDATE sessions SET meta = (SELECT meta FROM sessions WHERE session_id = 's2') WHERE session_id = 's1'",
    )


def wrong_expiry(patient: Patient) -> None:
    execute(patient, "UPDATE sessions SET expire_ms = 5 WHERE session_id = 's1'")


def lost_label(patient: Patient) -> None:
    execute(patient, "DELETE FROM labels WHERE session_id = 's1'")


def wrong_size(patient: Patient) -> None:
    execute(patient, "UPDATE sessions SET bytes = 1 WHERE session_id = 's1'")


def wrong_sum(patient: Patient) -> None:
    execute(patient, "UPDATE tenants SET bytes = bytes + 1")


def row_of_text(patient: Patient) -> None:
    execute(patient, "UPDATE sessions SET meta = 'no blob' WHERE session_id = 's1'")


def request_of_noise(patient: Patient) -> None:
    execute(
        patient,
        "UPDATE requests SET revision = 'x', fingerprint = CAST(x'ff' AS TEXT) WHERE request_id = 'q4'",
    )


SQLITE_DAMAGE = [
    (drop_requests, Problem.REQUESTS),
    (wrong_request, Problem.REQUESTS),
    (stray_request, Problem.REQUESTS),
    (hidden_column, Problem.LISTING),
    (row_of_noise, Problem.ROW),
    (row_of_another, Problem.ROW),
    (row_of_text, Problem.ROW),
    (request_of_noise, Problem.REQUESTS),
    (wrong_expiry, Problem.EXPIRY),
    (lost_label, Problem.LISTING),
    (wrong_size, Problem.LISTING),
    (wrong_sum, Problem.FILE),
]


@pytest.mark.parametrize(
    ("damage", "problem"), [pytest.param(do, what, id=do.__name__) for do, what in SQLITE_DAMAGE]
)
@pytest.mark.parametrize("patient", ["sqlite"], indirect=True)
async def test_damage_in_a_file(
    patient: Patient, damage: Callable[[Patient], None], problem: Problem
) -> None:
    damage(patient)
    await _found_and_repaired(patient, problem)


def redis_drop(part: int) -> Callable[[Any], None]:
    def drop(client: Any) -> None:
        client.delete(session_keys(KEY)[part])

    return drop


def redis_set(part: int, name: str, value: str | bytes) -> Callable[[Any], None]:
    def change(client: Any) -> None:
        client.hset(session_keys(KEY)[part], name, value)

    return change


def expires_elsewhen(client: Any) -> None:
    """The row says the year 2100, the keys an hour."""
    client.hset(session_keys(KEY)[0], "expire_ms", "4102444800000")
    for name in session_keys(KEY):
        client.pexpire(name, 3_600_000)


REDIS_DAMAGE: list[tuple[str, Callable[[Any], None], Problem]] = [
    ("row gone", redis_drop(0), Problem.ROW),
    ("request ids gone", redis_drop(1), Problem.REQUESTS),
    ("request id of nothing", redis_set(1, "never", "3|fp"), Problem.REQUESTS),
    ("request id unreadable", redis_set(1, "q0", "?"), Problem.REQUESTS),
    ("row unreadable", redis_set(0, "revision", "six"), Problem.ROW),
    ("row of noise", redis_set(0, "head_hash", b"\xff\xfe"), Problem.ROW),
    ("row of another type", lambda c: (redis_drop(0)(c), c.set(session_keys(KEY)[0], "x")), Problem.ROW),
    ("counts wrong", redis_set(0, "item_count", "99"), Problem.COUNTS),
    ("row altered", redis_set(0, "context_tokens", "77"), Problem.ROW),
    ("not listed", lambda c: c.zrem(index_key(KEY.tenant), KEY.session_id), Problem.LISTING),
    ("expires", lambda c: c.pexpire(session_keys(KEY)[1], 3_600_000), Problem.EXPIRY),
    ("expires at another time", expires_elsewhen, Problem.EXPIRY),
    ("entry that is no record", lambda c: c.xadd(session_keys(KEY)[2], {"x": "y"}, id="6-1"), Problem.LOG),
]


@pytest.mark.redis
@pytest.mark.parametrize(
    ("damage", "problem"), [pytest.param(do, what, id=name) for name, do, what in REDIS_DAMAGE]
)
@pytest.mark.parametrize("patient", ["redis"], indirect=True)
async def test_damage_in_redis(
    patient: Patient, client: redis.Redis, damage: Callable[[Any], None], problem: Problem
) -> None:
    damage(client)
    await _found_and_repaired(patient, problem)


async def _found_and_repaired(patient: Patient, problem: Problem) -> None:
    assert problem in await patient.problems()
    assert (await patient.repair()).remaining == []
    assert await patient.problems() == set()
    async with patient.served() as store:
        row = await store.load(KEY)
        assert (row.revision, row.state, row.labels) == (6, State.ACTIVE, {"updated": "3"})
        assert len(await store.read(KEY)) == 6
        page = await store.list_sessions(KEY.tenant, limit=10)
        assert {one.session_id for one in page.rows} == {"s1", "s2"}
        page = await store.list_sessions(KEY.tenant, limit=10, labels={"updated": "3"})
        assert [one.session_id for one in page.rows] == ["s1"]
        for request_id, revision in MADE.request_ids().items():
            outcome = await store.begin(KEY, request(request_id, "t"))
            assert isinstance(outcome, Replay) and outcome.revision == revision
        assert await store.find_request(KEY, "never") is None
        assert row.item_count == 5


@pytest.mark.redis
@pytest.mark.parametrize("patient", ["redis"], indirect=True)
async def test_a_lost_log_in_redis_is_found_and_marked(patient: Patient, client: redis.Redis) -> None:
    client.delete(session_keys(KEY)[2])
    assert await patient.problems() == {Problem.LOG}
    await patient.repair()
    async with patient.served() as store:
        assert (await store.load(KEY)).state is State.DAMAGED


@pytest.mark.fault(47)
@pytest.mark.redis
@pytest.mark.parametrize("patient", ["redis"], indirect=True)
async def test_a_lost_marker_is_found_and_made_again(patient: Patient, client: redis.Redis) -> None:
    client.delete("pv1:store")
    assert await patient.problems() == {Problem.FILE}
    await patient.repair()
    assert await patient.problems() == set()


@pytest.mark.redis
@pytest.mark.parametrize("patient", ["redis"], indirect=True)
async def test_a_session_in_use_is_left_alone(patient: Patient, client: redis.Redis) -> None:
    client.zrem(index_key(KEY.tenant), KEY.session_id)
    async with patient.served() as store:
        await store.begin(KEY, request("running", "t"))
        done = await patient.repair()
        assert done.busy == [KEY] and done.remaining != []
        await store.renew(KEY, "t", 1000)


@pytest.mark.parametrize("patient", ["sqlite"], indirect=True)
async def test_damaged_pages_are_found_and_the_rest_is_still_checked(patient: Patient) -> None:
    assert isinstance(patient.bench, SqliteBench)
    path = patient.bench.path
    execute(patient, "PRAGMA wal_checkpoint(TRUNCATE)")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        page = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'records'").fetchone()[0]
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xa5" * 64)
    problems = {one.problem for one in (await patient.check()).findings}
    assert Problem.FILE in problems


async def test_reading_a_file_page_by_page_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_PAGES_PER_REPORT", 1)
    path, told = tmp_path / "history.sqlite3", list[tuple[int, int]]()
    store = open_store(f"sqlite:///{path}")
    await store.open()
    await store.create(row(KEY), first_record(), "fp")
    await store.close()
    recovery.RecoveredFile(path, lambda done, of: told.append((done, of))).close()
    assert told == [(number, len(told)) for number in range(1, len(told) + 1)] != []
