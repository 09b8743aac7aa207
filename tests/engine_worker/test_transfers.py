"""Copies between the tiers, and the order that they keep inside one plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pensieve.engine.plan import Copy
from pensieve.engine.worker.torch_worker import TorchWorker
from support.engine.worker_driver import (
    CHUNK,
    EVERYTHING,
    logprobs,
    make_worker,
    random_tokens,
    reference_logprobs,
    span,
    step,
)

TABLE = [5, 0, 9, 3]


def pages(worker: TorchWorker, numbers: list[int]) -> torch.Tensor:
    return worker.pools.device[:, numbers].clone()


def test_swap_out_reuse_swap_in_is_byte_exact(folder: Path) -> None:
    worker, tokens, other = make_worker(folder), random_tokens(30), random_tokens(32, seed=1)
    step(worker, [span(tokens, 0, 29)], [TABLE])
    before = pages(worker, TABLE)
    out = step(worker, [], [], swap_out=[(5, 7), (0, 1), (9, 12), (3, 0)])
    step(worker, [span(other, 0, 32)], [TABLE])  # somebody else gets the pages
    assert not torch.equal(pages(worker, TABLE).nan_to_num(7.0), before.nan_to_num(7.0))
    target = [20, 21, 2, 11]
    swap_in = list(zip([7, 1, 12, 0], target, strict=True))
    result = step(worker, [span(tokens, 29, 30, sampling=EVERYTHING)], [target], swap_in=swap_in)
    got = pages(worker, target)
    # Slot 5 of the last chunk was written by this step, into a page that arrived in this step.
    assert got[:, -1, :, :, 29 % CHUNK].isfinite().all()
    got[:, -1, :, :, 29 % CHUNK] = before[:, -1, :, :, 29 % CHUNK]
    assert torch.equal(got.nan_to_num(7.0), before.nan_to_num(7.0))
    torch.testing.assert_close(logprobs(result), reference_logprobs(folder, tokens)[-1], atol=1e-4, rtol=1e-4)
    assert out.swap_out_bytes == result.swap_in_bytes == before.nbytes
    assert out.swap_out_seconds > 0 and result.swap_in_seconds > 0 and out.swap_in_seconds == 0
    assert set(result.timings) == {"prepare", "model", "attention", "sample"}


def test_a_page_swapped_out_is_overwritten_by_the_same_plan(llama: Path) -> None:
    """Its old content reaches the host although a swap-in, a copy or the model writes it in this very step."""
    worker, tokens, other = make_worker(llama), random_tokens(32), random_tokens(24, seed=1)
    step(worker, [span(tokens, 0, 32)], [TABLE])
    step(worker, [], [], swap_out=[(3, 4)])
    before = pages(worker, TABLE)
    step(
        worker,
        [span(other, 0, 8, row=0)],
        [[5]],
        swap_out=[(5, 0), (0, 1), (9, 2)],
        copies=[(9, 0)],  # reads what was swapped out, before the swap-in below overwrites it
        swap_in=[(4, 9)],
    )
    host = worker.pools.host.transpose(0, 1)
    assert torch.equal(host[:, [0, 1, 2]], before[:, :3])
    assert torch.equal(pages(worker, [0]), before[:, 2:3])
    assert torch.equal(pages(worker, [9]), before[:, 3:4])
    fresh = make_worker(llama)
    step(fresh, [span(other, 0, 8)], [[5]])
    torch.testing.assert_close(pages(worker, [5]), pages(fresh, [5]), atol=1e-6, rtol=0)


def test_copy_on_write_of_a_shared_tail(llama: Path) -> None:
    """Two branches go on from one partly filled page; the original keeps its own continuation."""
    worker, stem = make_worker(llama), random_tokens(12)
    left, right = [*stem, 50, 51], [*stem, 60]
    step(worker, [span(stem, 0, 12)], [[5, 0]])
    result = step(
        worker,
        [
            span(left, 12, 14, row=0, sampling=EVERYTHING),
            span(right, 12, 13, row=1, sampling=EVERYTHING),
        ],
        [[5, 0], [5, 8]],
        copies=[(0, 8)],
    )
    for row, tokens in enumerate((left, right)):
        want = reference_logprobs(llama, tokens)[-1]
        torch.testing.assert_close(logprobs(result, row), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pipelined", [True, False])
def test_swap_in_without_computing(llama: Path, pipelined: bool) -> None:
    worker = make_worker(llama, pipelined_swap_in=pipelined)
    worker.pools.host.copy_(torch.randn_like(worker.pools.host))
    step(worker, [], [], swap_in=[(2, 6), (1, 4)])
    assert torch.equal(pages(worker, [6, 4]), worker.pools.host.transpose(0, 1)[:, [2, 1]])


def test_layers_arrive_one_by_one_in_order(llama: Path) -> None:
    pools = make_worker(llama).pools
    pools.host.copy_(torch.randn_like(pools.host))
    transfers = pools.swap_in([Copy(3, 5)])

    def arrived() -> list[bool]:
        return [bool(pools.device[layer, 5].isfinite().all()) for layer in range(pools.num_layers)]

    assert arrived() == [False, False, False]
    transfers.wait(0)
    assert arrived() == [True, False, False]
    transfers.wait(0)
    transfers.wait(2)
    assert arrived() == [True, True, True]
    pools.device[:, 5] = 0.0
    transfers.finish()
    assert not pools.device[:, 5].any(), "a layer was copied twice, over what the step has written"


def test_swap_in_is_ahead_of_the_model_when_not_pipelined(llama: Path) -> None:
    pools = make_worker(llama).pools
    pools.host.zero_()
    pools.swap_in([Copy(3, 5)], pipelined=False)
    assert pools.device[:, 5].isfinite().all()
