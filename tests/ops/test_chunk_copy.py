"""Page copies without a GPU: the instructions for an H200, refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pensieve.kernels.chunk_checksum import _checksum
from pensieve.kernels.chunk_copy import TILE_BYTES, WARPS, WORD, ChunkCopy, _copy, runs_of


def ptx(kernel: triton.JITFunction, fixed: dict[str, int | bool]) -> str:
    """Compiled for sm_90 as a launch with aligned pools would."""
    free = {"first", "count", "layers", "first_layer"}
    pointers = {
        "dst": "*i64",
        "src": "*i64",
        "pairs": "*i32",
        "pool": "*i64",
        "sums": "*i64",
        "failed": "*i32",
    }
    signature = {
        name: "constexpr" if name in fixed else pointers.get(name, "i32") for name in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name not in fixed and name not in free
    }
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
    options = {"num_warps": WARPS, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(compiled.asm["ptx"])


@pytest.mark.parametrize("run_bytes", [16384, 163840, 10240])
def test_a_program_has_its_whole_tile_on_the_way(run_bytes: int) -> None:
    """16 bytes an access, and every load of a tile before the first store: the link's latency is paid once a tile."""
    words, tile = run_bytes // 8, TILE_BYTES // 8
    text = ptx(_copy, {"WORDS": words, "TILE": tile, "TILES": -(-words // tile)})
    loads = [match.start() for match in re.finditer(r"ld\.global\.v2\.b64|ld\.global\.v4\.b32", text)]
    stores = [match.start() for match in re.finditer(r"st\.global\.v2\.b64|st\.global\.v4\.b32", text)]
    assert len(loads) == len(stores) == TILE_BYTES // (16 * 32 * WARPS)
    assert max(loads) < min(stores)
    assert not re.search(r"[ls][dt]\.global\.b64", text), "some words travel one by one"


@pytest.mark.parametrize("compare", [False, True])
def test_checksums_build(compare: bool) -> None:
    text = ptx(_checksum, {"COMPARE": compare, "WORDS": 20480, "TILE": 2048})
    assert "ld.global.v2.b64" in text or "ld.global.v4.b32" in text


def runs(layers: int = 3, pages: int = 4, words: int = 8) -> torch.Tensor:
    return torch.zeros(layers, pages, words, dtype=WORD)


def test_views_of_pools_share_their_memory() -> None:
    device, host = torch.randn(3, 5, 2, 1, 4, 8), torch.randn(6, 3, 2, 1, 4, 8)
    inside, outside = runs_of(device), runs_of(host, chunk_first=True)
    assert inside.shape == (3, 5, 32) and outside.shape == (3, 6, 32)
    inside[2, 4] = 0
    outside[2, 4] = 0
    assert not device[2, 4].any() and not host[4, 2].any()
    with pytest.raises(ValueError, match="8 bytes"):
        runs_of(torch.zeros(3, 5, 2, 1, 1, 2, dtype=torch.float16))


def test_pools_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        ChunkCopy(runs(), runs(words=16))
    with pytest.raises(ValueError, match="do not fit"):
        ChunkCopy(runs(), runs(layers=2))
    with pytest.raises(ValueError, match=r"not torch\.int64 runs"):
        ChunkCopy(runs().float(), runs())
    with pytest.raises(ValueError, match=r"not torch\.int64 runs"):
        ChunkCopy(runs(), runs().transpose(1, 2))
    with pytest.raises(ValueError, match="16 bytes"):
        ChunkCopy(runs(), torch.zeros(3 * 4 * 8 + 1, dtype=WORD)[1:].view(3, 4, 8))


def test_copies_that_do_not_fit_are_refused() -> None:
    copy, pairs = ChunkCopy(runs(), runs()), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    with pytest.raises(ValueError, match="pairs are"):
        copy(pairs.long())
    with pytest.raises(ValueError, match="pairs are"):
        copy(pairs.t())
    with pytest.raises(ValueError, match="not layers of 3"):
        copy(pairs, layers=range(1, 4))
    with pytest.raises(ValueError, match="not among 6"):
        copy(pairs, first=5, count=2)
    with pytest.raises(ValueError, match="not among 4"):
        copy(pairs, first=3, count=2, layers=range(1, 3))


def test_no_tool_is_needed_to_import(tmp_path: Path) -> None:
    """The module is imported on machines without a GPU, where nothing of it is launched."""
    script = "import pensieve.kernels.chunk_copy, pensieve.kernels.chunk_checksum"
    subprocess.run([sys.executable, "-P", "-c", script], cwd=tmp_path, check=True)
