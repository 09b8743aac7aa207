"""Rules of batch formation: unified batches, first come first served, reserve, suspension, finish reasons."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from functools import partial

import pytest

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import FinishReason, Phase, Sampling, Usage, pack_tokens
from pensieve.engine.engine import Engine
from pensieve.engine.messages import (
    Cancel,
    Evict,
    Evicted,
    Failed,
    Finished,
    GetResidency,
    RequestProgress,
    ResidentTokens,
    Submit,
)
from pensieve.engine.plan import Plan
from pensieve.engine.scheduling.request import Request
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY, HashWorker, oracle_tokens, verify_tokens

CACHE = CacheConfig(device_chunks=16, host_chunks=16, chunk_tokens=4, swap_watermark=0.0)
SCHEDULER = SchedulerConfig(context_limit=64, max_batch_tokens=16, max_running=8)


class Rig:
    """An engine on hashed KV whose plans can be looked at."""

    def __init__(
        self, cache: CacheConfig = CACHE, scheduler: SchedulerConfig = SCHEDULER, *, overlapped: bool = False
    ) -> None:
        self.clock = Clock()
        self.worker = HashWorker(cache.device_chunks, cache.host_chunks, cache.chunk_tokens)
        self.engine: Engine = make_engine(cache, scheduler, self.worker, self.clock, overlapped=overlapped)
        limit = min(scheduler.context_limit, cache.device_chunks * cache.chunk_tokens)
        self.driver = Driver(self.engine, self.clock, random.Random(0), verify_tokens, VOCABULARY, limit)

    def turn(self, session: str, count: int, want: int) -> int:
        key = self.driver.start_turn(session, list(range(count)), want)
        assert key is not None
        return key

    def receipt(self, session: str, new: list[int]) -> Usage:
        """The receipt of a further turn, when all is done."""
        self.driver.start_turn(session, new, 1)
        self.driver.run_until_idle()
        usage = self.driver.finished[-1].usage
        assert usage is not None
        return usage

    def step(self) -> Plan:
        self.driver.step()
        return self.worker.plans[-1]


def sizes(plan: Plan) -> list[tuple[int, int]]:
    """(request, tokens) of each span."""
    return [(span.request, len(span.tokens)) for span in plan.spans]


def test_prefill_and_decode_share_a_step() -> None:
    rig = Rig()
    first = rig.turn("a", 5, 8)
    assert sizes(rig.step()) == [(first, 5)]
    second = rig.turn("b", 6, 8)
    assert sizes(rig.step()) == [(first, 1), (second, 6)]


def test_without_unified_batches_they_do_not() -> None:
    rig = Rig(scheduler=replace(SCHEDULER, unified_batch=False))
    first = rig.turn("a", 5, 8)
    rig.step()
    second = rig.turn("b", 6, 8)
    assert sizes(rig.step()) == [(second, 6)]
    assert sizes(rig.step()) == [(first, 1), (second, 1)]


def test_long_prefill_is_split_by_the_budget_while_others_decode() -> None:
    rig = Rig()
    first = rig.turn("a", 3, 9)
    rig.step()
    second = rig.turn("b", 40, 2)
    assert [sizes(rig.step()) for _ in range(3)] == [
        [(first, 1), (second, 15)],
        [(first, 1), (second, 15)],
        [(first, 1), (second, 10)],
    ]
    plan = rig.worker.plans[-1]
    assert [span.sample is not None for span in plan.spans] == [True, True]
    assert all(span.sample is None for span in rig.worker.plans[-2].spans if span.request == second)


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    rig = Rig()
    first = rig.turn("a", 40, 12)
    rig.step()
    rig.turn("big", 40, 2)  # does not fit beside the first
    rig.turn("small", 2, 2)  # would
    for _ in range(3):
        assert {request for request, _ in sizes(rig.step())} == {first}
    rig.driver.run_until_idle()
    assert [turn.session for turn in rig.driver.finished] == ["a", "big", "small"]


def test_dropped_range_and_new_input_are_two_spans_of_one_step() -> None:
    rig = Rig(CacheConfig(device_chunks=10, host_chunks=0, chunk_tokens=4, swap_watermark=0.0))
    rig.turn("a", 14, 2)
    rig.driver.run_until_idle()
    rig.turn("b", 27, 1)  # takes seven of ten pages: drops a's first chunk
    rig.driver.run_until_idle()
    rig.driver.start_turn("a", [1, 2, 3], 1)
    plan = rig.step()
    assert [(span.start, span.end) for span in plan.spans] == [(0, 4), (16, 19)]
    assert [span.sample is not None for span in plan.spans] == [False, True]


def test_the_youngest_is_suspended_and_returns_first() -> None:
    rig = Rig(CacheConfig(device_chunks=8, host_chunks=8, chunk_tokens=4, decode_reserve=0.0))
    rig.turn("a", 12, 12)
    rig.step()
    rig.turn("b", 10, 12)
    while not rig.engine.stats().suspensions_total:
        rig.step()
    rig.turn("c", 2, 2)
    waiting = [request.session for request in rig.engine._scheduler.queue]
    assert waiting == ["b", "c"]
    before = len(rig.worker.plans)
    rig.driver.run_until_idle()
    later = [span.request for plan in rig.worker.plans[before:] for span in plan.spans]
    assert later.index(2) < later.index(3)
    assert sorted(turn.session for turn in rig.driver.finished) == ["a", "b", "c"]


@pytest.mark.parametrize("swap_in_first", [True, False])
def test_swap_out_ahead_of_time_yields_to_swap_in(
    swap_in_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CacheConfig(device_chunks=24, host_chunks=60, chunk_tokens=4, swap_watermark=0.6)
    rig = Rig(cache, replace(SCHEDULER, swap_in_first=swap_in_first))
    tiers, evictor = rig.engine._cache._tiers, rig.engine._cache._evictor
    ahead: list[tuple[bool, bool]] = []
    save_ahead = evictor.save_ahead

    def spy(now: float, limit: int) -> None:
        before = len(tiers._swap_out)
        save_ahead(now, limit)
        ahead.append((len(tiers._swap_out) > before, tiers.swaps_in))

    monkeypatch.setattr(evictor, "save_ahead", spy)
    rig.driver.rng.seed(3)
    for _ in range(400):
        rig.driver.act()
        rig.step() if rig.engine.has_work else None
    assert any(plan.swap_in for plan in rig.worker.plans) and (True, False) in ahead
    assert ((True, True) in ahead) is not swap_in_first


def test_the_last_token_is_cached_before_the_next_turn() -> None:
    rig = Rig()
    rig.turn("a", 6, 4)
    rig.driver.run_until_idle()
    usage = rig.receipt("a", [7, 8])
    assert (usage.gpu_cached_tokens, usage.recomputed_tokens, usage.new_tokens) == (10, 0, 2)


def finish_without_a_further_step(rig: Rig) -> int:
    """Run a turn until it has just finished, when its last token is not cached yet; returns its request key."""
    key = rig.turn("a", 6, 4)
    while not rig.driver.finished:
        rig.step()
    assert rig.engine.has_work
    return key


def test_a_late_cancel_does_not_cost_the_last_token() -> None:
    rig = Rig()
    key = finish_without_a_further_step(rig)
    rig.engine.handle(Cancel(key))
    rig.driver.run_until_idle()
    assert rig.receipt("a", [7]).recomputed_tokens == 0


@pytest.mark.parametrize("session", ["a", ""])
def test_evict_leaves_nothing_of_a_session_that_has_just_finished(session: str) -> None:
    rig = Rig()
    finish_without_a_further_step(rig)
    (evicted,) = rig.engine.handle(Evict(1, session))
    assert isinstance(evicted, Evicted)
    assert evicted.tokens == 9
    assert rig.engine.stats().device_used == 0


def test_stateless_recomputes_all_of_the_history() -> None:
    rig = Rig(scheduler=replace(SCHEDULER, stateless=True))
    rig.turn("a", 6, 4)
    rig.driver.run_until_idle()
    usage = rig.receipt("a", [7, 8])
    assert (usage.gpu_cached_tokens, usage.recomputed_tokens, usage.new_tokens) == (0, 10, 2)
    assert rig.engine.stats().device_used == 0


def run_one(
    sampling: Sampling, scheduler: SchedulerConfig = SCHEDULER, *, overlapped: bool = False
) -> tuple[FinishReason, int]:
    """Finish reason and output length of a turn on the context 0 … 9."""
    rig = Rig(scheduler=scheduler, overlapped=overlapped)
    rig.engine.handle(Submit(1, "a", pack_tokens(range(10)), 10, sampling))
    for _ in range(100):
        for event in rig.engine.step():
            if isinstance(event, Finished):
                return event.reason, event.usage.output_tokens
    raise AssertionError("did not finish")


@pytest.mark.parametrize("overlapped", [False, True])
def test_finish_reasons(overlapped: bool) -> None:
    run = partial(run_one, overlapped=overlapped)
    answer = oracle_tokens(range(10), 60)
    third = answer[2]
    assert third not in answer[:2]
    assert run(Sampling(max_output_tokens=5)) == (FinishReason.LENGTH, 5)
    assert run(Sampling(stop_token_ids=(third,))) == (FinishReason.STOP_TOKEN, 3)
    with_eos = replace(SCHEDULER, eos_token_ids=(third,))
    assert run(Sampling(max_output_tokens=9), with_eos) == (FinishReason.EOS, 3)
    assert run(Sampling(max_output_tokens=9, ignore_eos=True), with_eos) == (FinishReason.LENGTH, 9)
    assert run(Sampling(ignore_eos=True)) == (FinishReason.CONTEXT_FULL, 54)
    assert run(Sampling(max_output_tokens=5, presence_penalty=1e-30)) == (FinishReason.LENGTH, 5)


def test_a_step_is_launched_before_the_one_before_it_has_answered() -> None:
    rig = Rig(overlapped=True)
    turn = rig.turn("a", 5, 3)
    plans = [rig.step(), rig.step()]
    assert sizes(plans[0]) == [(turn, 5)] and sizes(plans[1]) == [(turn, 1)]
    assert plans[1].spans[0].tokens.tolist() == [
        rig.driver.turns[turn].outputs[0][0]
    ]  # known by now, PENDING then
    assert len(rig.driver.turns[turn].outputs[0]) == 1  # the second is being sampled
    rig.driver.run_until_idle()
    assert len(rig.worker.plans) == 4  # the last one caches the last token


def test_an_end_that_shows_late_costs_no_step_and_leaves_the_whole_turn_cached() -> None:
    answer = oracle_tokens(range(10), 3)
    rig = Rig(overlapped=True)
    key = rig.driver.start_turn("a", list(range(10)), 9, Sampling(stop_token_ids=(answer[2],)))
    rig.driver.run_until_idle()
    assert rig.driver.finished[0].outputs[0] == answer and key is not None
    assert len(rig.worker.plans) == 4  # in the fourth, the one behind the end was sampled in vain
    (residency,) = rig.engine.handle(GetResidency(1, "a"))
    assert isinstance(residency, ResidentTokens) and residency.device_tokens == 13


def test_a_generation_suspended_in_its_last_step_ends_without_coming_back() -> None:
    rig = Rig(
        CacheConfig(device_chunks=9, host_chunks=0, chunk_tokens=4, decode_reserve=0.0),
        replace(SCHEDULER, context_limit=36, max_batch_tokens=64),
        overlapped=True,
    )
    rig.turn("old", 16, 12)  # both fill four chunks; there is one more, for the older one's first token
    end = oracle_tokens(range(16), 1)
    young = rig.driver.start_turn("young", list(range(16)), 9, Sampling(stop_token_ids=(end[0],)))
    rig.step()
    rig.step()  # suspends the younger one, whose only token is then found to be its last
    assert rig.engine.stats().suspensions_total == 1
    assert [turn.session for turn in rig.driver.finished] == ["young"]
    rig.driver.run_until_idle()
    assert sum(span.request == young for plan in rig.worker.plans for span in plan.spans) == 1


@pytest.mark.fault(24)
@pytest.mark.parametrize(("count", "refused"), [(63, False), (64, True), (1000, True)])
def test_a_context_that_can_never_fit_is_refused_at_once(count: int, refused: bool) -> None:
    rig = Rig()
    events = rig.engine.handle(Submit(1, "a", pack_tokens(range(count)), count, Sampling()))
    assert isinstance(events[0], Failed if refused else RequestProgress)
    if refused:
        assert events[0].reason == "CONTEXT_LIMIT_EXCEEDED"
        assert not rig.engine.has_work


@pytest.mark.fault(20)
@pytest.mark.parametrize(("count", "num_new"), [(0, 0), (3, 4)])
def test_nonsense_from_the_front_end_fails_the_request_not_the_engine(count: int, num_new: int) -> None:
    rig = Rig()
    (event,) = rig.engine.handle(Submit(1, "a", pack_tokens(range(count)), num_new, Sampling()))
    assert isinstance(event, Failed)
    assert not rig.engine.has_work


@pytest.mark.fault(35)
def test_a_full_queue_refuses() -> None:
    rig = Rig(scheduler=replace(SCHEDULER, max_queued=2))
    events = [rig.engine.handle(Submit(n, f"s{n}", pack_tokens([1]), 1, Sampling()))[0] for n in range(3)]
    assert [isinstance(event, Failed) for event in events] == [False, False, True]


def test_progress_names_the_phase() -> None:
    rig = Rig()
    rig.engine.handle(Submit(1, "a", pack_tokens(range(20)), 20, Sampling(max_output_tokens=2)))
    phases = [
        (event.phase, event.tokens_done)
        for _ in range(2)
        for event in rig.engine.step()
        if isinstance(event, RequestProgress)
    ]
    assert phases == [(Phase.PREFILL, 16), (Phase.DECODE, 20)]


def test_cancel_leaves_what_was_computed() -> None:
    rig = Rig()
    key = rig.turn("a", 20, 5)
    rig.step()
    rig.driver.cancel(key, keep=False)
    assert not rig.engine._scheduler.has_requests
    rig.engine.check()
    (residency,) = rig.engine.handle(GetResidency(1, "a"))
    assert isinstance(residency, ResidentTokens)
    assert residency.device_tokens == 16


@pytest.mark.parametrize("candidates", [1, 3])
def test_whether_a_request_fits_is_a_question(candidates: int) -> None:
    """Asking changes no field of the request or of its forks, whatever the answer is."""
    rig = Rig()
    rig.turn("a", 40, 12)
    rig.step()
    rig.driver.start_turn(
        "big", list(range(40)), 2, Sampling(candidates=candidates)
    )  # does not fit beside it
    rig.driver.start_turn("small", list(range(3)), 2, Sampling(candidates=candidates))
    scheduler = rig.engine._scheduler
    for request, fits in zip(list(scheduler.queue), (False, True), strict=True):
        members = [request] if request.group is None else request.group.members
        before = [_fields(member) for member in members]
        assert scheduler._running.fits(request) is fits
        assert [_fields(member) for member in members] == before
        rig.engine.check()


def _fields(request: Request) -> dict[str, object]:
    values = {one.name: getattr(request, one.name) for one in fields(request)}
    return values | {"tokens": request.tokens.tolist(), "missing": list(request.missing)}
