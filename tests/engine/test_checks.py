"""The chunks that a plan has checked: each is complete on the device, and all of one address hold the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.engine.plan import Plan, StepResult
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY, HashWorker, verify_tokens
from support.lengths import at_length

CACHE = CacheConfig(device_chunks=14, host_chunks=4, chunk_tokens=4, check_recomputed=True)
SCHEDULER = SchedulerConfig(context_limit=48, max_batch_tokens=16, max_running=4)


class CheckedWorker(HashWorker):
    """Remembers what the checked pages of each address hold."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config.device_chunks, config.host_chunks, config.chunk_tokens)
        self.known: dict[int, bytes] = {}
        self.checked = self.again = 0

    def run(self, plan: Plan) -> StepResult:
        result = super().run(plan)
        for check in plan.checks:
            held = self.device[check.page].tobytes()
            self.checked += 1
            self.again += check.address in self.known
            assert self.known.setdefault(check.address, held) == held, (
                f"page {check.page} holds another chunk"
            )
        return result


def play(seed: int, config: CacheConfig = CACHE) -> CheckedWorker:
    rng, clock, worker = random.Random(seed), Clock(), CheckedWorker(config)
    engine = make_engine(config, SCHEDULER, worker, clock, overlapped=seed % 2 == 1)
    driver = Driver(engine, clock, rng, verify_tokens, VOCABULARY, SCHEDULER.context_limit)
    for _ in range(60):
        driver.act()
        driver.step()
    driver.run_until_idle()
    return worker


def test_pages_of_one_address_hold_the_same() -> None:
    workers = [play(seed) for seed in range(at_length(8, 300))]
    assert sum(worker.checked for worker in workers) > 300
    assert sum(worker.again for worker in workers) > 50


def test_nothing_is_checked_unless_asked_for() -> None:
    assert play(0, replace(CACHE, check_recomputed=False)).checked == 0


def test_a_wrong_page_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle can fail: a page is named by its chunk's place in the context."""
    original = HashWorker.run

    def run(self: HashWorker, plan: Plan) -> StepResult:
        if plan.checks and random.Random(plan.step).random() < 0.2:
            self.device[plan.checks[0].page, 0] ^= 1
        return original(self, plan)

    monkeypatch.setattr(HashWorker, "run", run)
    with pytest.raises(AssertionError):
        for seed in range(8):
            play(seed)
