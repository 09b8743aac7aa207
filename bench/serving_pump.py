"""An engine without a model: with every step one token for each request, to see what a front end can carry.

``BUILDER`` names it for a server; the step length in milliseconds is taken from ``PUMP_STEP_MS``.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from dataclasses import dataclass

import click
import numpy as np

from pensieve.config import EngineOptions
from pensieve.core import FinishReason, Phase, Usage
from pensieve.engine.messages import (
    Cancel,
    Command,
    Event,
    Evict,
    Evicted,
    Finished,
    GetResidency,
    Output,
    Progress,
    Ready,
    Residency,
    Started,
    Stats,
    Submit,
)
from pensieve.options import by_name, resolve, serve_flags
from pensieve.server.app import run

BUILDER = "serving_pump:build"
STEP_VARIABLE = "PUMP_STEP_MS"
CONTEXT_LIMIT = 16384
VOCABULARY = 32000


@dataclass(slots=True)
class _Request:
    left: int
    usage: Usage


class PumpEngine:
    """``pensieve.engine.loop.Engine``: takes everything at once, knows no history, answers in random tokens."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[int, _Request] = {}
        self._queue: deque[tuple[int, _Request]] = deque()
        self._next = 0.0
        self._draw = np.random.default_rng(0)
        self._steps = self._tokens = self._batch = 0

    def ready(self) -> Ready:
        return Ready(CONTEXT_LIMIT, VOCABULARY, "pump", "none", CONTEXT_LIMIT * 1000, 0, 32)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._queue)

    def handle(self, command: Command) -> list[Event]:
        if isinstance(command, Submit):
            total = len(command.tokens) // 4
            usage = Usage(
                context_tokens=total, new_tokens=command.num_new, gpu_cached_tokens=total - command.num_new
            )
            left = command.sampling.max_output_tokens or CONTEXT_LIMIT - total
            self._queue.append((command.request, _Request(left, usage)))
            return [Progress(command.request, Phase.QUEUED, 0, 0, total)]
        if isinstance(command, Cancel):
            self._running.pop(command.request, None)
        if isinstance(command, Evict):
            return [Evicted(command.call, 0)]
        if isinstance(command, GetResidency):
            return [Residency(command.call, 0, 0)]
        return []

    def step(self) -> list[Event]:
        """Wait for the end of the step; whoever was there at its begin gets a token."""
        events: list[Event] = []
        while self._queue:
            key, request = self._queue.popleft()
            self._running[key] = request
            events.append(Started(key, request.usage))
        now = time.monotonic()
        self._next = max(self._next + self._step_s, now)
        time.sleep(self._next - now)
        tokens = self._draw.integers(0, VOCABULARY, len(self._running)).tolist()
        for (key, request), token in zip(list(self._running.items()), tokens, strict=True):
            events.append(Output(key, (token,)))
            request.left -= 1
            if not request.left:
                del self._running[key]
                events.append(Finished(key, FinishReason.LENGTH, request.usage))
        self._steps += 1
        self._batch = len(tokens)
        self._tokens += len(tokens)
        return events

    def stats(self) -> Stats:
        return Stats(
            steps_total=self._steps,
            running=len(self._running),
            queued=len(self._queue),
            output_total=self._tokens,
            step_seconds_total=self._steps * self._step_s,
            last_batch_tokens=self._batch,
        )

    def close(self) -> None:
        """Nothing to give back."""


def build(options: EngineOptions) -> PumpEngine:
    """For ``pensieve.engine.host``."""
    return PumpEngine(float(os.environ.get(STEP_VARIABLE, "20")) / 1e3)


@click.command()
@serve_flags
def main(**flags: object) -> None:
    """`pensieve serve` in front of this engine."""
    sys.exit(run(resolve(by_name(flags)).options, builder=BUILDER))


if __name__ == "__main__":
    main()
