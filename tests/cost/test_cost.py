"""The cost model: interpolation, extrapolation, files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.engine.cost import CostModel, CostProfileError

MODEL = CostModel(((32, 1.0), (64, 2.0), (128, 5.0)), 10.0, 32)


def test_cost_interpolates_between_profiled_points_and_continues_the_last_line() -> None:
    assert MODEL.cost([32, 48, 96, 128, 192]).tolist() == [11.0, 11.5, 13.5, 15.0, 18.0]


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_estimated_cost_rises_with_the_context(a: int, b: int) -> None:
    model = CostModel.estimate(
        windows=(None,) * 4,
        query_heads=8,
        head_dim=64,
        parameters=10_000_000,
        chunk_tokens=32,
        context_limit=2048,
    )
    low, high = model.cost(sorted((a, b)))
    assert low <= high
    assert np.isclose(model.attention_cost(640).item(), 20 * model.attention_cost(32).item())


def test_profile_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    data = {"format": 1, "chunk_tokens": 32, "attention": [[32, 0.5], [64, 1.0]], "other_seconds": 2.0}
    path.write_text(json.dumps(data))
    assert CostModel.from_json(path) == CostModel(((32, 0.5), (64, 1.0)), 2.0, 32)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "{}",
        '{"format": 2, "chunk_tokens": 32, "attention": [[1, 1], [2, 2]], "other_seconds": 1}',
        '{"format": 1, "chunk_tokens": 32, "attention": [[1, 1]], "other_seconds": 1}',
        '{"format": 1, "chunk_tokens": 32, "attention": [[1, 1], [2, NaN]], "other_seconds": 1}',
    ],
)
def test_a_bad_profile_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(CostProfileError):
        CostModel.from_json(path)


def test_layers_with_windows_cost_no_more_beyond_them() -> None:
    shape = {"query_heads": 8, "head_dim": 64, "parameters": 10_000_000, "chunk_tokens": 32}
    one, two = (
        CostModel.estimate(windows=windows, context_limit=2048, **shape)
        for windows in ((None,), (None, 64, 64, 128))
    )
    lengths = np.array([32, 64, 128, 1024])
    extra = two.attention_cost(lengths) - one.attention_cost(lengths)
    assert np.allclose(extra / one.attention_cost(1), [96, 192, 256, 256])
