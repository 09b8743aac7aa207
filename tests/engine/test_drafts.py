"""Drafts change the number of steps and never an answer, whatever they are."""

from __future__ import annotations

import functools
import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import FinishReason, Sampling, SessionKey, pack_tokens
from pensieve.engine.cache.chunk import Slice
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.tiers import Tiers
from pensieve.engine.engine import Engine
from pensieve.engine.messages import Output, Submit
from pensieve.engine.plan import Plan, SampleSpec, StepResult
from pensieve.engine.scheduling.drafts import LONGEST_MATCH, MOST_PLACES, Drafter, Odds
from pensieve.engine.scheduling.request import Guesses, Request
from pensieve.engine.scheduling.scheduler import OutputToken, Scheduler
from support.engine.adversary import Adversary
from support.engine.choosing import EOS, STOP, VOCAB, ChoosingWorker, expected, grammar, make_tokenizer
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY, HashWorker, oracle_tokens, verify_beams, verify_tokens
from support.engine.structured_rig import Answers, make_structured
from support.lengths import seeds

TOKENIZER = make_tokenizer()
LIMIT = 120
WORDS = grammar("start: /[a-f]{3,12}/")

# -- any drafts ------------------------------------------------------------------------------------------------------


def hash_answer(request: Request, known: Sequence[int], count: int) -> Sequence[int]:
    seed = request.sampling.seed if request.sampling.temperature > 0.0 else 0
    context = request.tokens[: request.prompt_tokens].tolist()
    return oracle_tokens(context, len(known) + count, seed)[len(known) :]


def play(seed: int, totals: Counter[str], *, overlapped: bool) -> None:
    """One random schedule with an adversary's drafts, every answer checked."""
    rng = random.Random(seed)
    size = rng.choice((1, 2, 8))
    device = rng.choice((3, 5, 9)) * max(1, 32 // size) * rng.choice((1, 3))
    cache = CacheConfig(
        device, rng.choice((0, 1, device, 3 * device)), size, swap_watermark=rng.choice((0.0, 0.25, 1.0)),
        decode_reserve=rng.choice((0.0, 0.1)),
    )  # fmt: skip
    scheduler = SchedulerConfig(
        rng.choice((64, 150)), max_batch_tokens=rng.choice((7, 32, 500)), max_running=rng.choice((3, 16)),
        stateless=rng.random() < 0.1, unified_batch=rng.random() < 0.8, max_drafts=rng.choice((1, 7, 64)),
    )  # fmt: skip
    worker = HashWorker(cache.device_chunks, cache.host_chunks, cache.chunk_tokens)
    engine = make_engine(cache, scheduler, worker, clock := Clock(), overlapped=overlapped)
    limit = min(scheduler.context_limit, cache.device_chunks * cache.chunk_tokens)
    driver = Driver(engine, clock, rng, verify_tokens, VOCABULARY, limit)
    driver.verify_beams = verify_beams
    driver.tenants = seed % 2 == 1
    with pytest.MonkeyPatch.context() as patch:
        Adversary(rng, hash_answer, VOCABULARY).install(patch)
        check_drafts_are_harmless(patch)
        for _ in range(80):
            driver.act()
            for _ in range(rng.randrange(4)):
                driver.step()
        driver.run_until_idle()
    for turn in driver.finished:
        assert turn.usage is not None and turn.usage.reconciles
        assert turn.usage.accepted_tokens <= min(turn.usage.drafted_tokens, turn.usage.output_tokens)
        totals["swapped"] += turn.usage.swapped_in_tokens
        totals["recomputed"] += turn.usage.recomputed_tokens
    stats = engine.stats()
    totals["accepted"] += stats.accepted_total
    totals["rejected"] += stats.drafted_total - stats.accepted_total
    totals["suspended"] += stats.suspensions_total
    totals["longest"] = max(totals["longest"], *(span.drafts for plan in worker.plans for span in plan.spans))
    spans = [span for plan in worker.plans for span in plan.spans if span.undecided is not None]
    assert overlapped or not spans
    if overlapped:
        totals["undecided"] += len(spans)
        totals["undecided, with drafts"] += sum(span.drafts > 0 for span in spans)
        totals["undecided, chosen late"] += sum(
            span.sample is not None and span.sample.late for span in spans
        )
    engine.close()


def check_drafts_are_harmless(patch: pytest.MonkeyPatch) -> None:
    """Check that no request leaves the batch while a step with drafts runs, and that nothing is evicted while its
    drafts have pages of their own."""
    plan, evict, evicted = Scheduler.plan, Tiers.evict_from_device, list[Slice]()

    def planned(self: Scheduler, now: float) -> Plan:
        suspensions, pages = self.suspensions, self.drafting.pages
        guessing = any(one.guesses for one in self.running)
        evicted.clear()
        made = plan(self, now)
        if guessing:
            assert self.suspensions == suspensions
            assert not (pages and evicted)
        return made

    patch.setattr(Scheduler, "plan", planned)
    patch.setattr(Tiers, "evict_from_device", lambda self, part: (evicted.append(part), evict(self, part))[1])


@pytest.mark.parametrize("overlapped", [False, True], ids=["in_turn", "overlapped"])
def test_answers_equal_a_stateless_run(overlapped: bool) -> None:
    totals = Counter(
        {"swapped": 0, "recomputed": 0, "accepted": 0, "rejected": 0, "suspended": 0, "longest": 0}
    )
    if overlapped:
        totals |= {"undecided": 0, "undecided, with drafts": 0, "undecided, chosen late": 0}
    for seed in seeds(6, 300):
        play(2 * seed + overlapped, totals, overlapped=overlapped)
    assert all(totals.values()), f"a path was never taken: {totals}"


# -- any sampling ----------------------------------------------------------------------------------------------------


def random_sampling(rng: random.Random) -> Sampling:
    values: dict[str, Any] = {
        "max_output_tokens": rng.choice((1, 2, 25, 60, None)),
        "seed": rng.randrange(1 << 64),
    }
    if rng.random() < 0.6:
        values |= {
            "temperature": rng.choice((0.5, 2.0)),
            "top_k": rng.choice((0, 5)),
            "top_p": rng.choice((1.0, 0.7)),
        }
    if rng.random() < 0.4:
        values |= {
            "repetition_penalty": 1.3,
            "frequency_penalty": rng.choice((0.0, 0.4)),
            "presence_penalty": 0.2,
        }
    if rng.random() < 0.3:
        values |= {"min_output_tokens": rng.choice((2, 30)), "logit_bias": {EOS: 2.0, STOP: 3.0, 40: -1e9}}
    if rng.random() < 0.3:
        values |= {"stop_token_ids": tuple(rng.sample(range(VOCAB), 8))}
    if rng.random() < 0.2:
        values |= {"candidates": 3, "temperature": 1.0}
    if rng.random() < 0.2:
        values |= {"top_logprobs": 2}
    if rng.random() < 0.15:
        values |= {"grammar": WORDS}
    return Sampling(**values)


def drawn_answer(request: Request, known: Sequence[int], count: int) -> Sequence[int]:
    context = request.tokens[: request.prompt_tokens].tolist()
    return ANSWERS(tuple(context), pickle.dumps(request.sampling))[0][len(known) :][:count]


@functools.lru_cache(maxsize=64)
def ANSWERS(context: tuple[int, ...], sampling: bytes) -> tuple[list[int], FinishReason]:
    return expected(TOKENIZER, list(context), pickle.loads(sampling), LIMIT)


def answers_of(rng: random.Random, *, overlapped: bool, tight: bool) -> Engine:
    """Several turns of any sampling at once, every answer checked."""
    device = 17 if tight else 400
    cache = CacheConfig(device, 10, 8, decode_reserve=0.0)
    scheduler = SchedulerConfig(LIMIT, (EOS,), max_batch_tokens=64, max_running=12, max_drafts=40)
    structured = make_structured(TOKENIZER, VOCAB)
    worker = ChoosingWorker(device, 10, 8)
    engine = make_engine(
        cache, scheduler, worker, Clock(), VOCAB, overlapped=overlapped, structured=structured
    )
    answers, asked = Answers(engine), {}
    with pytest.MonkeyPatch.context() as patch:
        Adversary(rng, drawn_answer, VOCAB, (EOS, STOP)).install(patch)
        for request in range(1, 9):
            context = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 40))]
            asked[request] = context, random_sampling(rng)
            answers.submit(request, *asked[request])
            for _ in range(rng.randrange(3)):
                answers.step()
        answers.run()
    for request, (context, sampling) in asked.items():
        for candidate in range(sampling.candidates):
            tokens, reason = expected(TOKENIZER, context, sampling, LIMIT, candidate)
            assert answers.outputs[request, candidate] == tokens, (sampling, candidate)
            assert candidate or answers.ended[request] is reason
    engine.check()
    engine.close()
    return engine


def test_answers_of_any_sampling() -> None:
    totals = Counter({"accepted": 0, "rejected": 0, "suspended": 0})
    for number in seeds(12, 200):
        seed, overlapped = number // 2, number % 2 == 1
        engine = answers_of(random.Random(f"{seed}{overlapped}"), overlapped=overlapped, tight=seed % 2 == 0)
        stats = engine.stats()
        totals["accepted"] += stats.accepted_total
        totals["rejected"] += stats.drafted_total - stats.accepted_total
        totals["suspended"] += stats.suspensions_total
    assert all(totals.values()), totals


def test_guesses_through_a_pending_token_are_learnt_from() -> None:
    """The first of them stands for the token that a running step chooses: wrong, it says nothing about the others."""
    for token, learnt in ((5, (2, 3)), (7, (0, 3))):
        request = Request.from_submit(Submit(1, "s", pack_tokens([1, 5, 6, 5, 6, 9]), 6, Sampling()), 0, 0.0)
        request.begin_drafts(Odds())
        request.propose(3, 0.0)
        assert request.drafter is not None
        request.drafter.learn = (learn := Mock())  # type: ignore[method-assign]
        request.on_launched()
        guesses = np.array([5, 6, 5], np.int32)
        request.on_guessed(Guesses(request.num_known, guesses, guesses[1:], 3))
        request.on_launched()
        assert request.latest_length == request.length + 2
        request.on_sampled(token, 1.0)  # of the step before
        request.on_sampled(6, 2.0)
        request.on_drafts(1)
        learn.assert_called_once_with(3, *learnt)
        assert request.undecided is None and (request.drafted, request.accepted) == (2, 1)


# -- faults that they must notice ------------------------------------------------------------------------------------


def one_too_far(patch: pytest.MonkeyPatch) -> None:
    """The first wrong draft counts, too."""
    commit = Scheduler.commit

    def committed(self: Scheduler, plan: Plan, result: StepResult, now: float) -> list[OutputToken]:
        guesses = {span.request: span.tokens[-span.drafts :].tolist() for span in plan.spans if span.drafts}
        found, wrong = [], set[int]()
        for one in result.sampled:
            left = guesses.get(one.request)
            if left and one.request not in wrong and (guess := left.pop(0)) != one.token_id:
                wrong.add(one.request)
                one = msgspec.structs.replace(one, token_id=guess)
            found.append(one)
        return commit(self, plan, replace(result, sampled=tuple(found)), now)

    patch.setattr(Scheduler, "commit", committed)


def rejected_stays_valid(patch: pytest.MonkeyPatch) -> None:
    """Drafts count as computed when they are planned."""
    extend = CacheManager.extend

    def extended(
        self: CacheManager, key: SessionKey, tokens: int, now: float, *, free_only: bool = False
    ) -> bool:
        done = extend(self, key, tokens, now, free_only=free_only)
        if done and free_only:
            chunk = self._running[key].chunks[(tokens - 1) // self.config.chunk_tokens]
            chunk.filled = (tokens - 1) % self.config.chunk_tokens + 1
        return done

    patch.setattr(CacheManager, "extend", extended)


def seed_advanced_by_rejected(patch: pytest.MonkeyPatch) -> None:
    """The index of a draw counts rejected drafts."""
    patch.setattr(
        Request, "output_tokens",
        property(lambda self: self.length - self.prompt_tokens + (self.drafted - self.accepted)),
    )  # fmt: skip


def seed_not_advanced(patch: pytest.MonkeyPatch) -> None:
    """All draws of a step have one index."""
    patch.setattr(SampleSpec, "after", lambda self, drafts: self)


def kept_pages(patch: pytest.MonkeyPatch) -> None:
    """Pages of rejected drafts are forgotten in the page table only."""

    def take_back(self: CacheManager, key: SessionKey, tokens: int) -> None:
        self._running[key].table = self._running[key].table[: self.chunks_for(tokens)]

    patch.setattr(CacheManager, "take_back", take_back)


def all_seem_wrong(patch: pytest.MonkeyPatch) -> None:
    """A step is made while one with drafts runs, as if all of these were wrong."""
    made = Scheduler._plan_one_group

    def planned(self: Scheduler, *given: Any) -> Plan:
        plan = made(self, *given)
        return replace(
            plan, spans=tuple(msgspec.structs.replace(span, undecided=None) for span in plan.spans)
        )

    patch.setattr(Scheduler, "_plan_one_group", planned)


def index_of_none_accepted(patch: pytest.MonkeyPatch) -> None:
    """A draw after drafts has the index that it would have if all were wrong."""
    specs = Scheduler.late_specs

    def late(self: Scheduler, plan: Plan, *given: Any) -> list[SampleSpec | None]:
        asked = [spec for span in plan.spans for spec in span.specs]
        return [
            None if spec is None else msgspec.structs.replace(spec, output_index=one.output_index)
            for spec, one in zip(specs(self, plan, *given), asked, strict=True)
        ]

    patch.setattr(Scheduler, "late_specs", late)


def leaves_with_drafts(patch: pytest.MonkeyPatch) -> None:
    """A request may be suspended while a step with its drafts runs."""
    patch.setattr(Scheduler, "_may_suspend", lambda self: False)


MUTANTS = (
    one_too_far, rejected_stays_valid, seed_advanced_by_rejected, seed_not_advanced, kept_pages, all_seem_wrong,
    index_of_none_accepted, leaves_with_drafts,
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_faults_are_noticed(mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        mutant(patch)
        for seed in range(20):
            answers_of(random.Random(seed), overlapped=seed % 2 == 1, tight=True)


# -- where drafts come from ------------------------------------------------------------------------------------------


def slow_drafts(text: list[int], most: int) -> list[list[int]]:
    """The drafts after each of the longest matches of the text's end, up to ``LONGEST_MATCH`` tokens long."""
    best, found = 2, []
    for place in range(1, len(text) - 1):
        length = 0
        while length < min(LONGEST_MATCH, place + 1) and text[place - length] == text[-1 - length]:
            length += 1
        if length >= best:
            if length > best:
                best, found = length, []
            period = text[place + 1 :]
            found.append([period[at % len(period)] for at in range(most)])
    return found


@given(st.lists(st.integers(0, 3), min_size=1, max_size=250), st.data())
def test_drafts_are_those_of_a_longest_match(text: list[int], data: st.DataObject) -> None:
    """Whatever part of the text came at once, and for texts with few places."""
    text = [token + 5 * (at // 30) for at, token in enumerate(text)]  # few places per pair
    drafter, seen = Drafter(1, (), Odds()), data.draw(st.sampled_from((1, len(text))))
    while True:
        most = data.draw(st.integers(0, 5))
        drafts, chances = drafter.propose(np.array(text[:seen], np.int32), most, 0.0)
        expected_ = slow_drafts(text[:seen], most)
        counts = Counter(tuple(text[at : at + 2]) for at in range(seen - 1))
        if max(counts.values(), default=0) < MOST_PLACES:
            assert drafts == (expected_[-1] if expected_ else []), text[:seen]
        assert chances == sorted(chances, reverse=True) and all(0 < chance <= 1 for chance in chances)
        drafter.learn(drafter.match, data.draw(st.integers(0, len(drafts))), len(drafts))
        if seen == len(text):
            break
        seen = min(len(text), seen + data.draw(st.sampled_from((1, 2, 70))))


def test_odds_learn_and_the_price_cuts() -> None:
    text = np.array([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], np.int32)
    drafter = Drafter(1, (), Odds())
    drafts, before = drafter.propose(text, 5, 0.0)
    assert drafts == [3, 4, 5, 6, 7]
    drafter.learn(drafter.match, 0, 5)
    drafts, after = drafter.propose(text, 5, 0.0)
    assert after[0] < before[0]
    cut, _ = drafter.propose(text, 5, after[1] + 1e-9)
    assert cut == [3]
    for _ in range(50):
        drafter.learn(drafter.match, 5, 5)
    assert len(drafter.propose(text, 5, 0.5)[0]) == 5


def test_an_answer_begins_with_the_odds_of_others() -> None:
    text, odds = np.array([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], np.int32), Odds()
    fresh = Drafter(1, (), odds).propose(text, 5, 0.0)[1]
    other = Drafter(1, (), odds)
    for right in (0, 5) * 20:
        other.propose(text, 5, 0.0)
        other.learn(other.match, right, 5)
    later, learnt = Drafter(1, (), odds).propose(text, 5, 0.0)[1], other.propose(text, 5, 0.0)[1]
    assert later[0] < fresh[0] and later == pytest.approx(learnt, rel=0.05)


def test_odds_that_others_spoilt_are_not_for_good() -> None:
    """Answers that repeat nothing do not keep others from drafts. A prediction is tried whatever others were worth."""
    text, odds = np.array([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], np.int32), Odds()
    spoiler = Drafter(1, (), odds)
    for match in (0, 2, 4, 8, 16, None) * 200:
        spoiler.learn(match, 0, 1)
    assert Drafter(10, [9], odds).propose(text, 1, 0.5)[0] == [9]
    drafter, skipped = Drafter(1, (), odds), 0
    while not drafter.propose(text, 5, 0.1)[0]:
        skipped += 1
    assert skipped == 64


def test_a_prediction_is_followed_from_the_first_token_and_found_again() -> None:
    predicted = range(10, 30)
    drafter = Drafter(3, predicted, Odds())
    assert drafter.propose(np.array([1, 2, 3], np.int32), 4, 0.0)[0] == [10, 11, 12, 13]
    assert drafter.propose(np.array([1, 2, 3, 10, 11], np.int32), 4, 0.0)[0] == [12, 13, 14, 15]
    assert drafter.propose(np.array([1, 2, 3, 10, 11, 99], np.int32), 4, 0.0)[0] == []
    assert drafter.propose(np.array([1, 2, 3, 10, 11, 99, 27, 28], np.int32), 4, 0.0)[0] == [29]


def has_drafts(plan: Plan) -> bool:
    return any(span.drafts for span in plan.spans)


class SlowToPlan(HashWorker):
    """Claims times of a device that waits for its plans."""

    gap = 0.0

    def run(self, plan: Plan) -> StepResult:
        return replace(super().run(plan), timings={"device": 0.010, "gap": self.gap})


@pytest.mark.parametrize(
    ("waits", "gap", "least", "most"),
    [(True, 0.001, 200, 300), (True, 0.008, 1, 15), (False, 0.008, 150, 300)],
)
def test_an_engine_that_must_wait_drafts_if_that_is_worth_it(
    waits: bool, gap: float, least: int, most: int
) -> None:
    context, worker = list(range(20)), SlowToPlan(60, 1, 8)
    worker.gap = gap
    engine = make_engine(
        CacheConfig(60, 0, 8), SchedulerConfig(400, max_drafts=2), worker, Clock(), overlapped=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_may_suspend", lambda self: waits)
        patch.setattr(Request, "propose", lambda request, most, price: ([5] * most, [0.3] * most))
        sampling = Sampling(max_output_tokens=300, ignore_eos=True)
        engine.handle(Submit(1, "s", pack_tokens(context), 20, sampling))
        while engine.has_work:
            engine.step()
    assert least <= sum(has_drafts(plan) for plan in worker.plans) <= most


@pytest.mark.parametrize("waits", [True, False])
def test_a_device_gets_its_next_step_before_tokens_are_reported(waits: bool) -> None:
    """A step with drafts runs while its caller handles events, and its tokens are out only when the next step is on the
    device. That is made when they are known, or before that if it need not wait for them."""
    worker, order = HashWorker(60, 1, 8), list[str]()
    engine = make_engine(
        CacheConfig(60, 0, 8), SchedulerConfig(400, max_drafts=2), worker, Clock(), overlapped=True
    )
    engine._scheduler.drafting.sync_share = 0.0
    in_order = ["_commit", "launch", "_report"] if waits else ["launch", "_commit", "_report"]
    launch, report, commit = worker.launch, engine._report, engine._commit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_may_suspend", lambda self: waits)
        patch.setattr(Request, "propose", lambda request, most, price: ([5] * most, [0.3] * most))
        for owner, name, inner in (
            (worker, "launch", launch), (engine, "_report", report), (engine, "_commit", commit),
        ):  # fmt: skip
            patch.setattr(
                owner, name, lambda *args, inner=inner, name=name: (order.append(name), inner(*args))[1]
            )
        engine.handle(
            Submit(1, "s", pack_tokens(range(20)), 20, Sampling(max_output_tokens=9, ignore_eos=True))
        )
        steps = 0
        while engine.has_work:
            before = len(order)
            engine.step()
            steps += order[before:] == in_order
    assert steps >= 6
    assert sum(has_drafts(plan) for plan in worker.plans) >= 6
    assert order.count("launch") == order.count("_report") == len(worker.plans)


@pytest.mark.parametrize(("pages", "waits"), [(6, True), (40, False)])
def test_the_next_plan_waits_if_others_may_need_the_pages_of_drafts(pages: int, waits: bool) -> None:
    engine = make_engine(
        CacheConfig(pages, 0, 8),
        SchedulerConfig(40, max_drafts=16),
        HashWorker(pages, 1, 8),
        Clock(),
        overlapped=True,
    )
    scheduler = engine._scheduler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_may_suspend", lambda self: False)  # another reason to wait, not asked here
        patch.setattr(
            Request, "propose",
            lambda request, most, price: ([5] * 9, [1.0] * 9) if request.key == 1 and most >= 9 else ([], []),
        )  # fmt: skip
        for number in (1, 2):
            tokens = pack_tokens(range(10 * number, 10 * number + 10))
            engine.handle(
                Submit(number, f"s{number}", tokens, 10, Sampling(max_output_tokens=20, ignore_eos=True))
            )
        while not any(request.guesses for request in scheduler.running):
            engine.step()
        assert len(scheduler.running) == 2
        assert scheduler.should_wait() == waits


def test_a_known_answer_takes_few_steps() -> None:
    """As after an engine's death; a wrong prediction costs no token."""
    context = list(range(20))
    right = oracle_tokens(context, 200)
    for predicted, most in ((right[:180], 30), (right[:50] + right[90:180], 150), ([5] * 180, 201)):
        engine = make_engine(
            CacheConfig(200, 0, 8), SchedulerConfig(400, max_drafts=64), HashWorker(200, 1, 8), Clock()
        )
        sampling = Sampling(max_output_tokens=200, ignore_eos=True)
        engine.handle(Submit(1, "s", pack_tokens(context), 20, sampling, predicted=pack_tokens(predicted)))
        answer: list[int] = []
        while engine.has_work:
            for event in engine.step():
                answer += event.token_ids if isinstance(event, Output) else ()
        assert answer == right and engine.stats().steps_total <= most
