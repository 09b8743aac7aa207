"""The real streams with copies that begin late by chance, and with waits that can be left out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import ClassVar, cast

import torch

from pensieve.engine.kv.mechanisms import RunCopy
from pensieve.engine.kv.pools import KvFormat, KvPools
from pensieve.engine.kv.swap import CudaLanes, SwapEngine
from pensieve.engine.kv.timeline import Lane, Mark
from pensieve.engine.plan import Plan
from pensieve.model.arch import Arch
from support.engine.swap_plans import DEVICE_PAGES, HOST_PAGES, PAGE_TOKENS, Pools, make_plan, work_of

LAYERS, WORDS = 5, 64
HEAD_DIM = WORDS // (2 * PAGE_TOKENS)
Edge = tuple[Lane, Lane]


def nap(rng: random.Random) -> None:
    """Hold the current stream up by up to 2 ms, or not at all.

    That is longer than a slow processor takes to queue what follows; with 0.3 ms, waits that were left out showed on an
    H100 beside other work only.
    """
    cycles = rng.choice([0, 0, 20_000, 200_000, 4_000_000])
    if cycles:
        torch.cuda._sleep(cycles)


class SlowLanes(CudaLanes):
    rng: ClassVar[random.Random] = random.Random(0)
    ignored: ClassVar[frozenset[Edge]] = frozenset()
    """Waits (of the first lane for the second) that are left out."""
    layers_wait: ClassVar[bool] = True

    def _choose(self, lane: Lane, mechanism: str, dst: torch.Tensor, src: torch.Tensor) -> RunCopy:
        return _Late(super()._choose(lane, mechanism, dst, src), self.rng)

    def follow(self, lane: Lane, after: Lane, mark: Mark) -> None:
        if (lane, after) not in self.ignored:
            super().follow(lane, after, mark)

    def wait(self, layer: int) -> None:
        if self.layers_wait:
            super().wait(layer)


class _Late:
    def __init__(self, copy: RunCopy, rng: random.Random) -> None:
        self._copy, self._rng = copy, rng
        self.warm_up = copy.warm_up

    def __call__(self, pairs: torch.Tensor, *, first: int, count: int, layers: range) -> None:
        nap(self._rng)
        self._copy(pairs, first=first, count=count, layers=layers)


def make_engine(
    pools: KvPools,
    compute: torch.cuda.Stream,
    rng: random.Random,
    *,
    ignored: Sequence[Edge] = (),
    layers_wait: bool = True,
    mechanism: str = "kernel",
    **options: bool,
) -> SwapEngine:
    """An engine with slow copies."""
    names = {"rng": rng, "ignored": frozenset(ignored), "layers_wait": layers_wait}
    lanes = type("Lanes", (SlowLanes,), names)
    engine = type("Engine", (SwapEngine,), {"lanes_type": lanes})
    return cast(SwapEngine, engine(pools, compute, mechanism=mechanism, **({"pipelined": True} | options)))


def make_pools(device_chunks: int = DEVICE_PAGES, host_chunks: int = HOST_PAGES) -> KvPools:
    """Pools of whole numbers, ``WORDS`` of them a run."""
    return KvPools(
        cast(Arch, SimpleNamespace(num_layers=LAYERS, num_kv_heads=1, head_dim=HEAD_DIM)),
        device_chunks=device_chunks,
        host_chunks=host_chunks,
        form=KvFormat(PAGE_TOKENS, torch.int32),
        device=torch.device("cuda"),
    )


class Rig:
    """An engine on a GPU beside an oracle. All plans and their numbers are made first: nothing may wait afterwards."""

    def __init__(self, seed: int, plans: int = 30, **options: object) -> None:
        rng = random.Random(seed)
        self.rng = rng
        self.compute = torch.cuda.Stream()
        self.pools = make_pools()
        self.oracle = Pools.random(LAYERS, WORDS, seed)
        self.device = self.pools.device.view(LAYERS, -1, WORDS)
        self.device[:, :DEVICE_PAGES] = torch.from_numpy(self.oracle.device)
        self.pools.host.view(HOST_PAGES, LAYERS, WORDS).copy_(torch.from_numpy(self.oracle.host))
        self.plans = [make_plan(rng, step) for step in range(plans)]
        self.numbers = [self._upload(plan) for plan in self.plans]
        self.got = torch.zeros(plans, LAYERS, WORDS, dtype=torch.int32, device="cuda")
        self.swap = make_engine(self.pools, self.compute, rng, **options)  # type: ignore[arg-type]
        torch.cuda.synchronize()

    @staticmethod
    def _upload(plan: Plan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pages written, what is added to them [L, w, 1], and pages read."""
        work = work_of(plan)
        added = [[work.number(layer, page) for page in work.written] for layer in range(LAYERS)]
        written, read = (torch.tensor(pages, dtype=torch.int64).cuda() for pages in (work.written, work.read))
        return written, torch.tensor(added, dtype=torch.int32).cuda().unsqueeze(-1), read

    def step(self, index: int) -> None:
        written, added, read = self.numbers[index]
        for layer in range(LAYERS):
            self.swap.wait(layer)
            nap(self.rng)
            pages = self.device[layer]
            pages.index_copy_(0, written, pages.index_select(0, written) * 3 + added[layer])
            nap(self.rng)
            torch.sum(pages.index_select(0, read), 0, dtype=torch.int32, out=self.got[index, layer])

    def run(self) -> bool:
        """Queue every plan at once, then compare what came of them."""
        with torch.cuda.stream(self.compute):
            for index, plan in enumerate(self.plans):
                self.swap.before_step(plan)
                if plan.spans:
                    self.step(index)
                self.swap.after_step(plan)
                self.swap.counters()
        self.swap.drain()
        torch.cuda.synchronize()
        want = [self.oracle.run(plan) for plan in self.plans]
        device = self.device[:, :DEVICE_PAGES].cpu().numpy()
        host = self.pools.host.view(HOST_PAGES, LAYERS, WORDS).numpy()
        same = bool((device == self.oracle.device).all() and (host == self.oracle.host).all())
        same &= all(bool((a == b).all()) for a, b in zip(self.got.cpu().numpy(), want, strict=True))
        self.swap.close()
        self.pools.close()
        return same
