"""``apply`` with what is left of erased records: one change, in its place in the chain, in every store."""

from __future__ import annotations

import msgspec
import pytest

from pensieve.errors import DataLoss, NotFound, PensieveError, RevisionMismatch
from pensieve.server.history.cuts import erasing_record
from pensieve.store import LoggedRecord
from pensieve.store._codec import (
    FORMAT_ERASED,
    decode_record,
    encode_record,
    make_erased_record,
    make_stored_record,
    verify_next,
)
from pensieve.store.records import History, Record
from support.store.store_bench import (
    Bench,
    counts,
    first_record,
    key,
    request,
    rewind_record,
    row,
    turn_record,
)

KEY = key()


async def talk(bench: Bench, turns: int = 3, ttl_s: float = 0.0) -> list[LoggedRecord]:
    await bench.store.create(row(KEY, ttl_s=ttl_s), first_record(), "fp")
    return await go_on(bench, range(1, turns + 1))


async def go_on(bench: Bench, bases: range) -> list[LoggedRecord]:
    for base in bases:
        record = turn_record(base, f"r{base}", f"said in {base} " * 20)
        assert record.turn is not None
        record = msgspec.structs.replace(record, turn=msgspec.structs.replace(record.turn, mark=f"m{base}"))
        await bench.store.begin(KEY, request(f"r{base}", f"t{base}"))
        await bench.store.commit(KEY, f"t{base}", "fp", record, counts(base + 1))
    return await bench.store.read(KEY)


def erased(log: list[LoggedRecord], keep: int) -> tuple[Record, tuple[Record, ...]]:
    base = History().after((one.record, one.head_hash) for one in log)
    return erasing_record(base, rewind_record(base.revision, "erase", keep), log)


async def test_what_is_left_stands_in_the_place_of_the_whole(bench: Bench) -> None:
    log = await talk(bench, ttl_s=60.0)
    record, rests = erased(log, 3)
    assert record.erases == (3, 4) == tuple(rest.revision for rest in rests)
    for _ in range(2):  # a repetition changes nothing
        after = await bench.store.apply(KEY, "fp", record, counts(5), erased_records=rests)
        assert after.revision == 5
    found = await bench.store.read(KEY)
    assert found[:2] == log[:2] and [one.head_hash for one in found[:4]] == [one.head_hash for one in log]
    assert [one.record for one in found[2:]] == [*rests, record]
    piece = await bench.store.read_slice(KEY, after_revision=2, head_hash=log[1].head_hash, limit=1)
    assert piece.records[0].record == rests[0]
    assert await bench.store.find_request(KEY, "r3") == 4
    assert await bench.store.find_marked("acme", "m3", None, limit=5) == []
    assert len(await bench.store.find_marked("acme", "m1", None, limit=5)) == 1
    size = sum(len(encode_record(one.record)) for one in found)
    assert (await bench.store.usage("acme")).bytes == size
    bench.expire(KEY)
    with pytest.raises(NotFound):
        await bench.store.read(KEY)


async def test_nothing_is_erased_in_a_log_that_went_on_or_is_another(bench: Bench) -> None:
    log = await talk(bench)
    record, rests = erased(log, 3)
    elsewhere = msgspec.structs.replace(
        rests[0], erased=msgspec.structs.replace(rests[0].erased, chain="00" * 20)
    )
    late = rewind_record(3, "late", 3)
    for wrong, left in ((record, [elsewhere]), (late, rests)):
        with pytest.raises(RevisionMismatch):
            await bench.store.apply(KEY, "fp", wrong, counts(5), erased_records=left)
        assert await bench.store.read(KEY) == log
    await bench.store.begin(KEY, request("r9", "t9"))
    with pytest.raises(PensieveError) as refused:
        await bench.store.apply(KEY, "fp", record, counts(5), erased_records=rests)
    assert refused.value.reason == "TURN_IN_PROGRESS" and await bench.store.read(KEY) == log


async def test_a_repetition_after_further_turns_leaves_their_marks(bench: Bench) -> None:
    """The reply was lost, and turns were committed since: the caller makes the record anew, for the log as it is."""
    record, rests = erased(await talk(bench), 3)
    await bench.store.apply(KEY, "fp", record, counts(5), erased_records=rests)
    log = await go_on(bench, range(5, 6))
    again, rests = erased(log, 3)
    assert again.revision == 7 and 6 in again.erases
    assert (await bench.store.apply(KEY, "fp", again, counts(7), erased_records=rests)).revision == 6
    assert await bench.store.read(KEY) == log
    assert [one.revision for one in await bench.store.find_marked("acme", "m5", None, limit=5)] == [6]


async def test_damage_to_what_is_left_is_found(bench: Bench) -> None:
    record, rests = erased(await talk(bench), 3)
    await bench.store.apply(KEY, "fp", record, counts(5), erased_records=rests)
    bench.damage(KEY, 3)
    with pytest.raises(DataLoss, match="record 3"):
        await bench.store.read(KEY)


def test_what_is_left_fits_in_its_place_only() -> None:
    first = make_stored_record(first_record(), "")
    second = make_stored_record(turn_record(1, "r1"), first.head_hash)
    log = [
        LoggedRecord(first_record(), first.head_hash),
        LoggedRecord(turn_record(1, "r1"), second.head_hash),
    ]
    _, (rest,) = erased(log, 0)
    left = make_erased_record(rest)
    assert left.head_hash == second.head_hash and left.data[0] == FORMAT_ERASED
    assert verify_next(KEY, left, 2, first.head_hash).record == rest
    for entry, before in (
        (left, second.head_hash),
        (left._replace(head_hash=first.head_hash), first.head_hash),
    ):
        with pytest.raises(DataLoss, match="does not continue the chain"):
            verify_next(KEY, entry, 2, before)
    for data in (bytes((1,)) + left.data[1:], bytes((FORMAT_ERASED,)) + second.data[1:]):
        with pytest.raises(ValueError):
            decode_record(data)
