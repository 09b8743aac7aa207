"""What of a step's time falls to which of its parts: a timeline of kernels, from torch's profiler, put into sums."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

PARTS = {
    "attention": r"^_attend|attend_hopper",
    "merge": r"^_merge",
    "split-K sum": r"splitK_?reduce",
    "products": r"^_row_product|nvjet|gemm|gemv|cutlass|xmma|wgmma",
    "norm": r"norm_rows",
    "activation": r"^_activate",
    "KV write": r"^_prepare_and_store",
}
"""Kernels by their names, the first that fits; all others are ``rest``."""
BETWEEN = "nothing"
"""Time in which no kernel runs."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of a kernel, in microseconds of the profiler's clock."""

    name: str
    start: float
    end: float

    @property
    def part(self) -> str:
        return next((part for part, names in PARTS.items() if re.search(names, self.name)), "rest")


@dataclass(frozen=True, slots=True)
class Share:
    launches: float
    ms: float
    """Durations added up. A kernel that begins early and then waits for the one before counts its waiting."""
    alone_ms: float
    """From the end of whatever ended before to its own end: what the step would be shorter without it, at most. These
    add up to the step."""


def shares(kernels: Iterable[Kernel], steps: int) -> dict[str, Share]:
    """The parts of one of ``steps`` steps, the longest first."""
    ordered = sorted(kernels, key=lambda kernel: kernel.end)
    count: dict[str, int] = defaultdict(int)
    whole: dict[str, float] = defaultdict(float)
    alone: dict[str, float] = defaultdict(float)
    done = min((kernel.start for kernel in ordered), default=0.0)
    for kernel in ordered:
        alone[BETWEEN] += max(0.0, kernel.start - done)
        alone[kernel.part] += kernel.end - max(kernel.start, done)
        whole[kernel.part] += kernel.end - kernel.start
        count[kernel.part] += 1
        done = max(done, kernel.end)
    parts = sorted(alone, key=lambda part: -alone[part])
    return {
        part: Share(
            count[part] / steps, round(whole[part] / steps / 1e3, 4), round(alone[part] / steps / 1e3, 4)
        )
        for part in parts
    }


def profiled(step: Callable[[], object], steps: int) -> list[Kernel]:
    """The kernels of so many steps, which a GPU runs one after the other; none on a machine without one."""
    if not torch.cuda.is_available():
        step()
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
    ]
