"""The products of mixtures of experts on a CPU, against their reference.

Run by ``tests/ops/test_interpreted.py`` in a process of its own; see ``interpreted_decoder.py``.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.kernels import grouped_product as module
from pensieve.kernels.expert_rows import combine_rows, group_rows, pick_experts
from pensieve.kernels.grouped_product import MANY_ROWS, clamped_glu, grouped_product
from support.kernels.expert_cases import (
    check_glu,
    check_groups,
    check_picks,
    check_product,
    check_sums,
    product_case,
)
from support.lengths import at_length

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@settings(max_examples=at_length(8, 50))
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 33]), min_size=1, max_size=5),
    inputs=st.sampled_from([1, 31, 32, 33, 64]), columns=st.sampled_from([1, 63, 64, 65]), transposed=st.booleans(),
    bias=st.booleans(), read=st.booleans(), write=st.booleans(), dtype=st.sampled_from([torch.float32, torch.float16]),
)  # fmt: skip
def test_products(
    counts: list[int], inputs: int, columns: int, transposed: bool, bias: bool, read: bool, write: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    check_product(
        product_case(
            counts, inputs, columns, dtype=dtype, transposed=transposed, bias=bias, read=read, write=write
        )
    )


def test_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXACT", MANY_ROWS)
    check_product(product_case([130, 0, 1, 64], 40, 260))


def test_clamped_units() -> None:
    for rows, inner, dtype in ((1, 1, torch.float32), (3, 513, torch.float32), (2, 40, torch.float16)):
        check_glu(rows, inner, dtype=dtype)


@settings(max_examples=at_length(7, 40))
@given(tokens=st.integers(1, 4), experts=st.integers(1, 40), picked=st.integers(1, 9), half=st.booleans())
def test_picks(tokens: int, experts: int, picked: int, half: bool) -> None:
    check_picks(tokens, experts, min(picked, experts), dtype=torch.float16 if half else torch.float32)


def test_equal_logits_pick_the_first() -> None:
    _, picked = pick_experts(torch.zeros(2, 5), 3, softmax_first=True, renormalised=True, rounded=True)
    assert picked.tolist() == [[0, 1, 2]] * 2


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_picks_experts_that_exist() -> None:
    for first in (False, True):
        logits = torch.full((1, 5), torch.nan)
        _, picked = pick_experts(logits, 3, softmax_first=first, renormalised=False, rounded=True)
        assert int(picked.min()) >= 0 and int(picked.max()) < 5


@settings(max_examples=at_length(7, 40))
@given(tokens=st.integers(0, 50), experts=st.integers(1, 9), picked=st.integers(1, 4))
def test_groups(tokens: int, experts: int, picked: int) -> None:
    check_groups(tokens, experts, min(picked, experts))


def test_groups_of_many_rows() -> None:
    check_groups(700, 6, 3, used=4)


@settings(max_examples=at_length(6, 30))
@given(
    tokens=st.integers(1, 4), picked=st.integers(1, 5), width=st.sampled_from([1, 33, 512, 600]), half=st.booleans(),
    exact=st.booleans(),
)  # fmt: skip
def test_sums(tokens: int, picked: int, width: int, half: bool, exact: bool) -> None:
    check_sums(tokens, picked, width, dtype=torch.float16 if half else torch.float32, exact_weights=exact)


def test_nan_goes_through() -> None:
    assert clamped_glu(torch.full((1, 4), torch.nan), 1.702, 7.0).isnan().all()


def test_nothing_to_do() -> None:
    ends = torch.zeros(3, dtype=torch.int32)
    assert grouped_product(torch.empty(0, 8), torch.empty(3, 8, 5), None, ends).shape == (0, 5)
    assert clamped_glu(torch.empty(0, 8), 1.702, 7.0).shape == (0, 4)
    weights, picked = pick_experts(torch.empty(0, 8), 2, softmax_first=True, renormalised=False, rounded=True)
    assert weights.shape == picked.shape == (0, 2)
    assert group_rows(picked, 3)[0].tolist() == [0, 0, 0]
    assert combine_rows(torch.empty(0, 8), weights).shape == (0, 8)


def test_arguments_that_do_not_fit_are_refused() -> None:
    x, weight, ends = torch.zeros(4, 8), torch.zeros(3, 8, 5), torch.tensor([1, 2, 4], dtype=torch.int32)
    index = torch.zeros(4, dtype=torch.int64)
    refused = (
        (x[:, :7], weight, None, ends, None, None),
        (x, weight.half(), None, ends, None, None),
        (x.double(), weight.double(), None, ends, None, None),
        (x.t().contiguous().t(), weight, None, ends, None, None),
        (x, weight, None, ends.long(), None, None),
        (x, weight, None, ends[:2], None, None),
        (x, weight, torch.zeros(3, 8), ends, None, None),
        (x, weight, None, ends, index[::2], index),
        (x, weight, None, ends, None, index[:3]),
    )
    for x_, weight_, bias, ends_, read, write in refused:
        with pytest.raises(ValueError):
            grouped_product(x_, weight_, bias, ends_, read=read, write=write)
    for up in (
        torch.zeros(4, 7),
        torch.zeros(8, 4).t(),
        torch.zeros(4),
        torch.zeros(4, 8, dtype=torch.int32),
    ):
        with pytest.raises(ValueError):
            clamped_glu(up, 1.702, 7.0)
