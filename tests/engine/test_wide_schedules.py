"""Schedules of all that can happen to an engine, on tiers of any tightness: every answer is that of a stateless run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import pytest

from pensieve.config import PolicyName
from pensieve.engine.cache import tails
from pensieve.engine.elastic import ElasticTier
from pensieve.engine.scheduling.request import Request
from support.engine.adversary import Adversary
from support.engine.engine_driver import make_engine
from support.engine.hash_worker import VOCABULARY
from support.engine.hybrid_worker import HybridOracle, held_back
from support.engine.random_masks import RandomMasks
from support.engine.tight_tiers import KINDS, ShortTurns, check_size, setup
from support.engine.wide_driver import TickingClock, WideDriver, WideWorker
from support.lengths import seeds


class Wide(WideDriver, ShortTurns):
    """All actions, in short turns."""


def play(kind: str, seed: int, *, elastic: bool = False) -> Wide | None:
    """One random schedule, every answer checked; None if the tier holds no context that is worth it."""
    rng = random.Random(seed)
    cache, scheduler = setup(kind, rng, elastic=elastic)
    clock = TickingClock(rng=rng)
    cache = replace(
        cache, policy=rng.choice(get_args(PolicyName)), prefix_sharing=rng.random() < 0.9,
        decode_reserve=rng.choice((0.0, 0.1, 0.5)), check_recomputed=rng.random() < 0.5,
    )  # fmt: skip
    scheduler = replace(
        scheduler, max_drafts=rng.choice((0, 1, 7, 64)), stateless=rng.random() < 0.05,
        swap_in_first=rng.random() < 0.5, max_queued=rng.choice((1, 1024, 1024, 1024)),
        eos_token_ids=rng.choice(((), (5,), (5, 6, 7, 8))),
    )  # fmt: skip
    worker, free = WideWorker(cache, rng), [10_000]
    masks = RandomMasks(rng) if rng.random() < 0.5 else None
    if elastic and rng.random() < 0.3:
        worker.allocate = held_back(rng)
    slack, idle = rng.choice((0, 0, 20)), rng.choice((0.0, 60.0))
    # The callers restore it.
    tails.LEAST_SPAN = rng.choice((1, 2, 4)) * cache.chunk_tokens  # type: ignore[misc]
    engine = make_engine(
        cache, scheduler, worker, clock, overlapped=seed % 2 == 1, structured=masks,
        elastic=None if not elastic else lambda manager: ElasticTier(
            manager, ranks=2, slack_bytes=slack, idle_release_s=idle, free_memory=lambda: free[0]
        ),
    )  # fmt: skip
    limit = engine._scheduler.context_limit
    if limit < 4:
        return None
    oracle = HybridOracle(cache.groups)
    driver = Wide(engine, clock, rng, oracle.verify, VOCABULARY, limit)
    driver.eos, driver.answer = scheduler.eos_token_ids, oracle.tokens
    driver.verify_beams = oracle.verify_beams if kind != "state" and rng.random() < 0.5 else None
    driver.tenants, driver.groups, driver.masks = seed % 3 == 0, rng.choice((0.1, 0.3, 0.7)), masks

    def answer(request: Request, known: Sequence[int], count: int) -> Sequence[int]:
        context = request.tokens[: request.prompt_tokens].tolist()
        drawn = request.sampling.seed if request.sampling.temperature > 0.0 else 0
        return oracle.tokens(context, len(known) + count, drawn)[len(known) :]

    with pytest.MonkeyPatch.context() as patch:
        if rng.random() < 0.6:
            Adversary(rng, answer, VOCABULARY).install(patch)
        for _ in range(rng.choice((20, 40, 80))):
            driver.act()
            free[0] = rng.choice((free[0], 5, 30, 10_000))
            for _ in range(rng.randrange(3)):
                driver.step()
        free[0] = 10_000
        driver.leave_nothing()
    for plan in worker.plans:
        check_size(plan, scheduler)
    return driver


def player(kind: str, elastic: bool) -> Callable[[int], Wide | None]:
    return lambda seed: play(kind, seed, elastic=elastic)


PLAYERS = {f"{kind} {elastic}": player(kind, elastic) for kind in KINDS for elastic in (False, True)}


@pytest.mark.parametrize("name", PLAYERS)
def test_answers_equal_a_stateless_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "LEAST_SPAN", tails.LEAST_SPAN)
    found = Counter({"answers": 0, "failed": 0})
    for seed in seeds(8, 600):
        driver = PLAYERS[name](seed)
        if driver is not None:
            found["answers"] += len(driver.finished)
            found["failed"] += driver.failed
    assert all(found.values()), f"never happened: {found}"
