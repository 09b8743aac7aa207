"""Page copies and checksums on a CPU, against the plain reference.

A pytest file that is not collected by itself: Triton's interpreter is chosen when triton is imported, so
``tests/ops/test_interpreted.py`` runs it in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from pensieve.kernels import reference
from pensieve.kernels.chunk_checksum import ChunkChecksum
from pensieve.kernels.chunk_copy import ChunkCopy, chunk_copy, runs_of
from support.lengths import some

LAYERS, PAGES, CHUNKS = 5, 9, 7
PAIRS = [(7, 1), (0, 6), (3, 2), (8, 0)]
SIZES = [
    ((2, 1, 1, 8), 1024), ((2, 2, 4, 16), 1024), ((2, 5, 2, 80), 1024), ((2, 1, 16, 32), 1024),
    ((2, 3, 32, 64), 16384), ((2, 1, 3, 24), 16384),
]  # fmt: skip
"""Shapes of pages of float16, 32 bytes to 24 KiB a run, and bytes of a tile: part of a tile, whole tiles, both."""


def pools(shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes; NaNs of every kind among them."""
    numbers = torch.Generator().manual_seed(sum(shape))
    device = torch.randint(
        0, 256, (LAYERS, PAGES, *shape[:-1], shape[-1] * dtype.itemsize), generator=numbers
    )
    host = torch.randint(0, 256, (CHUNKS, LAYERS, *device.shape[2:]), generator=numbers)
    return device.to(torch.uint8).view(dtype), host.to(torch.uint8).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("shape", "tile_bytes"), SIZES, ids=str)
@pytest.mark.parametrize("programs", some([8, 1, 3], 2))
def test_both_directions(shape: tuple[int, ...], tile_bytes: int, programs: int) -> None:
    device, host = pools(shape)
    want_device, want_host = device.clone(), host.clone()
    pairs = torch.tensor(PAIRS, dtype=torch.int32)
    src, dst = pairs.long().unbind(1)
    for layer in range(LAYERS):
        reference.chunk_copy(want_host[:, layer], want_device[layer], dst, src)
    inside, outside = runs_of(device), runs_of(host, chunk_first=True)
    options = {"programs": programs, "tile_bytes": tile_bytes}
    ChunkCopy(outside, inside, **options)(pairs)
    assert same(host, want_host) and same(device, want_device)
    back = pairs.flip(1).contiguous()
    back[:, 1] = torch.tensor([2, 8, 5, 1])
    for layer in range(1, 4):
        reference.chunk_copy(want_device[layer], want_host[:, layer], back[:, 1].long(), back[:, 0].long())
    ChunkCopy(inside, outside, **options)(back, layers=range(1, 4))
    assert same(host, want_host) and same(device, want_device)


@pytest.mark.parametrize("cuts", [[0, 20], [0, 1, 20], [0, 5, 6, 13, 19, 20], list(range(21))], ids=len)
def test_any_part_of_the_runs(cuts: list[int]) -> None:
    """Parts of a copy, cut inside a page, are together the whole."""
    device, host = pools((2, 2, 4, 16))
    whole = host.clone()
    pairs = torch.tensor(PAIRS, dtype=torch.int32)
    inside = runs_of(device)
    chunk_copy(runs_of(whole, chunk_first=True), inside, pairs)
    copy = ChunkCopy(runs_of(host, chunk_first=True), inside)
    for first, last in itertools.pairwise(cuts):
        before = host.clone()
        copy(pairs, first=first, count=last - first)
        changed = (before.view(torch.uint8) != host.view(torch.uint8)).flatten(2).any(-1)
        touched = {(PAIRS[run // LAYERS][1], run % LAYERS) for run in range(first, last)}
        assert {tuple(place) for place in changed.nonzero().tolist()} <= touched
    assert same(host, whole)


def test_inside_one_pool() -> None:
    device, _ = pools((2, 1, 4, 16), torch.float32)
    want = device.clone()
    want[:, [4, 6]] = device[:, [1, 1]]
    chunk_copy(runs_of(device), runs_of(device), torch.tensor([[1, 4], [1, 6]], dtype=torch.int32))
    assert same(device, want)


def test_nothing() -> None:
    device, host = pools((2, 1, 4, 16))
    before = host.clone()
    chunk_copy(runs_of(host, chunk_first=True), runs_of(device), torch.empty((0, 2), dtype=torch.int32))
    assert same(host, before)


@pytest.mark.parametrize("shape", [(2, 1, 1, 8), (2, 5, 8, 80)], ids=str)
def test_checksums(shape: tuple[int, ...]) -> None:
    device, _ = pools(shape)
    failed = torch.zeros(CHUNKS, dtype=torch.int32)
    checksum = ChunkChecksum(runs_of(device), CHUNKS, failed)
    out = torch.tensor(PAIRS, dtype=torch.int32)
    back = out.flip(1).contiguous()
    checksum.compare(back, range(LAYERS))
    assert not failed.any(), "nothing was kept, so nothing differs"
    checksum.keep(out, 0, 7)
    checksum.keep(out, 7, len(PAIRS) * LAYERS - 7)
    assert int((checksum.sums != 0).sum()) == len(PAIRS) * LAYERS
    checksum.compare(back, range(LAYERS))
    assert not failed.any()
    words = device.view(torch.int64).view(LAYERS, PAGES, -1)
    words[3, 0, :2] = words[3, 0, :2].flip(0)  # pair (0, 6): two words change places
    words[1, 8, -1] ^= 1 << 40  # pair (8, 0): one bit
    checksum.compare(back, range(2, LAYERS))
    assert failed.nonzero().flatten().tolist() == [6]
    checksum.compare(back, range(0, 2))
    assert failed.nonzero().flatten().tolist() == [0, 6]


def test_zeros_have_a_checksum() -> None:
    device = torch.zeros(LAYERS, PAGES, 2, 1, 4, 8, dtype=torch.float16)
    failed = torch.zeros(CHUNKS, dtype=torch.int32)
    checksum = ChunkChecksum(runs_of(device), CHUNKS, failed)
    checksum.keep(torch.tensor([[2, 3]], dtype=torch.int32), 0, LAYERS)
    device[4, 2, 0, 0, 0, 0] = 1.0
    checksum.compare(torch.tensor([[3, 2]], dtype=torch.int32), range(LAYERS))
    assert failed.nonzero().flatten().tolist() == [3]
