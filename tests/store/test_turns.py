"""Begin, renew, commit, abort: every outcome in its order, on every store."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pensieve.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    NotFound,
    RevisionMismatch,
    TurnFenced,
    TurnInProgress,
)
from pensieve.store import Began, Replay, RunningElsewhere
from pensieve.store.records import History, RecordKind
from support.store.store_bench import (
    LEASE_MS,
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


async def create(bench: Bench) -> None:
    await bench.store.create(row(KEY), first_record(), "fp")


async def turn(bench: Bench, base: int, request_id: str) -> None:
    """One whole turn on revision ``base``."""
    token = f"token-{request_id}"
    assert isinstance(await bench.store.begin(KEY, request(request_id, token)), Began)
    await bench.store.commit(KEY, token, f"fp-{request_id}", turn_record(base, request_id), counts(base + 1))


async def test_a_committed_turn_is_in_the_log_and_in_the_row(bench: Bench) -> None:
    await create(bench)
    began = await bench.store.begin(KEY, request("r1", "t1", seed=42))
    assert isinstance(began, Began)
    assert (began.seed, began.row.revision) == (42, 1)
    assert began.row.running is not None
    assert (began.row.running.request_id, began.row.running.attempt) == ("r1", "attempt-t1")
    assert 0 < began.row.running.lease_ms_left <= LEASE_MS

    after = await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
    assert (after.revision, after.head_item, after.item_count, after.context_tokens) == (2, 4, 2, 10)
    assert after.running is None
    assert after.update_ms >= after.create_ms > 0
    assert await bench.store.load(KEY) == after

    history = History()
    for logged in await bench.store.read(KEY):
        history = history.apply(logged.record, logged.head_hash)
    assert (history.revision, history.head_hash) == (2, after.head_hash)
    assert [item.text for item in history.items] == ["hello", "HELLO"]
    assert await bench.store.find_request(KEY, "r1") == 2
    assert await bench.store.find_request(KEY, "r2") is None


async def test_nothing_of_a_turn_is_seen_before_its_commit(bench: Bench) -> None:
    await create(bench)
    await bench.store.begin(KEY, request("r1", "t1"))
    assert (await bench.store.load(KEY)).revision == 1
    assert len(await bench.store.read(KEY)) == 1
    assert await bench.store.find_request(KEY, "r1") is None


async def test_begin_on_nothing(bench: Bench) -> None:
    with pytest.raises(NotFound) as caught:
        await bench.store.begin(KEY, request("r1", "t1"))
    assert caught.value.reason == "SESSION_NOT_FOUND"


async def test_begin_again_with_its_token_is_the_same_begin(bench: Bench) -> None:
    await create(bench)
    await bench.store.begin(KEY, request("r1", "t1", seed=5))
    again = await bench.store.begin(KEY, request("r1", "t1", seed=5))
    assert isinstance(again, Began)
    assert again.seed == 5


async def test_the_same_request_under_another_token_is_running_elsewhere(bench: Bench) -> None:
    await create(bench)
    await bench.store.begin(KEY, request("r1", "t1"))
    met = await bench.store.begin(KEY, request("r1", "t2"))
    assert isinstance(met, RunningElsewhere)
    assert (met.owner, met.attempt) == ("replica-1", "attempt-t1")
    assert 0 < met.lease_ms_left <= LEASE_MS


async def test_another_request_meets_a_busy_session(bench: Bench) -> None:
    await create(bench)
    await bench.store.begin(KEY, request("r1", "t1"))
    with pytest.raises(TurnInProgress) as caught:
        # Busy is told before the revision.
        await bench.store.begin(KEY, request("r2", "t2", expected_revision=9))
    assert caught.value.metadata["active_request_id"] == "r1"
    assert 0 < float(caught.value.metadata["retry_after_s"]) <= LEASE_MS / 1000
    assert caught.value.retry_after_s is not None


async def test_one_request_id_cannot_mean_two_turns(bench: Bench) -> None:
    await create(bench)
    await bench.store.begin(KEY, request("r1", "t1"))
    with pytest.raises(AlreadyExists) as running:
        await bench.store.begin(KEY, request("r1", "t2", fingerprint="other"))
    assert running.value.reason == "REQUEST_ID_REUSED"
    await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
    with pytest.raises(AlreadyExists) as committed:
        await bench.store.begin(KEY, request("r1", "t3", fingerprint="other"))
    assert committed.value.reason == "REQUEST_ID_REUSED"


async def test_a_committed_request_is_replayed_whatever_else_holds(bench: Bench) -> None:
    """Known comes before busy and before the revision: a late retry of turn 1 succeeds while turn 3 runs."""
    await create(bench)
    await turn(bench, 1, "r1")
    await turn(bench, 2, "r2")
    await bench.store.begin(KEY, request("r3", "t3"))
    replay = await bench.store.begin(KEY, request("r1", "t9", expected_revision=1))
    assert isinstance(replay, Replay)
    assert (replay.revision, replay.row.revision) == (2, 3)
    assert replay.row.running is not None


async def test_revision_checks(bench: Bench) -> None:
    await create(bench)
    await turn(bench, 1, "r1")
    with pytest.raises(RevisionMismatch) as moved_on:
        await bench.store.begin(KEY, request("r2", "t2", expected_revision=1))
    assert moved_on.value.metadata == {"current_revision": "2"}
    with pytest.raises(DataLoss) as behind:
        await bench.store.begin(KEY, request("r2", "t2", expected_revision=3))
    assert behind.value.reason == "HISTORY_REGRESSED"
    assert isinstance(await bench.store.begin(KEY, request("r2", "t2", expected_revision=2)), Began)


async def test_a_store_that_is_behind_what_its_caller_knows_begins_nothing(bench: Bench) -> None:
    await create(bench)
    created = await bench.store.load(KEY)
    await turn(bench, 1, "r1")
    after = await bench.store.load(KEY)
    lost = replace(after, revision=3, head_hash="00" * 20)
    forked = replace(after, head_hash="00" * 20)
    await bench.store.begin(KEY, request("r2", "t2"))
    before = replace(created, head_hash="00" * 20)
    for seen in (lost, forked, before):  # told before busy: whoever runs builds on what has lost its end
        with pytest.raises(DataLoss) as caught:
            await bench.store.begin(KEY, request("r3", "t3", known=seen))
        assert caught.value.reason == "HISTORY_REGRESSED"
    await bench.store.abort(KEY, "t2")
    assert isinstance(await bench.store.begin(KEY, request("r1", "t9", known=lost)), Replay)
    for token, seen in (("t4", created), ("t5", after), ("t6", replace(lost, create_ms=1))):
        began = await bench.store.begin(KEY, request("r3", token, known=seen))
        assert isinstance(began, Began), "it knows no more than the store, or knew another session of that id"
        await bench.store.abort(KEY, token)
    assert (await bench.store.load(KEY)).revision == 2


async def test_a_lapsed_lease_is_taken_over_and_the_old_holder_fenced(bench: Bench) -> None:
    await create(bench)
    await bench.store.begin(KEY, request("r1", "t1"))
    bench.lapse_lease(KEY)
    assert (await bench.store.load(KEY)).running is None
    assert isinstance(await bench.store.begin(KEY, request("r2", "t2")), Began)
    with pytest.raises(TurnFenced):
        await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
    with pytest.raises(TurnFenced):
        await bench.store.renew(KEY, "t1", LEASE_MS)
    await bench.store.abort(KEY, "t1")  # must not end the other's turn
    after = await bench.store.commit(KEY, "t2", "fp-r2", turn_record(1, "r2"), counts(2))
    assert after.revision == 2
    with pytest.raises(TurnFenced):  # nor after the other has finished
        await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
    assert [logged.record.request_id for logged in await bench.store.read(KEY)] == ["", "r2"]


async def test_a_retry_after_a_lapse_gets_the_first_attempts_seed(bench: Bench) -> None:
    await create(bench)
    await bench.store.begin(KEY, request("r1", "t1", seed=-(2**62)))
    bench.lapse_lease(KEY)
    again = await bench.store.begin(KEY, request("r1", "t2", seed=11))
    assert isinstance(again, Began)
    assert again.seed == -(2**62)
    bench.lapse_lease(KEY)
    other = await bench.store.begin(KEY, request("r1", "t3", seed=12, fingerprint="other"))
    assert isinstance(other, Began)
    assert other.seed == 12


async def test_a_lapsed_lease_that_nobody_took_still_commits(bench: Bench) -> None:
    await create(bench)
    await bench.store.begin(KEY, request("r1", "t1"))
    bench.lapse_lease(KEY)
    after = await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
    assert after.revision == 2


async def test_renew_keeps_the_lease(bench: Bench) -> None:
    await create(bench)
    await bench.store.begin(KEY, request("r1", "t1"))
    bench.lapse_lease(KEY)
    await bench.store.renew(KEY, "t1", LEASE_MS)
    with pytest.raises(TurnInProgress):
        await bench.store.begin(KEY, request("r2", "t2"))


async def test_abort_leaves_no_trace(bench: Bench) -> None:
    await create(bench)
    before = await bench.store.load(KEY)
    await bench.store.begin(KEY, request("r1", "t1", seed=5))
    await bench.store.abort(KEY, "t1")
    await bench.store.abort(KEY, "t1")
    assert await bench.store.load(KEY) == before
    again = await bench.store.begin(KEY, request("r1", "t2", seed=6))
    assert isinstance(again, Began)
    assert again.seed == 6
    with pytest.raises(TurnFenced):
        await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))


async def test_commit_again_is_the_row_again(bench: Bench) -> None:
    await create(bench)
    await turn(bench, 1, "r1")
    after = await bench.store.load(KEY)
    again = await bench.store.commit(KEY, "token-r1", "fp-r1", turn_record(1, "r1"), counts(2))
    assert again == after
    with pytest.raises(AlreadyExists):
        await bench.store.commit(KEY, "token-r1", "other", turn_record(1, "r1"), counts(2))
    assert len(await bench.store.read(KEY)) == 2


async def test_commit_on_another_revision_is_fenced(bench: Bench) -> None:
    await create(bench)
    await bench.store.begin(KEY, request("r1", "t1"))
    with pytest.raises(TurnFenced):
        await bench.store.commit(KEY, "t1", "fp-r1", turn_record(2, "r1"), counts(3))
    with pytest.raises(TurnFenced):
        await bench.store.commit(KEY, "", "fp-r1", turn_record(1, "r1"), counts(2))


async def test_apply_rewinds_and_is_idempotent(bench: Bench) -> None:
    await create(bench)
    await turn(bench, 1, "r1")
    after = await bench.store.apply(KEY, "fp", rewind_record(2, "w1"), counts(3), expected_revision=2)
    assert after.revision == 3
    again = await bench.store.apply(KEY, "fp", rewind_record(2, "w1"), counts(3), expected_revision=2)
    assert again == after
    with pytest.raises(AlreadyExists):
        await bench.store.apply(KEY, "other", rewind_record(3, "w1"), counts(4))
    assert [logged.record.kind for logged in await bench.store.read(KEY)] == [
        RecordKind.CREATE,
        RecordKind.TURN,
        RecordKind.REWIND,
    ]


async def test_apply_checks_lease_and_revision(bench: Bench) -> None:
    await create(bench)
    await bench.store.begin(KEY, request("r1", "t1"))
    with pytest.raises(TurnInProgress) as busy:
        await bench.store.apply(KEY, "fp", rewind_record(1, "w1"), counts(2), expected_revision=9)
    assert busy.value.metadata["active_request_id"] == "r1"
    bench.lapse_lease(KEY)
    with pytest.raises(DataLoss):
        await bench.store.apply(KEY, "fp", rewind_record(1, "w1"), counts(2), expected_revision=9)
    with pytest.raises(RevisionMismatch):
        await bench.store.apply(KEY, "fp", rewind_record(1, "w1"), counts(2), expected_revision=0)
    with pytest.raises(RevisionMismatch) as not_next:
        await bench.store.apply(KEY, "fp", rewind_record(2, "w1"), counts(3))
    assert not_next.value.metadata == {"current_revision": "1"}
    assert (await bench.store.apply(KEY, "fp", rewind_record(1, ""), counts(2))).revision == 2
    with pytest.raises(TurnFenced):  # the change went past the lapsed turn
        await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))


async def test_writes_to_a_damaged_session_are_refused(bench: Bench) -> None:
    await create(bench)
    await turn(bench, 1, "r1")
    await bench.store.begin(KEY, request("r2", "t2"))
    await bench.store.mark_damaged(KEY)
    for attempt in (
        bench.store.begin(KEY, request("r1", "t3")),
        bench.store.apply(KEY, "fp", rewind_record(2, "w1"), counts(3)),
        bench.store.commit(KEY, "t2", "fp-r2", turn_record(2, "r2"), counts(3)),
    ):
        with pytest.raises(FailedPrecondition) as caught:
            await attempt
        assert caught.value.reason == "SESSION_DAMAGED"
    # A commit whose reply was lost is still acknowledged.
    assert (await bench.store.commit(KEY, "token-r1", "fp-r1", turn_record(1, "r1"), counts(2))).revision == 2
