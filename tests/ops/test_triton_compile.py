"""The attention kernel compiled for an H200 without one: registers, spills, shared memory and the instructions that
its speed rests on. The budgets are what the tiles of ``attention_tiles`` promise to fit on a multiprocessor."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pensieve.kernels.attention_plan import Geometry
from pensieve.kernels.attention_tiles import Tile, choose_tiles
from pensieve.kernels.ragged_paged_attention import MERGED_AT_ONCE, _attend, _merge, constants, options

REGISTERS, SHARED_BYTES = 65536, 233472
"""Of one Hopper multiprocessor."""
STACK, STACK_OF_LARGE = 16, 320
"""Bytes a thread that spill at most, over the versions of Triton from 3.6 on."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTERS = {
    "q": "*bf16", "pool": "*bf16", "tables": "*i32", "out": "*bf16", "lse": "*fp32", "words": "*i32",
    "partial": "*fp32", "partial_lse": "*fp32",
}  # fmt: skip
ANY_VALUE = ("items_at", "table_stride", "partial_rows", "merges_at")

pytestmark = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this build of Triton brings no CUDA tools")


@dataclass(frozen=True, slots=True)
class Binary:
    registers: int
    stack: int
    shared: int
    ptx: str


def build(kernel: triton.JITFunction, fixed: dict[str, int | bool], build_options: dict[str, int]) -> Binary:
    """Compile for sm_90 as a launch with aligned tensors would, and read the resources of the result."""
    signature = {}
    for name in kernel.arg_names:
        signature[name] = "constexpr" if name in fixed else POINTERS.get(name, "i32")
    if "factor" in signature:
        signature["factor"] = "fp32"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name] not in ("constexpr", "fp32") and name not in ANY_VALUE
    }
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=build_options)
    listing = usage(compiled.asm["cubin"])
    registers, stack = (int(re.search(rf"{key}:(\d+)", listing)[1]) for key in ("REG", "STACK"))
    return Binary(registers, stack, compiled.metadata.shared, compiled.asm["ptx"])


def usage(cubin: bytes) -> str:
    """What cuobjdump says of a binary's resources; it reads regular files only."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def attend(dim: int, name: str, *, lse: bool = False) -> tuple[Tile, Binary]:
    tile = getattr(choose_tiles(dim, 2), name)
    geometry = Geometry(40, 10, dim, 2, 132)
    count_at = 0 if name.startswith("narrow") else 1
    return tile, build(_attend, {**constants(tile, count_at, geometry, 32), "LSE": lse}, options(tile))


@pytest.mark.parametrize("name", ["narrow", "narrow_beside", "wide_few", "wide"])
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


def test_the_two_kinds_share_a_multiprocessor() -> None:
    _, wide = attend(128, "wide")
    tile, narrow = attend(128, "narrow_beside")
    assert wide.registers * 32 * 8 + tile.resident * narrow.registers * 32 * tile.warps <= REGISTERS
    assert wide.shared + 1024 + tile.resident * (narrow.shared + 1024) <= SHARED_BYTES


@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_largest_heads_build(name: str) -> None:
    _, binary = attend(256, name, lse=True)
    assert binary.shared + 1024 <= SHARED_BYTES and binary.stack <= STACK_OF_LARGE


def test_merge_builds_without_spills() -> None:
    fixed = {"KV_HEADS": 10, "GROUPS": 4, "DIM": 128, "WIDTH": 128, "PIECES": MERGED_AT_ONCE, "LSE": True}
    assert build(_merge, fixed, {"num_warps": 4, "enable_fp_fusion": True}).stack == 0
