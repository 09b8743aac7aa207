"""Writing KV into pages and copying pages between pools."""

from __future__ import annotations

import random

import pytest
import torch

from pensieve.kernels.reference import chunk_copy, kv_write


@pytest.mark.parametrize("page", [1, 4, 32])
def test_write_puts_each_token_in_its_slot(page: int) -> None:
    pool = torch.full((9, 2, 3, page, 5), torch.nan)
    slots = torch.tensor(random.Random(page).sample(range(9 * page), min(9, 8 * page)))
    qkv = torch.randn(len(slots), 12, 5)  # k and v as the model hands them over: slices of one tensor
    k, v = qkv[:, 4:7], qkv[:, 7:10]
    kv_write(pool, k, v, slots)
    for index, slot in enumerate(slots.tolist()):
        assert torch.equal(pool[slot // page, 0, :, slot % page], k[index])
        assert torch.equal(pool[slot // page, 1, :, slot % page], v[index])
    assert int(pool.isfinite().sum()) == len(slots) * 2 * 3 * 5


def test_write_skips_padding() -> None:
    pool = torch.zeros(2, 2, 1, 4, 3)
    k = torch.ones(3, 1, 3)
    kv_write(pool, k, k * 2, torch.tensor([-1, 5, -1]))
    assert int(pool.count_nonzero()) == 6
    assert (pool[1, 0, 0, 1] == 1).all() and (pool[1, 1, 0, 1] == 2).all()


def test_copy_between_pools_of_other_layouts() -> None:
    device, host = torch.randn(3, 8, 2, 2, 4, 5), torch.randn(6, 3, 2, 2, 4, 5)
    before = host.clone()
    src, dst = torch.tensor([7, 0, 3]), torch.tensor([1, 5, 2])
    chunk_copy(host[:, 1], device[1], dst, src)
    assert torch.equal(host[[1, 5, 2], 1], device[1][[7, 0, 3]])
    before[[1, 5, 2], 1] = device[1][[7, 0, 3]]
    assert torch.equal(host, before)


def test_copy_inside_a_pool_reads_before_it_writes() -> None:
    pool = torch.arange(4.0).view(4, 1, 1, 1, 1).clone()
    chunk_copy(pool, pool, torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]))
    assert pool.flatten().tolist() == [0.0, 0.0, 1.0, 2.0]


def test_copy_of_nothing() -> None:
    pool, none = torch.ones(2, 2, 1, 1, 1), torch.empty(0, dtype=torch.int64)
    chunk_copy(pool, pool.clone(), none, none)
    assert (pool == 1).all()
