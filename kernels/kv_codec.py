"""Keys and values in 8 bits: a code for each value, and a power of two for each token and head.

A page of one layer holds codes ``[2, Hkv, N, D]``, behind them the exponents int8 ``[2, Hkv, N]``, then padding. Its
pool is the view of the codes, ``[P, 2, Hkv, N, D]`` in ``float8_e4m3fn`` or ``int8``; ``exponents_of`` views the rest.
So a pool's dtype says how it is read, and an operation takes plain and coded pools alike.

A vector's code depends on that vector alone. ``exponent`` is read off the bits of its largest magnitude ``m``, such
that ``m / 2**exponent`` lies in [128, 256) for FP8 and in [64, 128) for int8; ``code = round(x / 2**exponent)``, ties
to even, at most 127 in int8. Decoding is exact in float32 and bfloat16.

* No exponent is below ``LEAST``: vectors below 2**-33 lose precision, and a vector of zeros has this one.
* A vector with a NaN or an infinity, or whose exponent would be above ``MOST``, decodes to NaN throughout (exponent
  ``NOT_FINITE``).
"""

from __future__ import annotations

from typing import Final

import torch

CODES: Final = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Dtype of the codes by the name of ``--kv-dtype``."""
TOP: Final = {torch.float8_e4m3fn: 7, torch.int8: 6}
"""Binary exponent of the largest code of a vector."""
MOST_CODE: Final = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
LEAST: Final = -40
MOST: Final = 79
NOT_FINITE: Final = -128
"""Exponents. Attention adds a value's exponent to its score: within these limits float32 holds all that follows."""

PAGES_AT_ONCE: Final = 1024
"""Pages that ``coded`` encodes at a time: it needs several times their size in float32."""
Index = tuple[torch.Tensor | slice, ...]


def is_coded(pool: torch.Tensor) -> bool:
    """Whether a layer's pool [P, 2, Hkv, N, D] holds codes."""
    return pool.dtype in TOP


def encode(x: torch.Tensor, code: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``x`` [..., D], a float dtype, and the exponents int8 [...]."""
    wide = x.to(_wide(x.dtype))
    largest = wide.abs().amax(-1)
    exponent = torch.frexp(largest.clamp_min(2.0**LEAST)).exponent - 1 - TOP[code]
    known = largest.isfinite() & (exponent <= MOST)
    exponent = exponent.clamp(LEAST, MOST)
    scaled = torch.where(known.unsqueeze(-1), wide * _power_of_two(-exponent).unsqueeze(-1), 0.0)
    most = MOST_CODE[code]
    codes = (scaled.round() if code == torch.int8 else scaled).clamp(-most, most).to(code)
    return codes, torch.where(known, exponent, NOT_FINITE).to(torch.int8)


def decode(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values [..., D] of ``codes`` [..., D] and ``exponents`` int8 [...]."""
    factor = torch.where(exponents == NOT_FINITE, torch.nan, _power_of_two(exponents.clamp_min(LEAST)))
    return (codes.to(_wide(dtype)) * factor.unsqueeze(-1)).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2**exponent exactly, float32, for exponents of normal numbers."""
    power: torch.Tensor = ((exponent.int() + 127) << 23).view(torch.float32)
    return power


def exponents_of(pool: torch.Tensor) -> torch.Tensor:
    """View the exponents of a coded pool, int8 [P, 2, Hkv, N]."""
    pages, _, heads, tokens, dim = pool.shape
    codes = 2 * heads * tokens * dim
    return pool.view(torch.int8).as_strided(
        (pages, 2, heads, tokens),
        (pool.stride(0), heads * tokens, tokens, 1),
        pool.storage_offset() + codes,
    )


def used_bytes(heads: int, tokens: int, dim: int) -> int:
    """Return the bytes of a page before its padding."""
    return 2 * heads * tokens * (dim + 1)


def pool_of(pages: torch.Tensor, heads: int, tokens: int, dim: int, code: torch.dtype) -> torch.Tensor:
    """View pages uint8 [P, bytes], of a layer each, as a coded pool [P, 2, Hkv, N, D]."""
    codes = 2 * heads * tokens * dim
    assert pages.shape[1] >= used_bytes(heads, tokens, dim)
    pool: torch.Tensor = pages[:, :codes].view(code).unflatten(1, (2, heads, tokens, dim))
    return pool


def read(pool: torch.Tensor, at: Index, dtype: torch.dtype) -> torch.Tensor:
    """Return the values [..., D] at ``at``, an index of [P, 2, Hkv, N], of a coded pool."""
    return decode(pool.view(torch.uint8)[at].view(pool.dtype), exponents_of(pool)[at], dtype)


def write(pool: torch.Tensor, at: Index, values: torch.Tensor) -> None:
    """Encode ``values`` [..., D] and store them at ``at``, an index of [P, 2, Hkv, N], of a coded pool."""
    codes, exponents_of(pool)[at] = encode(values, pool.dtype)
    pool.view(torch.uint8)[at] = codes.view(torch.uint8)


def coded(pool: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """Return a coded copy of a plain pool [P, 2, Hkv, N, D]."""
    pages, _, heads, tokens, dim = pool.shape
    held = pool.new_zeros((pages, used_bytes(heads, tokens, dim)), dtype=torch.uint8)
    result = pool_of(held, heads, tokens, dim, code)
    for start in range(0, pages, PAGES_AT_ONCE):
        part = slice(start, start + PAGES_AT_ONCE)
        write(result, (part,), pool[part])
    return result


def check_pool(pool: torch.Tensor, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raises ValueError unless a pool holds values of ``dtype``, one of ``dtypes``, or codes in pages that are each
    contiguous and have room for the exponents."""
    if dtype not in dtypes or (pool.dtype != dtype and not is_coded(pool)):
        raise ValueError(
            f"the tokens are {dtype} and the pool {pool.dtype}: both must be float16, bfloat16 or float32, or the pool "
            "coded in 8 bits"
        )
    if is_coded(pool) and len(pool):
        heads, tokens, dim = pool.shape[2:]
        inner = (heads * tokens * dim, tokens * dim, dim, 1)
        if pool.stride()[1:] != inner or pool.stride(0) < used_bytes(heads, tokens, dim):
            raise ValueError(
                f"a coded pool with strides {pool.stride()} has no room for exponents in its pages"
            )
