"""Tiers that running requests pin to the last page, and turns that fit them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from pensieve.config import CacheConfig, CacheGroup, SchedulerConfig
from pensieve.core import Hints, Sampling
from pensieve.engine.plan import Plan
from support.engine.engine_driver import Driver

KINDS = ("full", "window", "state")


class ShortTurns(Driver):
    """Cuts each turn so that it fits what its session has left of the context."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        lengths = (2, self.limit // 3, self.limit * 2 // 3)
        self.prompts = [[self.rng.randrange(self.vocabulary) for _ in range(count)] for count in lengths]

    def start_turn(
        self,
        session: str,
        input_tokens: Sequence[int],
        want: int,
        sampling: Sampling | None = None,
        hints: Hints | None = None,
    ) -> int | None:
        history = self.history.get(session, [])
        room = self.limit - len(history)
        if room < 3:
            if history and not any(turn.session == session for turn in self.turns.values()):
                del history[self.rng.randrange(1, len(history)) :]
            return None
        tokens = list(input_tokens)[: max(1, room // 2)]
        return super().start_turn(session, tokens, max(1, min(want, room - len(tokens))), sampling, hints)


def setup(kind: str, rng: random.Random, *, elastic: bool) -> tuple[CacheConfig, SchedulerConfig]:
    """A model, and a device tier for one or two of the longest contexts."""
    size, limit = rng.choice((1, 2, 3, 4)), rng.choice((10, 16, 24, 32))
    groups = [CacheGroup("full", 0, rng.choice((1, 2)), size, rng.choice((1, 3)))]
    if kind != "full" and rng.random() < 0.15:
        groups = [CacheGroup("full", 0, 0, 0, 1)]
    if kind == "state":
        groups.append(CacheGroup("state", 0, rng.choice((1, 3)), 3, rng.choice((1, 2))))
    elif kind == "window":
        width = rng.choice((2, 3, 5, 6, 9, 13))
        groups.append(CacheGroup("window", width, rng.choice((1, 2, 3)), size, rng.choice((1, 2))))
    device = max(4, int(-(-limit // size) * rng.choice((0.7, 1, 1.2, 1.5, 2)))) + rng.randrange(4)
    host = rng.choice((0, 0, 1, device // 2, device * 2))
    chunk = sum(group.page_bytes for group in groups)
    others = rng.randrange(2, device + 1) if len(groups) > 1 else 0
    num_bytes = device * groups[0].page_bytes + others * groups[-1].page_bytes + rng.randrange(3)
    num_bytes = max(num_bytes, sum(group.device_unit * group.page_bytes for group in groups))
    most = int(num_bytes * rng.choice((1.3, 2, 3))) if elastic else num_bytes
    cache = CacheConfig(
        max(most // chunk, 1), host, size, groups=tuple(groups), swap_watermark=rng.choice((0.0, 0.25, 1.0)),
        decode_reserve=rng.choice((0.0, 0.1)), device_bytes=most, host_bytes=host * chunk,
        device_floor_bytes=num_bytes if elastic else None,
    )  # fmt: skip
    if kind == "full" and not elastic:
        whole = replace(groups[0], device_unit=device)
        cache = replace(cache, device_chunks=device, groups=(whole,), device_bytes=None, host_bytes=None)
    running = rng.choice((2, 4, 8, 16))
    budget = rng.choice((1, 8, 24, 100))
    if kind == "state":
        budget = max(budget, size + running)
    unified = rng.random() < 0.8
    return cache, SchedulerConfig(limit, max_batch_tokens=budget, max_running=running, unified_batch=unified)


def check_size(plan: Plan, scheduler: SchedulerConfig) -> None:
    """A plan has no more of anything than a worker on a GPU has memory for."""
    tokens, drafts = plan.num_tokens, sum(span.drafts for span in plan.spans)
    assert not drafts or tokens <= scheduler.max_batch_tokens, "drafts take more than is left over"
    assert tokens <= max(scheduler.max_batch_tokens, scheduler.max_running), f"{tokens} tokens in a step"
    assert len(plan.specs) <= scheduler.max_running + scheduler.max_drafts, f"{len(plan.specs)} tokens chosen"
    assert len(plan.page_tables) <= scheduler.max_running, f"{len(plan.page_tables)} requests in a step"
