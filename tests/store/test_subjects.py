"""``find_subject`` on every store: each session about a person is found by its row, whatever an index says."""

from __future__ import annotations

import contextlib
import sqlite3

import msgspec
import pytest
import redis

from pensieve.store import redis_store
from pensieve.store._redis.rows import session_keys, tenant_keys
from pensieve.store.records import SessionConfig, SessionRow, State
from support.store.store_bench import (
    TENANT,
    Bench,
    RedisBench,
    SqliteBench,
    first_record,
    key,
    row,
    whole_turn,
)

ADA = "ada@example.com"


async def make(bench: Bench, name: str, subject: str = "", tenant: str = TENANT, ttl_s: float = 0.0) -> None:
    """A session of one turn, about ``subject``."""
    at, config = key(name, tenant), SessionConfig(model="tiny", subject=subject, ttl_s=ttl_s)
    record = msgspec.structs.replace(first_record(), config=config)
    await bench.store.create(msgspec.structs.replace(row(at), config=config), record, "fp")
    await whole_turn(bench.store, at, 1)


async def found(bench: Bench, subject: str = ADA, tenant: str = TENANT) -> dict[str, SessionRow]:
    return {one.session_id: one for one in await bench.store.find_subject(tenant, subject)}


async def test_the_sessions_about_a_person(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "BATCH", 2)
    for number in range(5):
        await make(bench, f"ada-{number}", ADA)
    for name, subject in (("other", "bob"), ("none", ""), ("longer", f"{ADA}.uk"), ("gone", ADA)):
        await make(bench, name, subject)
    await make(bench, "old", ADA, ttl_s=1000.0)
    await make(bench, "foreign", ADA, tenant="acme2")
    await bench.store.delete(key("gone"))
    bench.expire(key("old"))
    rows = await found(bench)
    assert set(rows) == {f"ada-{number}" for number in range(5)}
    assert all((one.config.subject, one.revision) == (ADA, 2) for one in rows.values())
    assert set(await found(bench, tenant="acme2")) == {"foreign"}
    assert await found(bench, subject="nobody") == {}


async def test_damaged_sessions_of_an_unknown_subject_are_shown(bench: Bench) -> None:
    """Their records may be about the person: the caller has to know of them."""
    for name, subject in (("hers", ADA), ("unknown", ""), ("his", "bob"), ("whole", "")):
        await make(bench, name, subject)
    for name in ("hers", "unknown", "his"):
        await bench.store.mark_damaged(key(name))
    rows = await found(bench)
    assert set(rows) == {"hers", "unknown"} and {one.state for one in rows.values()} == {State.DAMAGED}


async def test_no_index_hides_a_session(bench: Bench) -> None:
    """Derived data is lost: the row of one session, and the place of another in the listing."""
    await make(bench, "lost-row", ADA)
    await make(bench, "unlisted", ADA)
    if isinstance(bench, SqliteBench):
        with contextlib.closing(sqlite3.connect(bench.path, isolation_level=None)) as behind:
            behind.execute("PRAGMA foreign_keys = OFF")
            behind.execute("DELETE FROM sessions WHERE session_id = 'lost-row'")
        states = {"lost-row": State.ACTIVE, "unlisted": State.ACTIVE}
    elif isinstance(bench, RedisBench):
        with contextlib.closing(redis.Redis.from_url(bench.url)) as behind:
            behind.delete(session_keys(key("lost-row"))[0], *tenant_keys(TENANT))
        states = {"lost-row": State.DAMAGED, "unlisted": State.ACTIVE}
    else:
        states = {"lost-row": State.ACTIVE, "unlisted": State.ACTIVE}
    assert {name: one.state for name, one in (await found(bench)).items()} == states
