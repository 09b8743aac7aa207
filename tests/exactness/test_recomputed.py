"""``--verify-swap --invariant``: a chunk that is computed again must have the bits that it had before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.config import EngineOptions
from pensieve.engine.build import cache_config
from pensieve.engine.kv.recomputed import ComputedChunks, RestoreMismatch
from pensieve.engine.plan import PageCheck
from pensieve.kernels import kv_codec
from support.engine.exactness import Bench, random_setup, run_schedule
from support.lengths import at_length
from support.ranks.rank_threads import RankBench

SEEDS = at_length((2, 4), range(60))
"""The first two make many chunks compute again."""


def play(bench: Bench, seeds: Sequence[int], *, elastic: bool = False) -> int:
    """Play schedules; return how many chunks were computed again."""
    found: list[ComputedChunks] = []

    def keep(worker: Any) -> Any:
        found.append(getattr(worker, "_worker", worker).computed)
        return worker

    for seed in seeds:
        run_schedule(bench, seed, keep, elastic=elastic)
    return sum(one.compared for one in found)


@pytest.mark.parametrize("elastic", [False, True])
def test_chunks_computed_again_are_the_same(elastic: bool, tmp_path: Path) -> None:
    assert play(Bench("qwen2", tmp_path, invariant=True), SEEDS, elastic=elastic) > 3


def test_codes_computed_again_are_the_same(tmp_path: Path) -> None:
    """Their pages end with padding, which holds anything in an elastic tier. (The oracle computes in float64, where a
    value may round to another code.)"""
    bench = Bench("qwen2", tmp_path, invariant=True, kv_dtype="int8", near_tie=1.0)
    assert bench.groups(1)[0].layer_page_bytes > kv_codec.used_bytes(
        bench.model.arch.num_kv_heads, 1, bench.model.arch.head_dim
    )
    assert play(bench, SEEDS, elastic=True) > 3


def test_with_windows(tmp_path: Path) -> None:
    assert play(Bench("gemma2", tmp_path, invariant=True), SEEDS) > 0


def test_on_two_ranks(tmp_path: Path) -> None:
    assert play(RankBench("qwen2", tmp_path, 2, invariant=True), SEEDS[1:]) > 5


def test_steps_that_are_not_invariant_are_noticed(tmp_path: Path) -> None:
    bench = Bench("qwen2", tmp_path)
    bench.invariant = True  # its products are not
    with pytest.raises(RestoreMismatch, match="computed again"):
        play(bench, range(20))


def test_a_flipped_bit_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page of a chunk that is computed again, and in no other."""
    original = ComputedChunks.sums

    def flipped(self: ComputedChunks, checks: Sequence[PageCheck]) -> torch.Tensor:
        for check in checks:
            if check.address in self._known:
                page = self._pages.device[-1, check.page]
                page.view(-1).view(torch.int32)[-1] ^= 1
                break
        return original(self, checks)

    monkeypatch.setattr(ComputedChunks, "sums", flipped)
    with pytest.raises(RestoreMismatch, match="computed again"):
        play(Bench("qwen2", tmp_path, invariant=True), SEEDS[:1])


def test_checks_need_the_promise(tmp_path: Path) -> None:
    bench = Bench("qwen2", tmp_path)
    info = bench.info(*random_setup(random.Random(1)))
    asked = EngineOptions(model=str(tmp_path), verify_swap=True)
    assert not cache_config(asked, info).check_recomputed
    assert cache_config(asked, replace(info, is_invariant=True)).check_recomputed
    assert not cache_config(
        EngineOptions(model=str(tmp_path)), replace(info, is_invariant=True)
    ).check_recomputed


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pensieve.engine.kv.recomputed.MOST", 3)
    worker: Any = Bench("qwen2", tmp_path).worker(*random_setup(random.Random(1)))
    chunks = worker.computed
    for address in range(9):
        chunks.compare([PageCheck(address, 0)], torch.tensor([address]))
    assert list(chunks._known) == [6, 7, 8]
    chunks.compare([PageCheck(6, 0), PageCheck(5, 0)], torch.tensor([6, 99]))
    with pytest.raises(RestoreMismatch, match=r"\[4\]"):
        chunks.compare([PageCheck(6, 4)], torch.tensor([7]))
