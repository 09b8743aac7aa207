"""The attention kernel compiled for an H200 without one: registers, spills, shared memory and the instructions that
its speed rests on. The budgets are what the tiles of ``attention.tiles`` promise to fit on a multiprocessor."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import triton

from pensieve.kernels.attention.kinds import PIECE_KEYS, Geometry
from pensieve.kernels.attention.tiles import Tile, choose_tiles
from pensieve.kernels.attention.work_lists import MERGES, NARROW, WIDE
from pensieve.kernels.ragged_paged_attention import (
    CONCURRENT,
    MERGED_AT_ONCE,
    PRIMARY,
    SECONDARY,
    _attend,
    _merge,
    constants,
    options,
)
from support.kernels import compiled_kernels
from support.kernels.compiled_kernels import CUOBJDUMP, Binary
from support.lengths import at_length

REGISTERS, SHARED_BYTES = 65536, 233472
"""What one Hopper multiprocessor has."""
STACK, STACK_OF_LARGE, STACK_OF_FIXED, STACK_OF_CODES = 16, 320, 700, 64
"""At most so many bytes a thread spill, over the versions of Triton from 3.6 on."""
TYPES = {
    "q": "*bf16", "pool": "*bf16", "tables": "*i32", "out": "*bf16", "lse": "*fp32", "words": "*i32",
    "partial": "*fp32", "partial_lse": "*fp32", "partial_total": "*fp32", "sinks": "*bf16", "factor": "fp32",
}  # fmt: skip
CODED = ("*fp8e4nv", "*i8")
ANY_VALUE = ("table_stride", "partial_rows", "window")

pytestmark = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this build of Triton brings no CUDA tools")


def build(
    kernel: triton.JITFunction, fixed: dict[str, int | float | bool], build_options: dict[str, int]
) -> Binary:
    """Compile as a launch with aligned tensors would."""
    return compiled_kernels.build(kernel, TYPES, fixed, build_options, any_value=ANY_VALUE)


def attend(
    dim: int, name: str, *, lse: bool = False, mixed: bool = False, hopper: bool = False, piece: int = 0,
    window: int | None = None, **features: Any,
) -> tuple[Tile, Binary]:  # fmt: skip
    """Compile as for a launch on Hopper. ``mixed``: beside the other launch; ``hopper``: that is the kernel for
    Hopper; ``piece``, ``window``: of the geometry; ``features``: of ``constants``."""
    tile = getattr(choose_tiles(dim, 2, hopper=hopper, fixed=piece > 0), name)
    which = NARROW if name in ("narrow", "narrow_concurrent", "short") else WIDE
    order = CONCURRENT if mixed and which == NARROW else PRIMARY
    geometry = Geometry(40, 10, dim, 2, 132, piece=piece, window=window)
    fixed = constants(tile, which, geometry, 32, **features)
    return tile, build(_attend, {**fixed, "ORDER": order.value, "LSE": lse}, options(tile, order))


@pytest.mark.parametrize("name", ["narrow", "narrow_concurrent", "short", "few", "wide"])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_programs_fit(dim: int, name: str) -> None:
    tile, binary = attend(dim, name)
    assert binary.registers * 32 * tile.warps * tile.resident <= REGISTERS
    assert (binary.shared + 1024) * tile.resident <= SHARED_BYTES
    # Two programs of the large tile fit at the price of some spills, which was measured to pay.
    assert binary.stack <= (STACK_OF_LARGE if name == "wide" else STACK)
    products = "wgmma.mma_async" if tile.rows >= 64 else "mma.sync"
    assert binary.ptx.count(products) > 0
    # Keys and values of one tile, 16 bytes a thread, for every buffer filled ahead of the loop.
    copies = 2 * tile.keys * max(64, 1 << (dim - 1).bit_length()) * 2 // (16 * 32 * tile.warps)
    assert binary.ptx.count("cp.async.cg") >= copies * (tile.stages - 1)


@pytest.mark.parametrize(
    ("pool", "name"),
    at_length((("*fp8e4nv", "narrow"),), tuple(itertools.product(CODED, ("narrow", "few", "wide")))),
)
def test_programs_over_codes_fit(pool: str, name: str) -> None:
    """Decoding takes registers, not memory."""
    tile = getattr(choose_tiles(128, 2, coded=True), name)
    fixed = constants(
        tile, NARROW if name == "narrow" else WIDE, Geometry(40, 10, 128, 2, 132, coded=True), 32
    )
    types = {**TYPES, "pool": pool}
    binary = compiled_kernels.build(
        _attend,
        types,
        {**fixed, "ORDER": PRIMARY.value, "LSE": False},
        options(tile, PRIMARY),
        any_value=ANY_VALUE,
    )
    assert binary.registers * 32 * tile.warps * tile.resident <= REGISTERS
    assert (binary.shared + 1024) * tile.resident <= SHARED_BYTES
    assert binary.stack <= STACK_OF_CODES
    assert ("e4m3x2" in binary.ptx) == (pool == "*fp8e4nv"), "the conversion is an instruction"


@pytest.mark.parametrize("name", ["narrow", "narrow_concurrent", "short", "few", "wide"])
@pytest.mark.parametrize("dim", [64, 128])
def test_programs_with_windows_and_sinks_fit(dim: int, name: str) -> None:
    """As the layers of gpt-oss need them."""
    tile, binary = attend(dim, name, window=128, sinks=True)
    assert binary.registers * 32 * tile.warps * tile.resident <= REGISTERS
    assert (binary.shared + 1024) * tile.resident <= SHARED_BYTES
    assert binary.stack <= (STACK_OF_LARGE if name == "wide" else STACK)


@pytest.mark.parametrize("name", ["narrow", "narrow_concurrent", "short", "few", "wide"])
def test_programs_with_fixed_pieces_fit(name: str) -> None:
    tile, binary = attend(128, name, piece=PIECE_KEYS)
    assert binary.registers * 32 * tile.warps * tile.resident <= REGISTERS
    assert (binary.shared + 1024) * tile.resident <= SHARED_BYTES
    # The sum of a large item's earlier pieces waits outside of the registers.
    assert binary.stack <= (STACK_OF_FIXED if tile.rows > 16 else 2 * STACK)


@pytest.mark.parametrize("dim", [64, 128])
def test_programs_fit_beside_the_kernel_for_hopper(dim: int) -> None:
    tile, binary = attend(dim, "narrow_concurrent", mixed=True, hopper=True)
    assert binary.registers * 32 * tile.warps * tile.resident <= REGISTERS
    assert (binary.shared + 1024) * tile.resident <= SHARED_BYTES
    assert binary.stack <= STACK_OF_LARGE
    assert "griddepcontrol.wait" in binary.ptx and "griddepcontrol.launch_dependents" in binary.ptx


def test_the_two_kinds_share_a_multiprocessor() -> None:
    _, wide = attend(128, "wide", mixed=True)
    tile, narrow = attend(128, "narrow_concurrent", mixed=True)
    assert wide.registers * 32 * 8 + tile.resident * narrow.registers * 32 * tile.warps <= REGISTERS
    assert wide.shared + 1024 + tile.resident * (narrow.shared + 1024) <= SHARED_BYTES


@pytest.mark.parametrize("name", ["narrow", "short", "few", "wide"])
@pytest.mark.parametrize("features", [{}, {"window": 128, "inner_softcap": 0.00125}], ids=["plain", "gemma2"])
def test_largest_heads_build(name: str, features: dict[str, Any]) -> None:
    tile, binary = attend(256, name, lse=True, **features)
    assert binary.registers * 32 * tile.warps * tile.resident <= REGISTERS
    assert (binary.shared + 1024) * tile.resident <= SHARED_BYTES and binary.stack <= STACK_OF_LARGE


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("piece", [0, 512])
def test_merge_builds_without_spills(rows: int, sinks: bool, piece: int) -> None:
    fixed = {
        "LIST": MERGES, "KV_HEADS": 10, "GROUPS": 4, "DIM": 128, "WIDTH": 128, "LSE": True,
        "ROWS": rows, "PIECES": MERGED_AT_ONCE // rows, "ORDER": SECONDARY.value,
        "SINKS": sinks, "PIECE": piece,
    }  # fmt: skip
    assert build(_merge, fixed, {"num_warps": 4, "enable_fp_fusion": True}).stack <= (STACK if piece else 0)
