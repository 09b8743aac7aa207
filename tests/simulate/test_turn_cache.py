"""``TurnCache`` decides what ``CacheManager`` decides."""

from __future__ import annotations

import random

import pytest

from pensieve.config import CacheConfig
from pensieve.simulate.scenario import policies
from pensieve.simulate.turns.cache import TurnCache
from support.cache.turn_twins import COST, SIZE, Both, Manager


# ``arc`` weighs its two lists anew in each round, and the twin asks for fewer rounds.
@pytest.mark.parametrize("name", [name for name in policies.NAMES if name != "arc"])
@pytest.mark.parametrize("host", [0, 40, 90])
def test_decides_as_the_manager(name: str, host: int) -> None:
    agree(Both(name, host, f"{name}{host}"))


@pytest.mark.parametrize("name", ["gittins", "retention", "lru"])
@pytest.mark.parametrize("host", [0, 40])
def test_and_with_hints(name: str, host: int) -> None:
    agree(Both(name, host, f"{name}{host}", hinted=True))


def agree(both: Both) -> None:
    """Step both, and compare what is where."""
    for _ in range(700):
        both.step()
        both.compare()
    assert both.lost > 0 and both.suspended > 10, (
        "nothing was ever evicted or suspended: the test shows nothing"
    )


def test_waits_for_its_own_copies() -> None:
    """A session whose chunks the plan in hand copies out cannot be admitted by the same plan."""
    config = CacheConfig(device_chunks=20, host_chunks=20, chunk_tokens=SIZE, swap_watermark=0.0)
    twin, manager = TurnCache(config, COST, policies.make_policy("lru")[0]), Manager(config, "lru")
    for key, tokens in ((1, 40), (3, 80)):
        twin.admit(key, 0, tokens, float(key))
        twin.complete()
        twin.release(key, tokens, float(key))
        manager.admit(key, 0, tokens, float(key))
        manager.computed(key, 0, tokens)
        manager.complete()
        manager.release(key, tokens, float(key))
    twin.admit(2, 0, 64, 9.0)
    manager.admit(2, 0, 64, 9.0)
    assert not twin.can_admit(1, 41, reserve=True) and not manager.can_admit(1, 40, 41)
    twin.complete()
    manager.complete()
    assert twin.can_admit(1, 41, reserve=True) and manager.can_admit(1, 40, 41)


def test_ranked_ahead_it_loses_no_more() -> None:
    """With ``slack`` the order is a little stale, no more than that."""
    exact, ahead = (
        TurnCache(CacheConfig(600, 600, SIZE), COST, policies.make_policy("retention")[0], n) for n in (0, 24)
    )
    rng = random.Random(1)
    lost = {exact: 0, ahead: 0}
    context = dict.fromkeys(range(360), 0)
    for turn in range(3000):
        key, now = rng.randrange(90) + 90 * (turn // 900), 2.0 * turn
        history, total = context[key], context[key] + rng.randrange(1, 60)
        for cache in (exact, ahead):
            lost[cache] += cache.admit(key, history, total, now).recomputed
            cache.save_ahead(now, 10**6)
            cache.complete()
            cache.release(key, total, now)
        context[key] = total
    assert lost[exact] > 1000
    assert lost[ahead] == pytest.approx(lost[exact], rel=0.05)


def test_clear_frees_everything() -> None:
    config = CacheConfig(device_chunks=16, host_chunks=8, chunk_tokens=SIZE)
    cache = TurnCache(config, COST, policies.make_policy("retention")[0])
    cache.admit(1, 0, 100, 0.0)
    cache.complete()
    cache.release(1, 100, 1.0)
    cache.admit(2, 0, 60, 2.0)
    cache.complete()
    cache.clear()
    assert (cache.device_free, cache.host_free, cache.unpinned) == (16, 8, 16)
    assert cache.admit(1, 100, 128, 3.0).recomputed == 100
