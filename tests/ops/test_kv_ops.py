"""Writing KV into pages and copying pages between pools."""

from __future__ import annotations

import random

import pytest
import torch

from pensieve.kernels.arguments import HeadPrep
from pensieve.kernels.reference import chunk_copy, kv_write


@pytest.mark.parametrize("page", [1, 4, 32])
def test_write_puts_each_token_in_its_slot(page: int) -> None:
    pool = torch.full((9, 2, 3, page, 6), torch.nan)
    slots = torch.tensor(random.Random(page).sample(range(9 * page), min(9, 8 * page)))
    qkv = torch.randn(len(slots), 15, 6)[:, 3:]  # as the model hands it over: a view
    before = qkv.clone()
    q = kv_write(pool, qkv, slots, HeadPrep())
    assert torch.equal(q, before[:, :6])
    for index, slot in enumerate(slots.tolist()):
        assert torch.equal(pool[slot // page, 0, :, slot % page], before[index, 6:9])
        assert torch.equal(pool[slot // page, 1, :, slot % page], before[index, 9:])
    assert int(pool.isfinite().sum()) == len(slots) * 2 * 3 * 6


@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
def test_write_skips_padding(slot_type: torch.dtype) -> None:
    pool = torch.zeros(2, 2, 1, 4, 3)
    qkv = torch.tensor([5.0, 1.0, 2.0])[None, :, None].expand(3, 3, 3)
    kv_write(pool, qkv, torch.tensor([-1, 5, -1], dtype=slot_type), HeadPrep())
    assert int(pool.count_nonzero()) == 6
    assert (pool[1, 0, 0, 1] == 1).all() and (pool[1, 1, 0, 1] == 2).all()


def test_heads_are_normed_then_turned_and_values_left_alone() -> None:
    torch.manual_seed(0)
    qkv, angles = torch.randn(5, 7, 8), torch.rand(5, 4) * 6
    query_norm, key_norm = torch.rand(8) + 0.5, torch.rand(8) + 0.5
    pool = torch.zeros(5, 2, 2, 1, 8)
    q = kv_write(
        pool, qkv.clone(), torch.arange(5), HeadPrep(angles.cos(), angles.sin(), query_norm, key_norm, 1e-3)
    )
    scale = (qkv.double().pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()
    heads = (
        qkv.double() * scale * torch.cat([query_norm.expand(3, 8), key_norm.expand(2, 8), torch.ones(2, 8)])
    )
    # Pair i of a head is one complex number, which the angle turns.
    pairs = torch.complex(heads[..., :4], heads[..., 4:])
    turned = pairs * torch.polar(torch.ones(5, 4, dtype=torch.float64), angles.double())[:, None]
    want = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(q.double(), want[:, :3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool[:, 0, :, 0].double(), want[:, 3:5], rtol=1e-5, atol=1e-5)
    assert torch.equal(pool[:, 1, :, 0], qkv[:, 5:])


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
