"""The real streams over tiers of two KV groups, with copies that begin late by chance."""

from __future__ import annotations

import random

import torch

from pensieve.engine.kv.pools import HybridPools, KvFormat
from pensieve.engine.plan import NO_PAGE, Plan
from pensieve.model.arch import Arch, Layer, StateShape
from pensieve.model.groups import KvGroup
from support.engine.hybrid_plans import (
    LAYERS,
    NUM_LAYERS,
    PAGE_TOKENS,
    WINDOW,
    Memory,
    Planner,
    Shape,
    Work,
    work_of,
)
from support.engine.slow_lanes import make_engine, nap

STATE = StateShape(conv_channels=1, conv_width=2, heads=1, key_dim=1, value_dim=8)
"""16 bytes of inputs and 32 of state: a layer page of the second group."""


def make_pools(shape: Shape, floor: int | None = None) -> HybridPools:
    """Pools on a GPU for the random plans; ``floor``: see ``HybridPools``."""
    first, second = LAYERS[shape.kind]
    layers = tuple(
        Layer(
            attends=layer in first or shape.kind == "window",
            window=WINDOW if shape.kind == "window" and layer in second else None,
            state=STATE if shape.kind == "state" and layer in second else None,
        )
        for layer in range(NUM_LAYERS)
    )
    arch = Arch(
        family="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=1,
        context_limit=64, norm="rms", norm_eps=1e-5, activation="silu", gated_mlp=True, layers=layers,
    )  # fmt: skip
    groups = (
        KvGroup("full", first, shape.device.sizes[0].layer_page_bytes),
        KvGroup("window", second, shape.device.sizes[1].layer_page_bytes, WINDOW)
        if shape.kind == "window"
        else KvGroup("state", second, shape.device.sizes[1].layer_page_bytes),
    )
    return HybridPools(
        arch,
        groups,
        (shape.device, shape.host),
        form=KvFormat(PAGE_TOKENS, torch.float32),
        device=torch.device("cuda"),
        floor=floor,
    )


def on_gpu(pages: list[int]) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int64).cuda()


class _Numbers:
    """What one step needs on the device, made before anything is queued."""

    def __init__(self, work: Work) -> None:
        self.written = [on_gpu(pages) for pages in work.written]
        self.read = [on_gpu(pages) for pages in work.read]
        self.added = [
            torch.tensor([[work.number(layer, page) for page in pages] for layer in range(NUM_LAYERS)])
            .int()
            .cuda()
            .unsqueeze(-1)
            for pages in work.written
        ]
        chains = work.chains
        self.before = on_gpu([max(chain.read, 0) for chain in chains])
        self.known = on_gpu([int(chain.read != NO_PAGE) for chain in chains]).int().unsqueeze(-1)
        targets = [
            (page, factor, index)
            for index, chain in enumerate(chains)
            for page, factor in ((chain.boundary, 5), (chain.live, 7))
            if page != NO_PAGE
        ]
        self.targets = on_gpu([page for page, _, _ in targets])
        self.factors = on_gpu([factor for _, factor, _ in targets]).int().unsqueeze(-1)
        self.sources = on_gpu([index for _, _, index in targets])


class Rig:
    """An engine on a GPU beside an oracle. All plans and their numbers are made first: nothing may wait afterwards."""

    def __init__(self, seed: int, plans: int = 30, **options: object) -> None:
        self.rng = random.Random(seed)
        self.shape = Shape.draw(self.rng)
        planner = Planner(self.rng, self.shape)
        self.plans = [planner.make(step) for step in range(plans)]
        self.compute = torch.cuda.Stream()
        self.pools = make_pools(self.shape)
        self.oracle = Memory.random(self.shape, seed)
        self._values(self.pools.device).copy_(torch.from_numpy(self.oracle.device))
        self._values(self.pools.host).copy_(torch.from_numpy(self.oracle.host))
        self.works = [work_of(plan, self.shape) for plan in self.plans]
        self.numbers = [_Numbers(work) for work in self.works]
        self.swap = make_engine(self.pools, self.compute, self.rng, **options)  # type: ignore[arg-type]
        self.got: list[list[torch.Tensor]] = []
        torch.cuda.synchronize()

    @staticmethod
    def _values(buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(torch.int32)

    def step(self, index: int) -> list[torch.Tensor]:
        """Queue a step as ``Memory.compute`` does it."""
        numbers, work = self.numbers[index], self.works[index]
        outputs = []
        for layer in range(NUM_LAYERS):
            self.swap.wait(layer)
            nap(self.rng)
            for group, layers in enumerate(LAYERS[self.shape.kind]):
                if layer not in layers:
                    continue
                pages = self.pools.groups[group].device[layers.index(layer)].view(torch.int32)
                written = numbers.written[group]
                if len(work.written[group]):
                    values = pages.index_select(0, written) * 3 + numbers.added[group][layer]
                    pages.index_copy_(0, written, values)
                outputs.append(pages.index_select(0, numbers.read[group]).sum(0, dtype=torch.int32))
                if group == 1 and work.chains:
                    before = pages.index_select(0, numbers.before) * numbers.known
                    after = before.index_select(0, numbers.sources) * numbers.factors + work.step
                    pages.index_copy_(0, numbers.targets, after)
        return outputs

    def run(self) -> bool:
        """Queue every plan at once, then compare what came of them."""
        with torch.cuda.stream(self.compute):
            for index, plan in enumerate(self.plans):
                self.swap.before_step(plan)
                self.got.append(self.step(index) if plan.spans else [])
                self.swap.after_step(plan)
                self.swap.counters()
        self.swap.drain()
        torch.cuda.synchronize()
        want = [self._want(plan) for plan in self.plans]
        same = bool((self._values(self.pools.device).cpu().numpy() == self.oracle.device).all())
        same &= bool((self._values(self.pools.host).numpy() == self.oracle.host).all())
        for got, wanted in zip(self.got, want, strict=True):
            same &= all(
                bool((one.cpu().numpy() == other).all()) for one, other in zip(got, wanted, strict=True)
            )
        self.swap.close()
        self.pools.close()
        return same

    def _want(self, plan: Plan) -> list[object]:
        outputs = self.oracle.run(plan)
        return list(outputs) if plan.spans else []
