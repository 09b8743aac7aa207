"""Every way that cuBLASLt knows to make one product, by its C interface: torch takes the first that it names.

The library is the one that torch has loaded. Constants and layouts are those of ``cublasLt.h``, CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import torch

WORKSPACE = 64 << 20
"""Bytes; torch gives 32 MiB on Hopper."""
MOST = 48
"""Ways asked for."""
COMPUTE_32F, R_32F, R_16BF = 68, 0, 14
TRANSPOSE_A, PREFERENCE_WORKSPACE, CONFIG_SPLIT = 3, 1, 2


class Found(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class Lt:
    def __init__(self) -> None:
        """Raises RuntimeError when torch has not loaded it."""
        path = re.search(r"/\S*libcublasLt\.so\S*", Path("/proc/self/maps").read_text())
        if path is None:
            raise RuntimeError("torch has not loaded cuBLASLt")
        self._library = ctypes.CDLL(path[0])
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")

    def ways(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> list[tuple[int, Callable[[torch.Tensor], None]]]:
        """For ``x`` [B, K] times ``weight`` [N, K] transposed into ``out`` [B, N], all bfloat16: into how many parts
        each way splits K, and what makes the product that way with a weight of that shape. Torch's is the first."""
        (rows, inner), width = x.shape, len(weight)
        desc, preference = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(desc), COMPUTE_32F, R_32F)
        yes = ctypes.c_int32(1)
        self._call("cublasLtMatmulDescSetAttribute", desc, TRANSPOSE_A, ctypes.byref(yes), ctypes.c_size_t(4))
        # By columns, as the library counts: out' [N, B] = weight [K, N] transposed, times x' [K, B].
        a, b, c = (self._layout(*shape) for shape in ((inner, width), (inner, rows), (width, rows)))
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        room = ctypes.c_size_t(WORKSPACE)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute", preference, PREFERENCE_WORKSPACE, ctypes.byref(room),
            ctypes.c_size_t(8),
        )  # fmt: skip
        found, count = (Found * MOST)(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, desc, a, b, c, c, preference, MOST, found,
            ctypes.byref(count),
        )  # fmt: skip

        def way(result: Found) -> Callable[[torch.Tensor], None]:
            one, zero = ctypes.c_float(1), ctypes.c_float(0)

            def run(weight: torch.Tensor) -> None:
                self._call(
                    "cublasLtMatmul", self._handle, desc, ctypes.byref(one), _at(weight), a, _at(x), b,
                    ctypes.byref(zero), _at(out), c, _at(out), c, ctypes.byref(result, Found.algorithm.offset),
                    _at(self._workspace), ctypes.c_size_t(WORKSPACE),
                    ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
                )  # fmt: skip

            return run

        return [(self._split(each), way(each)) for each in found[: count.value] if each.state == 0]

    def _split(self, result: Found) -> int:
        value, written = ctypes.c_int32(), ctypes.c_size_t()
        self._call(
            "cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(result, Found.algorithm.offset), CONFIG_SPLIT,
            ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(written),
        )  # fmt: skip
        return value.value

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", ctypes.byref(layout), R_16BF, ctypes.c_uint64(rows),
            ctypes.c_uint64(columns), ctypes.c_int64(rows),
        )  # fmt: skip
        return layout

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: status {status}")


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
