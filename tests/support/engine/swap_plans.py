"""Random plans over tiny pools, in which pages are reused at once, and what must come of them, one after the other.

A run of the pools is one array of whole numbers; a step's "model" in layer l turns each page that it writes into
``3 * old + number(step, l, page)`` and then adds up all the pages of all its tables. So whatever is read or written
too early or too late changes all later values.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pensieve.core import RequestKey
from pensieve.engine.plan import Copy, PageTable, Plan, Span

PAGE_TOKENS = 4
DEVICE_PAGES, HOST_PAGES = 9, 7


def make_plan(rng: random.Random, step: int) -> Plan:
    """Any copies that a plan may have, and in most plans spans: some rows share pages, none writes another's."""
    host, device = range(HOST_PAGES), range(DEVICE_PAGES)
    out = _pairs(rng, device, host, 3)
    saved = {copy.dst for copy in out}
    come_in = _pairs(rng, [page for page in host if page not in saved], device, 3)
    copies = _pairs(rng, device, device, 2) if rng.random() < 0.3 else ()
    copies = tuple(copy for copy in copies if copy.src != copy.dst)
    tables: list[PageTable] = []
    spans: list[Span] = []
    taken: set[int] = set()
    for _ in range(rng.randrange(4) if rng.random() < 0.8 else 0):
        table = rng.sample(device, rng.randrange(1, 5))
        start = rng.randrange(len(table) * PAGE_TOKENS)
        length = rng.randrange(1, min(len(table) * PAGE_TOKENS - start, 6) + 1)
        pages = set(table[start // PAGE_TOKENS : -(-(start + length) // PAGE_TOKENS)])
        if not pages & taken:
            taken |= pages
            spans.append(Span(RequestKey(len(tables)), start, np.zeros(length, np.int32), len(tables)))
            tables.append(np.array(table, np.int32))
    return Plan(step, tuple(spans), tuple(tables), out, copies, come_in)


def _pairs(rng: random.Random, sources: Sequence[int], targets: Sequence[int], most: int) -> tuple[Copy, ...]:
    count = rng.choice([0, 0, *range(1, most + 1)])
    return tuple(
        Copy(rng.choice(sources), target) for target in rng.sample(targets, min(count, len(targets)))
    )


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a plan's step does in every layer."""

    step: int
    written: list[int]
    read: list[int]
    """All pages of all rows; a page that two rows share stands here twice."""

    def number(self, layer: int, page: int) -> int:
        return 1000 * self.step + 50 * layer + page + 1


def work_of(plan: Plan) -> StepWork:
    written = [
        int(page)
        for span in plan.spans
        for page in plan.page_tables[span.page_table][
            span.start // PAGE_TOKENS : (span.end - 1) // PAGE_TOKENS + 1
        ]
    ]
    return StepWork(plan.step, written, [int(page) for table in plan.page_tables for page in table])


Values = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Pools:
    """The contents of both pools: device [L, P, words] and host [C, L, words]."""

    device: Values
    host: Values

    @staticmethod
    def random(num_layers: int, words: int, seed: int) -> Pools:
        numbers = np.random.default_rng(seed)
        shapes = (num_layers, DEVICE_PAGES, words), (HOST_PAGES, num_layers, words)
        return Pools(*(numbers.integers(-(2**31), 2**31, shape, dtype=np.int32) for shape in shapes))

    def copy(self) -> Pools:
        return Pools(self.device.copy(), self.host.copy())

    def write(self, work: StepWork, layer: int, page: int) -> None:
        self.device[layer, page] = self.device[layer, page] * np.int32(3) + np.int32(work.number(layer, page))

    def read(self, work: StepWork, layer: int) -> Values:
        total: Values = self.device[layer, work.read].sum(axis=0, dtype=np.int32)
        return total

    def run(self, plan: Plan) -> Values:
        """Carry out a plan in the order of ``pensieve.engine.plan``; returns what its step read, [L, words]."""
        for copy in plan.swap_out:
            self.host[copy.dst] = self.device[:, copy.src]
        before = self.device.copy()
        for copy in plan.copies:
            self.device[:, copy.dst] = before[:, copy.src]
        for copy in plan.swap_in:
            self.device[:, copy.dst] = self.host[copy.src]
        work = work_of(plan)
        outputs = np.zeros((len(self.device), self.device.shape[2]), np.int32)
        for layer in range(len(self.device)):
            for page in work.written:
                self.write(work, layer, page)
            if work.read:
                outputs[layer] = self.read(work, layer)
        return outputs
