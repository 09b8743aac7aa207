"""The keys of a session answer for each other: what is lost or altered behind the store's back is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from msgspec.structs import replace

from pensieve.errors import DataLoss, FailedPrecondition, TurnInProgress
from pensieve.store import Began, RunningElsewhere, TenantUsage
from pensieve.store._codec import encode_record
from pensieve.store._redis.rows import session_keys
from pensieve.store.records import State
from pensieve.store.redis_store import RedisStore
from support.store.store_bench import (
    TENANT,
    counts,
    first_record,
    key,
    request,
    rewind_record,
    row,
    turn_record,
    whole_turn,
)

pytestmark = pytest.mark.redis

KEY = key()
META, REQUESTS, LOG = session_keys(KEY)
FIRST = replace(first_record(), request_id="creation")

Tamper = Callable[[Any], object]
TAMPERINGS: dict[str, Tamper] = {
    "log deleted": lambda plain: plain.delete(LOG),
    "log's end cut": lambda plain: plain.xdel(LOG, "3-0"),
    "log's middle cut": lambda plain: plain.xdel(LOG, "2-0"),
    "row deleted": lambda plain: plain.delete(META),
    "row of before": lambda plain: plain.hset(META, "revision", "2"),
    "another newest record": lambda plain: plain.hset(META, "head_hash", "00" * 20),
    "request ids deleted": lambda plain: plain.delete(REQUESTS),
    "one request id deleted": lambda plain: plain.hdel(REQUESTS, "r1"),
    "configuration altered": lambda plain: plain.hset(META, "config", '{"model":"tinx"}'),
    "counts altered": lambda plain: plain.hset(META, "context_tokens", "7"),
    "seal altered": lambda plain: plain.hset(META, "seal", "nothing"),
}


@pytest.fixture
async def session(store: RedisStore) -> None:
    await store.create(row(KEY), FIRST, "fp")
    await whole_turn(store, KEY, 1)
    await whole_turn(store, KEY, 2)
    assert len(await store.read(KEY)) == 3


def content(plain: Any) -> list[Any]:
    return [plain.xrange(LOG), plain.hgetall(REQUESTS)]


@pytest.mark.fault(43)
@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("tampering", TAMPERINGS)
@pytest.mark.parametrize("operation", ["begin", "retry", "commit", "apply"])
async def test_nothing_is_built_on_a_session_whose_keys_disagree(
    store: RedisStore, client: redis.Redis, tampering: str, operation: str
) -> None:
    """By a server that has read all of it before, and would not read it again."""
    if operation == "commit":
        assert isinstance(await store.begin(KEY, request("r3", "t3")), Began)
    TAMPERINGS[tampering](client)
    before = content(client)
    calls = {
        "begin": lambda: store.begin(KEY, request("r3", "t3")),
        "retry": lambda: store.begin(KEY, request("r1", "t9")),
        "commit": lambda: store.commit(KEY, "t3", "fp-r3", turn_record(3, "r3"), counts(4)),
        "apply": lambda: store.apply(KEY, "fp", rewind_record(3, "r9"), counts(4)),
    }
    with pytest.raises(DataLoss) as caught:
        await calls[operation]()
    assert caught.value.reason == "HISTORY_CORRUPT"
    assert content(client) == before
    if tampering != "row deleted":
        assert (await store.load(KEY)).state is State.DAMAGED
        with pytest.raises(FailedPrecondition):
            await calls["begin"]()
    await store.delete(KEY)
    assert not client.exists(REQUESTS, LOG)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("name", [META, REQUESTS, LOG])
async def test_a_key_of_another_type_is_no_session(store: RedisStore, client: redis.Redis, name: str) -> None:
    client.set(name, "something else")
    before = {key: client.dump(key) for key in (META, REQUESTS, LOG)}
    for attempt in (
        store.begin(KEY, request("r3", "t3")),
        store.apply(KEY, "fp", rewind_record(3, "r9"), counts(4)),
        store.read(KEY),
    ):
        with pytest.raises(DataLoss) as caught:
            await attempt
        assert caught.value.reason == "HISTORY_CORRUPT"
    assert {key: client.dump(key) for key in (META, REQUESTS, LOG)} == before


@pytest.mark.usefixtures("session")
async def test_a_log_without_its_row_is_no_free_name(store: RedisStore, client: redis.Redis) -> None:
    client.delete(META)
    before = content(client)
    for attempt in (store.load(KEY), store.read(KEY), store.create(row(KEY), first_record(), "fp")):
        with pytest.raises(DataLoss):
            await attempt
    assert content(client) == before


@pytest.mark.usefixtures("session")
async def test_a_request_id_that_turned_into_another_is_found_by_reading(
    store: RedisStore, client: redis.Redis
) -> None:
    """As many as there were, so only the log can tell."""
    client.hset(REQUESTS, "r?", client.hget(REQUESTS, "r2") or b"")
    client.hdel(REQUESTS, "r2")
    with pytest.raises(DataLoss) as caught:
        await store.read(KEY)
    assert caught.value.metadata == {"revision": "3"}
    assert (await store.load(KEY)).state is State.DAMAGED


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("unreadable", ["configuration", "type"])
async def test_one_unreadable_row_hides_no_other_session(
    store: RedisStore, client: redis.Redis, unreadable: str
) -> None:
    await store.create(row(key("s2")), first_record(), "fp")
    if unreadable == "configuration":
        client.hset(META, "config", "{")
    else:
        client.set(META, "something else")
    for attempt in (store.load(KEY), store.read(KEY)):
        with pytest.raises(DataLoss) as caught:
            await attempt
        assert caught.value.reason == "HISTORY_CORRUPT"
    page = await store.list_sessions(TENANT, limit=5)
    assert {one.session_id: one.state for one in page.rows} == {"s1": State.DAMAGED, "s2": State.ACTIVE}


@pytest.mark.usefixtures("session")
async def test_a_program_that_does_not_seal_may_write_in_between(
    store: RedisStore, client: redis.Redis
) -> None:
    """Two versions on one store: what the older one wrote is taken as it is, then sealed and measured again."""
    sealed = client.hget(META, "seal")
    old = client.hget(META, "bytes")
    await whole_turn(store, KEY, 3)
    assert sealed is not None and old is not None
    client.hset(META, mapping={"seal": sealed, "bytes": old})  # as if revision 4 had been written without
    client.zrem(f"pv1:i:{{{TENANT}}}", "s1")
    client.delete(f"pv1:u:{{{TENANT}}}", f"pv1:b:{{{TENANT}}}")
    assert (await store.load(KEY)).revision == 4
    await whole_turn(store, KEY, 4)
    written = [FIRST, *(turn_record(base, f"r{base}") for base in range(1, 5))]
    assert await store.usage(TENANT) == TenantUsage(1, sum(len(encode_record(one)) for one in written))
    client.hdel(REQUESTS, "r1")
    with pytest.raises(DataLoss):
        await store.begin(KEY, request("r5", "t5"))


@pytest.mark.usefixtures("session")
async def test_usage_is_put_right_while_the_listing_is_read(store: RedisStore, client: redis.Redis) -> None:
    true = await store.usage(TENANT)
    assert true.sessions == 1 and true.bytes > 0
    client.delete(f"pv1:u:{{{TENANT}}}", f"pv1:b:{{{TENANT}}}")
    assert await store.usage(TENANT) == TenantUsage(0, 0)
    await store.purge_expired()
    assert await store.usage(TENANT) == true


# ---- clocks


@pytest.mark.fault(51)
@pytest.mark.usefixtures("session")
async def test_a_clock_that_is_set_back_lengthens_no_lease(store: RedisStore, client: redis.Redis) -> None:
    """Redis' clock goes back by an hour after a turn was begun: its lease then ends an hour from now."""
    await store.begin(KEY, request("r3", "t3", lease_ms=10_000))
    until = int(client.hget(META, "run_until_ms") or 0)
    client.hset(META, "run_until_ms", str(until + 3_600_000))
    running = (await store.load(KEY)).running
    assert running is not None and 0 < running.lease_ms_left <= 10_000
    for asked in (request("r4", "t4"), request("r3", "t5")):
        try:
            outcome = await store.begin(KEY, asked)
        except TurnInProgress as error:
            assert error.retry_after_s is not None and error.retry_after_s <= 10.0
        else:
            assert isinstance(outcome, RunningElsewhere) and 0 < outcome.lease_ms_left <= 10_000
    assert int(client.hget(META, "run_until_ms") or 0) <= until + 20_000, "it is over when a lease is"


@pytest.mark.fault(51)
@pytest.mark.usefixtures("session")
async def test_the_clock_of_a_server_decides_nothing(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    true = time.time()
    for step in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda step=step: true + step)
        monkeypatch.setattr(time, "time_ns", lambda step=step: int((true + step) * 1e9))
        base = (await store.load(KEY)).revision
        begun = await store.begin(KEY, request(f"r{base}", f"t{base}", lease_ms=10_000))
        assert isinstance(begun, Began) and begun.row.running is not None
        assert 9_000 < begun.row.running.lease_ms_left <= 10_000
        await store.renew(KEY, f"t{base}", 10_000)
        with pytest.raises(TurnInProgress) as caught:
            await store.begin(KEY, request("other", "other"))
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s <= 10.0
        after = await store.commit(
            KEY, f"t{base}", f"fp-r{base}", turn_record(base, f"r{base}"), counts(base + 1)
        )
        assert abs(after.update_ms / 1000 - true) < 600
