"""Times of what ends a block of a model that is divided over GPUs: product, sum over ranks, residual sum and norm.

On two GPUs, by rows of 5120 values: the sum and the norm by each way that there is, whatever ``pensieve.engine.ranks``
would choose, and products of Llama-2-13B's layer with their end, exchanged in one piece and in several.
Each time is the median replay of a CUDA graph of many calls, on rank 0. Which way is taken by what size
(``engine/ranks/symmetric.py``, ``collectives.py``) is set by this table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

from common.provenance import commit, gpu_name

from pensieve.engine.ranks import symmetric
from pensieve.engine.ranks.collectives import NcclCollective, join
from pensieve.engine.ranks.symmetric import ExchangeRoom, FusedRoom, SymmetricSums, TwoShotRoom
from pensieve.kernels.norm import add_norm
from pensieve.model.collective import SumRoom

WIDTH = 5120
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
INNER = {"o": 5120, "down": 13824}
"""Columns of the products that end a block, over all ranks."""
CALLS, REPLAYS = 40, 9


def timed(call: Callable[[int], object]) -> float:
    """Median microseconds of a call; the argument is the call's number."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(2):
            call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for number in range(CALLS):
            call(number)
    taken = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return median(taken[2:])


class Ways:
    """What is timed, for one number of rows."""

    def __init__(self, sums: SymmetricSums, rows: int) -> None:
        self.sums, self.rows = sums, rows
        self.part, self.x = (torch.zeros(rows, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.weight = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)

    def norm(self, _: int) -> None:
        add_norm(self.x, self.part, self.weight, None, 1e-5)

    def nccl(self, number: int) -> None:
        dist.all_reduce(self.part)
        self.norm(number)

    def by(self, kind: type[SumRoom]) -> Callable[[int], None]:
        """The sum in a room of that kind, nothing being made in it."""
        return lambda number: self._end(self._room(kind, number))

    def product(self, kind: type[SumRoom] | None, inner: int, pieces: int = 1) -> Callable[[int], None]:
        """As ``Transformer`` ends a block, by NCCL or in a room of that kind."""
        block, weight = (
            torch.randn(n, inner, device="cuda", dtype=torch.bfloat16) for n in (self.rows, WIDTH)
        )

        def run(number: int) -> None:
            if kind is None:
                torch.mm(block, weight.t(), out=self.part)
                return self.nccl(number)
            room, step = self._room(kind, number), -(-self.rows // pieces)
            for start in range(0, self.rows, step):
                end = min(start + step, self.rows)
                torch.mm(block[start:end], weight.t(), out=room.memory[start:end])
                room.made(start, end)
            return self._end(room)

        return run

    def _room(self, kind: type[SumRoom], number: int) -> SumRoom:
        size, shape = self.part.nbytes, (self.rows, WIDTH)
        if kind is TwoShotRoom:
            return TwoShotRoom(self.sums, self.sums._buffer[:size].view(torch.bfloat16).view(shape))
        parts = self.sums.slot(shape, torch.bfloat16, 0 if number % 2 == 0 else 1)
        return FusedRoom(self.sums, parts) if kind is FusedRoom else ExchangeRoom(self.sums, parts)

    def _end(self, room: SumRoom) -> None:
        room.add_norm(self.x, self.weight, None, 1e-5, add_norm)


def sums_table(sums: SymmetricSums) -> list[str]:
    lines = ["| rows | norm alone | NCCL | two-shot | one kernel |", "|---:|---:|---:|---:|---:|"]
    for rows in ROWS:
        ways = Ways(sums, rows)
        small = rows * WIDTH * 2 <= symmetric.TWO_SHOT_BYTES
        cells = [timed(ways.norm), timed(ways.nccl)]
        cells += [timed(ways.by(kind)) for kind in (TwoShotRoom, FusedRoom) if small]
        lines.append(f"| {rows} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    return lines


def products_table(sums: SymmetricSums) -> list[str]:
    pieces = (2, 3, 4, 8)
    head = "| product | rows | NCCL | two-shot | one kernel | " + " | ".join(f"exchange, {n}" for n in pieces)
    lines = [head + " |", "|---|" + "---:|" * (4 + len(pieces))]
    for name, inner in INNER.items():
        for rows in ROWS[-6:]:
            ways, part = Ways(sums, rows), inner // sums.ranks
            small = rows * WIDTH * 2 <= symmetric.TWO_SHOT_BYTES
            cells = [f"{timed(ways.product(None, part)):.1f}"]
            for kind in (TwoShotRoom, FusedRoom):
                cells.append(f"{timed(ways.product(kind, part)):.1f}" if small else "")
            cells += [f"{timed(ways.product(ExchangeRoom, part, count)):.1f}" for count in pieces]
            lines.append(f"| {name} | {rows} | " + " | ".join(cells) + " |")
    return lines


@click.command()
@click.option("--ranks", default=2, hidden=True)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("bench/results"), help="Folder of the table."
)
@click.option("--rank", default=0, hidden=True)
@click.option("--meeting", default=-1, hidden=True)
def main(ranks: int, out: Path, rank: int, meeting: int) -> None:
    """Time sums over the ranks of a model on this machine's GPUs; a table, rank_sums.md."""
    others: list[subprocess.Popen[bytes]] = []
    if rank == 0:
        meeting = os.memfd_create("meeting")
        for other in range(1, ranks):
            command = [sys.executable, *sys.argv, "--rank", str(other), "--meeting", str(meeting)]
            others.append(subprocess.Popen(command, pass_fds=[meeting]))
    together = join("cuda", rank, ranks, meeting, symmetric=True)
    assert isinstance(together, NcclCollective)
    with torch.inference_mode():
        assert together._symmetric is not None, "these GPUs cannot see each other's memory"
        lines = [*sums_table(together._symmetric), "", *products_table(together._symmetric)]
    together.close()
    for process in others:
        process.wait(timeout=30)
    if rank == 0:
        head = (
            f"`python bench/kernel_ops/rank_sums.py`: µs on {ranks} {gpu_name()}, torch {torch.__version__}, rows of "
            f"{WIDTH} in bfloat16, commit {commit()}."
        )
        text = "\n".join([head, "", *lines, ""])
        out.mkdir(parents=True, exist_ok=True)
        (out / "rank_sums.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
