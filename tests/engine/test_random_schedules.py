"""Whatever happens to the cache, every answer is that of a stateless run: random schedules on hashed KV."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import get_args

import pytest

from pensieve.config import CacheConfig, PolicyName, SchedulerConfig
from pensieve.engine.cache.chunk import Chunk
from pensieve.engine.cache.eviction import EvictionRound, Holder, HolderVictims, reclaim_kind
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY, HashWorker, verify_beams, verify_tokens
from support.lengths import FIRST_SEED, at_length

PLAYED = at_length(14, 18)
"""Random schedules of each test."""

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def random_setup(rng: random.Random) -> tuple[CacheConfig, SchedulerConfig]:
    """Sizes down to the minimum, every switch in every position."""
    size = rng.choice((1, 2, 8, 32))
    device = rng.choice((2, 3, 5, 9, 20)) * max(1, 32 // size)
    cache = CacheConfig(
        device_chunks=device,
        host_chunks=rng.choice((0, 1, device // 2, device, 4 * device)),
        chunk_tokens=size,
        policy=rng.choice(POLICIES),
        swap_watermark=rng.choice((0.0, 0.25, 0.5, 1.0)),
        decode_reserve=rng.choice((0.0, 0.0, 0.1, 0.3)),
    )
    scheduler = SchedulerConfig(
        context_limit=rng.choice((64, 150, 400)),
        max_batch_tokens=rng.choice((1, 7, 32, 500)),
        max_running=rng.choice((1, 3, 16)),
        stateless=rng.random() < 0.1,
        unified_batch=rng.random() < 0.8,
        swap_in_first=rng.random() < 0.5,
    )
    return cache, scheduler


@pytest.mark.fault(12, 31)
@pytest.mark.parametrize("overlapped", [False, True], ids=["in_turn", "overlapped"])
@pytest.mark.parametrize("block", range(at_length(1, 12)))
def test_answers_equal_a_stateless_run(block: int, overlapped: bool) -> None:
    totals = {"swapped": 0, "recomputed": 0, "cached": 0, "suspended": 0, "found": 0, "warmed": 0}
    warmed: Counter[str] = Counter()
    first = (
        FIRST_SEED + (2 * block + overlapped) * PLAYED
    )  # no schedule is played in both ways: others find more
    for seed in range(first, first + PLAYED):
        rng = random.Random(seed)
        cache, scheduler = random_setup(rng)
        clock = Clock()
        worker = HashWorker(cache.device_chunks, cache.host_chunks, cache.chunk_tokens)
        engine = make_engine(cache, scheduler, worker, clock, overlapped=overlapped)
        limit = min(scheduler.context_limit, cache.device_chunks * cache.chunk_tokens)
        driver = Driver(engine, clock, rng, verify_tokens, VOCABULARY, limit)
        driver.verify_beams = verify_beams
        driver.tenants = seed % 2 == 1
        for _ in range(120):
            driver.act()
            for _ in range(rng.randrange(4)):
                driver.step()
        driver.run_until_idle()
        for turn in driver.finished:
            assert turn.usage is not None and turn.usage.reconciles
            totals["swapped"] += turn.usage.swapped_in_tokens
            totals["recomputed"] += turn.usage.recomputed_tokens
            totals["cached"] += turn.usage.gpu_cached_tokens
            totals["found"] += turn.num_new - turn.usage.new_tokens
        warmed += driver.warmed
        totals["warmed"] += engine.stats().warmed_total
        totals["suspended"] += engine.stats().suspensions_total
    assert all(totals.values()), f"a path was never taken: {totals}"
    assert set(warmed) == {"", "no_room", "running", "nothing_to_do", "busy"}, warmed


def test_a_round_knows_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round keeps of a holder is what its chunks say, but for those that the round has handed out."""
    kept, take, asked = EvictionRound._candidates, EvictionRound.take, Counter[str]()
    taken: defaultdict[EvictionRound, set[Chunk]] = defaultdict(set)

    def compared(self: EvictionRound, holder: Holder) -> HolderVictims:
        known = holder in self._seen
        victims = kept(self, holder)
        left = [chunk for chunk in holder.own_chunks if chunk not in taken[self]]
        assert victims.chunks == [chunk.index for chunk in left if reclaim_kind(chunk) is self._reclaim]
        asked["again" if known else "first"] += 1
        return victims

    def recorded(self: EvictionRound) -> list[Chunk]:
        group = take(self)
        taken[self].update(group)
        return group

    monkeypatch.setattr(EvictionRound, "_candidates", compared)
    monkeypatch.setattr(EvictionRound, "take", recorded)
    for seed in range(at_length(8, 400)):
        taken.clear()
        rng = random.Random(1000 + seed)
        cache, scheduler = random_setup(rng)
        worker = HashWorker(cache.device_chunks, cache.host_chunks, cache.chunk_tokens)
        engine = make_engine(cache, scheduler, worker, clock := Clock(), overlapped=seed % 2 == 0)
        limit = min(scheduler.context_limit, cache.device_chunks * cache.chunk_tokens)
        driver = Driver(engine, clock, rng, verify_tokens, VOCABULARY, limit)
        driver.tenants = seed % 3 == 1
        for _ in range(120):
            driver.act()
            for _ in range(rng.randrange(4)):
                driver.step()
        driver.run_until_idle()
    assert asked["again"] > asked["first"] > at_length(150, 1000), asked
