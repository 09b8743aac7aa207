"""A server with the real scheduler and cache, and a model that only takes its time: so much a step, so much a token.

    python bench/service/priced_engine.py --model demo [options of `pensieve serve`]

The prices are taken from ``STEP_MS`` and ``TOKEN_US``.
What is measured on it is the service's own doing: how it queues, shares and refuses, not how fast a model is.
"""

from __future__ import annotations

import os
import sys
import time

import click

from pensieve.config import CacheConfig, EngineOptions, SchedulerConfig, batch_limits
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel
from pensieve.engine.engine import Engine
from pensieve.engine.messages import EngineReady
from pensieve.engine.plan import Plan, Sampled, StepResult, SynchronousWorker
from pensieve.engine.scheduling.scheduler import Scheduler
from pensieve.options.serve import by_name, resolve, serve_flags
from pensieve.server.app import run

BUILDER, ENGINE = "priced_engine:build", "service/priced_engine.py"
STEP_VARIABLE, TOKEN_VARIABLE = "STEP_MS", "TOKEN_US"
CONTEXT_LIMIT = 8192
DEVICE_TOKENS, HOST_TOKENS = 1 << 17, 1 << 18
VOCABULARY = 1536
"""The demo model's: every token has text."""


class PricedWorker(SynchronousWorker):
    """Computes nothing and takes as long as a model would."""

    def __init__(self, step_s: float, token_s: float) -> None:
        self._step_s = step_s
        self._token_s = token_s
        self._free_at = 0.0

    def run(self, plan: Plan) -> StepResult:
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + self._step_s + self._token_s * plan.num_tokens
        time.sleep(self._free_at - now)
        sampled = [
            Sampled(span.request, 300 + span.end % 1000) for span in plan.spans if span.sample is not None
        ]
        return StepResult(tuple(sampled))

    def close(self) -> None:
        """Nothing to give back."""


def build(options: EngineOptions) -> Engine:
    """For ``pensieve.engine.process.host``."""
    size = options.chunk_tokens
    batch_tokens, running = batch_limits(options, "cpu")
    cache = CacheConfig(DEVICE_TOKENS // size, HOST_TOKENS // size, size, options.policy)
    limits = SchedulerConfig(
        CONTEXT_LIMIT, max_batch_tokens=batch_tokens, max_running=running, max_queued=options.max_queued
    )
    scheduler = Scheduler(limits, CacheManager(cache, CostModel(((0, 0.0), (1024, 1.0)), 0.2, size)))
    ready = EngineReady(CONTEXT_LIMIT, VOCABULARY, "none", "none", DEVICE_TOKENS, HOST_TOKENS, size)
    prices = float(os.environ[STEP_VARIABLE]) / 1e3, float(os.environ[TOKEN_VARIABLE]) / 1e6
    return Engine(scheduler, PricedWorker(*prices), ready)


@click.command()
@serve_flags
def main(**flags: object) -> None:
    """`pensieve serve` in front of this engine."""
    sys.exit(run(resolve(by_name(flags)).options, builder=BUILDER))


if __name__ == "__main__":
    main()
