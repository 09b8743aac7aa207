"""Candidates and beams: whatever happens to a group, each candidate's answer is that of a turn of its own, and a search
finds what a stateless search would."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from pensieve.config import CacheConfig, CacheGroup, SchedulerConfig
from pensieve.core import Sampling, pack_tokens
from pensieve.engine.cache import tails
from pensieve.engine.cache.sharing import PrefixPath
from pensieve.engine.messages import Cancel, Submit
from pensieve.engine.scheduling.request import Request
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY, HashWorker, verify_beams, verify_tokens
from support.engine.hybrid_worker import HybridOracle, HybridWorker
from support.lengths import FIRST_SEED, at_length

GROUPS = {
    "full": (CacheGroup("full", 0, 1, 4, 1),),
    "window": (CacheGroup("full", 0, 2, 4, 3), CacheGroup("window", 6, 3, 4, 2)),
    "state": (CacheGroup("full", 0, 2, 4, 3), CacheGroup("state", 0, 3, 3, 2)),
}


def run(seed: int, *, overlapped: bool) -> tuple[Driver, HashWorker]:
    """One random schedule of turns of which most are groups, on tiers that are too small for them."""
    rng = random.Random(seed)
    size = rng.choice((1, 4, 8))
    device = rng.choice((12, 20, 40)) * max(1, 8 // size)
    cache = CacheConfig(
        device_chunks=device,
        host_chunks=rng.choice((0, device // 2, 2 * device)),
        chunk_tokens=size,
        swap_watermark=rng.choice((0.0, 0.25)),
        decode_reserve=rng.choice((0.0, 0.1)),
    )
    scheduler = SchedulerConfig(
        context_limit=150,
        max_batch_tokens=rng.choice((5, 32, 500)),
        max_running=rng.choice((5, 16)),
        stateless=rng.random() < 0.1,
        unified_batch=rng.random() < 0.8,
    )
    clock = Clock()
    worker = HashWorker(cache.device_chunks, cache.host_chunks, cache.chunk_tokens)
    engine = make_engine(cache, scheduler, worker, clock, overlapped=overlapped)
    limit = min(scheduler.context_limit, cache.device_chunks * cache.chunk_tokens)
    driver = Driver(engine, clock, rng, verify_tokens, VOCABULARY, limit)
    driver.verify_beams, driver.groups = verify_beams, 0.7
    for _ in range(60):
        driver.act()
        for _ in range(rng.randrange(4)):
            driver.step()
    driver.run_until_idle()
    return driver, worker


@pytest.mark.parametrize("block", range(at_length(1, 14)))
def test_groups_answer_as_turns_of_their_own(block: int) -> None:
    """Each second schedule plans steps ahead. No schedule is played in both ways: others find more."""
    seen: Counter[str] = Counter()
    first = FIRST_SEED + 28 * block
    for seed in range(first, first + 28):
        driver, worker = run(seed, overlapped=seed % 2 == 1)
        for turn in driver.finished:
            seen["candidates"] += len(turn.outputs) > 1
            seen["stopped alone"] += bool(turn.stopped)
            seen["beams"] += turn.beams is not None
            seen["refused"] += turn.failed is not None
        seen["suspended"] += driver.engine.stats().suspensions_total
        seen["copied tails"] += sum(len(plan.copies) for plan in worker.plans)
    assert min(seen[name] for name in ("candidates", "stopped alone", "beams", "suspended")) > 0, seen
    assert seen["copied tails"] > 20, seen


def test_a_search_takes_one_step_for_each_token() -> None:
    """All beams begin with the prompt. One that branches goes on in the plan that branches it: none waits a step."""
    cache = CacheConfig(device_chunks=100, host_chunks=0, chunk_tokens=4)
    worker = HashWorker(cache.device_chunks, cache.host_chunks, cache.chunk_tokens)
    engine = make_engine(cache, SchedulerConfig(context_limit=100), worker, Clock())
    sampling = Sampling(max_output_tokens=20, ignore_eos=True, beam_width=4)
    engine.handle(Submit(1, "s", pack_tokens([1, 2, 3]), 3, sampling))
    while engine.has_work:
        engine.step()
    widths = [len(plan.spans) for plan in worker.plans if plan.spans]
    assert widths[:20] == [4] * 20, widths


def test_a_search_is_suspended_as_a_whole_and_goes_on_where_it_was() -> None:
    """An older generation grows into the pages of a search: all beams leave together, and the answer stays exact."""
    cache = CacheConfig(device_chunks=17, host_chunks=0, chunk_tokens=4, decode_reserve=0.0)
    worker = HashWorker(cache.device_chunks, cache.host_chunks, cache.chunk_tokens)
    clock = Clock()
    engine = make_engine(cache, SchedulerConfig(context_limit=80), worker, clock, overlapped=True)
    driver = Driver(engine, clock, random.Random(0), verify_tokens, VOCABULARY, 68)
    driver.verify_beams = verify_beams
    driver.start_turn("old", list(range(8)), 50)
    driver.step()
    driver.start_turn("search", list(range(20, 26)), 16, Sampling(beam_width=3))
    running = set[int]()
    while driver.turns:
        driver.step()
        running.add(sum(request.guided for request in engine._scheduler.running))
    assert running == {0, 3}, "no beam runs without the others"
    assert engine.stats().suspensions_total > 0
    assert {turn.session for turn in driver.finished} == {"old", "search"}


@pytest.mark.parametrize("name", ["full", "state"])
def test_a_candidate_that_was_stopped_before_it_began_is_not_stopped_again(name: str) -> None:
    """It had no KV and no place in the batch. The turn's end stopped it a second time, which ended the engine."""
    groups = GROUPS[name]
    cache = CacheConfig(20, 0, 4, decode_reserve=0.0, groups=groups, device_bytes=20 * 40)
    engine = make_engine(cache, SchedulerConfig(40, max_batch_tokens=4), HybridWorker(cache), Clock())
    for steps in (0, 1):
        engine.handle(Submit(1, "s", pack_tokens(range(9)), 9, Sampling(max_output_tokens=3, candidates=3)))
        for _ in range(steps):
            engine.step()
        engine.handle(Cancel(1, 2))
        engine.handle(Cancel(1))
        while engine.has_work:
            engine.step()
        engine.check()


def test_candidates_that_stop_one_after_the_other_while_their_prompt_is_computed() -> None:
    """Each next one takes over the rest of the prompt, and the slices of the chunks that it shares with the one that
    leaves; not that one's last chunk."""
    cache = CacheConfig(40, 0, 4, groups=GROUPS["window"])
    engine = make_engine(
        cache, SchedulerConfig(40, max_batch_tokens=3), HybridWorker(cache), clock := Clock()
    )
    verify = HybridOracle(GROUPS["window"]).verify
    driver = Driver(engine, clock, random.Random(0), verify, VOCABULARY, engine._scheduler.context_limit)
    driver.start_turn("s", list(range(10)), 3, Sampling(temperature=1.0, seed=1, candidates=3))
    for number in (0, 1):
        driver.step()
        driver.turns[1].stopped.add(number)
        driver.turns[1].ended.add(number)
        engine.handle(Cancel(1, number))
        engine.check()
    driver.run_until_idle()
    assert len(driver.finished[0].outputs[2]) == 3


def test_a_beam_that_waits_is_not_admitted_by_the_addresses_of_another() -> None:
    """A search is suspended while a step runs. Its addresses are looked up in the queue, then it goes on as another
    beam: cached chunks are found for that one's context."""
    request = Request.from_submit(Submit(1, "s", pack_tokens(range(9)), 9, Sampling(beam_width=2)), 0, 0.0)
    request.lead(2, guided=True)
    request.set_prefix_path(PrefixPath("tenant", (b"1", b"2")))
    request.continue_with(np.arange(8, 16, dtype=np.int32), 5)
    assert request.path is None


@pytest.mark.parametrize("cut", [0, 5], ids=["tail", "shared chunk"])
@pytest.mark.parametrize("name", ["full", "window"])
def test_candidates_that_fill_the_device(name: str, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the tier, a group that is admitted has a page for each candidate's last chunk: a copy of the
    leader's *tail*, or behind a *shared chunk* that the leader itself had to copy."""
    monkeypatch.setattr(tails, "LEAST_SPAN", 8)
    groups, copied = GROUPS[name], 0
    for count in (2, 3, 4):
        for device in range(3, 20):
            two = len(groups) == 2
            cache = CacheConfig(device, 0, 4, decode_reserve=0.0, **({"groups": groups} if two else {}))
            worker = HybridWorker(cache) if two else HashWorker(device, 0, 4)
            verify = HybridOracle(groups).verify if two else verify_tokens
            engine = make_engine(cache, SchedulerConfig(40), worker, clock := Clock())
            limit = engine._scheduler.context_limit
            driver = Driver(engine, clock, random.Random(0), verify, VOCABULARY, limit)
            for session in ("s0", "s1"):
                driver.history[session] = list(range(9))
                driver.start_turn(session, [5], 3)
                driver.run_until_idle()
            if cut:
                del driver.history["s1"][cut:]
            driver.start_turn("s1", [50], 2, Sampling(temperature=1.0, seed=1, candidates=count))
            driver.run_until_idle()
            copied += sum(len(plan.copies) for plan in worker.plans)
    assert copied, "nothing was ever copied"
