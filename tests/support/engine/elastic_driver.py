"""Hand-made plans for a worker whose device tier is elastic, with one KV group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pensieve.config import EngineOptions
from pensieve.core import Sampling
from pensieve.engine.kv.virtual.backing import Backing
from pensieve.engine.plan import Copy, Plan, StepResult
from pensieve.engine.worker.torch_worker import Worker, build_worker
from support.engine.worker_driver import CHUNK, span

FLOOR, CEILING = 8, 64
"""Pages."""


def make_elastic(folder: Path, sizes: str = "", **options: Any) -> Worker:
    """A worker with an elastic device tier, of ``FLOOR`` to ``CEILING`` pages unless ``sizes`` says otherwise."""
    sizes = sizes or f"{FLOOR * CHUNK}tokens..{CEILING * CHUNK}tokens"
    given = {"device": "cpu", "host_cache": "192tokens", "chunk_tokens": CHUNK} | options
    return build_worker(EngineOptions(model=str(folder), device_cache=sizes, **given))


def backing_of(worker: Worker) -> Backing:
    backing = worker.pools.backing  # type: ignore[attr-defined]
    assert isinstance(backing, Backing)
    return backing


def page(worker: Worker, index: int) -> int:
    """Number of the page at an index of the tier."""
    grid = worker.info.device_tier.grids[0]
    unit, slot = divmod(index, grid.size.unit_pages)
    return grid.first + unit * grid.stride + slot


def ends(worker: Worker, pages: int) -> tuple[int, int]:
    return pages * worker.info.device_tier.sizes[0].page_bytes, 0


def run(
    worker: Worker,
    tokens: Sequence[int],
    part: tuple[int, int],
    indices: Sequence[int],
    *,
    sampling: Sampling | None = None,
    memory: int | None = None,
    copies: Sequence[tuple[int, int]] = (),
    swap_out: Sequence[tuple[int, int]] = (),
    swap_in: Sequence[tuple[int, int]] = (),
) -> StepResult:
    """Run a plan; pages of the device are given by their indices."""
    spans = (span(tokens, *part, sampling=sampling),) if part[0] < part[1] else ()
    tables = (np.array([page(worker, index) for index in indices], np.int32),) if spans else ()
    return worker.run(
        Plan(
            0,
            spans,
            tables,
            tuple(Copy(page(worker, src), dst) for src, dst in swap_out),
            tuple(Copy(page(worker, src), page(worker, dst)) for src, dst in copies),
            tuple(Copy(src, page(worker, dst)) for src, dst in swap_in),
            memory=None if memory is None else ends(worker, memory),
        )
    )


def held(worker: Worker) -> int:
    return backing_of(worker).region.held
