"""The decoder's elementwise kernels on a CPU, against their references.

A pytest file that is not collected by itself: Triton's interpreter is chosen when triton is imported, so
``tests/ops/test_interpreted.py`` runs it in a process of its own, with TRITON_INTERPRET=1. The interpreter cannot round
to bfloat16; that type is tested on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.kernels import activation as activation_kernel
from pensieve.kernels import fp8_product, fp8_reference, reference, row_product
from pensieve.kernels import kv_write as kv_write_kernel
from pensieve.kernels.activation import activate
from pensieve.kernels.arguments import Activation, HeadPrep
from pensieve.kernels.kv_write import kv_write
from pensieve.kernels.norm import add_norm, norm
from pensieve.kernels.row_product import BLOCK, LEAST_HEIGHT, ROWS, linear
from pensieve.kernels.upload import upload
from pensieve.model.ops import triton_ops
from pensieve.model.transformer import Transformer
from support.kernels.decoder_cases import (
    check_activation,
    check_heads,
    check_norm,
    check_product,
    check_sum_norm,
    head_case,
)
from support.kernels.decoder_models import SHAPES, Shape, heads_only, random_weights, small_arch
from support.lengths import at_length, some

DTYPES = [torch.float32, torch.float16]
ACTIVATIONS: list[Activation] = ["silu", "relu", "relu2", "gelu", "gelu_tanh"]
dtypes = st.sampled_from(DTYPES)
# exp of a large number is inf, as meant: silu of a very negative one is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", some([2, 80, 16, 128, 64, 256, 96], 4))
def test_head_sizes(dim: int, dtype: torch.dtype) -> None:
    for norm_, turn in ((False, True), (True, True), (True, False), (False, False)):
        check_heads(head_case(3, dim=dim, dtype=dtype, norm=norm_, turn=turn))


def test_norm_weights_in_float32() -> None:
    check_heads(head_case(3, dtype=torch.float16, norm=True, norm_type=torch.float32))
    for add in (False, True):
        check_norm(3, 100, dtype=torch.float16, add=add, weight_type=torch.float32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [BLOCK, BLOCK + 1, 2 * BLOCK - 1, 3 * BLOCK])
def test_the_product_of_one_row(width: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_product, "F", None)
    monkeypatch.setattr(row_product, "LEAST_HEIGHT", 0)
    for height in (ROWS, 3 * ROWS):
        check_product(1, width, height, bias=bias, dtype=torch.float16)


@pytest.mark.parametrize(
    ("rows", "width", "height", "dtype"),
    [
        (2, BLOCK, LEAST_HEIGHT, torch.float16), (0, BLOCK, LEAST_HEIGHT, torch.float16),
        (1, BLOCK, LEAST_HEIGHT, torch.float32), (1, BLOCK - 1, LEAST_HEIGHT, torch.float16),
        (1, BLOCK, LEAST_HEIGHT + 1, torch.float16), (1, BLOCK, LEAST_HEIGHT - ROWS, torch.float16),
    ],
)  # fmt: skip
def test_other_products_are_those_of_torch(
    rows: int, width: int, height: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_product, "_row_product", None)
    x, weight, bias = torch.randn(rows, width), torch.randn(height, width), torch.randn(height)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    for added in (None, bias):
        assert linear(x, weight, added).equal(F.linear(x, weight, added))


def test_rows_that_do_not_lie_together_are_torchs() -> None:
    turned = torch.randn(BLOCK, LEAST_HEIGHT).half().t()
    x = torch.randn(1, BLOCK).half()
    assert linear(x, turned, None).equal(F.linear(x, turned))
    with pytest.raises(RuntimeError, match="shapes"):
        linear(torch.zeros(1, BLOCK).half(), torch.zeros(ROWS, 2 * BLOCK).half(), None)


@pytest.mark.parametrize("heads", [(1, 1), (40, 10), (14, 2), (7, 1), (12, 12), (40, 1)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    check_heads(head_case(2, heads=heads[0], kv_heads=heads[1], norm=True))


@pytest.mark.parametrize("page", [1, 3, 32, 256])
def test_pages(page: int) -> None:
    check_heads(head_case(9, page=page, slot_type=torch.int32))


@settings(max_examples=at_length(10, 80))
@given(
    tokens=st.integers(1, 6), groups=st.integers(1, 5), kv_heads=st.integers(1, 6),
    half=st.sampled_from([1, 4, 5, 8, 20]), page=st.integers(1, 9), dtype=dtypes, norm_=st.booleans(),
    turn=st.booleans(), padding=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_heads(
    tokens: int, groups: int, kv_heads: int, half: int, page: int, dtype: torch.dtype, norm_: bool, turn: bool,
    padding: float, seed: int,
) -> None:  # fmt: skip
    case = head_case(
        tokens, heads=groups * kv_heads, kv_heads=kv_heads, dim=2 * half, page=page, dtype=dtype, norm=norm_,
        turn=turn, padding=padding, seed=seed,
    )  # fmt: skip
    check_heads(case)


def test_large_programs_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_write_kernel, "LARGE_STEP_VALUES", 0)
    check_heads(head_case(5, heads=40, kv_heads=10, norm=True))


def test_heads_inside_wider_tensors() -> None:
    case = head_case(5, norm=True)
    wide = torch.full((5, 11, 16), torch.nan)
    wide[:, 2:10] = case.qkv
    pool = torch.full((4, 3, 2, 2, 8, 16), torch.nan)[: len(case.pool), 1]
    prep = case.prep
    assert prep.cos is not None and prep.sin is not None
    angles = torch.cat([prep.cos, prep.sin], dim=1)
    strided = replace(prep, cos=angles[:, :8], sin=angles[:, 8:])
    want, want_pool = case.run(fast=True)
    got = kv_write(pool, wide[:, 2:10], case.slots, strided)
    assert torch.equal(got, want) and torch.equal(pool.nan_to_num(7.0), want_pool.nan_to_num(7.0))
    assert wide[:, :2].isnan().all() and wide[:, 10:].isnan().all()
    assert got.data_ptr() == wide[:, 2].data_ptr(), "queries are prepared in place"


def test_queries_that_need_nothing_are_not_touched() -> None:
    case = head_case(4, turn=False)
    case.qkv[:, :4] = torch.nan
    queries, _ = case.run(fast=True)
    assert queries.isnan().all()


@settings(max_examples=at_length(8, 60))
@given(
    tokens=st.integers(1, 4), width=st.integers(1, 300), dtype=dtypes, layer=st.booleans(), add=st.booleans()
)
def test_norms(tokens: int, width: int, dtype: torch.dtype, layer: bool, add: bool) -> None:
    check_norm(tokens, width, dtype=dtype, layer=layer, add=add)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("width", [768, 2048, 5120, 16384])
def test_norms_of_models(width: int, layer: bool) -> None:
    check_norm(2, width, dtype=torch.float16, layer=layer)


def test_layer_norm_far_from_zero() -> None:
    check_norm(3, 512, dtype=torch.float16, layer=True, offset=300.0)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_over_ranks(ranks: int, layer: bool) -> None:
    for width, dtype in ((64, torch.float32), (100, torch.float16)):
        check_sum_norm(3, width, ranks, dtype=dtype, layer=layer)


@settings(max_examples=at_length(8, 60))
@given(
    tokens=st.integers(1, 4), inner=st.integers(1, 600), gated=st.booleans(), kind=st.sampled_from(ACTIVATIONS),
    dtype=dtypes,
)  # fmt: skip
def test_activations(tokens: int, inner: int, gated: bool, kind: Activation, dtype: torch.dtype) -> None:
    check_activation(tokens, inner, gated, kind, dtype=dtype)


def test_large_programs_of_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_kernel, "LARGE_STEP_VALUES", 0)
    check_activation(2, 2500, True, "silu")


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_nan_goes_through(kind: Activation) -> None:
    assert activate(torch.full((1, 4), torch.nan), False, kind).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 100, 1030])
def test_codes_of_rows(width: int, dtype: torch.dtype) -> None:
    """Before the last rounding, which the interpreter cannot do."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(9, width, generator=generator).to(dtype)
    x *= torch.exp2(torch.randint(-8, 8, (9, 1), generator=generator).float()).to(dtype)
    x[1], x[2, 0], x[3, 0], x[4], x[5, 0] = 0.0, torch.nan, -torch.inf, 448.0, 448.0 if width > 1 else 450.0
    codes, scales = torch.empty(9, width), torch.empty(9)
    fixed = fp8_product.row_constants(width) | fp8_product.row_options(width)
    fp8_product._quantise[(9,)](x, codes, scales, x.stride(0), **fixed)
    want = fp8_reference.row_scales(x)
    torch.testing.assert_close(scales, want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(codes, x.float() / want[:, None], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=at_length(8, 40))
@given(
    tokens=st.integers(1, 5),
    width=st.integers(1, 600),
    biased=st.booleans(),
    dtype=dtypes,
    same=st.booleans(),
)
def test_scales_of_products(tokens: int, width: int, biased: bool, dtype: torch.dtype, same: bool) -> None:
    sums, rows, scales = torch.randn(16, width), torch.rand(tokens), torch.rand(width)
    sums = sums.to(dtype) if same else sums
    bias = torch.randn(width).to(dtype) if biased else None
    want = sums[:tokens].float() * rows[:, None] * scales
    want = (want if bias is None else want + bias).to(dtype)
    got = fp8_product.rescale(sums, rows, scales, bias, dtype)
    torch.testing.assert_close(got, want)


def test_nothing_to_do() -> None:
    none = torch.empty(0, 16)
    assert activate(none, True, "silu").shape == (0, 8)
    total, normed = add_norm(none, none, torch.ones(16), None, 1e-5)
    assert total.shape == normed.shape == norm(none, torch.ones(16), None, 1e-5).shape == (0, 16)
    pool = torch.zeros(1, 2, 2, 8, 16)
    assert kv_write(pool, torch.empty(0, 8, 16), torch.empty(0, dtype=torch.int64), HeadPrep()).shape == (
        0,
        4,
        16,
    )
    assert (pool == 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decoder_of_these_kernels(shape: Shape) -> None:
    arch = small_arch(shape)
    weights = random_weights(arch)
    tokens, positions, rows = torch.tensor([3, 9, 96, 0]), torch.tensor([5, 0, 63, 17]), torch.tensor([2, 0])
    slots = torch.tensor([39, 0, 17, 6])
    plain = heads_only(arch, slots, reference.kv_write)
    want = Transformer(arch, weights).forward(tokens, positions, plain, rows)
    fast = heads_only(arch, slots, kv_write)
    got = Transformer(arch, weights, triton_ops()).forward(tokens.int(), positions.int(), fast, rows.int())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast.pools, plain.pools, rtol=1e-4, atol=1e-4)


@settings(max_examples=at_length(6, 40))
@given(count=st.integers(0, 3000), spare=st.integers(0, 50))
def test_upload(count: int, spare: int) -> None:
    src = torch.arange(1, count + spare + 1, dtype=torch.int32)
    dst = torch.zeros(count + spare + 7, dtype=torch.int32)
    upload(dst, src, count)
    assert torch.equal(dst[:count], src[:count]) and not dst[count:].any()


def test_upload_refuses_what_does_not_fit() -> None:
    words = torch.zeros(8, dtype=torch.int32)
    refused = ((words, words[:4], 5), (words, words.long(), 1), (words[::2], words, 2), (words, words, -1))
    for dst, src, count in refused:
        with pytest.raises(ValueError):
            upload(dst, src, count)
