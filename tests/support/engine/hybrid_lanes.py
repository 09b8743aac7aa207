"""The fake streams of ``fake_lanes`` over tiers of two KV groups."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from pensieve.engine.kv.mechanisms import calls_for
from pensieve.engine.kv.queue import Pairs
from pensieve.engine.kv.timeline import Lane
from pensieve.engine.plan import Copy
from support.engine.fake_lanes import FakeLanes, FakeMark
from support.engine.hybrid_plans import LAYERS, NUM_LAYERS, Memory, Values, Work
from support.engine.swap_plans import Pools


class HybridLanes(FakeLanes):
    """Do one layer page at a time on each lane, in any order that the waits allow."""

    def __init__(
        self,
        memory: Memory,
        rng: random.Random,
        ignored: frozenset[tuple[Lane, Lane]] = frozenset(),
        layers_wait: bool = True,
    ) -> None:
        super().__init__(Pools.random(NUM_LAYERS, 1, 0), rng, ignored, layers_wait)
        self.memory = memory

    def copy_out(self, group: int, prepared: object, first: int, count: int) -> None:
        assert isinstance(prepared, np.ndarray)
        layers = len(LAYERS[self.memory.shape.kind][group])
        for run in range(first, first + count):
            source, target = prepared[run // layers].tolist()
            number = run % layers
            self.queues[Lane.OUT].append(
                _copy(
                    self.memory.on_host(group, number, target), self.memory.on_device(group, number, source)
                )
            )

    def copy_in(self, prepared: dict[int, object]) -> None:
        for layers, together in calls_for(self.groups, self.rng.choice([1, 1 << 20, 1 << 30])):
            for layer in layers:
                for group, pairs in prepared.items():
                    assert isinstance(pairs, np.ndarray)
                    self._bring(group, pairs, layer)
            for part in together:
                mark = self.mark(Lane.IN)
                assert isinstance(mark, FakeMark)
                self.arrived[part.start] = mark

    def _bring(self, group: int, pairs: Pairs, layer: int) -> None:
        layers = LAYERS[self.memory.shape.kind][group]
        if layer in layers:
            number = layers.index(layer)
            for source, target in pairs.tolist():
                values = self.memory.on_host(group, number, source)
                self.queues[Lane.IN].append(_copy(self.memory.on_device(group, number, target), values))

    def copy_on_device(self, pairs: dict[int, Pairs]) -> None:
        copies = [
            Copy(source, target, group) for group, pages in pairs.items() for source, target in pages.tolist()
        ]
        self.queues[Lane.COMPUTE].append(lambda: self.memory.copy_on_device(copies))

    def compute(self, work: Work, outputs: list[Values]) -> None:
        """Queue a step; what it reads is appended to ``outputs`` when it runs."""

        def part(layer: int) -> Callable[[], None]:
            return lambda: outputs.extend(self.memory.compute(work, layer))

        for layer in range(NUM_LAYERS):
            self.wait(layer)
            self.queues[Lane.COMPUTE].append(part(layer))


def _copy(target: Values, source: Values) -> Callable[[], None]:
    def copy() -> None:
        target[:] = source

    return copy
