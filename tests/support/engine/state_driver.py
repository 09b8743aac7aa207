"""Hand-made plans for a model with recurrent layers: the tests take and free pages of both groups themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pensieve.config import EngineOptions
from pensieve.core import RequestKey
from pensieve.engine.cache.pages import PagePool
from pensieve.engine.kv.pools import HybridPools
from pensieve.engine.plan import NO_PAGE, Chain, Copy, Plan, SampleSpec, Span
from pensieve.engine.worker.torch_worker import build_worker
from support.engine.worker_driver import EVERYTHING, logprobs

CHUNK = 4
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device_cache": "300tokens",
    "host_cache": "300tokens",
    "chunk_tokens": CHUNK,
    "max_batch_tokens": 128,
    "max_running": 4,
}


class StateContext:
    """One context on a worker. Pages hold NaN until they are written, and again when they are freed."""

    def __init__(self, folder: Path, tokens: Sequence[int], device: str = "cpu") -> None:
        self.worker = build_worker(EngineOptions(model=str(folder), device=device, **OPTIONS))
        pools = self.worker.pools  # type: ignore[attr-defined]
        assert isinstance(pools, HybridPools)
        self.pools = pools
        pools.device.fill_(255)
        pools.host.fill_(255)
        self.tokens = np.array(tokens, np.int32)
        self.device, self.host = (PagePool(tier.num_bytes, tier.sizes) for tier in pools.tiers)
        self.pages = [self.device.take(0) for _ in range(-(-len(tokens) // CHUNK))]
        self.step = 0
        self.swap_in: tuple[Copy, ...] = ()
        self.swap_out: tuple[Copy, ...] = ()

    def state_page(self) -> int:
        return self.device.take(1)

    def run(
        self,
        spans: Sequence[tuple[int, int]],
        read: int,
        live: int = NO_PAGE,
        boundary: tuple[int, int] = (NO_PAGE, 0),
        stores: int = 3,
    ) -> torch.Tensor:
        """Compute consecutive spans as one chain, with a boundary (page, position) if there is one; return all
        log-probabilities after the last token."""
        made = tuple(
            Span(
                RequestKey(0), start, self.tokens[start:end], 0,
                SampleSpec(EVERYTHING, 0) if (start, end) == spans[-1] else None, stores,
            )
            for start, end in spans
        )  # fmt: skip
        table = np.array(self.pages[: -(-spans[-1][1] // CHUNK)], np.int32)
        self.step += 1
        plan = Plan(
            self.step,
            made,
            (table,),
            self.swap_out,
            (),
            self.swap_in,
            chains=(Chain(0, len(spans) - 1, read, *boundary, live),),
        )
        self.swap_in = self.swap_out = ()
        return logprobs(self.worker.run(plan))

    def free_state(self, page: int) -> None:
        """Free a state page, as if another context had written NaN there."""
        self.finish()
        for layer in self.pools.groups[1].device:
            layer[page] = -1
        self.device.put_back(page, 1)

    def full_pages(self) -> torch.Tensor:
        """What the full group holds of the context."""
        pages = self.pages if self.pools.groups[0].layers else []
        return self.pools.groups[0].device[:, pages].cpu()

    def finish(self) -> None:
        """Wait for copies that are still under way."""
        if self.pools.device.is_cuda:
            self.worker.swap.drain()  # type: ignore[attr-defined]
            torch.cuda.synchronize()

    def close(self) -> None:
        self.worker.close()
