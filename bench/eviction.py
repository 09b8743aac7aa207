"""Time of one eviction round against the number of cached sessions.

    python bench/eviction.py --sessions 1000 --sessions 100000 --policy gittins

The design allows one round 1 ms with 100,000 cached sessions. A round is: rank all sessions, take the victims.
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
from pensieve.core import SessionKey
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost.model import CostModel

COST = CostModel(((0, 0.0), (4096, 1.0)), 0.2, 32)


def filled_cache(sessions: int, chunks_each: int, policy: PolicyName) -> CacheManager:
    """A cache in which every session is idle and fully on the device."""
    config = CacheConfig(sessions * chunks_each, host_chunks=sessions, policy=policy, swap_watermark=0.25)
    cache = CacheManager(config, COST)
    context = np.arange(32 * chunks_each, dtype=np.int32)
    rng = np.random.default_rng(0)
    for number in range(sessions):
        key = SessionKey(f"s{number}")
        restore = cache.admit(key, context, int(rng.integers(1, len(context))), 0.0)
        for start, end in restore.missing:
            cache.computed(key, start, end)
        cache.release(key, float(rng.random() * 1000))
    cache.index.round(Reclaim.SAVED_PAGE, 1000.0, 1)  # bring the rows up to date once
    return cache


def measure(cache: CacheManager, victims: int, repeats: int = 30) -> tuple[float, float]:
    """(median, worst) seconds of a background swap-out round for ``victims`` chunks."""
    times: list[float] = []
    for repeat in range(repeats):
        taken = []
        started = time.perf_counter()
        order = cache.index.round(Reclaim.SAVED_PAGE, 1000.0 + repeat, victims)
        for _ in range(victims):
            taken.append(order.take()[0])
            taken[-1].saving = True
            order.put_back()
        times.append(time.perf_counter() - started)
        for chunk in taken:
            chunk.saving = False
    return statistics.median(times), max(times)


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
def main(sessions: tuple[int, ...], policies: tuple[PolicyName, ...], victims: int, chunks: int) -> None:  # fmt: skip
    """Measure eviction rounds."""
    table = Table("policy", "sessions", "chunks", "median ms", "worst ms")
    rows = []
    for policy in policies:
        for count in sessions:
            median, worst = measure(filled_cache(count, chunks, policy), victims)
            rows.append(
                {"policy": policy, "sessions": count, "median_ms": median * 1e3, "worst_ms": worst * 1e3}
            )
            table.add_row(
                policy, f"{count:,}", f"{count * chunks:,}", f"{median * 1e3:.3f}", f"{worst * 1e3:.3f}"
            )
    Console().print(table)
    machine = {"machine": platform.platform(), "python": platform.python_version(), "numpy": np.__version__}
    print(json.dumps({"victims": victims, "rows": rows, **machine}))


if __name__ == "__main__":
    main()
