"""The attention kernel for Hopper compiled without such a device: its budget, and the schedule that makes it fast."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
import triton

from pensieve.kernels.attention.hopper import launch as hopper
from pensieve.kernels.attention.hopper.launch import (
    FIRST_VERSION,
    GROUP_ROWS,
    KEYS,
    SLAB,
    addressable,
    supports,
)
from pensieve.kernels.attention.kinds import Geometry
from pensieve.kernels.attention.tiles import choose_tiles
from support.kernels.compiled_kernels import CUOBJDUMP, Binary, compile_for_h200, dump

REGISTERS, SHARED_BYTES, THREADS = 65536, 232448, 384
"""What a multiprocessor has, and the threads of the one program on it: two warp groups, and a third around the
loader."""
STACK = 64
"""At most so many bytes a thread spill, outside the loops, over the versions of Triton from 3.6 on."""
STACK_OF_WINDOWS = 96
"""The same with windows and sinks, whose third loop keeps its own bounds."""
TYPES = {
    "tables": "*i32", "out": "*bf16", "lse": "*fp32", "words": "*i32", "partial": "*fp32", "partial_lse": "*fp32",
    "sinks": "*bf16", "factor": "fp32",
}  # fmt: skip
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
compiled = pytest.mark.skipif(
    VERSION < FIRST_VERSION or not CUOBJDUMP.exists(), reason="needs Triton 3.6 with its CUDA tools"
)


def build(
    dim: int, groups: int, page: int, *,
    lse: bool = False, beside: bool = False, windowed: bool = False, sinks: bool = False,
) -> Binary:  # fmt: skip
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    from pensieve.kernels.attention.hopper.kernel import attend_hopper

    fixed: dict[str, Any] = {
        "KV_HEADS": 10, "GROUPS": groups, "DIM": dim, "PAGE": page, "BESIDE": beside, "LSE": lse,
        "WINDOWED": windowed, "SINKS": sinks,
    }  # fmt: skip
    types = TYPES | {
        "q_desc": f"tensordesc<bf16[{GROUP_ROWS // groups}, {groups}, {SLAB}],{NVMMASharedLayout(128, 16, 3)!r}>",
        "pool_desc": f"tensordesc<bf16[{min(page, KEYS)}, {SLAB}],{NVMMASharedLayout(128, 16, 2)!r}>",
    }
    signature = {
        name: "constexpr" if name in fixed else types.get(name, "i32") for name in attend_hopper.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(attend_hopper.arg_names)
        if signature[name].startswith("*") or name.startswith("out_")
    }
    source = GluonASTSource(attend_hopper, signature, fixed, aligned)
    return compile_for_h200(source, {"num_warps": 4, "enable_fp_fusion": True})


@compiled
@pytest.mark.parametrize(
    ("dim", "groups", "page", "lse", "beside"),
    [
        (128, 4, 32, False, False),
        (128, 1, 16, True, True),
        (128, 8, 256, False, False),
        (64, 1, 32, True, False),
    ],
)
def test_fits_a_multiprocessor_and_overlaps(
    dim: int, groups: int, page: int, lse: bool, beside: bool
) -> None:
    binary = build(dim, groups, page, lse=lse, beside=beside)
    # Instructions of interest, in order: matrix products, waits for them, exponentials, bulk copies.
    code = re.findall(
        r"\s(HGMMA|WARPGROUP\.DEPBAR\.LE gsb0, 0x\d|MUFU\.EX2|UTMALDG)", dump(binary.cubin, "-sass")
    )
    assert binary.registers * THREADS <= REGISTERS and binary.stack <= STACK
    assert binary.shared <= SHARED_BYTES
    assert ("griddepcontrol.launch_dependents" in binary.ptx) == beside
    # Per group: the first scores, two loops of scores and weighted values, the last values; 16 of the inner dimension
    # each. Were the assembler to give up on keeping products in flight, it would wait after every one.
    assert code.count("HGMMA") == 2 * (3 * dim // 16 + 3 * KEYS // 16)
    waits = [place for place, name in enumerate(code) if name.startswith("WARPGROUP")]
    assert len(waits) == binary.ptx.count("wgmma.wait_group") == 2 * 6
    # The softmax of a tile (a row of 32 scores twice a lane) stands where the values' product is still in flight.
    in_flight = [(a, b) for a, b in pairwise(waits) if code[a].endswith("0x1")]
    assert len(in_flight) == 2 * 2
    for begin, end in in_flight:
        assert code[end].endswith("0x0") and code[begin:end].count("MUFU.EX2") >= 2 * KEYS // 4
    copies = dim // SLAB * (2 + 2 * KEYS // min(page, KEYS))
    assert code.count("UTMALDG") == copies


@compiled
@pytest.mark.parametrize(("dim", "groups", "page"), [(64, 8, 32), (128, 4, 16)])
def test_fits_with_windows_and_sinks(dim: int, groups: int, page: int) -> None:
    """As the layers of gpt-oss need it: a third loop over the first tiles, and the schedule of the others."""
    binary = build(dim, groups, page, windowed=True, sinks=True)
    code = re.findall(r"\s(HGMMA|WARPGROUP\.DEPBAR\.LE gsb0, 0x\d)", dump(binary.cubin, "-sass"))
    assert binary.registers * THREADS <= REGISTERS and binary.stack <= STACK_OF_WINDOWS
    assert binary.shared <= SHARED_BYTES
    assert code.count("HGMMA") == 2 * (4 * dim // 16 + 4 * KEYS // 16)
    assert len(code) - code.count("HGMMA") == 2 * 8, "products stay in flight"


def test_what_it_is_written_for_is_what_is_planned() -> None:
    tile = choose_tiles(128, 2, hopper=True).wide
    assert (tile.rows, tile.keys) == (2 * GROUP_ROWS, KEYS)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 0 else (8, 0)
    )
    monkeypatch.setattr(hopper.triton, "__version__", "3.6.0")
    cuda = torch.device("cuda", 0)
    fine = Geometry(40, 10, 128, 2, 132)
    assert supports(fine, torch.bfloat16, 32, cuda) and supports(fine, torch.float16, 16, cuda)
    assert not supports(fine, torch.bfloat16, 32, torch.device("cuda", 1))
    assert not supports(fine, torch.bfloat16, 32, torch.device("cpu"))
    assert not supports(fine, torch.float32, 32, cuda)
    assert not supports(fine, torch.bfloat16, 8, cuda) and not supports(fine, torch.bfloat16, 48, cuda)
    assert not supports(Geometry(40, 8, 128, 2, 132), torch.bfloat16, 32, cuda)
    assert not supports(Geometry(40, 10, 80, 2, 132), torch.bfloat16, 32, cuda)
    monkeypatch.setattr(hopper.triton, "__version__", "3.5.1")
    assert not supports(fine, torch.bfloat16, 32, cuda)


def test_strides_that_bulk_copies_cannot_follow() -> None:
    q, pool = torch.zeros(5, 4, 128, dtype=torch.half), torch.zeros(3, 2, 2, 32, 128, dtype=torch.half)
    assert addressable(q, pool)
    assert addressable(
        torch.zeros(5, 6, 128, dtype=torch.half)[:, 1:5], torch.zeros(3, 4, 2, 32, 128)[:, 1:3]
    )
    assert not addressable(torch.zeros(5, 4, 132, dtype=torch.half)[..., :128], pool)
    assert not addressable(q, torch.zeros(3, 2, 2, 32, 256, dtype=torch.half)[..., :128])
    assert not addressable(q, torch.zeros(3, 2, 32, 2, 128, dtype=torch.half).transpose(2, 3))
