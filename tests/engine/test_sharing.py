"""Rules of sharing, one by one: who finds whose chunks, who owns them, what an edit changes."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve.core import SessionKey
from pensieve.engine.cache.chunk import Range, SharedRun
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.plan import PENDING
from support.cache.cache_rig import (
    begin,
    chunks,
    commit,
    compute,
    drop,
    end,
    joined,
    make,
    owner_names,
    places,
    receipt,
    serve,
    text,
    to_host,
)

PROMPT = text(40)
A, B, C = SessionKey("A"), SessionKey("B"), SessionKey("C")
ASK_A, ASK_B = joined(PROMPT, text(3, seed=1)), joined(PROMPT, text(5, seed=2))


# -- finding ---------------------------------------------------------------------------------------------------------


def test_a_second_session_with_the_same_prompt_hits() -> None:
    cache = make()
    assert receipt(serve(cache, "A", ASK_A, 0.0), ASK_A) == (0, 0, 0, 43)
    assert receipt(serve(cache, "B", ASK_B, 1.0), ASK_B) == (40, 0, 0, 5)
    assert owner_names(cache, "B") == ["AB"] * 10 + ["B"] * 2


def test_what_is_on_the_host_comes_back_once_for_both() -> None:
    cache = make()
    serve(cache, "A", ASK_A, 0.0)
    to_host(cache, "A", range(10))
    restore = begin(cache, "B", ASK_B, 1.0)
    assert receipt(restore, ASK_B) == (0, 40, 0, 5)
    compute(cache, "B", restore)
    assert commit(cache) == (0, 0, 10)
    assert receipt(serve(cache, "A", ASK_A, 2.0, new=0), ASK_A) == (42, 0, 1, 0)


def test_what_was_dropped_is_recomputed_once_for_both() -> None:
    cache = make()
    serve(cache, "A", ASK_A, 0.0)
    drop(cache, "A", [2, 3])
    restore = serve(cache, "B", ASK_B, 1.0)
    assert (receipt(restore, ASK_B), restore.missing) == ((32, 0, 0, 13), ((8, 16), (40, 45)))
    assert receipt(serve(cache, "A", ASK_A, 2.0, new=0), ASK_A) == (42, 0, 1, 0)


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("", ""), ("a", ""), ("", "a")])
def test_nothing_is_found_across_scopes_or_without_one(first: str, second: str) -> None:
    cache = make()
    serve(cache, "A", ASK_A, 0.0, scope=first)
    assert receipt(serve(cache, "B", ASK_B, 1.0, scope=second), ASK_B) == (0, 0, 0, 45)
    assert owner_names(cache, "A") == ["A"] * 11


def test_nothing_is_found_when_sharing_is_off() -> None:
    cache = make(sharing=False)
    serve(cache, "A", ASK_A, 0.0)
    assert receipt(serve(cache, "B", ASK_B, 1.0), ASK_B) == (0, 0, 0, 45)
    assert receipt(serve(cache, "A", ASK_A, 2.0, new=0), ASK_A) == (42, 0, 1, 0)


def test_requests_that_join_one_plan_compute_their_prompt_once() -> None:
    cache = make()
    first = begin(cache, "A", ASK_A, 0.0)
    compute(cache, "A", first)
    second = begin(cache, "B", ASK_B, 0.0)
    assert second.missing == ((40, 45),)
    compute(cache, "B", second)
    commit(cache)
    end(cache, "A", 1.0)
    end(cache, "B", 1.0)


def test_nobody_joins_the_plan_that_copies_what_it_wants_out() -> None:
    cache = make()
    serve(cache, "A", ASK_A, 0.0)
    cache._evictor.reserve((35, 0), 1.0)
    assert "H" in places(cache, "A") and chunks(cache, "A")[0].saving
    path = cache.prefix_path(B, "a", ASK_B)
    assert not cache.can_admit(B, ASK_B, len(ASK_B), path=path)
    commit(cache)
    assert cache.can_admit(B, ASK_B, len(ASK_B), path=path)


def test_the_wait_for_a_copy_holds_for_what_one_would_adopt_in_place_of_its_own() -> None:
    """A's answer has no address, because T had the same when A ended with a candidate beside it."""
    cache = make(device=24)
    answer, whole = text(9, seed=5), joined(text(9), text(9, seed=5))
    for name in ("A", "T"):
        compute(cache, name, begin(cache, name, text(9), 0.0))
        commit(cache)
    for count in range(10, 19):
        assert cache.extend(A, count, 0.0)
        cache.computed(A, count - 1, count)
    assert cache.branch(A, SessionKey("A#1"), joined(whole, text(1)), len(whole), 0.0) is not None
    commit(cache)
    end(cache, "T", 0.0, answer)
    cache.release(A, 9.0, whole)
    cache.release(SessionKey("A#1"), 9.0)
    cache.evict(SessionKey("A#1"))
    cache.check()
    assert [bool(chunk.digest) for chunk in chunks(cache, "A")] == [True, True, False, False, False]
    cache._evictor.reserve((24 - 6, 0), 10.0)
    assert any(chunk.saving for chunk in chunks(cache, "T")) and not any(
        chunk.saving for chunk in chunks(cache, "A")
    )
    context = joined(whole, text(5, seed=6))
    path = cache.prefix_path(A, "a", context)
    assert not cache.can_admit(A, context, 5, path=path)
    commit(cache)
    assert receipt(serve(cache, "A", context, 11.0, new=5), context)[3] == 5


@pytest.mark.parametrize("state", ["whole", "host", "partly dropped"])
def test_a_fork_finds_every_full_chunk(state: str) -> None:
    cache = make()
    serve(cache, "A", PROMPT, 0.0, answer=text(9, seed=3))
    if state == "host":
        to_host(cache, "A", range(13))
    if state == "partly dropped":
        drop(cache, "A", [0, 5])
    context = joined(PROMPT, text(9, seed=3), text(6, seed=4))
    got = receipt(serve(cache, "B", context, 1.0, new=6), context)
    assert got == {"whole": (48, 0, 1, 6), "host": (0, 48, 1, 6), "partly dropped": (40, 0, 9, 6)}[state]
    cache.evict(A)
    cache.check()
    assert receipt(serve(cache, "B", context, 2.0, new=0), context) == (54, 0, 1, 0)


def test_what_nobody_owns_any_more_is_gone() -> None:
    cache = make()
    serve(cache, "A", ASK_A, 0.0)
    serve(cache, "B", ASK_B, 1.0)
    assert cache.evict(A) == 3
    assert receipt(serve(cache, "C", ASK_A, 2.0), ASK_A) == (40, 0, 0, 3)
    for key in (B, C):
        cache.evict(key)
    cache.check()
    assert cache.occupancy().device_used == 0 and not cache._shared._by_digest
    assert receipt(serve(cache, "A", ASK_A, 3.0), ASK_A) == (0, 0, 0, 43)


def test_a_session_whose_scope_changes_begins_anew() -> None:
    cache = make()
    serve(cache, "A", ASK_A, 0.0)
    serve(cache, "B", ASK_B, 1.0)
    assert receipt(serve(cache, "A", ASK_A, 2.0, scope="b"), ASK_A) == (0, 0, 0, 43)
    assert owner_names(cache, "B") == ["B"] * 12
    assert receipt(serve(cache, "C", ASK_B, 3.0, scope="b"), ASK_B) == (40, 0, 0, 5)
    assert receipt(serve(cache, "A", ASK_A, 4.0, scope=""), ASK_A) == (0, 0, 0, 43)
    assert owner_names(cache, "C") == ["C"] * 12


@pytest.mark.parametrize("size", [1, 4])
def test_the_chunk_with_the_last_token_is_nobody_elses(size: int) -> None:
    cache = make(60, 60, size=size)
    context = text(8)
    serve(cache, "A", context, 0.0)
    restore = serve(cache, "B", context, 1.0)
    assert receipt(restore, context) == (8 - size, 0, 0, size)
    assert [chunk.shared for chunk in chunks(cache, "B")][-1:] == [True], "folded when its request ended"
    again = serve(cache, "A", context, 2.0, new=0)
    assert receipt(again, context) == (7, 0, 1, 0)  # what comes before the last token is A's own, copied
    cache.evict(A)
    assert receipt(serve(cache, "B", joined(context, text(2, seed=1)), 3.0, new=2), text(10)) == (8, 0, 0, 2)


# -- owners ----------------------------------------------------------------------------------------------------------


def test_an_edit_leaves_the_others_chunks_alone() -> None:
    cache = make()
    serve(cache, "A", ASK_A, 0.0)
    serve(cache, "B", ASK_B, 1.0)
    edited = joined(PROMPT[:17], text(20, seed=9))
    restore = begin(cache, "A", edited, 2.0, new=20)
    assert receipt(restore, edited) == (17, 0, 0, 20)  # one of them copied into a chunk of its own
    compute(cache, "A", restore)
    assert commit(cache) == (0, 1, 0)
    end(cache, "A", 2.0)
    assert owner_names(cache, "A") == ["AB"] * 4 + ["A"] * 6
    assert owner_names(cache, "B") == ["AB"] * 4 + ["B"] * 8
    assert receipt(serve(cache, "B", ASK_B, 3.0, new=0), ASK_B) == (44, 0, 1, 0)


def test_an_edit_copies_nothing_that_the_same_plan_computes() -> None:
    cache = make()
    serve(cache, "A", ASK_A, 0.0)
    serve(cache, "B", ASK_B, 1.0)
    drop(cache, "A", range(10))
    compute(cache, "A", begin(cache, "A", ASK_A, 2.0, new=0))
    edited = joined(PROMPT[:18], text(5, seed=9))
    restore = begin(cache, "B", edited, 2.0, new=5)
    assert (receipt(restore, edited), restore.missing) == ((16, 0, 2, 5), ((16, 23),))
    compute(cache, "B", restore)
    assert commit(cache) == (0, 0, 0)


def test_runs_split_and_dissolve_as_owners_come_and_go() -> None:
    cache = make()
    for name, count in (("A", 40), ("B", 24), ("C", 12)):
        serve(cache, name, joined(PROMPT[:count], text(2, seed=ord(name))), 0.0)
    assert owner_names(cache, "A") == ["ABC"] * 3 + ["AB"] * 3 + ["A"] * 5
    runs = {id(chunk.holder) for chunk in chunks(cache, "A") if isinstance(chunk.holder, SharedRun)}
    assert len(runs) == 2
    cache.evict(A)
    cache.check()
    assert owner_names(cache, "B") == ["BC"] * 3 + ["B"] * 4
    serve(cache, "B", joined(PROMPT[:6], text(9, seed=8)), 1.0)
    assert owner_names(cache, "C") == ["BC"] + ["C"] * 3
    cache.evict(B)
    cache.check()
    assert owner_names(cache, "C") == ["C"] * 4 and cache.sessions[C].shared == 0


@pytest.mark.parametrize("place", ["device", "host", "dropped"])
def test_doubles_generated_side_by_side_become_one(place: str) -> None:
    cache = make()
    answer = text(9, seed=3)
    for name in ("A", "B"):
        compute(cache, name, begin(cache, name, PROMPT, 0.0))
        commit(cache)
    end(cache, "A", 1.0, answer)
    if place == "host":
        to_host(cache, "A", [10, 11])
    if place == "dropped":
        drop(cache, "A", [10, 11])
    end(cache, "B", 2.0, answer)
    assert owner_names(cache, "A") == ["AB"] * 12 + ["A"]
    assert places(cache, "A") == {"device": "D" * 13, "host": "D" * 10 + "BBD", "dropped": "D" * 13}[place]
    context = joined(PROMPT, answer)
    assert receipt(serve(cache, "A", context, 3.0, new=0), context) == (48, 0, 1, 0)


def test_tokens_whose_ids_never_came_get_no_address() -> None:
    cache = make(60, 60, size=1)
    compute(cache, "A", begin(cache, "A", text(3), 0.0))
    for count in (4, 5):
        assert cache.extend(A, count, 0.0)
        cache.computed(A, count - 1, count)
    commit(cache)
    cache.release(A, 1.0, joined(text(3), np.array([9, PENDING], np.int32)))
    cache.check()
    assert [bool(chunk.digest) for chunk in chunks(cache, "A")] == [True] * 4 + [False]
    context = joined(text(3), np.array([9, 5, 6], np.int32))
    for name in ("B", "A"):
        assert receipt(serve(cache, name, context, 2.0, new=2), context)[0] in (4, 5)
    assert cache.sessions[A].chunks[4] is cache.sessions[B].chunks[4]


# -- branches --------------------------------------------------------------------------------------------------------


def branched(cache: CacheManager, filled: int = 42) -> tuple[Range, ...] | None:
    """A runs with ``filled`` tokens; B goes on from all but the last of one more."""
    compute(cache, "A", begin(cache, "A", joined(PROMPT, text(filled - 40, seed=3)), 0.0))
    commit(cache)
    context = joined(PROMPT, text(filled - 40, seed=3), text(1, seed=4))
    return cache.branch(A, B, context, len(context) - 1, 0.0)


def test_a_branch_shares_full_chunks_and_copies_the_tail() -> None:
    cache = make()
    assert branched(cache) == ((42, 43),)
    assert owner_names(cache, "B") == ["AB"] * 10 + ["B"]
    assert commit(cache) == (0, 1, 0)
    cache.computed(B, 42, 43)
    end(cache, "A", 1.0, text(7, seed=5))
    end(cache, "B", 1.0, text(3, seed=6))
    assert owner_names(cache, "A") == ["AB"] * 10 + ["A"] * 3
    assert [chunk.filled for chunk in chunks(cache, "B")][-2:] == [4, 2]
    cache.evict(A)
    context = joined(PROMPT, text(2, seed=3), text(1, seed=4), text(3, seed=6))
    assert receipt(serve(cache, "B", context, 2.0, new=0), context) == (45, 0, 1, 0)


def test_a_branch_within_a_plan_computes_its_tail_anew() -> None:
    """The tail of A is written by the plan that would have to copy it."""
    cache = make()
    serve(cache, "A", PROMPT, 0.0)
    context = joined(PROMPT, text(3, seed=1))
    restore = begin(cache, "A", context, 1.0, new=3)
    assert restore.missing == ((40, 43),)
    assert cache.branch(A, B, context, len(context) - 1, 1.0) == ((40, 43),)
    assert commit(cache) == (0, 0, 0)


def test_a_branch_that_has_no_page_changes_nothing() -> None:
    cache = make(device=11, host=0)
    assert branched(cache) is None
    commit(cache)
    assert owner_names(cache, "A") == ["A"] * 11 and len(cache.sessions) == 1


def test_the_branch_that_is_chosen_takes_the_sessions_place() -> None:
    cache = make()
    assert branched(cache) == ((42, 43),)
    commit(cache)
    assert not cache.replace(A, B), "both run"
    end(cache, "A", 1.0)
    cache.computed(B, 42, 43)
    end(cache, "B", 1.0)
    assert cache.replace(A, B) and not cache.replace(A, B)
    cache.check()
    assert owner_names(cache, "A") == ["A"] * 11 and len(cache.sessions) == 1
    context = joined(PROMPT, text(2, seed=3), text(1, seed=4))
    assert receipt(serve(cache, "A", context, 2.0, new=0), context) == (42, 0, 1, 0)
