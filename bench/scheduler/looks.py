"""How long a look at all sessions holds up the engine: the first, and those after it in which nothing has changed.

python bench/scheduler/looks.py --sessions 1000 --chunks 200
"""

from __future__ import annotations

import json
import time

import click
import numpy as np

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import SessionKey
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost.model import CostModel
from pensieve.engine.scheduling.scheduler import Scheduler
from pensieve.engine.strips import Looker

SIZE = 32
KEPT = 0.7
"""Part of the chunks that there is room for, in both tiers together."""


def filled(sessions: int, chunks: int) -> Scheduler:
    """A scheduler whose cache holds so many idle sessions, most chunks on the host and some dropped."""
    pages = int(KEPT * sessions * chunks)
    config = CacheConfig(max(pages // 3, 2 * chunks), pages - pages // 3, SIZE, policy="retention")
    cost = CostModel(((0, 0.0), (1 << 17, 4.0)), 1.0, SIZE)
    scheduler = Scheduler(SchedulerConfig(context_limit=chunks * SIZE + 1), CacheManager(config, cost))
    tokens = np.zeros(chunks * SIZE, np.int32)
    for number in range(sessions):
        key, now = SessionKey(f"default/{number}"), float(number)
        for start, end in scheduler.cache.admit(key, tokens, len(tokens), now).missing:
            scheduler.cache.computed(key, start, end)
        scheduler.cache.take_copies()
        scheduler.cache.complete_copies()
        scheduler.cache.release(key, now)
    return scheduler


def look(looker: Looker, now: float) -> list[float]:
    """Seconds of each piece of one look."""
    pieces: list[float] = []
    at = 0
    while True:
        begun = time.perf_counter()
        strips = looker.look(1, at, now)
        pieces.append(time.perf_counter() - begun)
        at = strips.next
        if not at:
            return pieces


@click.command()
@click.option("--sessions", type=int, default=1000, show_default=True)
@click.option("--chunks", type=int, default=200, show_default=True, help="Of each session.")
@click.option("--looks", type=int, default=20, show_default=True)
def main(sessions: int, chunks: int, looks: int) -> None:
    """Measure looks; the last line is one JSON document, in milliseconds."""
    looker = Looker(filled(sessions, chunks))
    first = look(looker, 1e6)
    later = sorted((look(looker, 1e6) for _ in range(looks)), key=sum)
    middle = later[len(later) // 2]
    found = {
        "first": {"pieces": len(first), "total": 1e3 * sum(first), "longest": 1e3 * max(first)},
        "later": {"pieces": len(middle), "total": 1e3 * sum(middle), "longest": 1e3 * max(middle)},
    }
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
