"""Time of one eviction round against the number of cached sessions, and of admitting one long context.

    python bench/eviction.py --sessions 1000 --sessions 100000 --policy gittins --sharing 0.5 --prompts 100

The design allows one round 1 ms with 100,000 cached sessions, and the admission of 16k tokens as much. A round is: rank
all sessions, take the victims. An admission is: find the addresses of a context, ask whether it fits, lay it out. Times
are processor time of this process, as machines have other work too.
The last line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from typing import get_args

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from pensieve.config import CacheConfig, PolicyName
from pensieve.core import Hints, SessionKey, TokenArray
from pensieve.engine.cache.chunk import Chunk
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel

COST = CostModel(((0, 0.0), (4096, 1.0)), 0.2, 32)


def filled_cache(
    sessions: int, chunks_each: int, policy: PolicyName, sharing: float, prompts: int, *, hinted: bool,
    tenants: int = 0,
) -> CacheManager:  # fmt: skip
    """A cache in which every session is idle and fully on the device.

    sharing: share of the sessions that have the first half of their chunks in common with others.
    prompts: how many different beginnings those have.
    hinted: every session has hints.
    tenants: among whom the sessions are dealt out. All but the first have a share: of what they hold all, or half.
    """
    config = CacheConfig(sessions * chunks_each, host_chunks=sessions, policy=policy, swap_watermark=0.25)
    cache = CacheManager(config, COST)
    rng = np.random.default_rng(0)
    common = 32 * chunks_each // 2
    beginnings = rng.integers(0, 30_000, (prompts, common), dtype=np.int32)
    for number in range(sessions):
        key = SessionKey(f"s{number}")
        context = rng.integers(0, 30_000, 32 * chunks_each, dtype=np.int32)
        if number < sharing * sessions:
            context[:common] = beginnings[number % prompts]
        hints = Hints(next_turn_s=float(rng.exponential(100)), importance=2.0) if hinted else None
        tenant = f"tenant {number % tenants}" if tenants else "tenant"
        serve(cache, key, context, tenant if sharing else "", float(rng.random() * 1000), hints, tenant)
    for number in range(1, tenants):
        cache.shares.set_share(f"tenant {number}", (1 - number % 2 / 2) / tenants)
    cache.index.round(Reclaim.SAVED_PAGE, 1000.0, 1)  # bring the rows up to date once
    return cache


def serve(
    cache: CacheManager,
    key: SessionKey,
    context: TokenArray,
    scope: str,
    now: float,
    hints: Hints | None = None,
    tenant: str = "tenant",
) -> float:
    """One turn without an answer; seconds that its admission took."""
    started = time.process_time()
    path = cache.prefix_path(key, scope, context)
    assert cache.can_admit(key, context, len(context), reserve=False, path=path, tenant=tenant)
    restore = cache.admit(key, context, len(context), now, path, tenant=tenant)
    taken = time.process_time() - started
    for start, end in restore.missing:
        cache.computed(key, start, end)
    cache.take_copies()
    cache.complete_copies()
    cache.release(key, now, hints=hints)
    return taken


def measure(cache: CacheManager, victims: int, repeats: int = 60) -> tuple[float, float, float]:
    """(least, median, worst) seconds of a background swap-out round for ``victims`` chunks."""
    times: list[float] = []
    for repeat in range(repeats):
        taken: list[Chunk] = []
        started = time.process_time()
        allowance = cache.shares.allowance(cache._tiers.device, cache.shares.number("tenant 0"))
        order = cache.index.round(Reclaim.SAVED_PAGE, 1000.0 + repeat, victims, allowance)
        while len(taken) < victims:
            taken.append(order.take()[0])
            taken[-1].saving = True
            order.put_back()
        times.append(time.process_time() - started)
        for chunk in taken:
            chunk.saving = False
    return min(times), statistics.median(times), max(times)


def admissions(tokens: int, repeats: int = 40) -> dict[str, tuple[float, float]]:
    """Least and median milliseconds to admit a context: sharing nothing, with new addresses, found."""
    rng = np.random.default_rng(0)
    found: dict[str, tuple[float, float]] = {}
    for name in ("no scope", "new in its scope", "found"):
        cache = CacheManager(CacheConfig(tokens // 32 * 3, host_chunks=0), COST)
        context = rng.integers(0, 30_000, tokens, dtype=np.int32)
        if name == "found":
            serve(cache, SessionKey("first"), context, "tenant", 0.0)
        times: list[float] = []
        for repeat in range(repeats):
            if name != "found":
                context = rng.integers(0, 30_000, tokens, dtype=np.int32)
            key = SessionKey(f"s{repeat}")
            times.append(serve(cache, key, context, "" if name == "no scope" else "tenant", 1.0 + repeat))
            cache.evict(key)
        found[name] = (min(times) * 1e3, statistics.median(times) * 1e3)
    return found


@click.command(context_settings={"show_default": True})
@click.option("--sessions", multiple=True, type=int, default=(1_000, 10_000, 100_000))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(get_args(PolicyName)),
    default=("retention", "gittins"),
)
@click.option("--victims", default=32, help="Chunks to find per round.")
@click.option("--chunks", default=4, help="Chunks per session.")
@click.option("--sharing", default=0.0, help="Share of the sessions that begin like others.")
@click.option("--prompts", default=100, help="How many different beginnings those have.")
@click.option("--hints", is_flag=True, help="Every session has some.")
@click.option("--tenants", default=0, help="How many there are, all but one with a share of the cache.")
@click.option("--admit", default=16_384, help="Tokens of the context to admit.")
def main(
    sessions: tuple[int, ...], policies: tuple[PolicyName, ...], victims: int, chunks: int, sharing: float,
    prompts: int, hints: bool, tenants: int, admit: int,
) -> None:  # fmt: skip
    """Measure eviction rounds and admissions."""
    table = Table("policy", "sessions", "chunks", "median ms", "worst ms")
    rows = []
    for policy in policies:
        for count in sessions:
            cache = filled_cache(count, chunks, policy, sharing, prompts, hinted=hints, tenants=tenants)
            least, median, worst = measure(cache, victims)
            times = {"least_ms": least * 1e3, "median_ms": median * 1e3, "worst_ms": worst * 1e3}
            rows.append({"policy": policy, "sessions": count, **times})
            table.add_row(
                policy, f"{count:,}", f"{count * chunks:,}", f"{median * 1e3:.3f}", f"{worst * 1e3:.3f}"
            )
    Console().print(table)
    machine = {"machine": platform.platform(), "python": platform.python_version(), "numpy": np.__version__}
    admitted = {"tokens": admit, "least_and_median_ms": admissions(admit)}
    shared = {"sharing": sharing, "prompts": prompts, "hints": hints, "tenants": tenants}
    print(json.dumps({"victims": victims, **shared, "rows": rows, "admission": admitted, **machine}))


if __name__ == "__main__":
    main()
