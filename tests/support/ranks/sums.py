"""``python -P -m support.ranks.sums``: sums over ranks on GPUs, of all sizes and by all ways, in any order.

What ends a block of the decoder (``Transformer``'s product, sum, residual sum and norm) is done a few hundred times in
steps of random sizes, with and without a graph; each result must be the same on all ranks to the last bit, and as near
to one in float64 as rounding allows. Prints one JSON object: how many sums went
by each kind of ``ReduceBuffer``.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter

import click
import torch
import torch.nn.functional as F

from pensieve.config import EngineOptions
from pensieve.debug import child_environment
from pensieve.engine.ranks.collectives import NcclCollective, join
from pensieve.model.collective import BufferIndex, ReduceBuffer
from pensieve.model.ops import triton_ops
from pensieve.model.transformer import Transformer
from pensieve.model.weights import Linear, NormWeights
from support.kernels.decoder_models import SHAPES, random_weights, small_arch

WIDTH, INNER = 5120, 512
ROWS = (1, 2, 3, 7, 8, 64, 128, 129, 200, 512, 1000, 2048, 3000, 4096, 5000, 14000)
"""Up to more than there is memory for."""


class Ranked:
    """This rank's end of a block, and what it should come to."""

    def __init__(self, together: NcclCollective) -> None:
        self.together = together
        arch = small_arch(SHAPES[0])
        weights = random_weights(arch, "cuda")
        self.model = Transformer(arch, weights, triton_ops(), together)
        self._generator = torch.Generator("cuda").manual_seed(1)  # the same on all ranks

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device="cuda").to(torch.bfloat16)

    def case(self, rows: int, slot: BufferIndex, *, bias: bool, layer: bool, graph: bool) -> None:
        """One block's end, compared."""
        together, rank, ranks = self.together, self.together.rank, self.together.ranks
        blocks, weights = self.normal(ranks, rows, INNER), self.normal(ranks, WIDTH, INNER)
        x, scale, shift = self.normal(rows, WIDTH), self.normal(WIDTH), self.normal(WIDTH)
        linear = Linear(weights[rank], shift if bias and rank == 0 else None)
        norm = NormWeights(scale, shift if layer else None)
        exact = sum(blocks[r].double() @ weights[r].double().T for r in range(ranks))
        parts = sum(F.linear(blocks[r], weights[r]).double().abs() for r in range(ranks))
        assert isinstance(exact, torch.Tensor) and isinstance(parts, torch.Tensor)
        exact = x.double() + exact + (shift.double() if bias else 0)
        got, normed = self._run(slot, x, blocks[rank].contiguous(), linear, norm, graph=graph)
        # Each part is rounded, their sum is, and the residual sum: half a unit of 2**-8 each.
        room = (parts + exact.abs() + x.double().abs() + 1) * 2**-8 * 2
        assert bool(((got.double() - exact).abs() <= room).all()), f"{rows} rows: a sum is wrong"
        want = triton_ops().norm(got, scale, norm.bias, self.model.arch.norm_eps)
        assert torch.allclose(normed.float(), want.float(), atol=0.07, rtol=0.02), (
            f"{rows} rows: a norm is wrong"
        )
        for tensor in (got, normed):
            everybody = together.all_gather(tensor.contiguous())
            assert all(torch.equal(one, everybody[0]) for one in everybody), f"{rows} rows: ranks differ"

    def _run(
        self,
        slot: BufferIndex,
        x: torch.Tensor,
        block: torch.Tensor,
        linear: Linear,
        norm: NormWeights,
        *,
        graph: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        other: BufferIndex = 1 if slot == 0 else 0
        if not graph:
            self.model._end_block(
                other, x.clone(), [(block, linear)], (None, norm)
            )  # in use the two alternate
            return self.model._end_block(slot, x.clone(), [(block, linear)], (None, norm))
        captured, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.model._end_block(0, x.clone(), [(block, linear)], (None, norm))
            self.model._end_block(1, x.clone(), [(block, linear)], (None, norm))
        torch.cuda.synchronize()
        with torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
            for _ in range(10):
                found = [
                    self.model._end_block(each, x.clone(), [(block, linear)], (None, norm)) for each in (0, 1)
                ]
        for _ in range(3):
            captured.replay()
        torch.cuda.synchronize()
        return found[slot]


def watch(together: NcclCollective, ways: Counter[str]) -> None:
    """Count by which way sums go."""
    rooms = together.reduce_buffer

    def counted(shape: tuple[int, int], dtype: torch.dtype, slot: BufferIndex) -> ReduceBuffer | None:
        room = rooms(shape, dtype, slot)
        ways[type(room).__name__] += 1
        return room

    together.reduce_buffer = counted  # type: ignore[method-assign]


@click.command()
@click.option("--ranks", default=2)
@click.option("--rank", default=0, hidden=True)
@click.option("--meeting", default=-1, hidden=True)
@click.option("--cases", default=150)
@click.option("--symmetric/--no-symmetric", default=True)
def main(ranks: int, rank: int, meeting: int, cases: int, symmetric: bool) -> None:
    others: list[subprocess.Popen[bytes]] = []
    if rank == 0:
        meeting = os.memfd_create("meeting")
        for other in range(1, ranks):
            command = [sys.executable, "-P", "-m", "support.ranks.sums", *sys.argv[1:]]
            command += ["--rank", str(other), "--meeting", str(meeting)]
            environment = child_environment(failpoints=False)
            others.append(subprocess.Popen(command, pass_fds=[meeting], env=environment))
    options = EngineOptions(model="", tensor_parallel=ranks, all_reduce="auto" if symmetric else "nccl")
    together = join("cuda", rank, meeting, options)
    assert isinstance(together, NcclCollective)
    ways: Counter[str] = Counter()
    watch(together, ways)
    ranked, rng = Ranked(together), random.Random(5)
    try:
        with torch.inference_mode():
            for number in range(cases):
                rows, slot = rng.choice(ROWS), rng.choice((0, 1))
                graph = number % 10 == 9
                ranked.case(rows, slot, bias=rng.random() < 0.5, layer=rng.random() < 0.5, graph=graph)
        together.close()
    finally:
        for process in others:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
    assert all(process.returncode == 0 for process in others)
    if rank == 0:
        print(json.dumps(ways))


if __name__ == "__main__":
    main()
