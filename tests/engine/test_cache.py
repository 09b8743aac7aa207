"""Rules of the chunk cache, one by one: who gives way, when it is copied, what comes back how."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.config import CacheConfig, PolicyName
from pensieve.core import SessionKey, TokenArray
from pensieve.engine.cache.chunk import CachedSession, Place, Restore, TierTokens
from pensieve.engine.cache.index import Reclaim, lowest
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel

COST = CostModel(((0, 0.0), (1000, 1000.0)), 4.0, 4)
"""Cost(l) = l + 4: chunk k of four tokens costs 4k + 8."""


def make(device: int, host: int, policy: PolicyName = "retention", watermark: float = 0.0) -> CacheManager:
    return CacheManager(
        CacheConfig(
            device_chunks=device, host_chunks=host, chunk_tokens=4, policy=policy, swap_watermark=watermark
        ),
        COST,
    )


def tokens(count: int, seed: int = 0) -> TokenArray:
    return (np.arange(count) * 7 + seed).astype(np.int32)


def serve(
    cache: CacheManager, name: str, count: int, now: float, *, new: int | None = None, seed: int = 0
) -> Restore:
    """One whole turn: restore, compute what is missing, release."""
    key = SessionKey(name)
    context = tokens(count, seed)
    assert cache.can_admit(key, context, count if new is None else new)
    restore = cache.admit(key, context, count if new is None else new, now)
    for start, end in restore.missing:
        cache.computed(key, start, end)
    commit(cache)
    cache.release(key, now)
    cache.check()
    return restore


def commit(cache: CacheManager) -> tuple[int, int, int]:
    """Execute the planned copies; how many of each kind there were."""
    out, copies, swapped_in, _ = cache.take_copies()
    cache.complete_copies()
    return len(out), len(copies), len(swapped_in)


def places(cache: CacheManager, name: str) -> str:
    """A letter per chunk: D(evice) B(oth) H(ost) .(dropped)."""
    letters = {Place.DEVICE: "D", Place.BOTH: "B", Place.HOST: "H", Place.DROPPED: "."}
    session = cache.sessions.get(SessionKey(name))
    return "".join(letters[chunk.place] for chunk in session.chunks) if session else ""


def victims(cache: CacheManager, reclaim: Reclaim, now: float, count: int) -> list[tuple[str, int]]:
    """The next victims, without evicting them: (session, chunk index)."""
    order = cache.index.round(reclaim, now, count)
    found: list[tuple[str, int]] = []
    while len(found) < count and (group := order.take()):
        for chunk in group:
            chunk.pins += 1  # out of the running, as if evicted
            assert isinstance(chunk.holder, CachedSession)
            found.append((str(chunk.holder.key), chunk.index))
        order.put_back()
    return found


def test_retention_weighs_cost_against_idle_time() -> None:
    cache = make(20, 20)
    serve(cache, "old", 12, now=0.0)  # costs 8, 12, 16; idle 10 at t=10
    serve(cache, "new", 8, now=8.0)  # costs 8, 12; idle 2
    # V: old .8 1.2 1.6, new 4 6
    expected = [("old", 0), ("old", 1), ("old", 2), ("new", 0), ("new", 1)]
    assert victims(cache, Reclaim.SAVED_PAGE, 10.0, 5) == expected


def test_retention_spares_trailing_chunks_for_leading_ones_of_younger_sessions() -> None:
    cache = make(20, 20)
    serve(cache, "old", 16, now=0.0)  # costs 8, 12, 16, 20; idle 10: V .8 1.2 1.6 2.0
    serve(cache, "new", 8, now=5.0)  # costs 8, 12; idle 5: V 1.6 2.4
    order = victims(cache, Reclaim.SAVED_PAGE, 10.0, 6)
    assert order[:2] == [("old", 0), ("old", 1)]
    assert set(order[2:4]) == {("old", 2), ("new", 0)}
    assert order[4:] == [("old", 3), ("new", 1)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", [("old", 0), ("old", 1), ("old", 2), ("old", 3), ("new", 0), ("new", 1)]),
        ("whole-session", [("old", 0), ("old", 1), ("old", 2), ("old", 3), ("new", 0), ("new", 1)]),
        # score = chunks x idle: old 4x10, then 2x10, then new 2x5 ties with old 1x10
        ("trailing-half", [("old", 2), ("old", 3), ("old", 1)]),
    ],
)
def test_other_policies(policy: PolicyName, expected: list[tuple[str, int]]) -> None:
    cache = make(20, 20, policy)
    serve(cache, "old", 16, now=0.0)
    serve(cache, "new", 8, now=5.0)
    assert victims(cache, Reclaim.SAVED_PAGE, 10.0, len(expected)) == expected


def test_swap_out_ahead_keeps_the_device_copy_and_reclaims_it_lazily() -> None:
    cache = make(8, 8, watermark=0.5)
    serve(cache, "a", 16, now=0.0)
    serve(cache, "b", 8, now=1.0)
    cache.swap_out_ahead(2.0, limit=99)
    assert commit(cache) == (2, 0, 0)  # 2 of 8 free, 4 wanted
    assert (places(cache, "a"), places(cache, "b")) == ("BBDD", "DD")
    serve(cache, "c", 12, now=3.0)  # two free pages and one reclaimed
    assert (places(cache, "a"), places(cache, "b"), places(cache, "c")) == ("HBDD", "DD", "DDD")


def test_a_session_that_returns_before_its_page_was_taken_hits_for_free() -> None:
    cache = make(8, 8, watermark=1.0)
    serve(cache, "a", 16, now=0.0)
    cache.swap_out_ahead(1.0, limit=99)
    commit(cache)
    assert places(cache, "a") == "BBBB"
    restore = serve(cache, "a", 20, now=2.0, new=4)
    assert (restore.gpu_cached, restore.swapped_in, restore.recomputed) == (16, 0, 0)
    assert restore.missing == ((16, 20),)


@pytest.mark.fault(31)
def test_a_full_host_drops_leading_tokens_of_the_longest_idle() -> None:
    cache = make(4, 3)
    serve(cache, "a", 16, now=0.0)
    serve(cache, "b", 16, now=10.0)  # three of a's four chunks fit the host; the cheapest is dropped
    assert (places(cache, "a"), places(cache, "b")) == (".HHH", "DDDD")
    cache.evict(SessionKey("b"))
    restore = cache.admit(SessionKey("a"), tokens(16), 0, 20.0)
    # the last token is computed again, because something has to be
    assert (restore.gpu_cached, restore.swapped_in, restore.recomputed) == (0, 11, 5)
    assert restore.missing == ((0, 4), (15, 16))


def test_host_copies_of_chunks_in_use_give_way_before_anything_is_dropped() -> None:
    cache = make(8, 6)
    serve(cache, "old", 8, now=0.0)
    serve(cache, "a", 16, now=1.0)
    serve(cache, "b", 32, now=2.0)  # the others go to the host, which is full now
    cache.evict(SessionKey("b"))
    cache.admit(SessionKey("a"), tokens(17), 1, 3.0)
    commit(cache)
    assert (places(cache, "old"), places(cache, "a")) == ("HH", "BBBBD")
    serve(cache, "c", 12, now=4.0)
    serve(cache, "d", 12, now=5.0)  # c's chunks go to the host
    assert places(cache, "old") == "HH"  # of the least value, but its only copy
    assert (places(cache, "c"), places(cache, "a")) == ("HHH", "DDDBD")


def test_holes_are_separate_ranges() -> None:
    cache = make(8, 8)
    serve(cache, "a", 24, now=0.0)
    for index in (1, 4):
        cache._tiers.drop(cache.sessions[SessionKey("a")].chunks[index])
    assert places(cache, "a") == "D.DD.D"
    restore = serve(cache, "a", 30, now=1.0, new=6)
    assert restore.missing == ((4, 8), (16, 20), (24, 30))
    assert (restore.gpu_cached, restore.recomputed) == (16, 8)


def test_an_edit_keeps_the_common_prefix_only() -> None:
    cache = make(8, 8)
    serve(cache, "a", 20, now=0.0)
    edited = tokens(20)
    edited[9] = 9999
    key = SessionKey("a")
    restore = cache.admit(key, edited, 3, 1.0)
    assert restore.missing == ((9, 20),)
    assert (restore.gpu_cached, restore.recomputed) == (9, 8)


def test_something_is_always_computed() -> None:
    cache = make(8, 8)
    serve(cache, "a", 16, now=0.0)
    restore = serve(cache, "a", 16, now=1.0, new=0)
    assert restore.missing == ((15, 16),)
    assert (restore.gpu_cached, restore.recomputed) == (15, 1)


def test_new_tokens_count_as_new_even_if_an_abandoned_attempt_computed_them() -> None:
    cache = make(8, 8)
    serve(cache, "a", 16, now=0.0)
    restore = serve(cache, "a", 16, now=1.0, new=8)
    assert (restore.gpu_cached, restore.recomputed, restore.missing) == (8, 0, ((8, 16),))


def test_reserve_holds_back_new_requests_but_never_the_only_one() -> None:
    cache = CacheManager(
        CacheConfig(device_chunks=10, host_chunks=0, chunk_tokens=4, decode_reserve=0.2), COST
    )
    key = SessionKey("a")
    assert not cache.can_admit(key, tokens(32), 32, reserve_for="")  # two of ten left: not more than 20 %
    assert cache.can_admit(key, tokens(28), 28, reserve_for="")
    assert cache.can_admit(key, tokens(40), 40)
    assert not cache.can_admit(key, tokens(41), 41)


def test_evict_frees_idle_sessions_only() -> None:
    cache = make(8, 8)
    serve(cache, "a", 8, now=0.0)
    cache.admit(SessionKey("b"), tokens(8), 8, 1.0)
    assert cache.evict() == 8
    cache.check()
    assert cache.residency(SessionKey("a")) == TierTokens(0, 0)
    assert cache.occupancy().device_used == 2 * 4


@given(st.lists(st.floats(0, 100) | st.just(float("inf")), min_size=1, max_size=2000), st.integers(1, 50))
def test_lowest_is_a_partial_sort(values: list[float], count: int) -> None:
    array = np.array(values)
    found = sorted(array[lowest(array, count)].tolist())
    assert found[:count] == sorted(values)[:count]
    assert len(found) == min(count, len(values))


def test_many_sessions_keep_their_order_under_a_partial_ranking() -> None:
    """A round that ranks only as many sessions as it expects victims finds the same victims as a full sort."""
    cache = make(400, 0)
    rng = np.random.default_rng(1)
    for number in range(100):
        serve(cache, f"s{number}", int(rng.integers(1, 17)), now=float(rng.random() * 50), seed=number)
    chunks = [
        (
            COST.cost((chunk.index + 1) * 4).item() / (100.0 - session.last_active),
            str(session.key),
            chunk.index,
        )
        for session in cache.sessions.values()
        for chunk in session.chunks
    ]
    expected = [(name, index) for _, name, index in sorted(chunks)][:25]
    assert victims(cache, Reclaim.SAVED_PAGE, 100.0, 25) == expected


def test_a_session_that_is_left_with_fewer_tokens_holds_kv_of_no_more() -> None:
    cache = make(8, 8)
    key, context = SessionKey("a"), tokens(8)
    for start, end in cache.admit(key, context, 8, 0.0).missing:
        cache.computed(key, start, end)
    commit(cache)
    cache.release(key, 1.0, context[:5])
    cache.check()
    assert [chunk.filled for chunk in cache.sessions[key].chunks] == [4, 1]
    # Other tokens follow: what was known of the old ones does not stand for theirs.
    longer = np.concatenate([context[:5], tokens(4, seed=1000)])
    assert cache.admit(key, longer, 4, 2.0).missing == ((5, 9),)
