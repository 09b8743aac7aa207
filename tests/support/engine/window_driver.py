"""Hand-made plans for a model with windows: the tests take and free pages of both groups themselves."""

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
from pensieve.engine.plan import Copy, Plan, SampleSpec, Span
from pensieve.engine.worker.torch_worker import build_worker
from support.engine.worker_driver import EVERYTHING, logprobs

CHUNK = 4
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device_cache": "300tokens",
    "host_cache": "300tokens",
    "chunk_tokens": CHUNK,
    "max_batch_tokens": 64,
    "max_running": 4,
}
GONE = -1
"""Entry of a chunk that is held in neither page."""


class WindowContext:
    """One context on a worker. Pages hold NaN until they are written, and again when they are freed."""

    def __init__(self, folder: Path, tokens: Sequence[int], device: str = "cpu") -> None:
        self.worker = build_worker(EngineOptions(model=str(folder), device=device, **OPTIONS))
        pools = self.worker.pools  # type: ignore[attr-defined]
        assert isinstance(pools, HybridPools)
        self.pools = pools
        pools.device.fill_(255)
        pools.host.fill_(255)
        self._wait()
        self.tokens = np.array(tokens, np.int32)
        self.window = self.worker.info.groups[1].window or 0
        self.device, self.host = (PagePool(tier.num_bytes, tier.sizes) for tier in pools.tiers)
        chunks = -(-len(tokens) // CHUNK)
        self.pages = [[GONE] * chunks, [GONE] * chunks]
        self.step = 0
        self.swap_in: tuple[Copy, ...] = ()
        self.swap_out: tuple[Copy, ...] = ()

    def run(self, *spans: tuple[int, int], stores: int = 3) -> torch.Tensor:
        """Compute these positions in one plan; return all log-probabilities after the last of them."""
        tables = [np.array(pages, np.int32) for pages in self.take(spans, stores)]
        made = tuple(
            Span(
                RequestKey(0), start, self.tokens[start:end], 0,
                SampleSpec(EVERYTHING, 0) if (start, end) == spans[-1] else None, stores,
            )
            for start, end in spans
        )  # fmt: skip
        self.step += 1
        plan = Plan(
            self.step, made, (tables[0],), self.swap_out, (), self.swap_in, window_tables=(tables[1],)
        )
        self.swap_in = self.swap_out = ()
        return logprobs(self.worker.run(plan))

    def take(self, spans: Sequence[tuple[int, int]], stores: int) -> list[list[int]]:
        """Take the pages that the spans need and do not have; return the tables, up to the last chunk."""
        for start, end in spans:
            for chunk in range(start // CHUNK, -(-end // CHUNK)):
                for group in (0, 1):
                    if self.pages[group][chunk] == GONE and stores >> group & 1:
                        self.pages[group][chunk] = self.device.take(group)
        last = -(-max(end for _, end in spans) // CHUNK)
        return [pages[:last] for pages in self.pages]

    def free(self, group: int, chunks: range) -> None:
        """Free these chunks' pages of a group, as if other contexts had written NaN there."""
        for chunk in chunks:
            page = self.pages[group][chunk]
            if page != GONE:
                for layer in self.pools.groups[group].device:
                    layer[page] = -1  # NaN, whatever the dtype
                self.device.put_back(page, group)
                self.pages[group][chunk] = GONE
        self._wait()

    def leave_behind(self, position: int) -> None:
        """Free the window pages that no query from ``position`` on sees."""
        self.free(1, range(max(0, position - self.window + 1) // CHUNK))

    def contents(self, group: int) -> torch.Tensor:
        """What a group's pages hold, in the order of chunks."""
        layers = self.pools.groups[group].layers
        held = [page for page in self.pages[group] if page != GONE and layers]
        return self.pools.groups[group].device[:, held].cpu()

    def finish(self) -> None:
        """Wait for copies out that are still under way."""
        if self.pools.device.is_cuda:
            self.worker.swap.drain()  # type: ignore[attr-defined]

    def _wait(self) -> None:
        """Wait for writes of this test: the worker has streams of its own, which do not."""
        if self.pools.device.is_cuda:
            torch.cuda.synchronize()

    def close(self) -> None:
        self.worker.close()
