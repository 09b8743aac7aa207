"""A cost profile of a model with two KV groups: its plans name pages that exist, and only those that a step needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pensieve.config import KvDtypeName
from pensieve.core import RequestKey
from pensieve.engine.cache.pages import PageSize
from pensieve.engine.cost_profiles import ElasticPages, prober, quick_points
from pensieve.engine.kv.grid import TierLayout
from pensieve.engine.plan import NO_PAGE, Plan, Sampled, Span, StepResult, SynchronousWorker
from pensieve.engine.worker.hybrid_sizing import ContextSizes
from pensieve.engine.worker.spans import SpanColumns
from pensieve.model.arch import Layer, StateShape
from pensieve.model.groups import kv_groups
from support.model.tiny_arch import make_arch

STATE = StateShape(conv_channels=8, conv_width=4, heads=2, key_dim=8, value_dim=8)
CHUNK, LIMIT = 32, 4096


class Info:
    device, dtype, chunk_tokens, context_limit, max_batch_tokens, ranks = (
        "cpu",
        "float32",
        CHUNK,
        LIMIT,
        512,
        1,
    )

    device_floor: int | None = None
    kv_dtype: KvDtypeName = "auto"

    def __init__(self, tier: TierLayout, chunks: int) -> None:
        self.device_tier, self.device_chunks = tier, chunks


class Worker(SynchronousWorker):
    """Checks each plan against the tier."""

    def __init__(self, *layers: Layer, tokens: int = LIMIT) -> None:
        self.arch: Any = make_arch(*layers)
        self.groups = kv_groups(self.arch, CHUNK, "float32")
        sizes = ContextSizes(self.groups, CHUNK, LIMIT, 1, on_gpu=False)
        tier = sizes.device_layout(sizes.device_bytes(tokens))
        self.info: Any = Info(tier, sizes.chunks(tier))
        self.now = 0.0
        self.live: int | None = None

    def run(self, plan: Plan) -> StepResult:
        (span,) = plan.spans
        SpanColumns.from_plan(plan, CHUNK)
        first, second = self.info.device_tier.grids
        if self.groups[0].layers:
            assert first.is_page(plan.page_tables[0])
            assert len(np.unique(plan.page_tables[0])) == len(plan.page_tables[0]) == -(-span.end // CHUNK)
        if self.groups[1].window is None:
            (chain,) = plan.chains
            assert chain.read == (self.live if span.start else NO_PAGE) and chain.boundary == NO_PAGE
            self.live = chain.live
            assert second.is_page(np.array([chain.live]))
        else:
            (table,) = plan.window_tables
            seen = table[max(0, span.start - self.groups[1].window + 1) // CHUNK :]
            assert second.is_page(seen) and len(np.unique(seen)) == len(seen)
        self.now += 0.01 + 1e-5 * span.end
        return StepResult(sampled=(Sampled(span.request, 0),))

    def close(self) -> None: ...


WINDOW, FULL, RECURRENT = Layer(window=100), Layer(), Layer(attends=False, state=STATE)


@pytest.mark.parametrize(
    "layers",
    [(WINDOW, FULL), (WINDOW, WINDOW), (RECURRENT, FULL), (RECURRENT,)],
    ids=["windows", "windows alone", "states", "states alone"],
)
@pytest.mark.parametrize("tokens", [LIMIT, 700])
def test_contexts_of_all_lengths_fit_a_tier_that_holds_them(layers: tuple[Layer, ...], tokens: int) -> None:
    worker = Worker(*layers, tokens=tokens)
    contexts = [point.context for point in prober(worker, lambda: worker.now).measure(tokens // 2, 2)]
    assert contexts == [32 << step for step in range(len(contexts))] and 2 * contexts[-1] > tokens // 2


def test_a_quick_measurement() -> None:
    worker = Worker(WINDOW, FULL)
    points = quick_points(worker, seconds=1000.0, clock=lambda: worker.now)
    assert [point.context for point in points] == [32, 128, 512, 2048]


@pytest.mark.parametrize("place", ["one group", "window", "state", "states alone"])
def test_pages_of_an_elastic_tier_have_their_memory_backed(place: str) -> None:
    layers = {
        "one group": (Layer(), Layer()),
        "window": (Layer(), Layer(window=64), Layer(window=64)),
        "state": (Layer(), Layer(attends=False, state=STATE)),
        "states alone": (Layer(attends=False, state=STATE),),
    }[place]
    groups = kv_groups(make_arch(*layers), CHUNK, "float32")
    sizes = tuple(PageSize(len(group.layers), group.layer_page_bytes, 3) for group in groups)
    tier = TierLayout(48 * sum(size.unit_bytes for size in sizes), sizes)
    pages = ElasticPages(groups, tier, CHUNK)
    for step, (start, end) in enumerate([(0, 32), (32, 256), (256, 500), (480, 512)]):
        plan = pages.plan(step, Span(RequestKey(1), start, np.zeros(end - start, np.int32), 0))
        assert plan.memory is not None
        low, high = plan.memory
        first, second = tier.grids
        if groups[0].layers:
            assert first.is_page(plan.page_tables[0])
            last = first.address(int(plan.page_tables[0].max()), len(groups[0].layers) - 1)
            assert last + groups[0].layer_page_bytes <= low < last + 2 * sizes[0].unit_bytes
        used = [*plan.window_tables, *(np.array([chain.live]) for chain in plan.chains)]
        assert len(used) == len(groups) - 1 and (high == 0) == (not used)
        for numbers in used:
            assert second.is_page(numbers)
            assert second.address(int(numbers.min())) >= tier.num_bytes - high
