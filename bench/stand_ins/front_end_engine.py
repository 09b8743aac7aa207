"""A server whose engine has no model: with every step one token for each request.

    python bench/stand_ins/front_end_engine.py --model demo [options of `pensieve serve`]

The length of a step in milliseconds is taken from ``STEP_MS``.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

import click
import numpy as np

from pensieve.config import EngineOptions
from pensieve.core import FinishReason, Phase, RequestKey, Usage, packed_length
from pensieve.engine.messages import (
    Cancel,
    Command,
    EngineReady,
    Event,
    Evict,
    Evicted,
    Finished,
    GetResidency,
    Memory,
    Output,
    RequestProgress,
    ResidentTokens,
    SetMemory,
    Started,
    Stats,
    Submit,
)
from pensieve.engine.process.loop import StepAnnouncer
from pensieve.options.serve import by_name, resolve, serve_flags
from pensieve.server.app import run

BUILDER = "front_end_engine:build"
STEP_VARIABLE = "STEP_MS"
CONTEXT_LIMIT = 16384
VOCABULARY = 1536
"""The demo model's: every token has text."""


@dataclass(slots=True)
class _Request:
    left: int
    usage: Usage


class PacedEngine:
    """A ``HostedEngine``: takes everything at once, knows no history, answers in random tokens."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[int, _Request] = {}
        self._next = 0.0
        self._draw = np.random.default_rng(0)
        self._steps = self._tokens = 0
        self.announcer = StepAnnouncer()

    def ready(self) -> EngineReady:
        return EngineReady(CONTEXT_LIMIT, VOCABULARY, "none", "none", CONTEXT_LIMIT * 1000, 0, 32)

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def handle(self, command: Command) -> list[Event]:
        match command:
            case Submit(request=request):
                total = packed_length(command.tokens)
                usage = Usage(
                    context_tokens=total,
                    new_tokens=command.num_new,
                    gpu_cached_tokens=total - command.num_new,
                )
                left = command.sampling.max_output_tokens or CONTEXT_LIMIT - total
                self._running[request] = _Request(left, usage)
                return [RequestProgress(request, Phase.QUEUED, 0, 0, total), Started(request, usage)]
            case Cancel():
                self._running.pop(command.request, None)
            case Evict():
                return [Evicted(command.call, 0)]
            case GetResidency():
                return [ResidentTokens(command.call, 0, 0)]
            case SetMemory():
                return [Memory(command.call, 0, 0, 0, 0)]
        return []

    def step(self) -> list[Event]:
        """Wait for the end of the step; whoever was there at its begin gets a token."""
        self.announcer.announce(len(self._running), frozenset(map(RequestKey, self._running)))
        now = time.monotonic()
        self._next = max(self._next + self._step_s, now)
        time.sleep(self._next - now)
        events: list[Event] = []
        tokens = self._draw.integers(0, VOCABULARY, len(self._running)).tolist()
        for (key, request), token in zip(list(self._running.items()), tokens, strict=True):
            events.append(Output(key, (token,)))
            request.left -= 1
            if not request.left:
                del self._running[key]
                events.append(Finished(key, FinishReason.LENGTH, request.usage))
        self._steps += 1
        self._tokens += len(tokens)
        return events

    def stats(self) -> Stats:
        return Stats(steps_total=self._steps, running=len(self._running), output_total=self._tokens)

    def close(self) -> None:
        """Nothing to give back."""


def build(options: EngineOptions) -> PacedEngine:
    """For ``pensieve.engine.process.host``."""
    return PacedEngine(float(os.environ[STEP_VARIABLE]) / 1e3)


@click.command()
@serve_flags
def main(**flags: object) -> None:
    """`pensieve serve` in front of this engine."""
    sys.exit(run(resolve(by_name(flags)).options, builder=BUILDER))


if __name__ == "__main__":
    main()
