"""What a turn of a hybrid model computes again, and what becomes of the slices between turns."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve.config import CacheConfig, CacheGroup
from pensieve.core import SessionKey, TokenArray
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, OtherSlice, SharedRun
from pensieve.engine.cache.eviction import reclaim_kind
from pensieve.engine.cache.evictor import Evictor
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel

SIZE = 8
COST = CostModel(((0, 0.0), (1000, 1000.0)), 4.0, SIZE)
FULL, NO_LAYERS = CacheGroup("full", 0, 2, 16, 2), CacheGroup("full", 0, 0, 0, 1)
WINDOW, STATE = CacheGroup("window", 20, 3, 16, 2), CacheGroup("state", 0, 3, 16, 1)
MODELS = {
    "window": (FULL, WINDOW),
    "window alone": (NO_LAYERS, WINDOW),
    "state": (FULL, STATE),
    "state alone": (NO_LAYERS, STATE),
}
A, B = SessionKey("a"), SessionKey("b")


def make(name: str, device: int = 200, host: int = 0) -> CacheManager:
    return CacheManager(CacheConfig(device, host, SIZE, swap_watermark=0.0, groups=MODELS[name]), COST)


def text(count: int, seed: int = 0) -> TokenArray:
    return (np.arange(count) * 7 + 100_000 * seed).astype(np.int32)


def serve(
    cache: CacheManager, key: SessionKey, context: TokenArray, num_new: int, now: float, answer: int = 0
) -> int:
    """Serve a turn whose answer has ``answer`` tokens; return how many tokens of the history it computed again."""
    path = cache.prefix_path(key, "scope", context)
    assert cache.can_admit(key, context, num_new, path=path)
    restore = cache.admit(key, context, num_new, now, path)
    for start, end in restore.missing:
        while start < end:
            stop = start + min(cache.reach(key, end - start), end - start)
            cache.computed(key, start, stop, now)
            cache.take_copies()
            cache.complete_copies()
            start = stop
    whole = np.concatenate([context, text(answer, seed=99)]).astype(np.int32)
    for length in range(len(context) + 1, len(whole) + 1):
        assert cache.extend(key, length, now)
        cache.computed(key, length - 1, length, now)
        cache.take_copies()
        cache.complete_copies()
        cache.check()
    cache.release(key, now, whole)
    cache.check()
    return restore.recomputed


def parts(cache: CacheManager, key: SessionKey) -> list[OtherSlice]:
    """The slices of windows or states that a session has."""
    others = [chunk.other for chunk in cache.sessions[key].chunks]
    return [part for part in others if part is not None and part.cached]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [64, 67, 71, 72])
def test_the_next_turn_computes_less_than_a_chunk_again(name: str, length: int) -> None:
    cache = make(name)
    serve(cache, A, text(40), 40, 0.0, answer=length - 40)
    history = np.concatenate([text(40), text(length - 40, seed=99)])
    again = serve(cache, A, np.concatenate([history, text(5, seed=3)]).astype(np.int32), 5, 1.0)
    assert again < SIZE
    if "window" in name:
        assert again == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cut", [1, 5, 8])
def test_after_a_stop_string_it_computes_less_than_two(name: str, cut: int) -> None:
    cache = make(name)
    serve(cache, A, text(40), 40, 0.0, answer=30)
    history = np.concatenate([text(40), text(30 - cut, seed=99)])
    again = serve(cache, A, np.concatenate([history, text(5, seed=3)]).astype(np.int32), 5, 1.0)
    assert again < (1 if "window" in name else 2 * SIZE)


@pytest.mark.parametrize("name", MODELS)
def test_a_regenerated_turn_goes_on_at_its_prompt(name: str) -> None:
    cache = make(name)
    serve(cache, A, text(40), 40, 0.0, answer=60)
    assert serve(cache, A, text(40), 0, 1.0, answer=3) <= (1 if "window" in name else SIZE)


@pytest.mark.parametrize("name", MODELS)
def test_an_edit_further_back_computes_all_again(name: str) -> None:
    cache = make(name)
    serve(cache, A, text(40), 40, 0.0, answer=60)
    history = np.concatenate([text(40), text(60, seed=99)]).astype(np.int32)
    serve(cache, A, np.concatenate([history, text(60, seed=5)]).astype(np.int32), 60, 1.0, answer=2)
    edited = np.concatenate([history[:70], text(5, seed=8)]).astype(np.int32)
    assert serve(cache, A, edited, 5, 2.0) == 70


@pytest.mark.parametrize("name", MODELS)
def test_a_long_answer_leaves_no_slices_on_its_way(name: str) -> None:
    """The tail, and what two resume points need: nothing of the 160 tokens between."""
    cache = make(name)
    serve(cache, A, text(40), 40, 0.0, answer=200)
    kept = parts(cache, A)
    needed = [part for part in kept if not part.leftover]
    if "state" in name:
        assert [part.index for part in needed] == [29]
        assert [part.index for part in kept] == [3, 28, 29]  # the prompt's, the boundary before, the newest
    else:
        # A window of 20 and a chunk before position 240: from 213 on. The prompt's last token is at 39: from 20 on.
        assert [part.index for part in needed] == [26, 27, 28, 29]
        assert [part.index for part in kept if part.leftover] == [2, 3, 4]


@pytest.mark.parametrize("name", MODELS)
def test_a_tail_is_dropped_as_a_whole(name: str) -> None:
    """Without its window or state, a session's other chunks save no work: all of them go together."""
    cache = make(name, device=40 if "alone" not in name else 9)
    for number in range(12):
        serve(cache, SessionKey(f"s{number}"), text(60, seed=number), 60, float(number))
        for session in cache.sessions.values():
            tail = [part for part in parts(cache, session.key) if not part.leftover]
            wanted = {4, 5, 6, 7} if "window" in name else {6}
            assert {part.index for part in tail} == wanted, "half a tail"
    assert cache.occupancy().dropped, "nothing was dropped"


@pytest.mark.parametrize("name", ["window", "state"])
def test_what_others_computed_is_found_where_they_ended(name: str) -> None:
    """A beginning in common costs the second session a computation, and the third one nothing."""
    cache = make(name)
    common = text(64)
    found = []
    for number in range(1, 5):
        context = np.concatenate([common, text(30, seed=number)]).astype(np.int32)
        found.append(serve(cache, SessionKey(f"s{number}"), context, 30, 1.0))
    # The first one's turn began at the end of the common part, so its window there is left over. A state is not.
    assert found == ([64, 0, 0, 0] if name == "window" else [64, 64, 0, 0])


@pytest.mark.parametrize("name", MODELS)
def test_leftovers_go_first_and_are_never_saved(name: str) -> None:
    cache = make(
        name, device={"window": 60, "window alone": 20, "state": 40, "state alone": 8}[name], host=200
    )
    serve(cache, A, text(40), 40, 0.0, answer=60)
    assert any(part.leftover for part in parts(cache, A))
    for number in range(8):
        serve(cache, SessionKey(f"s{number}"), text(100, seed=1 + number), 100, 1.0 + number)
    assert cache.occupancy().host_used, "nothing had to leave the device"
    assert not any(part.leftover for part in parts(cache, A))
    saved = [
        part
        for session in cache.sessions.values()
        for part in parts(cache, session.key)
        if part.host != NOWHERE
    ]
    assert not any(part.leftover for part in saved)


def test_half_a_tail_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: Evictor, holder: CachedSession | SharedRun) -> None:
        others = [
            chunk.other for chunk in holder.own_chunks if chunk.other is not None and chunk.other.cached
        ]
        self._tiers.drop(next(part for part in others if reclaim_kind(part) is not None))

    monkeypatch.setattr(Evictor, "_drop_all", half)
    with pytest.raises(AssertionError, match="half a tail"):
        test_a_tail_is_dropped_as_a_whole("window alone")
