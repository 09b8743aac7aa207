"""The checks of ``pensieve doctor`` on torch, the GPU, its driver, Triton and pinned memory."""

from __future__ import annotations

import importlib
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pensieve.cli.doctor.checks import GIB, Check
from pensieve.cli.doctor.links import gpu_links

DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
OLDEST_TRITON: Final = (3, 4)
OLDEST_CAPABILITY: Final = (8, 0)
"""First NVIDIA architecture with bfloat16 matrix units, and the oldest that Triton's kernels here are made for."""


def accelerator() -> Iterator[Check]:
    """torch, the GPUs it sees, and what its kernels and copies need."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        yield Check(
            "accelerator", "torch", "fail", f"cannot be imported: {error}", "pip install torch==2.13.0"
        )
        return
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield Check(
        "accelerator", "torch", "ok", f"{torch.__version__}, {built}, {torch.get_num_threads()} threads"
    )
    if not torch.cuda.is_available():
        yield _no_gpu(torch)
        return
    driver = driver_version()
    yield Check("accelerator", "driver", "ok", driver or "version unknown")
    for index in range(torch.cuda.device_count()):
        yield _gpu(torch, index)
    yield from gpu_links(torch)
    yield _triton()
    yield _compiler()
    yield _pinned()


def driver_version(file: Path = DRIVER_FILE) -> str | None:
    """Version of the NVIDIA kernel module; None when it is not loaded."""
    try:
        text = file.read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else None


def _no_gpu(torch: Any) -> Check:
    """Why there is none, as far as can be told."""
    driver, nodes = driver_version(), list(Path("/dev").glob("nvidia[0-9]*"))
    if driver is None and not nodes:
        found, fix = "none: no NVIDIA driver", "none needed for the CPU; for a GPU: install NVIDIA's driver"
    elif not nodes:
        found = f"none: driver {driver}, but no device in this container"
        fix = "start the container with its GPUs (docker run --gpus all)"
    elif torch.version.cuda is None:
        found = f"none: driver {driver or 'unknown'}, but this torch is built without CUDA"
        fix = "install a CUDA build of torch"
    else:
        found = f"none: driver {driver or 'unknown'}, torch for CUDA {torch.version.cuda} sees no device"
        fix = "update the driver to one for that CUDA, and check CUDA_VISIBLE_DEVICES"
    return Check("accelerator", "gpu", "note", found, fix)


def _gpu(torch: Any, index: int) -> Check:
    name = torch.cuda.get_device_name(index)
    capability = tuple(torch.cuda.get_device_capability(index))
    free, total = torch.cuda.mem_get_info(index)
    found = (
        f"{name}, compute capability {capability[0]}.{capability[1]}, "
        f"{total / GIB:.0f} GiB, {free / GIB:.0f} GiB free"
    )
    if capability < OLDEST_CAPABILITY:
        return Check(
            "accelerator", f"gpu {index}", "fail", found, "needs compute capability 8.0; or --device cpu"
        )
    if free < total / 2:
        return Check("accelerator", f"gpu {index}", "note", found, "other programs use it: see nvidia-smi")
    return Check("accelerator", f"gpu {index}", "ok", found)


def _triton() -> Check:
    try:
        version = str(importlib.import_module("triton").__version__)
    except ImportError as error:
        return Check("accelerator", "triton", "fail", f"cannot be imported: {error}", "pip install triton")
    old = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TRITON
    fix = f"needs {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}" if old else ""
    return Check("accelerator", "triton", "fail" if old else "ok", version, fix)


def _compiler() -> Check:
    """Triton compiles a small launcher in C for each kernel."""
    found = next((path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))), None)
    if found is None:
        fix = "install gcc, or name a compiler in CC: Triton's kernels need one"
        return Check("accelerator", "C compiler", "note", "no gcc, clang or cc", fix)
    return Check("accelerator", "C compiler", "ok", found)


def _pinned() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("accelerator", "pinned memory", "ok", "no limit (ulimit -l)")
    found = f"ulimit -l is {soft / 1024:.0f} KiB; CUDA's own pinning is usually not bound by it"
    fix = "if pinning the host tier fails: ulimit -l unlimited, docker run --ulimit memlock=-1"
    return Check("accelerator", "pinned memory", "note", found, fix)
