"""A served hybrid model finds more idle conversations than one that keeps all layers whole in the same memory."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.config import CacheConfig, CacheGroup, SchedulerConfig
from pensieve.engine.cache import tails
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.exactness import Bench

SIZE, LENGTH = 8, 120
CHUNKS = LENGTH // SIZE
WINDOW_CHUNKS = 3
"""Chunks that the next turn reads through a window of 9, after a cut of the last chunk, too."""


def sessions_that_hit(bench: Bench, cache: CacheConfig, count: int) -> int:
    """Serve ``count`` sessions, then another turn of each, the latest first; return how many computed less than a chunk
    of their history again. Every answer is compared with transformers."""
    scheduler = SchedulerConfig(context_limit=160, max_batch_tokens=64, max_running=1)
    clock = Clock()
    engine = make_engine(cache, scheduler, bench.worker(cache, scheduler), clock, bench.vocabulary)
    driver = Driver(engine, clock, random.Random(1), bench.oracle.verify, bench.vocabulary, 160)
    for number in range(count):
        rng = random.Random(number)
        driver.start_turn(f"t{number}", [rng.randrange(3, bench.vocabulary) for _ in range(LENGTH - 4)], 4)
        driver.run_until_idle()
    driver.finished.clear()
    for number in reversed(range(count)):
        driver.start_turn(f"t{number}", [5], 1)
        driver.run_until_idle()
    engine.close()
    return sum(turn.usage is not None and turn.usage.recomputed_tokens < SIZE for turn in driver.finished)


@pytest.mark.parametrize("host", [0, 4], ids=["device alone", "host tier"])
def test_more_conversations_hit(host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer sees everything, two have a window of 9: a conversation takes 21 layer pages instead of 45."""
    monkeypatch.setattr(tails, "LEAST_SPAN", 3 * SIZE)
    bench = Bench("gemma3_text", tmp_path)
    page = 2 * bench.model.arch.num_kv_heads * SIZE * bench.model.arch.head_dim * 4
    device, more = 6 * CHUNKS * 3 * page, host * CHUNKS * 3 * page
    groups = CacheGroup("full", 0, 1, page, 2), CacheGroup("window", 9, 2, page, 2)
    hybrid = CacheConfig(
        6 * CHUNKS,
        host * CHUNKS,
        SIZE,
        swap_watermark=0.0,
        groups=groups,
        device_bytes=device,
        host_bytes=more,
    )
    room = device + more
    fits = room / (page * (CHUNKS + 2 * WINDOW_CHUNKS))
    count = int(0.8 * fits)
    assert sessions_that_hit(bench, hybrid, count) == count
    whole = replace(hybrid, groups=(CacheGroup(),), device_bytes=None, host_bytes=None)
    assert sessions_that_hit(bench, whole, count) <= 6 + host < 0.7 * count
