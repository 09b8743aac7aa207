"""Tensors into their places: every element, in any dtypes, by any number of threads, through little memory."""

from __future__ import annotations

import threading

import pytest
import torch

from pensieve.model import checkpoint
from pensieve.model.checkpoint import DirectMover, Mover, StagedMover, TensorFill, fill_all, pieces

CPU = torch.device("cpu")


def fills(source: torch.dtype, target: torch.dtype) -> list[TensorFill]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(1,), (3, 5), (129,), (64, 33), (1, 1, 2), (0,)]
    sources = [torch.randn(shape, generator=generator).to(source) for shape in shapes]
    sources += [sources[3][:, 4:11], sources[3][7:9, 20:]]  # columns of a matrix, as a rank reads them
    return [TensorFill(one, torch.full(one.shape, torch.nan, dtype=target)) for one in sources]


def staged() -> Mover:
    return StagedMover(CPU, pinned=False)


@pytest.mark.parametrize("make_mover", [DirectMover, staged], ids=["direct", "staged"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_every_element_arrives(
    monkeypatch: pytest.MonkeyPatch,
    make_mover: type[Mover],
    threads: int,
    source: torch.dtype,
    target: torch.dtype,
) -> None:
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 52)  # pieces that end in the middle of a row
    jobs, counts, lock = fills(source, target), [0], threading.Lock()

    def advance(count: int) -> None:
        with lock:
            counts[0] += count

    fill_all(jobs, CPU, advance, threads=threads, make_mover=make_mover)
    for job in jobs:
        assert torch.equal(job.target, job.source.to(target))
    assert counts[0] == sum(job.source.nbytes for job in jobs)


def test_parts_of_one_tensor() -> None:
    whole, first, second = torch.full((5, 4), torch.nan), torch.ones(2, 4), torch.zeros(3, 4)
    parts = whole.split([2, 3])
    fill_all([TensorFill(first, parts[0]), TensorFill(second, parts[1])], CPU, lambda count: None)
    assert torch.equal(whole, torch.cat([first, second]))


def test_pieces_bound_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 64)
    for source, target in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        for part, place in pieces(fills(source, target)):
            assert max(part.nbytes, place.nbytes) <= 64
            assert part.numel() == place.numel()


def test_a_failure_in_a_thread_is_not_lost() -> None:
    job = TensorFill(torch.zeros(8), torch.zeros(3))
    for threads in (1, 3):
        with pytest.raises(RuntimeError, match="size"):
            fill_all([job], CPU, lambda count: None, threads=threads)
