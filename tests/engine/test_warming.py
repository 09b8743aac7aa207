"""Warming brings a session to the device ahead of its turn, and nobody else is the worse for it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import DEFAULT_QOS, SessionKey, Usage, pack_tokens
from pensieve.engine.cache.policy import UNKNOWN
from pensieve.engine.messages import Evict, Warm, Warmed
from pensieve.engine.plan import Plan
from pensieve.engine.scheduling.warming import EXPECTED_S, MOST_PENDING, WARM_TOKENS
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY, HashWorker, verify_tokens

CACHE = CacheConfig(
    device_chunks=16,
    host_chunks=16,
    chunk_tokens=4,
    policy="retention",
    swap_watermark=0.0,
    decode_reserve=0.0,
)
SCHEDULER = SchedulerConfig(context_limit=64, max_batch_tokens=16, max_running=8)


class Rig:
    """An engine on hashed KV. Sessions are ``a`` to ``f``; those of the driver's scopes are others."""

    def __init__(
        self, cache: CacheConfig = CACHE, scheduler: SchedulerConfig = SCHEDULER, *, overlapped: bool = False
    ) -> None:
        self.clock = Clock()
        self.worker = HashWorker(cache.device_chunks, cache.host_chunks, cache.chunk_tokens)
        self.engine = make_engine(cache, scheduler, self.worker, self.clock, overlapped=overlapped)
        self.driver = Driver(self.engine, self.clock, random.Random(0), verify_tokens, VOCABULARY, 64)

    def turn(self, session: str, count: int, want: int = 1) -> int:
        key = self.driver.start_turn(session, list(range(count)), want)
        assert key is not None
        return key

    def done(self, session: str, count: int, want: int = 1) -> Usage:
        """A turn from its beginning to its end, and its receipt."""
        self.turn(session, count, want)
        self.driver.run_until_idle()
        usage = self.driver.finished[-1].usage
        assert usage is not None
        return usage

    def step(self) -> Plan:
        self.driver.step()
        return self.worker.plans[-1]

    def warm(self, session: str, scope: str = "") -> Warmed:
        (answer,) = self.engine.handle(
            Warm(7, session, pack_tokens(self.driver.history.get(session, [])), scope)
        )
        assert isinstance(answer, Warmed) and answer.call == 7
        return answer

    def on_device(self, session: str) -> int:
        held = self.engine._scheduler.cache.residency(SessionKey(session))
        return held.device

    def lost(self, session: str) -> None:
        """Nothing of the session is cached any more."""
        self.engine.handle(Evict(1, session))

    def swapped_out(self) -> None:
        """A session ``a`` of 23 tokens, all on the host, and an empty device."""
        self.done("a", 22)
        self.done("b", 60)
        self.lost("b")
        assert self.engine._scheduler.cache.residency(SessionKey("a")).host == 23


@pytest.mark.parametrize("overlapped", [False, True])
def test_what_is_on_the_host_is_there_when_its_turn_comes(overlapped: bool) -> None:
    rig = Rig(overlapped=overlapped)
    rig.swapped_out()
    before, new = rig.worker.plans[-1].step, rig.engine.stats().new_total
    assert rig.warm("a") == Warmed(7, "", 0, 23)
    rig.driver.run_until_idle()
    plans = [plan for plan in rig.worker.plans if plan.step > before]
    assert [len(plan.swap_in) for plan in plans if plan.swap_in] == [6]
    assert not any(plan.spans for plan in plans), "nothing is computed"
    assert rig.on_device("a") == 23 and rig.engine.stats().warmed_total == 23
    assert rig.engine.stats().new_total == new and rig.engine.stats().swapped_in_total == 0, "it is no turn"
    usage = rig.done("a", 3)
    assert (usage.gpu_cached_tokens, usage.swapped_in_tokens, usage.recomputed_tokens) == (23, 0, 0)


def test_what_was_dropped_is_recomputed_while_nobody_else_wants_the_machine() -> None:
    rig = Rig()
    rig.done("a", 22)
    rig.lost("a")
    assert rig.warm("a").refused == ""
    rig.driver.run_until_idle()
    assert rig.on_device("a") == 23 and rig.engine.stats().warmed_total == 23
    assert rig.engine._scheduler.computed_ahead == {DEFAULT_QOS.tenant: 23}
    assert rig.done("a", 3).gpu_cached_tokens == 23


def test_the_last_step_of_a_turn_refuses_no_other_session() -> None:
    """A turn's client has its end before the KV of the last token is computed, and may warm at once."""
    rig = Rig()
    rig.done("a", 22)
    rig.lost("a")
    rig.turn("b", 10, 2)
    while len(rig.driver.finished) < 2:
        rig.step()
    assert rig.engine._scheduler.running, "its last token is still to be computed"
    assert rig.warm("a").refused == "" and rig.warm("b").refused == "running"
    rig.driver.run_until_idle()
    assert rig.on_device("a") == 23


def test_refusals() -> None:
    rig = Rig()
    assert rig.warm("a").refused == "nothing_to_do", "nothing was said yet"
    rig.done("a", 22)
    assert rig.warm("a") == Warmed(7, "nothing_to_do", 23, 0)
    rig.lost("a")
    rig.turn("b", 10, 3)
    assert rig.warm("b").refused == "running" and rig.warm("a").refused == "busy"
    rig.step()
    assert rig.warm("b").refused == "running" and rig.warm("a").refused == "busy"
    rig.driver.run_until_idle()
    rig.done("c", 45)
    assert rig.warm("a").refused == "no_room", "others' chunks have no copies: they would have to be evicted"
    rig.driver.history["d"] = [1] * 64
    assert rig.warm("d").refused == "no_room", "it can never fit"
    rig.lost("c")
    assert rig.warm("a").refused == "" and rig.warm("a").refused == "", "it is in hand"
    for number in range(MOST_PENDING):
        rig.driver.history[f"x{number}"] = [1, 2, 3]
        rig.warm(f"x{number}")
    assert rig.warm("x0").refused == ""
    rig.driver.history["y"] = [1, 2, 3]
    assert rig.warm("y").refused == "busy"
    rig.driver.run_until_idle()
    stateless = Rig(scheduler=replace(SCHEDULER, stateless=True))
    stateless.done("a", 5)
    assert stateless.warm("a").refused == "nothing_to_do"


def test_it_takes_pages_that_cost_nothing_and_evicts_nothing() -> None:
    """Chunks that are on both tiers give their device pages; what only the device has stays."""
    rig = Rig()
    rig.done("a", 22)
    rig.done("b", 30)
    rig.done("c", 20)
    cache = rig.engine._scheduler.cache
    assert cache.residency(SessionKey("a")).host > 0
    before = {name: cache.residency(SessionKey(name)) for name in "bc"}
    assert rig.warm("a").refused == "no_room"
    cache.swap_out_ahead(rig.clock.now, 16)  # no watermark: nothing
    cache._evictor._watermark = 16
    rig.done("d", 1)
    rig.driver.run_until_idle()
    assert rig.warm("a").refused == ""
    rig.driver.run_until_idle()
    assert rig.on_device("a") == 23
    after = {name: cache.residency(SessionKey(name)) for name in "bc"}
    assert all(sum_of(before[name]) == sum_of(after[name]) for name in "bc"), "nothing was dropped"


def sum_of(held: object) -> int:
    return held.device + held.host  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("other", ["a", "b"])
def test_a_turn_ends_it_at_once_and_finds_what_it_has_brought(other: str, overlapped: bool) -> None:
    rig = Rig(overlapped=overlapped)
    rig.done("a", 45)
    rig.lost("a")
    assert rig.warm("a").refused == ""
    rig.step()
    key = rig.turn(other, 5, 4)
    plan = rig.step()
    assert {span.request for span in plan.spans} == {key}, "nothing but the turn"
    if other == "b":
        rig.driver.run_until_idle()
        rig.turn("a", 5, 4)
        rig.step()
    rig.driver.run_until_idle()
    usage = rig.driver.finished[-1].usage
    assert usage is not None
    assert usage.gpu_cached_tokens == rig.engine.stats().warmed_total == 16


def test_it_never_begins_while_somebody_waits() -> None:
    rig = Rig(scheduler=replace(SCHEDULER, max_running=1))
    rig.swapped_out()
    first = rig.turn("c", 5, 3)
    second = rig.turn("d", 5, 3)
    assert rig.warm("a").refused == ""
    loads = []
    while rig.driver.turns:
        waited = bool(rig.engine._scheduler.queue)
        plan = rig.step()
        loads += [waited] * len(plan.swap_in)
    assert first in [1, 2, 3] and second and not any(loads)
    rig.driver.run_until_idle()
    assert rig.on_device("a") == 23, "it comes as soon as nobody waits"


def test_nothing_is_pinned_afterwards() -> None:
    rig = Rig()
    rig.swapped_out()
    rig.warm("a")
    rig.driver.run_until_idle()
    assert not rig.engine.has_work
    assert rig.done("b", 2).context_tokens == 63, "a turn that needs every page has them"


@pytest.mark.parametrize("after", range(16))
def test_a_generation_that_needs_pages_ends_it_before_anybody_is_suspended(after: int) -> None:
    """Two generations fill the device to the last page; whenever it comes in, they go on as if it had not."""
    rig = Rig(overlapped=True)
    rig.swapped_out()
    rig.turn("c", 15, 16)
    rig.turn("d", 15, 16)
    for _ in range(after):
        rig.step()
    rig.warm("a")
    rig.driver.run_until_idle()
    assert rig.engine.stats().suspensions_total == 0


def test_it_counts_as_recent_and_teaches_the_policy_nothing() -> None:
    """A session idle for an hour is warmed: it is not the first to go, and its idle period is as long as before."""
    rig = Rig(replace(CACHE, policy="gittins"))
    rig.swapped_out()
    cache = rig.engine._scheduler.cache
    session = cache.sessions[SessionKey("a")]
    kind, policy = session.kind, cache.index.policy
    told: list[str] = []
    policy.on_return = policy.on_turn_end = lambda *_: told.append("told")  # type: ignore[assignment,method-assign,return-value]
    rig.clock.now += 3600
    rig.warm("a")
    rig.driver.run_until_idle()
    assert not told and session.kind == kind != UNKNOWN
    assert session.last_active == pytest.approx(rig.clock.now, abs=100) and session.hint.pause > 0
    rig.clock.now += EXPECTED_S
    value = cache.index.value(session, 1.0, 1, rig.clock.now)
    session.last_active -= 3600
    assert value > cache.index.value(session, 1.0, 1, rig.clock.now)


def test_evicting_a_session_takes_back_the_wish_to_warm_it() -> None:
    rig = Rig()
    rig.swapped_out()
    rig.warm("a")
    rig.lost("a")
    assert not rig.engine._scheduler.has_requests
    rig.driver.run_until_idle()
    assert rig.engine.handle(Evict(2)) and rig.on_device("a") == 0


def test_a_fork_finds_the_chunks_of_its_source() -> None:
    """It has nothing in the engine yet; warming makes it one more owner, and brings what is on the host."""
    rig = Rig()
    rig.driver.start_turn("s0", list(range(30)), 2)
    rig.driver.run_until_idle()
    rig.driver.start_turn("s4", list(range(60)), 1)
    rig.driver.run_until_idle()
    rig.lost("s4")
    rig.driver.history["s1"] = list(rig.driver.history["s0"])[:29]
    assert rig.warm("s1", "a").refused == ""
    rig.driver.run_until_idle()
    assert rig.on_device("s1") == 29
    rig.driver.start_turn("s1", [5, 6], 2)
    rig.driver.run_until_idle()
    usage = rig.driver.finished[-1].usage
    assert usage is not None and usage.gpu_cached_tokens == 29 and usage.recomputed_tokens == 0


def test_its_steps_are_short() -> None:
    """Whoever comes in the middle waits for no long prefill."""
    cache = replace(CACHE, device_chunks=400, host_chunks=0)
    rig = Rig(cache, SchedulerConfig(context_limit=1500, max_batch_tokens=4096, max_running=8))
    rig.driver.limit = 1500
    rig.driver.history["a"] = [number % VOCABULARY for number in range(1300)]
    assert rig.warm("a").refused == ""
    assert [rig.step().num_tokens for _ in range(3)] == [WARM_TOKENS, WARM_TOKENS, 1300 - 2 * WARM_TOKENS]
    assert rig.on_device("a") == 1300


def test_a_session_makes_no_room_for_itself() -> None:
    """Its own chunks that are on both tiers are reclaimable, and are what is to be there in the end."""
    rig = Rig()
    rig.swapped_out()
    rig.warm("a")
    rig.driver.run_until_idle()
    rig.done("d", 39)
    rig.done("c", 6)
    stats = rig.engine.stats()
    assert (stats.device_free, stats.device_reclaimable) == (0, 16) and 0 < rig.on_device("a") < 23
    assert rig.warm("a").refused == "no_room"
