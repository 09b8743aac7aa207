"""The decoder's elementwise kernels compiled for an H200 without one: no spills, and 16 bytes an access."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import triton

from pensieve.kernels import accepted, activation, fp8_product, kv_write, norm, row_product
from pensieve.kernels.arguments import Activation
from support.kernels.compiled_kernels import CUOBJDUMP, Binary, build, dump

REGISTERS = 65536
"""What one Hopper multiprocessor has."""
THREADS = 768
"""At least so many must be resident on a multiprocessor: with one 16-byte piece or more each on the way, enough to hide
memory."""
TENSORS = ("qkv", "pool", "cos", "sin", "query_norm", "key_norm", "x", "delta", "out", "weight", "bias", "up")
TYPES = {name: "*bf16" for name in TENSORS} | {"slots": "*i64", "eps": "fp32"}

pytestmark = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this build of Triton brings no CUDA tools")


def accesses(binary: Binary) -> Counter[str]:
    """How often the program reads and writes memory, by kind and width."""
    return Counter(re.findall(r"\b((?:ld|st)\.global[.\w]*?\.(?:v\d\.)?b\d+)", binary.ptx))


def fits(binary: Binary, kernel: triton.JITFunction) -> None:
    assert binary.stack == 0, f"{kernel.__name__} spills"
    assert binary.registers * THREADS <= REGISTERS


@pytest.mark.parametrize("warps", [kv_write.FEW_WARPS, kv_write.MANY_WARPS])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_heads(dim: int, warps: int) -> None:
    block = warps * kv_write.PER_WARP // kv_write._half_width(dim)
    for heads, norm_, turn, loads, stores in (
        ((40, 10), True, True, 8, 4), ((40, 10), False, True, 4, 4), ((40, 40), False, False, 2, 2),
    ):  # fmt: skip
        pool = torch.empty(1, 2, heads[1], 32, dim, dtype=torch.bfloat16, device="meta")
        fixed = kv_write.constants(pool, heads[0], block, norm=norm_, turn=turn)
        binary = build(kv_write._prepare_and_store, TYPES, fixed, kv_write.options(block, dim))
        fits(binary, kv_write._prepare_and_store)
        # The slot is read singly; nothing else is.
        wide = {"ld.global.v4.b32": loads, "st.global.v4.b32": stores, "ld.global.b64": 1}
        assert accesses(binary) == wide
        # Products are rounded before they are added, as torch does.
        assert not turn or "mul.rn." in binary.ptx
        assert not re.search(r"\b(fma|(mul|add|sub)\.(f|bf))", binary.ptx), "the assembler may fuse these"


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("width", [768, 2048, 4096, 5120, 8192, 16384])
def test_norms(width: int, layer: bool) -> None:
    options = norm.options(width)
    binary = build(norm._norm_rows, TYPES, norm.constants(width, add=True, layer=layer), options)
    fits(binary, norm._norm_rows)
    pieces = triton.next_power_of_2(width) // (8 * 32 * options["num_warps"])
    assert accesses(binary) == {"ld.global.v4.b32": (3 + layer) * pieces, "st.global.v4.b32": 2 * pieces}
    assert pieces <= 4
    if width == 5120:
        assert options["num_warps"] == 8


@pytest.mark.parametrize("kind", ["silu", "relu", "gelu"])
@pytest.mark.parametrize("block", [activation.FEW_COLUMNS, activation.MANY_COLUMNS])
def test_activations(block: int, kind: Activation) -> None:
    for inner in (13824, 11008, 3072):
        fixed = activation.constants(inner, block, True, kind)
        binary = build(activation._activate, TYPES, fixed, activation.options(block))
        fits(binary, activation._activate)
        assert accesses(binary) == {"ld.global.v4.b32": 2, "st.global.v4.b32": 1}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [4096, 5120, 13824])
def test_the_product_of_one_row(width: int, bias: bool) -> None:
    fixed = row_product.constants(width, bias=bias)
    binary = build(row_product._row_product, TYPES, fixed, row_product.options())
    assert binary.stack == 0
    # All weights of a block, at least, are on their way before any is multiplied. (Triton 3.6 has two blocks.)
    found = re.findall(r"LDG\.\S*128|FFMA", dump(binary.cubin, "-sass"))
    assert found.index("FFMA") > 8


@pytest.mark.parametrize("undecided", [False, True])
def test_rows_behind_drafts(undecided: bool) -> None:
    words = ("tokens", "source", "positions", "slots", "entries", "drafts", "rejected", "pages", "words")
    types = {name: "*i32" for name in words} | {"sampled": "*i64", "count": "i32", "programs": "i32"}
    fixed = {"PAGE": 32, "BLOCK": 256, "MOST": accepted.MOST_ROWS, "UNDECIDED": undecided}
    options = {"enable_fp_fusion": True}  # Triton 3.9 asks for it
    fits(build(accepted._complete_rows, types, fixed, options), accepted._complete_rows)
    tiles = {"NARROW": 0, "WIDE": 1, "NARROW_ROWS": 16, "WIDE_ROWS": 128, "GROUPS": 4, "BLOCK": 256}
    fits(build(accepted._shorten_items, types, tiles, options), accepted._shorten_items)


@pytest.mark.parametrize("width", [4096, 5120, 13824, 28672])
def test_codes_of_rows(width: int) -> None:
    types = TYPES | {"codes": "*fp8e4nv", "scales": "*fp32"}
    binary = build(
        fp8_product._quantise, types, fp8_product.row_constants(width), fp8_product.row_options(width)
    )
    assert binary.stack == 0
    assert "cvt.rn.satfinite.e4m3x2.f32" in binary.ptx
    assert set(accesses(binary)) <= {
        "ld.global.v4.b32",
        "st.global.v4.b32",
        "st.global.v2.b32",
        "st.global.b32",
    }


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("block", [fp8_product.FEW_COLUMNS, fp8_product.MANY_COLUMNS])
def test_scales_of_products(block: int, biased: bool) -> None:
    types = TYPES | {"sums": "*bf16", "rows": "*fp32", "scales": "*fp32"}
    fixed = fp8_product.constants(7680, block, biased=biased)
    binary = build(fp8_product._rescale, types, fixed, fp8_product.options(block))
    fits(binary, fp8_product._rescale)
    # The sums, the scales of their columns, the scale of the row, and the bias.
    wanted = {"ld.global.v4.b32": 3 + biased, "ld.global.b32": 1, "st.global.v4.b32": 1}
    assert accesses(binary) == wanted
