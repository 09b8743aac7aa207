"""Creating, reading, listing, expiring and deleting sessions, on every store."""

from __future__ import annotations

import msgspec
import pytest

from pensieve.core import SamplingDefaults
from pensieve.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    RevisionMismatch,
    TurnFenced,
    TurnInProgress,
)
from pensieve.store import Began, Key, TenantUsage
from pensieve.store._codec import encode_record
from pensieve.store.records import Record, RecordKind, SessionConfig, SessionRow, State
from support.store.store_bench import (
    LEASE_MS,
    TENANT,
    Bench,
    counts,
    first_record,
    key,
    request,
    rewind_record,
    row,
    turn_record,
    whole_turn,
)

KEY = key()


async def create(bench: Bench, at: Key = KEY, **options: object) -> SessionRow:
    return await bench.store.create(row(at, **options), first_record(), "fp")  # type: ignore[arg-type]


async def turn(bench: Bench, base: int, at: Key = KEY) -> SessionRow:
    return await whole_turn(bench.store, at, base)


async def names(bench: Bench, tenant: str = KEY.tenant, labels: dict[str, str] | None = None) -> list[str]:
    """All session ids of a listing, two to a page."""
    found: list[str] = []
    cursor = ""
    while True:
        page = await bench.store.list_sessions(tenant, limit=2, cursor=cursor, labels=labels)
        assert len(page.rows) <= 2
        found += [one.session_id for one in page.rows]
        cursor = page.cursor
        if not cursor:
            return found


# ---- create


async def test_the_row_keeps_what_it_was_given(bench: Bench) -> None:
    sampling = SamplingDefaults(temperature=0.7, stop=("\n",), logit_bias={50256: -100.0}, seed=2**63 - 1)
    config = SessionConfig(model="m", system_prompt="naïve \N{ELEPHANT} {}", sampling=sampling, ttl_s=3600.5)
    given = SessionRow(
        tenant=KEY.tenant,
        session_id=KEY.session_id,
        config=config,
        labels={"team": "blue", "ключ": ""},
        forked_from="parent",
        forked_from_item=4,
        head_item=1,
        item_count=1,
        context_tokens=9,
    )
    made = await bench.store.create(given, first_record(), "fp")
    assert (made.revision, made.state, len(made.head_hash)) == (1, State.ACTIVE, 40)
    assert made.expire_ms == made.create_ms + 3_600_500
    ignored = {"revision": 0, "head_hash": "", "create_ms": 0, "update_ms": 0, "expire_ms": 0}
    assert msgspec.structs.replace(made, **ignored) == given
    assert await bench.store.load(KEY) == made


async def test_create_is_idempotent_by_fingerprint(bench: Bench) -> None:
    first = await create(bench)
    assert await create(bench) == first
    after = await turn(bench, 1)
    assert await create(bench) == after
    with pytest.raises(AlreadyExists) as caught:
        await bench.store.create(row(KEY), first_record(), "other")
    assert caught.value.reason == "SESSION_EXISTS"


async def test_create_takes_only_a_first_record(bench: Bench) -> None:
    with pytest.raises(ValueError, match="CREATE"):
        await bench.store.create(row(KEY), turn_record(0, "r1"), "fp")


# ---- tenants


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    "other", [Key("other", "s1"), Key("acme/s1", ""), Key("acme", "}:m"), Key("", "acme/s1")]
)
async def test_no_name_leads_to_another_tenants_session(bench: Bench, other: Key) -> None:
    await create(bench)
    with pytest.raises(NotFound):
        await bench.store.load(other)
    with pytest.raises(NotFound):
        await bench.store.delete(other)
    await create(bench, other)
    await turn(bench, 1, other)
    assert (await bench.store.load(KEY)).revision == 1
    assert len(await bench.store.read(other)) == 2
    if other.tenant != KEY.tenant:
        assert await names(bench) == ["s1"]
        assert await names(bench, other.tenant) == [other.session_id]


# ---- read and damage


async def test_read_goes_on_from_what_the_caller_knows(bench: Bench) -> None:
    await create(bench)
    for base in (1, 2, 3):
        await turn(bench, base)
    log = await bench.store.read(KEY)
    assert [logged.record.revision for logged in log] == [1, 2, 3, 4]
    for revision in (1, 2, 3, 4):
        known = log[revision - 1].head_hash
        assert await bench.store.read(KEY, after_revision=revision, head_hash=known) == log[revision:]
        assert await bench.store.read(KEY, after_revision=revision) == log[revision:]


@pytest.mark.fault(42)
async def test_a_caller_ahead_of_the_store_or_on_another_branch_is_told(bench: Bench) -> None:
    await create(bench)
    await turn(bench, 1)
    for revision, known in ((3, ""), (1, "00" * 20), (2, "00" * 20)):
        with pytest.raises(DataLoss) as caught:
            await bench.store.read(KEY, after_revision=revision, head_hash=known)
        assert caught.value.reason == "HISTORY_REGRESSED"
    with pytest.raises(DataLoss) as caught:
        await bench.store.load(KEY, known_revision=3)
    assert (caught.value.reason, caught.value.metadata) == ("HISTORY_REGRESSED", {"current_revision": "2"})
    assert (await bench.store.load(KEY, known_revision=2)).revision == 2
    assert (await bench.store.load(KEY)).state is State.ACTIVE, "the store itself is sound"


@pytest.mark.fault(43)
@pytest.mark.parametrize("fault", ["flip first", "flip last", "drop first", "drop middle", "drop last"])
async def test_damage_is_found_and_contained(bench: Bench, fault: str) -> None:
    await create(bench)
    await create(bench, key("neighbour"))
    for base in (1, 2, 3):
        await turn(bench, base)
    act, _, where = fault.partition(" ")
    revision = {"first": 1, "middle": 2, "last": 4}[where]
    (bench.damage if act == "flip" else bench.drop_record)(KEY, revision)

    with pytest.raises(DataLoss) as caught:
        await bench.store.read(KEY)
    assert caught.value.reason == "HISTORY_CORRUPT"
    assert caught.value.metadata["revision"] == str(revision)
    damaged = await bench.store.load(KEY)
    assert (damaged.state, damaged.revision) == (State.DAMAGED, 4)
    assert await bench.store.find_request(KEY, "r2") == 3
    assert (await bench.store.load(key("neighbour"))).state is State.ACTIVE
    assert sorted(await names(bench)) == ["neighbour", "s1"]
    await bench.store.delete(KEY)


async def test_what_lies_before_the_damage_can_still_be_left_out(bench: Bench) -> None:
    await create(bench)
    for base in (1, 2, 3):
        await turn(bench, base)
    log = await bench.store.read(KEY)
    bench.damage(KEY, 2)
    assert await bench.store.read(KEY, after_revision=2, head_hash=log[1].head_hash) == log[2:]


# ---- update


async def test_an_update_changes_configuration_and_labels(bench: Bench) -> None:
    await create(bench, labels={"a": "1"})
    config = SessionConfig(model="tiny", system_prompt="Be long.", ttl_s=60)
    record = Record(revision=2, kind=RecordKind.UPDATE, time_ms=1, request_id="u1", config=config, labels={})
    after = await bench.store.apply(KEY, "fp", record, counts(2))
    assert (after.config, after.labels) == (config, {})
    assert after.expire_ms == after.update_ms + 60_000
    assert await bench.store.load(KEY) == after
    forever = Record(revision=3, kind=RecordKind.UPDATE, time_ms=1, config=SessionConfig(model="tiny"))
    after = await bench.store.apply(KEY, "fp", forever, counts(3))
    assert (after.expire_ms, after.labels) == (0, {})


# ---- expiry


async def test_an_expired_session_is_absent_and_its_name_free(bench: Bench) -> None:
    await create(bench, ttl_s=3600)
    await turn(bench, 1)
    bench.expire(KEY)
    for attempt in (
        bench.store.load(KEY),
        bench.store.read(KEY),
        bench.store.find_request(KEY, "r1"),
        bench.store.begin(KEY, request("r2", "t2")),
        bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2)),
        bench.store.apply(KEY, "fp", rewind_record(2, "w1"), counts(3)),
        bench.store.renew(KEY, "t1", LEASE_MS),
        bench.store.delete(KEY),
        bench.store.mark_damaged(KEY),
    ):
        with pytest.raises(NotFound) as caught:
            await attempt
        assert caught.value.reason in ("SESSION_EXPIRED", "SESSION_NOT_FOUND")
    assert await names(bench) == []
    await bench.store.delete(KEY, allow_missing=True)
    made = await bench.store.create(row(KEY), first_record(), "another")
    assert (made.revision, made.expire_ms) == (1, 0)
    assert await bench.store.find_request(KEY, "r1") is None
    assert len(await bench.store.read(KEY)) == 1


async def test_a_commit_extends_the_life_and_a_running_turn_keeps_it(bench: Bench) -> None:
    made = await create(bench, ttl_s=300)
    assert made.expire_ms == made.create_ms + 300_000
    began = await bench.store.begin(KEY, request("r1", "t1", lease_ms=900_000))
    assert isinstance(began, Began)
    assert began.row.expire_ms >= made.create_ms + 900_000
    await bench.store.renew(KEY, "t1", 1_800_000)
    assert (await bench.store.load(KEY)).expire_ms >= made.create_ms + 1_800_000
    after = await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
    assert after.expire_ms == after.update_ms + 300_000


async def test_purge_removes_what_has_expired_and_nothing_else(bench: Bench) -> None:
    await create(bench, key("stays"))
    await create(bench, key("stays-too"), ttl_s=10**6)
    await create(bench, ttl_s=3600)
    bench.expire(KEY)
    await bench.store.purge_expired()
    assert sorted(await names(bench)) == ["stays", "stays-too"]
    assert await bench.store.purge_expired() == 0


# ---- delete


async def test_a_deleted_session_stays_deleted(bench: Bench) -> None:
    await create(bench)
    await turn(bench, 1)
    await bench.store.begin(KEY, request("r2", "t2"))
    await bench.store.delete(KEY)
    await bench.store.delete(KEY)
    await bench.store.delete(KEY, expected_revision=99)
    await bench.store.abort(KEY, "t2")
    for attempt in (
        bench.store.load(KEY),
        bench.store.read(KEY),
        bench.store.find_request(KEY, "r1"),
        bench.store.begin(KEY, request("r1", "t3")),
        bench.store.commit(KEY, "t2", "fp-r2", turn_record(2, "r2"), counts(3)),
        bench.store.apply(KEY, "fp", rewind_record(2, "w1"), counts(3)),
        bench.store.renew(KEY, "t2", LEASE_MS),
        bench.store.mark_damaged(KEY),
        bench.store.create(row(KEY), first_record(), "fp"),
    ):
        with pytest.raises(NotFound) as caught:
            await attempt
        assert caught.value.reason == "SESSION_DELETED"
    assert await names(bench) == []


async def test_delete_checks_revision_and_presence(bench: Bench) -> None:
    with pytest.raises(NotFound):
        await bench.store.delete(KEY)
    await bench.store.delete(KEY, allow_missing=True)
    await create(bench)  # a delete of nothing leaves no tombstone
    await turn(bench, 1)
    with pytest.raises(RevisionMismatch):
        await bench.store.delete(KEY, expected_revision=1)
    with pytest.raises(DataLoss):
        await bench.store.delete(KEY, expected_revision=3)
    await bench.store.delete(KEY, expected_revision=2)


async def test_a_session_is_forgotten_and_its_id_is_free_again(bench: Bench) -> None:
    made = await bench.store.create(row(KEY, labels={"a": "b"}), first_record(), "fp")
    await bench.store.begin(KEY, request("r1", "t1"))
    with pytest.raises(TurnInProgress):
        await bench.store.forget(KEY, made.head_hash)
    bench.lapse_lease(KEY)
    before = await bench.store.apply(KEY, "fp", rewind_record(1, "w1"), counts(2))
    with pytest.raises(RevisionMismatch) as caught:
        await bench.store.forget(KEY, made.head_hash)
    assert caught.value.metadata == {"current_revision": "2"}
    await bench.store.forget(KEY, before.head_hash)
    with pytest.raises(NotFound) as missing:
        await bench.store.load(KEY)
    assert missing.value.reason == "SESSION_NOT_FOUND"
    assert await names(bench) == await names(bench, labels={"a": "b"}) == []
    assert await bench.store.usage(TENANT) == TenantUsage(0, 0)
    await bench.store.forget(KEY, before.head_hash)  # it is not there, as was wanted
    again = await bench.store.create(row(KEY), first_record(), "another")
    assert again.revision == 1 and await bench.store.find_request(KEY, "w1") is None
    for lost in ("t1", "t2"):
        with pytest.raises(TurnFenced):
            await bench.store.commit(KEY, lost, "fp-r1", turn_record(1, "r1"), counts(2))
    await turn(bench, 1)
    assert await names(bench) == [KEY.session_id]
    assert (await bench.store.usage(TENANT)).sessions == 1


async def test_what_is_damaged_or_deleted_is_not_forgotten(bench: Bench) -> None:
    made = await create(bench)
    await bench.store.mark_damaged(KEY)
    with pytest.raises(FailedPrecondition) as caught:
        await bench.store.forget(KEY, made.head_hash)
    assert caught.value.reason == "SESSION_DAMAGED"
    await bench.store.delete(KEY)
    await bench.store.forget(KEY, made.head_hash)
    with pytest.raises(NotFound) as deleted:
        await bench.store.load(KEY)
    assert deleted.value.reason == "SESSION_DELETED"


async def test_a_turn_loses_its_lease_with_a_new_session_of_the_same_name(bench: Bench) -> None:
    await create(bench, ttl_s=3600)
    await bench.store.begin(KEY, request("r1", "t1"))
    bench.lapse_lease(KEY)
    bench.expire(KEY)
    await create(bench)
    with pytest.raises(TurnFenced):
        await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))


# ---- list


async def test_listing_is_newest_first_in_pages(bench: Bench) -> None:
    ids = [f"s{number}" for number in range(7)]
    for name in ids:
        await create(bench, key(name), labels={"parity": "even" if int(name[1]) % 2 == 0 else "odd"})
    listed = await names(bench)
    rows = [await bench.store.load(key(name)) for name in ids]
    newest_first = sorted(rows, key=lambda one: (one.update_ms, one.session_id), reverse=True)
    assert listed == [one.session_id for one in newest_first]
    assert sorted(await names(bench, labels={"parity": "odd"})) == ["s1", "s3", "s5"]
    assert await names(bench, labels={"parity": "odd", "more": "1"}) == []
    assert await names(bench, "nobody") == []
    page = await bench.store.list_sessions(KEY.tenant, limit=7)
    assert (len(page.rows), page.cursor) == (7, "")

    begun = await bench.store.begin(key("s3"), request("r1", "t1"))
    assert isinstance(begun, Began)
    page = await bench.store.list_sessions(KEY.tenant, limit=10)
    assert [one.session_id for one in page.rows if one.running is not None] == ["s3"]


@pytest.mark.fault(23)
@pytest.mark.parametrize("cursor", ["x", "12", "12.", ".s1", "-1.s1", "9" * 30 + ".s1", "²3.s1"])
async def test_a_forged_cursor_is_refused(bench: Bench, cursor: str) -> None:
    with pytest.raises(InvalidArgument):
        await bench.store.list_sessions(KEY.tenant, limit=2, cursor=cursor)


async def test_usage_counts_live_sessions_and_the_bytes_of_their_records(bench: Bench) -> None:
    store = bench.store
    assert await store.usage(TENANT) == TenantUsage(0, 0)
    for name in ("a", "b", "c"):
        await store.create(row(key(name), ttl_s=3600.0 if name == "c" else 0.0), first_record(), "fp")
    await store.create(row(key("a", "other")), first_record(), "fp")
    first = len(encode_record(first_record()))
    assert await store.usage(TENANT) == TenantUsage(3, 3 * first)
    await whole_turn(store, key("a"), 1)
    turn = len(encode_record(turn_record(1, "r1")))
    assert await store.usage(TENANT) == TenantUsage(3, 3 * first + turn)
    await store.delete(key("b"))
    assert await store.usage(TENANT) == TenantUsage(2, 2 * first + turn)
    bench.expire(key("c"))
    assert await store.usage(TENANT) == TenantUsage(1, first + turn)
    await store.purge_expired()
    assert await store.usage(TENANT) == TenantUsage(1, first + turn)
    assert await store.usage("nobody") == TenantUsage(0, 0)
