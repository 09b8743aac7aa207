"""Codes of keys and values: every code, rounding, odd vectors, and the pages that hold them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.kernels import reference
from pensieve.kernels.arguments import HeadPrep
from pensieve.kernels.kv_codec import (
    CODES,
    LEAST,
    MOST,
    NOT_FINITE,
    TOP,
    check_pool,
    coded,
    decode,
    encode,
    exponents_of,
    pool_of,
    read,
    used_bytes,
)
from pensieve.kernels.spans import make_spans
from support.lengths import at_length

codes = pytest.mark.parametrize("code", CODES.values(), ids=str)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
SIZES = st.one_of(st.integers(-150, 127), st.integers(-8, 8))


def all_codes(code: torch.dtype) -> torch.Tensor:
    """The 256 codes."""
    return torch.arange(-128, 128).to(torch.int8).view(code)


def levels(code: torch.dtype) -> torch.Tensor:
    """The values of the codes that vectors are rounded to, float64, ascending."""
    values = all_codes(code).to(torch.float32).double()
    values = values[values.isfinite()]
    return values[values >= -127].unique() if code == torch.int8 else values.unique()


@codes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_decodes_exactly_and_comes_back(code: torch.dtype, dtype: torch.dtype) -> None:
    """Beside a value that fixes the exponent, each code is what its own value is encoded to."""
    largest = 2.0 ** TOP[code]
    for exponent in (-10, 0, 5):
        each = levels(code)
        each = each[each.abs() < 2 * largest]
        vectors = torch.stack([torch.full_like(each, largest), each], dim=1) * 2.0**exponent
        if dtype == torch.float16:
            vectors = vectors[vectors.abs().amax(1) < 60_000]
        got, exponents = encode(vectors.to(dtype), code)
        assert (exponents == exponent).all()
        assert torch.equal(decode(got, exponents, dtype).double(), vectors)


@codes
def test_all_256_codes_decode_to_what_they_stand_for(code: torch.dtype) -> None:
    every = all_codes(code)
    for exponent in (LEAST, -3, 0, MOST):
        found = decode(every[:, None], torch.full((256,), exponent, dtype=torch.int8), torch.float64)
        want = every.to(torch.float32).double() * 2.0**exponent
        assert torch.equal(found[:, 0].nan_to_num(7e77), want.nan_to_num(7e77))
    assert int(every.to(torch.float32).isnan().sum()) == (2 if code == torch.float8_e4m3fn else 0)


@settings(max_examples=at_length(150, 3000))
@given(
    values=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=9), size=SIZES,
    code=st.sampled_from(list(CODES.values())), dtype=st.sampled_from(DTYPES), outlier=st.integers(0, 30),
)  # fmt: skip
def test_each_value_takes_the_nearest_code(
    values: list[float], size: int, code: torch.dtype, dtype: torch.dtype, outlier: int
) -> None:
    """By brute force over all codes, in float64."""
    vector = torch.tensor(values, dtype=torch.float64) * 2.0**size
    vector[0] *= 2.0**outlier
    vector = vector.to(dtype)
    got, exponent = encode(vector, code)
    exact = vector.double()
    if not exact.isfinite().all() or exact.abs().max() >= 2.0 ** (MOST + TOP[code] + 1):
        assert exponent == NOT_FINITE and decode(got, exponent, torch.float32).isnan().all()
        return
    largest = exact.abs().max().item()
    wanted = LEAST if largest == 0 else max(LEAST, math.frexp(largest)[1] - 1 - TOP[code])
    assert exponent.item() == wanted
    scaled = exact / 2.0**wanted
    away = (scaled[:, None] - levels(code)[None]).abs().amin(1)
    assert torch.equal((scaled - got.to(torch.float32).double()).abs(), away)


@codes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ties_go_to_even(code: torch.dtype, dtype: torch.dtype) -> None:
    top = 2.0 ** TOP[code]
    if code == torch.int8:
        ties = {0.5: 0.0, 1.5: 2.0, 2.5: 2.0, -0.5: 0.0, -3.5: -4.0}
    else:
        ties = {1.0625: 1.0, 1.1875: 1.25, 2**-10: 0.0, 3 * 2**-10: 2**-8, -1.0625: -1.0}
    got, exponent = encode(torch.tensor([top, *ties], dtype=dtype), code)
    assert exponent == 0
    assert got.to(torch.float32)[1:].tolist() == list(ties.values())


@codes
def test_odd_vectors(code: torch.dtype) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf, 2.0 ** (MOST + TOP[code] + 1)):
        vectors = torch.tensor([[1.0, bad, 0.0], [1.0, 2.0, 3.0]])
        got, exponents = encode(vectors, code)
        found = decode(got, exponents, torch.float32)
        assert found[0].isnan().all() and torch.equal(found[1], vectors[1])
    got, exponents = encode(torch.zeros(2, 5), code)
    assert (exponents == LEAST).all() and (decode(got, exponents, torch.float32) == 0).all()
    assert (decode(*encode(torch.full((1, 4), 2.0**-70), code), torch.float32) == 0).all()


@settings(max_examples=at_length(60, 1000))
@given(
    row=st.lists(FLOATS, min_size=3, max_size=3), others=st.lists(st.lists(FLOATS, min_size=3, max_size=3)),
    code=st.sampled_from(list(CODES.values())),
)  # fmt: skip
def test_a_code_depends_on_its_vector_alone(
    row: list[float], others: list[list[float]], code: torch.dtype
) -> None:
    alone, together = encode(torch.tensor([row]), code), encode(torch.tensor([*others, row]), code)
    assert torch.equal(alone[0].view(torch.uint8)[0], together[0].view(torch.uint8)[-1])
    assert alone[1][0] == together[1][-1]


@codes
@pytest.mark.parametrize(("page", "heads", "dim"), [(1, 3, 6), (1, 1, 2), (32, 3, 16)])
def test_pages_hold_codes_then_exponents(code: torch.dtype, page: int, heads: int, dim: int) -> None:
    held = torch.full((4, used_bytes(heads, page, dim) + 24), 99, dtype=torch.uint8)
    pool = pool_of(held, heads, page, dim, code)
    check_pool(pool, torch.float32, (torch.float32,))
    qkv = torch.randn(2 * page, 3 * heads, dim)
    reference.kv_write(pool, qkv, torch.arange(page, 3 * page), HeadPrep())
    assert (held[[0, 3]] == 99).all() and (held[:, used_bytes(heads, page, dim) :] == 99).all()
    everything = (slice(1, 3),)
    want = decode(*encode(qkv[:, heads:].unflatten(1, (2, heads)), code), torch.float32)
    want = want.unflatten(0, (2, page)).permute(0, 2, 3, 1, 4)
    assert torch.equal(read(pool, everything, torch.float32), want)
    assert torch.equal(
        exponents_of(pool)[1:3].flatten(), held[1:3, 2 * heads * page * dim : -24].view(torch.int8).flatten()
    )


@codes
@pytest.mark.parametrize("window", [None, 5])
def test_attention_reads_what_the_codes_stand_for(code: torch.dtype, window: int | None) -> None:
    torch.manual_seed(0)
    plain = torch.randn(9, 2, 2, 4, 8)
    pool = coded(plain, code)
    decoded = read(pool, (slice(None),), torch.float32)
    assert not torch.equal(decoded, plain)
    spans, tables = make_spans([1, 6, 1], [9, 3, 0], [0, 1, 2]), torch.arange(9, dtype=torch.int32).view(3, 3)
    q = torch.randn(8, 4, 8)
    found = [
        reference.ragged_paged_attention(q, one, spans, tables, scale=0.3, window=window, return_lse=True)
        for one in (pool, decoded)
    ]
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_pools_without_room_for_exponents_are_refused() -> None:
    pool = torch.zeros(3, 2, 2, 4, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="no room for exponents"):
        check_pool(pool, torch.float32, (torch.float32,))
    with pytest.raises(ValueError, match="both must be"):
        check_pool(pool.half(), torch.float32, (torch.float32,))
