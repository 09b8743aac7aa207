"""Triton kernels compiled for an H200 without one, and what the binaries use of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True, slots=True)
class Binary:
    registers: int
    """Registers per thread."""
    stack: int
    """Bytes per thread: registers that did not fit."""
    shared: int
    """Bytes of shared memory per program."""
    ptx: str
    cubin: bytes


def build(
    kernel: triton.JITFunction,
    types: Mapping[str, str],
    fixed: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    any_value: Collection[str] = (),
) -> Binary:
    """Compile for sm_90 as a launch would whose pointers and strides are multiples of 16, those of ``any_value`` aside.

    ``types``: of the arguments that are not ``i32``; ``fixed``: values of the constants.
    """
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name] not in ("constexpr", "fp32") and name not in any_value
    }
    source = ASTSource(kernel, signature, constexprs=dict(fixed), attrs=aligned)
    return compile_for_h200(source, options)


def compile_for_h200(source: ASTSource, options: Mapping[str, Any]) -> Binary:
    """The binary of a kernel's source with its constants filled in."""
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options))
    listing = dump(compiled.asm["cubin"], "--dump-resource-usage")
    registers, stack = (int(re.search(rf"{key}:(\d+)", listing)[1]) for key in ("REG", "STACK"))
    return Binary(registers, stack, compiled.metadata.shared, compiled.asm["ptx"], compiled.asm["cubin"])


def dump(cubin: bytes, what: str) -> str:
    """What cuobjdump says of a binary; it reads regular files only."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout
