"""Orders to end a turn, left in the store for whoever holds its lease, on every store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pensieve.errors import NotFound, TurnFenced
from pensieve.store import Began, CalledOff, EndOrder, Renewed, RunningElsewhere
from support.store.store_bench import (
    LEASE_MS,
    Bench,
    counts,
    first_record,
    key,
    request,
    row,
    turn_record,
    whole_turn,
)

KEY = key()
FIRST, SECOND = EndOrder(keep=True, keep_tokens=3), EndOrder(keep=False)


async def begun(bench: Bench) -> None:
    await bench.store.create(row(KEY), first_record(), "fp")
    assert isinstance(await bench.store.begin(KEY, request("r1", "t1", seed=42)), Began)


async def test_the_holder_hears_the_first_order_when_it_renews(bench: Bench) -> None:
    await begun(bench)
    assert await bench.store.renew(KEY, "t1", LEASE_MS) == Renewed()
    assert await bench.store.ask_to_end(KEY, "r1", FIRST)
    assert await bench.store.ask_to_end(KEY, "r1", SECOND)
    for _ in range(2):
        assert await bench.store.renew(KEY, "t1", LEASE_MS) == Renewed(FIRST)
    assert (await bench.store.load(KEY)).running is not None


async def test_no_order_for_what_does_not_run(bench: Bench) -> None:
    with pytest.raises(NotFound):
        await bench.store.ask_to_end(KEY, "r1", FIRST)
    await begun(bench)
    assert not await bench.store.ask_to_end(KEY, "another", FIRST)
    await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
    assert not await bench.store.ask_to_end(KEY, "r1", FIRST)


async def test_an_order_ends_with_its_lease(bench: Bench) -> None:
    await begun(bench)
    assert await bench.store.ask_to_end(KEY, "r1", FIRST)
    bench.lapse_lease(KEY)
    assert not await bench.store.ask_to_end(KEY, "r1", FIRST)
    assert isinstance(await bench.store.begin(KEY, request("r1", "t2")), Began)
    assert await bench.store.renew(KEY, "t2", LEASE_MS) == Renewed(), "the order was for the attempt before"
    assert await bench.store.ask_to_end(KEY, "r1", SECOND)
    await bench.store.abort(KEY, "t2")
    assert isinstance(await bench.store.begin(KEY, request("r1", "t3")), Began)
    assert await bench.store.renew(KEY, "t3", LEASE_MS) == Renewed()


@pytest.mark.parametrize("order", [FIRST, SECOND], ids=["keeps", "discards"])
async def test_a_turn_that_was_asked_to_end_when_its_lease_had_lapsed_is_not_committed(
    bench: Bench, order: EndOrder
) -> None:
    """Its holder stood still. Who asked takes the turn for gone."""
    await begun(bench)
    bench.lapse_lease(KEY)
    assert not await bench.store.ask_to_end(KEY, "another", SECOND)
    assert await bench.store.renew(KEY, "t1", LEASE_MS) == Renewed(), "that was about another turn"
    bench.lapse_lease(KEY)
    assert not await bench.store.ask_to_end(KEY, "r1", order)
    with pytest.raises(TurnFenced):
        await bench.store.renew(KEY, "t1", LEASE_MS)
    with pytest.raises(TurnFenced):
        await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
    outcome = await bench.store.begin(KEY, replace(request("r1", "t2"), follows=True))
    assert isinstance(outcome, Began if order.keep else CalledOff)
    again = await bench.store.begin(KEY, request("r1", "t2"))
    assert isinstance(again, Began) and again.seed == 42


async def test_who_follows_a_turn_does_not_begin_it_again_when_it_was_called_off(bench: Bench) -> None:
    await begun(bench)
    follower = replace(request("r1", "t2"), follows=True)
    assert isinstance(await bench.store.begin(KEY, follower), RunningElsewhere)
    await bench.store.abort(KEY, "t1", called_off=True)
    assert (await bench.store.load(KEY)).running is None
    for _ in range(2):
        assert isinstance(await bench.store.begin(KEY, follower), CalledOff)
    with pytest.raises(TurnFenced):
        await bench.store.renew(KEY, "t1", LEASE_MS)
    with pytest.raises(TurnFenced):
        await bench.store.commit(KEY, "t1", "fp-r1", turn_record(1, "r1"), counts(2))
    other = replace(request("r2", "t3"), follows=True)
    assert isinstance(await bench.store.begin(KEY, other), Began), "it was another turn"
    await bench.store.abort(KEY, "t3")
    assert isinstance(await bench.store.begin(KEY, follower), Began), "that was long ago"


async def test_who_really_tries_again_begins_what_was_called_off(bench: Bench) -> None:
    await begun(bench)
    await bench.store.abort(KEY, "t1", called_off=True)
    assert isinstance(await bench.store.begin(KEY, request("r1", "t2")), Began)
    await bench.store.abort(KEY, "t2")
    assert isinstance(await bench.store.begin(KEY, replace(request("r1", "t3"), follows=True)), Began)


async def test_a_session_goes_on_after_a_turn_was_called_off(bench: Bench) -> None:
    await begun(bench)
    await bench.store.abort(KEY, "another", called_off=True)
    assert (await bench.store.load(KEY)).running is not None
    await bench.store.abort(KEY, "t1", called_off=True)
    await whole_turn(bench.store, KEY, 1)
    assert (await bench.store.load(KEY)).revision == 2


async def test_the_holder_hears_that_somebody_follows(bench: Bench) -> None:
    """Once for each look, so that it also learns when nobody does any more."""
    await begun(bench)
    assert isinstance(await bench.store.begin(KEY, request("r1", "t2")), RunningElsewhere)
    assert await bench.store.renew(KEY, "t1", LEASE_MS) == Renewed(), "it only asked"
    follower = replace(request("r1", "t2"), follows=True)
    for _ in range(2):
        assert isinstance(await bench.store.begin(KEY, follower), RunningElsewhere)
    assert await bench.store.ask_to_end(KEY, "r1", FIRST)
    assert await bench.store.renew(KEY, "t1", LEASE_MS) == Renewed(FIRST, followed=True)
    assert await bench.store.renew(KEY, "t1", LEASE_MS) == Renewed(FIRST)
    await bench.store.begin(KEY, follower)
    bench.lapse_lease(KEY)
    assert isinstance(await bench.store.begin(KEY, follower), Began)
    assert await bench.store.renew(KEY, "t2", LEASE_MS) == Renewed()
