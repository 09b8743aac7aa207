"""Time of one eviction round against the number of cached sessions, and of admitting one long context.

    python bench/eviction.py --sessions 1000 --sessions 100000 --policy gittins

The design allows one round 1 ms with 100,000 cached sessions, and the admission of 16k tokens as much. A round is: rank
all sessions, take the victims. An admission is: find the addresses of a context, ask whether it fits, lay it out. Times
are processor time of this process, as machines have other work too. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import get_args

import click
import numpy as np

from pensieve.config import CacheConfig, PolicyName
from pensieve.core import SessionKey, TokenArray
from pensieve.engine.cache.chunk import Chunk
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel

COST = CostModel(((0, 0.0), (4096, 1.0)), 0.2, 32)


def drawn(rng: np.random.Generator, tokens: int) -> TokenArray:
    return rng.integers(0, 30_000, tokens, dtype=np.int32)


def filled_cache(sessions: int, chunks_each: int, policy: PolicyName) -> CacheManager:
    """A cache in which every session is idle, fully on the device, and shares nothing."""
    config = CacheConfig(sessions * chunks_each, host_chunks=sessions, policy=policy, swap_watermark=0.25)
    cache = CacheManager(config, COST)
    rng = np.random.default_rng(0)
    for number in range(sessions):
        context = drawn(rng, 32 * chunks_each)
        serve(cache, SessionKey(f"s{number}"), context, "", float(rng.random() * 1000))
    cache.index.round(Reclaim.SAVED_PAGE, 1000.0, 1)  # bring the rows up to date once
    return cache


def serve(cache: CacheManager, key: SessionKey, context: TokenArray, scope: str, now: float) -> float:
    """One turn without an answer; seconds that its admission took."""
    started = time.process_time()
    path = cache.prefix_path(key, scope, context)
    assert cache.can_admit(key, context, len(context), path=path)
    restore = cache.admit(key, context, len(context), now, path, tenant="tenant")
    taken = time.process_time() - started
    for start, end in restore.missing:
        cache.computed(key, start, end)
    cache.take_copies()
    cache.complete_copies()
    cache.release(key, now)
    return taken


def rounds(cache: CacheManager, victims: int, repeats: int = 60) -> dict[str, float]:
    """Times of a background swap-out round for ``victims`` chunks."""
    times: list[float] = []
    for repeat in range(repeats):
        taken: list[Chunk] = []
        started = time.process_time()
        allowance = cache.shares.allowance(cache._tiers.device, cache.shares.number("tenant"))
        order = cache.index.round(Reclaim.SAVED_PAGE, 1000.0 + repeat, victims, allowance)
        while len(taken) < victims:
            taken.append(order.take()[0])
            taken[-1].saving = True
            order.put_back()
        times.append(time.process_time() - started)
        for chunk in taken:
            chunk.saving = False
    return {
        "least_ms": min(times) * 1e3, "median_ms": statistics.median(times) * 1e3, "worst_ms": max(times) * 1e3,
    }  # fmt: skip


def admissions(tokens: int, repeats: int = 40) -> dict[str, tuple[float, float]]:
    """Least and median milliseconds to admit a context: sharing nothing, with new addresses, found."""
    rng = np.random.default_rng(0)
    found: dict[str, tuple[float, float]] = {}
    for name in ("no scope", "new in its scope", "found"):
        cache = CacheManager(CacheConfig(tokens // 32 * 3, host_chunks=0), COST)
        context = drawn(rng, tokens)
        if name == "found":
            serve(cache, SessionKey("first"), context, "tenant", 0.0)
        times: list[float] = []
        for repeat in range(repeats):
            if name != "found":
                context = drawn(rng, tokens)
            key = SessionKey(f"s{repeat}")
            times.append(serve(cache, key, context, "" if name == "no scope" else "tenant", 1.0 + repeat))
            cache.evict(key)
        found[name] = (min(times) * 1e3, statistics.median(times) * 1e3)
    return found


@click.command(context_settings={"show_default": True})
@click.option("--sessions", multiple=True, type=int, default=(1_000, 10_000, 100_000))
@click.option("--policy", "policies", multiple=True, type=click.Choice(get_args(PolicyName)),
              default=("retention", "gittins"))  # fmt: skip
@click.option("--victims", default=32, help="Chunks to find per round.")
@click.option("--chunks", default=4, help="Chunks per session.")
@click.option("--admit", default=16_384, help="Tokens of the context to admit.")
def main(
    sessions: tuple[int, ...], policies: tuple[PolicyName, ...], victims: int, chunks: int, admit: int
) -> None:
    """Measure eviction rounds and admissions."""
    rows = [
        {"policy": policy, "sessions": count, **rounds(filled_cache(count, chunks, policy), victims)}
        for policy in policies
        for count in sessions
    ]
    admitted = {"tokens": admit, "least_and_median_ms": admissions(admit)}
    print(json.dumps({"victims": victims, "rows": rows, "admission": admitted}))


if __name__ == "__main__":
    main()
