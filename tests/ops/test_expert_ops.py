"""The kernels of mixtures of experts, compiled for an H200 without one."""

from __future__ import annotations

import pytest
import torch

from pensieve.kernels import grouped_product
from pensieve.kernels.grouped_product import MANY_ROWS, TILINGS, Tiling
from support.kernels.compiled_kernels import CUOBJDUMP, build

SHARED = 227 * 1024
"""Bytes of shared memory that one program may have on Hopper."""
FLOATS = ("x", "weight", "bias", "out")


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this build of Triton brings no CUDA tools")
@pytest.mark.parametrize("tiling", [*(tiling for _, tiling in TILINGS), MANY_ROWS])
def test_products_fit_an_h200(tiling: Tiling) -> None:
    types = dict.fromkeys(FLOATS, "*bf16") | dict.fromkeys(("ends", "read", "write"), "*i32")
    fixed = grouped_product.constants(2880, 32, tiling, bias=True, read=True, write=True)
    binary = build(
        grouped_product._grouped_product,
        types,
        fixed | {"column_stride": 1},
        grouped_product.options(tiling),
    )
    assert binary.stack == 0, "spills"
    assert binary.shared <= SHARED
    assert "cp.async" in binary.ptx and "mma" in binary.ptx, (
        "the next tile is not read while one is multiplied"
    )


def test_more_rows_per_expert_get_larger_tiles() -> None:
    found = [grouped_product.tiling_of(rows, 8, torch.bfloat16).rows for rows in (1, 64, 65, 192, 512, 513)]
    assert found == [16, 16, 32, 32, 64, 128]
