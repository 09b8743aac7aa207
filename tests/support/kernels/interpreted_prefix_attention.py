"""The ways of ``bench/sharing/prefix_attention.py`` on a CPU, at tiny sizes: they agree, and wrong plans are found.

A pytest file that is not collected by itself: ``tests/bench/test_prefix_attention.py`` runs it under Triton's
interpreter.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from pensieve.kernels.attention.plan import geometry_for
from pensieve.kernels.reference import ragged_paged_attention as reference_attention
from support.replay.benches import load_bench

EXACT = 1e-5
"""The ways may differ by so much in float32."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    loaded = load_bench("sharing/prefix_attention", monkeypatch)
    tiny = functools.partial(loaded.make_step, device="cpu", heads=8, kv_heads=2, dtype=torch.float32)
    monkeypatch.setattr(loaded, "make_step", tiny)
    monkeypatch.setattr(loaded, "HEADS", 8)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return loaded


@pytest.mark.parametrize(
    ("sessions", "cut"), [(3, (1, 1, 0)), (9, (3, 2, 0)), (3, (1, 2, 3)), (9, (2, 1, 2))], ids=str
)
def test_a_plan_by_hand_is_the_same_attention(bench: Any, sessions: int, cut: tuple[int, int, int]) -> None:
    shape = bench.SharedStep(sessions, 192, 71)
    step = bench.make_step(shape)
    want = reference_attention(step.q, step.pools[0], step.spans, step.tables, scale=128**-0.5)
    out = torch.full_like(step.q, torch.nan)
    geometry = geometry_for(8, step.pools[0])
    call = bench.planned(shape, bench.Cut(*cut), step.q, step.pools, step.tables, step.spans, out, geometry)
    call(0)
    assert bench.error_of(out, want) <= EXACT


@pytest.mark.parametrize("pieces", [1, 3])
def test_two_parts_are_the_whole(bench: Any, pieces: int) -> None:
    step = bench.make_step(bench.SharedStep(5, 192, 40))
    want = reference_attention(step.q, step.pools[0], step.spans, step.tables, scale=128**-0.5)
    out = torch.full_like(step.q, torch.nan)
    parts = bench.prefix_by_kernel(step, bench.Cut(pieces, 1, 0)), bench.suffix_part(step)
    bench.two_parts(*parts, out)(0)
    assert bench.error_of(out, want) <= EXACT


def test_private_pages_hold_the_same(bench: Any) -> None:
    step = bench.make_step(bench.SharedStep(4, 64, 33))
    own = bench.private(step)
    assert len(own.tables.unique()) == own.tables.numel() > len(step.tables.unique())
    for one, other in zip(step.pools, own.pools, strict=True):
        assert torch.equal(one[step.tables.long()], other[own.tables.long()])


def test_a_row_has_all_ways_or_says_what_failed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(contenders: dict[str, Any], sets: int, *_: int) -> dict[str, float]:
        for contender in contenders.values():
            contender(sets - 1)  # what was compared before is overwritten
        return {name: 10.0 + number for number, name in enumerate(contenders)}

    monkeypatch.setattr(bench, "times", times)
    monkeypatch.setattr(bench, "cuts", lambda *_: [bench.Cut(1, 1, 0), bench.Cut(2, 1, 0)])
    failures: dict[str, BaseException] = {}
    row = bench.measure(bench.SharedStep(5, 128, 40), bench.Ceilings(4e12, 8e14), failures.__setitem__, 60.0)
    missing = {name.split(" ")[-3] for name in failures}  # PyTorch's ways are for CUDA devices alone
    assert missing <= {"flash", "cudnn"}, failures
    assert {"shared", "product", "planned", "kernel + torch", "private"} <= set(row["us"])
    assert row["cuts"]["planned"]["tried"] == 2
    assert not row["served"], "so few sessions have nothing to gain"
    whole = bench.with_step(row, {5: 5.0})
    assert whole["step"]["shared_ms"] == pytest.approx(5.0 + 40 * 0.01)
    report = {
        "command": "x", "device": "d", "torch": "t", "triton": "t", "commit": "", "rows": [whole], "checked": [],
        "failures": ["one"],
    }  # fmt: skip
    table = [line for line in bench.as_markdown(report).splitlines() if line.startswith("|")]
    assert len(table) == 3 and len({line.count("|") for line in table}) == 1


def test_a_wrong_way_is_found(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(shape: Any, cut: Any, q: torch.Tensor, *rest: Any) -> Any:
        return lambda index: rest[3].copy_(q)

    monkeypatch.setattr(bench, "planned", wrong)
    with pytest.raises(ValueError, match="differs from the oracle"):
        bench.check_small(bench.SharedStep(5, 128, 40))
