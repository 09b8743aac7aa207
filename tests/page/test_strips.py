"""Strips of sessions: what they say is what a recount of the cache says, in pieces too, and little is counted twice."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from pensieve.config import CacheConfig, CacheGroup, SchedulerConfig
from pensieve.core import SessionKey
from pensieve.engine import strips as looks
from pensieve.engine.cache.chunk import NOWHERE
from pensieve.engine.engine import Engine
from pensieve.engine.messages import GetStrips, SessionStrip, Strips
from pensieve.engine.strips import StripReader
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY, HashWorker, verify_beams, verify_tokens
from support.engine.hybrid_worker import HybridOracle, HybridWorker
from support.lengths import at_length


def random_setup(rng: random.Random) -> tuple[CacheConfig, SchedulerConfig]:
    """Small tiers, in which much moves."""
    size = rng.choice((1, 2, 8, 32))
    device = rng.choice((5, 9, 20)) * max(1, 32 // size)
    cache = CacheConfig(
        device, rng.choice((0, device // 2, 2 * device)), size, swap_watermark=rng.choice((0.0, 0.5, 1.0))
    )
    scheduler = SchedulerConfig(
        context_limit=rng.choice((150, 400)),
        max_batch_tokens=rng.choice((7, 32, 500)),
        max_running=rng.choice((3, 16)),
        unified_batch=rng.random() < 0.8,
    )
    return cache, scheduler


def letters(strip: str) -> str:
    """A letter for each chunk."""
    assert re.fullmatch(r"([dbhxiornDBHXIORN][1-9]\d*)*", strip), strip
    return "".join(letter * int(count) for letter, count in re.findall(r"([a-zA-Z])(\d+)", strip))


def whole_look(engine: Engine) -> list[SessionStrip]:
    strips: list[SessionStrip] = []
    at = 0
    while True:
        (looked,) = engine.handle(GetStrips(7, at))
        assert isinstance(looked, Strips) and looked.call == 7
        strips += looked.sessions
        at = looked.next
        if not at:
            return strips


def recounted(engine: Engine) -> dict[str, str]:
    """The letters of every session, chunk by chunk and position by position."""
    cache, plan = engine._cache, engine._strips.plan
    size = cache.config.chunk_tokens
    owners = Counter(id(chunk) for session in cache.sessions.values() for chunk in session.chunks)
    wanted: dict[SessionKey, dict[int, str]] = {}
    for request in engine._scheduler.running:
        lacking = {at for start, end in request.missing for at in range(start, end)}
        for span in plan.spans:
            if span.request == request.key:
                lacking |= set(range(span.start, span.end))
        of_input = {at // size: "n" for at in lacking if request.history <= at < request.prompt_tokens}
        of_history = {at // size: "r" for at in lacking if at < request.history}
        wanted[request.session] = of_input | of_history
    found = {}
    for key, session in cache.sessions.items():
        word = ""
        for index, chunk in enumerate(session.chunks):
            on_device, on_host = chunk.device != NOWHERE, chunk.host != NOWHERE
            letter = {(1, 1): "b", (1, 0): "d", (0, 1): "h", (0, 0): "x"}[on_device, on_host]
            if any(copy.dst == chunk.host for copy in plan.swap_out):
                letter = "o"
            letter = wanted.get(key, {}).get(index, letter)
            if any(copy.dst == chunk.device for copy in plan.swap_in):
                letter = "i"
            word += letter.upper() if owners[id(chunk)] > 1 else letter
        found[str(key)] = word
    return found


@pytest.mark.parametrize("overlapped", [False, True], ids=["in_turn", "overlapped"])
def test_strips_are_what_a_recount_finds(overlapped: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(at_length(5, 60)):
        rng = random.Random(1000 + 2 * seed + overlapped)
        cache, scheduler = random_setup(rng)
        clock = Clock()
        worker = HashWorker(cache.device_chunks, cache.host_chunks, cache.chunk_tokens)
        engine = make_engine(cache, scheduler, worker, clock, overlapped=overlapped)
        limit = min(scheduler.context_limit, cache.device_chunks * cache.chunk_tokens)
        driver = Driver(engine, clock, rng, verify_tokens, VOCABULARY, limit)
        driver.verify_beams = verify_beams
        for _ in range(80):
            driver.act()
            for _ in range(rng.randrange(4)):
                driver.step()
                if rng.random() < 0.7:  # not after each: what is kept has to outlive steps
                    strips = whole_look(engine)
                    assert {one.session: letters(one.strip) for one in strips} == recounted(engine)
                    for one in strips:
                        session = engine._cache.sessions[SessionKey(one.session)]
                        assert one.running == session.running and one.idle_s >= 0.0
                        seen.update(one.strip)
    assert set("dbhxornDB") <= set(seen), f"a state was never seen: {seen}"


def test_a_second_strip_tells_of_windows() -> None:
    """Of 60 tokens in chunks of 4, the next turn reads the last 5 through a window of 6, or 9 after a cut."""
    groups = CacheGroup("full", 0, 1, 4, 1), CacheGroup("window", 6, 1, 4, 1)
    cache = CacheConfig(80, 80, 4, groups=groups)
    engine = make_engine(cache, SchedulerConfig(context_limit=200), HybridWorker(cache), clock := Clock())
    driver = Driver(engine, clock, random.Random(0), HybridOracle(groups).verify, VOCABULARY, 200)
    for tokens in (39, 19):
        driver.start_turn("t", list(range(tokens)), 1)
        driver.run_until_idle()
    (strip,) = whole_look(engine)
    # Positions 50 to 59 are in chunks 12 to 14. The turn began at 40 and its prompt ended at 58: chunks 8 and 9 are
    # left over, and 13 and 14 are needed anyway.
    assert (strip.strip, strip.tail) == ("d15", "d3l2")


def idle_engine(sessions: int, chunks: int = 3) -> tuple[Engine, Clock]:
    """An engine with so many idle sessions."""
    cache = CacheConfig(sessions * (chunks + 1) + 4, 0, 4, prefix_sharing=False)
    scheduler = SchedulerConfig(context_limit=200, max_batch_tokens=500, max_running=16)
    clock = Clock()
    engine = make_engine(cache, scheduler, HashWorker(cache.device_chunks, 0, 4), clock)
    driver = Driver(engine, clock, random.Random(0), verify_tokens, VOCABULARY, 200)
    for number in range(sessions):
        clock.now += 1.0
        driver.start_turn(f"t{number}", list(range(4 * chunks - 1)), 1)
        driver.run_until_idle()
    return engine, clock


def test_a_look_is_told_in_pieces() -> None:
    engine, clock = idle_engine(20)
    now = 0.0

    def slow() -> float:
        """Each question takes a third of what a look may take."""
        nonlocal now
        now += 0.34 * looks.READ_BUDGET_S
        return now

    looker = StripReader(engine._scheduler, slow)
    told: list[SessionStrip] = []
    at, pieces = 0, 0
    while True:
        looked = looker.read(1, at, clock.now)
        assert 1 <= len(looked.sessions) <= 3
        told += looked.sessions
        pieces, at = pieces + 1, looked.next
        clock.now += 10.0  # an engine may wait between two pieces, which makes nobody idle for longer
        if pieces == 2:
            engine._cache.evict(SessionKey("t9"))  # gone before its turn to be told
        if not at:
            break
    assert [one.session for one in told] == [f"t{number}" for number in range(20) if number != 9]
    idle = [one.idle_s for one in told]
    assert idle == sorted(idle, reverse=True) and idle[-1] >= 0.0
    assert whole_look(engine)[-1].idle_s > idle[-1]


def test_what_has_not_changed_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = idle_engine(20)
    counted: list[int] = []
    real = looks._runs
    monkeypatch.setattr(
        looks, "_runs", lambda chunks, *rest: counted.append(len(chunks)) or real(chunks, *rest)
    )
    first = whole_look(engine)
    assert len(counted) == 20 and [one.strip for one in first] == ["d3"] * 20
    assert [one.strip for one in whole_look(engine)] == ["d3"] * 20 and len(counted) == 20
    engine._cache._tiers.drop(engine._cache.sessions[SessionKey("t4")].chunks[1])
    assert whole_look(engine)[4].strip == "d1x1d1" and len(counted) == 21
