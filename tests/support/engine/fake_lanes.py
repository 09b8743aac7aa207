"""Three streams without a GPU: what is queued on them is done later, in any order that their waits allow."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pensieve.engine.kv.mechanisms import calls_for, layer_groups
from pensieve.engine.kv.queue import Pairs
from pensieve.engine.kv.timeline import Lane, Mark
from support.engine.swap_plans import Pools, StepWork, Values


@dataclass(eq=False)
class FakeMark:
    reached: bool = False

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, end_event: FakeMark) -> float:
        assert self.reached and end_event.reached
        return 2.0


@dataclass
class FakeLanes:
    """``queue.Lanes`` over numpy pools. A lane does one run, one page of a layer, or one sum at a time."""

    pools: Pools
    rng: random.Random
    ignored: frozenset[tuple[Lane, Lane]] = frozenset()
    """Waits (of the first lane for the second) that are forgotten: deliberate faults."""
    layers_wait: bool = True
    followed: list[tuple[Lane, Lane]] = field(default_factory=list)
    out_calls: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queues: dict[Lane, deque[FakeMark | Callable[[], None]]] = {lane: deque() for lane in Lane}
        self.waits: dict[Lane, deque[tuple[int, FakeMark]]] = {lane: deque() for lane in Lane}
        self.arrived: dict[int, FakeMark] = {}
        self.groups = layer_groups(len(self.pools.device))

    # -- Lanes -------------------------------------------------------------------------------------------------------

    def mark(self, lane: Lane) -> Mark:
        mark = FakeMark()
        self.queues[lane].append(lambda: setattr(mark, "reached", True))
        return mark

    def follow(self, lane: Lane, after: Lane, mark: Mark) -> None:
        assert isinstance(mark, FakeMark)
        self.followed.append((lane, after))
        if (lane, after) not in self.ignored:
            self.queues[lane].append(mark)

    def prepare(self, pairs: Pairs) -> Pairs:
        return pairs.copy()

    def copy_out(self, group: int, prepared: object, first: int, count: int) -> None:
        assert isinstance(prepared, np.ndarray) and group == 0
        self.out_calls.append((first, count))
        layers = len(self.pools.device)
        for run in range(first, first + count):
            source, target = prepared[run // layers]
            self._later(
                Lane.OUT, self.pools.host, (target, run % layers), self.pools.device, (run % layers, source)
            )

    def copy_in(self, prepared: dict[int, object]) -> None:
        pairs = prepared[0]
        assert isinstance(pairs, np.ndarray) and len(prepared) == 1
        for layers, groups in calls_for(self.groups, self.rng.choice([1, 1 << 20, 1 << 30])):
            for source, target in pairs:
                for layer in layers:
                    self._later(Lane.IN, self.pools.device, (layer, target), self.pools.host, (source, layer))
            for group in groups:
                mark = self.mark(Lane.IN)
                assert isinstance(mark, FakeMark)
                self.arrived[group.start] = mark

    def copy_on_device(self, pairs: dict[int, Pairs]) -> None:
        ((source, target),) = [pages.T for pages in pairs.values()]

        def copy() -> None:
            self.pools.device[:, target] = self.pools.device[:, source]

        self.queues[Lane.COMPUTE].append(copy)

    def _later(
        self, lane: Lane, dst: Values, target: tuple[int, int], src: Values, source: tuple[int, int]
    ) -> None:
        def copy() -> None:
            dst[target] = src[source]

        self.queues[lane].append(copy)

    # -- the step, and time ------------------------------------------------------------------------------------------

    def wait(self, layer: int) -> None:
        mark = self.arrived.get(layer)
        if mark is not None and self.layers_wait:
            self.queues[Lane.COMPUTE].append(mark)

    def step(self, work: StepWork, outputs: Values) -> None:
        """Queue a step; ``outputs`` [L, words] is written when it runs."""

        def write(layer: int, page: int) -> Callable[[], None]:
            return lambda: self.pools.write(work, layer, page)

        def read(layer: int) -> None:
            outputs[layer] = self.pools.read(work, layer)

        for layer in range(len(self.pools.device)):
            self.wait(layer)
            for page in work.written:
                self.queues[Lane.COMPUTE].append(write(layer, page))
            self.queues[Lane.COMPUTE].append(functools.partial(read, layer))

    def pass_time(self, actions: int | None = None) -> None:
        """Do that many of the queued things, or all. Which lane is next is chance, and which lane is slow, too."""
        weights = {lane: self.rng.choice([0.02, 1.0]) for lane in Lane}
        while actions is None or actions > 0:
            ready = [lane for lane in Lane if self._ready(lane)]
            if not ready:
                assert not any(self.queues.values()) or actions is not None, "the lanes wait for each other"
                return
            (lane,) = self.rng.choices(ready, [weights[lane] for lane in ready])
            action = self.queues[lane].popleft()
            if not isinstance(action, FakeMark):
                action()
            actions = None if actions is None else actions - 1

    def _ready(self, lane: Lane) -> bool:
        queue = self.queues[lane]
        return bool(queue) and (not isinstance(queue[0], FakeMark) or queue[0].reached)
