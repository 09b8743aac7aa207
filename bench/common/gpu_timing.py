"""Times of operations on a GPU by replaying CUDA graphs, and the ceilings that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Contender = Callable[[int], object]
"""One call; the argument says which of the data sets that take turns it uses."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches: bytes read and written by a large copy, operations of a large bf16 product."""

    copy_bytes_per_s: float
    matrix_flops: float

    def floor_us(self, num_bytes: float, flops: float) -> tuple[float, str]:
        """The least time for so many bytes and operations, and which of them bounds it."""
        memory, matrix = num_bytes / self.copy_bytes_per_s * 1e6, flops / self.matrix_flops * 1e6
        return (memory, "memory") if memory > matrix else (matrix, "matrix")


def measure_ceilings() -> Ceilings:
    """Ceilings of this device, in the state that it is in."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    # Not `target.copy_(source)`: captured, it becomes a copy node that runs at two thirds of the rate.
    taken = times({"copy": lambda _: torch.neg(source, out=target), "product": lambda _: a @ b}, 1, 4, 9)
    return Ceilings(2 * source.nbytes / taken["copy"] * 1e6, 2 * 8192**3 / taken["product"] * 1e6)


def times(contenders: dict[str, Contender], sets: int, calls: int, replays: int) -> dict[str, float]:
    """Median microseconds of one call of each.

    A contender's graph holds ``calls`` calls that take turns over ``sets`` data sets; contenders are replayed in turn,
    since the device's clocks follow its load.
    """
    graphs = {}
    for name, contender in contenders.items():
        contender(0)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in range(calls):
                contender(call % sets)
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for replay in range(replays + 2):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 2:
                taken[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return {name: sorted(values)[len(values) // 2] for name, values in taken.items()}
