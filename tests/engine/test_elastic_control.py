"""When an elastic device tier grows and shrinks, and what it tells people."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import pytest

from pensieve.config import CacheConfig, CacheGroup, SchedulerConfig
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.elastic import MEASURE_S, RETRY_S, ElasticTier, Need
from pensieve.engine.engine import Engine
from pensieve.engine.messages import Memory, SetMemory
from support.engine.engine_driver import COST, Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY, HashWorker
from support.engine.hybrid_worker import Ends, HybridOracle, HybridWorker

SIZE = 4
GROUPS = (CacheGroup("full", 0, 2, SIZE, 3),)
CHUNK, UNIT = 8, 24
FLOOR, CEILING, HOST = 10 * CHUNK, 60 * CHUNK, 100
CONFIG = CacheConfig(
    60, HOST, SIZE, groups=GROUPS, device_bytes=CEILING, host_bytes=HOST * CHUNK, device_floor_bytes=FLOOR
)
IDLE = Need(active=False)


def set_memory(engine: Engine, wanted: int | None = None) -> Memory:
    (answer,) = engine.handle(SetMemory(7, wanted))
    assert isinstance(answer, Memory) and answer.call == 7
    return answer


class Rig:
    """An engine with an elastic tier, and what its worker saw."""

    def __init__(self, *, ranks: int = 1, idle_release_s: float = 0.0) -> None:
        self.worker, self.clock = HybridWorker(CONFIG), Clock()

        def elastic(cache: CacheManager) -> ElasticTier:
            return ElasticTier(cache, ranks=ranks, idle_release_s=idle_release_s)

        scheduler = SchedulerConfig(48, max_batch_tokens=100, max_running=4)
        self.engine = make_engine(CONFIG, scheduler, self.worker, self.clock, elastic=elastic)
        oracle = HybridOracle(GROUPS)
        self.driver = Driver(
            self.engine, self.clock, random.Random(1), oracle.verify, VOCABULARY, self.engine._scheduler.context_limit
        )  # fmt: skip

    def turns(self, sessions: Sequence[str], tokens: int) -> None:
        """One turn of each session, one after the other."""
        for number, session in enumerate(sessions):
            assert self.driver.start_turn(session, [number] * tokens, 2)
            self.driver.run_until_idle()

    def held(self) -> int:
        return self.engine.stats().device_held


SESSIONS = [f"x{number}" for number in range(6)]


def test_a_plan_frees_a_few_pages_that_the_host_has_and_then_copies() -> None:
    """Else the one plan that follows a command would take longer than a step."""
    rig = Rig()
    rig.turns(SESSIONS, 29)
    cache = rig.engine._scheduler.cache
    cache.swap_out_ahead(rig.clock(), 10)
    cache.complete_copies()
    assert cache.resizer is not None
    changes = []
    for _ in range(5):
        before = cache.occupancy()
        cache.resizer.plan(FLOOR, 0, (0, 0), rig.clock(), most=1)
        after = cache.occupancy()
        cache.complete_copies()
        freed, copied = before.device_used - after.device_used, after.host_used - before.host_used
        changes.append((freed // SIZE, copied // SIZE))
    assert changes == [(4, 0), (4, 0), (3, 1), (1, 1), (1, 1)], (
        "(pages freed, copied out); ten were on the host"
    )


def test_it_grows_instead_of_evicting_and_shrinks_without_a_loss() -> None:
    rig = Rig()
    assert rig.engine._scheduler.context_limit == 9 * SIZE, "what the floor holds in whole units"
    rig.turns(SESSIONS, 29)
    assert FLOOR < rig.held() <= CEILING
    assert not any(plan.swap_out or plan.copies for plan in rig.worker.plans), "the tier could have grown"
    before = len(rig.worker.plans)
    answer = set_memory(rig.engine, FLOOR)
    assert (answer.wanted, answer.held, answer.refused) == (FLOOR, rig.held(), "")
    rig.driver.run_until_idle()
    assert rig.held() == FLOOR == sum(rig.worker.device.backed or ())
    shrinking = rig.worker.plans[before:]
    assert shrinking and not any(plan.spans for plan in shrinking), "no request runs"
    assert sum(len(plan.swap_out) for plan in shrinking) >= 6 * 8 - 9
    assert rig.engine.stats().dropped_total == 0
    rig.turns(SESSIONS, 1)
    for turn in rig.driver.finished[-6:]:
        assert turn.usage is not None and turn.usage.recomputed_tokens == 0
    assert rig.held() == FLOOR, "the operator wants no more"
    set_memory(rig.engine, CEILING)
    rig.driver.run_until_idle()
    assert rig.held() == CEILING, "the tier follows what the operator wants"


def test_running_turns_keep_their_pages_while_the_tier_shrinks() -> None:
    rig = Rig()
    for session in SESSIONS[:3]:
        rig.driver.start_turn(session, [1] * 12, 20)
    for _ in range(4):
        rig.driver.step()
    assert len(rig.driver.turns) == 3
    set_memory(rig.engine, FLOOR)
    rig.driver.step()
    assert rig.held() > FLOOR, "pinned pages stay"
    rig.driver.run_until_idle()
    assert rig.held() == FLOOR and len(rig.driver.finished) == 3
    assert rig.engine.stats().dropped_total == 0


def test_growth_that_fails_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.turns(SESSIONS[:1], 20)
    held = rig.held()
    asked: list[Ends] = []

    def refused(before: Ends, wanted: Ends) -> Ends:
        asked.append(wanted)
        return min(before[0], wanted[0]), 0

    rig.worker.allocate = refused
    with caplog.at_level(logging.WARNING):
        set_memory(rig.engine, CEILING)
        for _ in range(3):
            rig.driver._take(rig.engine.step())
        assert rig.held() == held and len(asked) == 1 and not rig.engine.has_work
        rig.clock.now += RETRY_S
        assert rig.engine.has_work
        rig.driver._take(rig.engine.step())
        assert len(asked) == 2 and asked[1][0] < asked[0][0], "half as much"
    assert len(caplog.records) == 2 and "could not be allocated" in caplog.text
    rig.driver.start_turn(SESSIONS[1], [1] * 20, 5)
    rig.driver.run_until_idle()
    assert rig.driver.finished[-1].usage is not None
    rig.worker.allocate = lambda before, wanted: wanted
    rig.clock.now += RETRY_S
    rig.driver.run_until_idle()
    assert rig.held() == CEILING


def test_ranks_and_refusals() -> None:
    rig = Rig(ranks=2)
    rig.turns(SESSIONS[:1], 5)
    answer = set_memory(rig.engine)
    assert (answer.floor, answer.ceiling, answer.wanted, answer.refused) == (
        2 * FLOOR,
        2 * CEILING,
        2 * CEILING,
        "",
    )
    assert answer.held == 2 * sum(rig.worker.device.backed or ())
    for size, words in ((2 * FLOOR - 1, "less than the floor"), (2 * CEILING + 1, "more than the ceiling")):
        answer = set_memory(rig.engine, size)
        assert words in answer.refused and "\n" not in answer.refused and answer.wanted == 2 * CEILING
    odd = set_memory(rig.engine, 2 * FLOOR + 1)
    assert odd.wanted == 2 * FLOOR + 1 and not odd.refused
    rig.driver.run_until_idle()
    stats = rig.engine.stats()
    assert stats.device_held == 2 * FLOOR and stats.device_wanted == 2 * FLOOR + 1
    assert (stats.device_floor, stats.device_ceiling) == (2 * FLOOR, 2 * CEILING)


def test_a_tier_of_one_size_says_so() -> None:
    engine = make_engine(CacheConfig(8, 8, SIZE), SchedulerConfig(30), HashWorker(8, 8, SIZE), Clock())
    assert set_memory(engine).refused == ""
    assert "has one size" in set_memory(engine, 100).refused
    assert not engine.has_work


def test_an_idle_server_returns_memory() -> None:
    rig = Rig(idle_release_s=600.0)
    rig.turns(SESSIONS, 29)
    assert rig.held() > FLOOR
    last = rig.clock.now
    rig.clock.now = last + 599.0 - 1.0
    assert not rig.engine.has_work or rig.held() == FLOOR
    rig.clock.now = last + 700.0
    assert rig.engine.has_work
    rig.driver.run_until_idle()
    assert rig.held() == FLOOR and set_memory(rig.engine).wanted == CEILING
    assert rig.engine.stats().dropped_total == 0
    rig.turns(["new"], 29)
    rig.turns(["newer"], 29)
    assert rig.held() > FLOOR, "it grows again when turns come"


def follow(tier: ElasticTier, need: Need, now: float) -> None:
    """Plans and results until nothing changes."""
    while (memory := tier.plan(need, now, 100)) is not None:
        tier.on_result(memory, now)


def tier_of(free: Callable[[], int], slack: int) -> ElasticTier:
    return ElasticTier(CacheManager(CONFIG, COST), slack_bytes=slack, free_memory=free)


def test_neighbours_come_first() -> None:
    """Less than the slack is free: shrink until twice that is. More than twice that is free: grow, up to there."""
    total, used = 1_000, [0]
    tier = tier_of(lambda: total - used[0] - tier.held, 100)
    now = 0.0

    def pass_time() -> None:
        nonlocal now
        for _ in range(20):
            now += MEASURE_S
            follow(tier, IDLE, now)

    pass_time()
    assert tier.held == FLOOR
    assert not tier.set_wanted(400, now)
    pass_time()
    assert tier.held == 400
    used[0] = 500
    pass_time()
    assert tier.held == 400, "100 bytes are free: enough"
    used[0] = 540
    pass_time()
    assert tier.held == 260, "twice the slack is free"
    assert tier.wanted == 400
    used[0] = 500
    pass_time()
    assert tier.held == 260, "idle: nothing would be evicted"
    busy = Need(active=True, num_bytes=1_000)
    for _ in range(20):
        now += MEASURE_S
        follow(tier, busy, now)
    assert tier.held == 300, "as long as twice the slack stays free"
    used[0] = 0
    for _ in range(20):
        now += MEASURE_S
        follow(tier, busy, now)
    assert tier.held == 400, "never above what the operator wants"
    used[0] = 2_000
    pass_time()
    assert tier.held == FLOOR


def test_a_request_waits_for_growth_but_not_for_ever() -> None:
    tier = tier_of(lambda: 0, 0)
    follow(tier, IDLE, 0.0)
    assert not tier.defers(FLOOR // UNIT * UNIT, 0.0) and tier.defers(FLOOR + 1, 0.0)
    memory = tier.plan(Need(active=True, num_bytes=FLOOR + 1), 0.0, 100)
    assert memory is not None and memory[0] > FLOOR and tier.defers(FLOOR + 1, 0.0)
    tier.on_result((FLOOR, 0), 0.0)
    assert not tier.defers(FLOOR + 1, 0.0), "memory could not be allocated: evict"
    assert tier.defers(FLOOR + 1, RETRY_S)
    assert not tier.set_wanted(FLOOR, RETRY_S) and not tier.defers(FLOOR + 1, RETRY_S)


def test_a_tier_of_one_size_has_no_controller() -> None:
    with pytest.raises(ValueError, match="one size"):
        ElasticTier(CacheManager(CacheConfig(8, 8, SIZE), COST))
