"""The four ways of ``bench/figure12.py`` on a CPU, at tiny sizes: they agree, and a wrong one is found.

A pytest file that is not collected by itself: ``tests/bench/test_figure12.py`` runs it under Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.replay.benches import load_bench

EXACT = 1e-5
"""The ways may differ by so much in float32."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_bench("figure12", monkeypatch)


def tiny(bench: Any, context: int, heads: int = 4, kv_heads: int = 2, new: int = 3) -> Any:
    shape = bench.Shape(context, heads, kv_heads, batch=2, new=new, dtype=torch.float32)
    return bench.make_step(shape, "cpu")


def answers(bench: Any, step: Any) -> dict[str, torch.Tensor]:
    return {name: way(0).clone() for name, way in bench.ways(step, None).items()}


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("context", [32, 64, 96])
def test_the_ways_agree(bench: Any, context: int, heads: tuple[int, int]) -> None:
    step = tiny(bench, context, *heads)
    found = answers(bench, step)
    assert list(found) == list(bench.WAYS)
    for answer in found.values():
        assert answer.shape == step.q.shape
        torch.testing.assert_close(answer, found["ideal"], rtol=EXACT, atol=EXACT)
    bench.check(bench.ways(step, None), EXACT)


def test_every_set_of_data_has_its_own_result(bench: Any) -> None:
    step = tiny(bench, 32)
    assert len(step.pools) > 1
    for way in bench.ways(step, None).values():
        first, second = way(0).clone(), way(1).clone()
        assert not torch.equal(first, second)
        assert torch.equal(way(0), first)


@pytest.mark.parametrize("name", ["pensieve", "copy out", "multi-round"])
def test_a_wrong_way_is_found(bench: Any, name: str) -> None:
    step = tiny(bench, 64)
    found = bench.ways(step, None)
    layout = step.paged if name == "copy out" else step.pools
    layout[0].add_(0.01 * torch.randn_like(layout[0]))
    with pytest.raises(ValueError, match="differs from the ideal result"):
        bench.check({name: found[name], "ideal": found["ideal"]}, 1e-3)


def test_no_result_is_a_difference(bench: Any) -> None:
    step = tiny(bench, 32)
    nothing = {"pensieve": lambda _: torch.full_like(step.q, torch.nan)}
    with pytest.raises(ValueError, match="pensieve differs"):
        bench.check({**nothing, "ideal": bench.ideal(step, None)})
