"""The check of ``pensieve doctor`` on what several GPUs are linked by: sums over ranks cross it in every layer."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from pensieve.cli.doctor.checks import Check

PATIENCE_S: Final = 10.0
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")
_KINDS: Final = {
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe through the CPU",
    "SYS": "PCIe and the link between CPUs",
}
"""What ``nvidia-smi topo -m`` calls paths that are no NVLink."""

Pair = tuple[int, int]


def gpu_links(torch: Any) -> Iterator[Check]:
    """How each GPU reaches the others; nothing when there is only one."""
    count = torch.cuda.device_count()
    if count < 2:
        return
    pairs = list(itertools.combinations(range(count), 2))
    kinds = topology(_matrix())
    by_kind: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_kind[kinds.get(pair, "unknown")].append(pair)
    found = "; ".join(f"{_name(kind)} between {_list(of, pairs)}" for kind, of in by_kind.items())
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        fix = "--tensor-parallel goes through host memory there, slowly: is the IOMMU on, or this a virtual machine?"
        yield Check("accelerator", "gpu links", "note", f"{found}; no peer access {_list(apart, pairs)}", fix)
    elif any(kind.startswith("NV") for kind in by_kind):
        yield Check("accelerator", "gpu links", "ok", found)
    else:
        fix = "--tensor-parallel gains little over PCIe; run one server for each GPU unless the model needs several"
        yield Check("accelerator", "gpu links", "note", found, fix)


def topology(matrix: str) -> dict[Pair, str]:
    """The link of each pair of GPUs in what ``nvidia-smi topo -m`` prints; {} of anything else."""
    lines = [_ESCAPES.sub("", line) for line in matrix.splitlines()]
    columns = next((re.findall(r"GPU(\d+)", line) for line in lines if line.count("GPU") > 1), [])
    found = {}
    for line in lines:
        row = re.match(r"GPU(\d+)\s+(\S.*)", line.strip())
        if row is None or row[2].startswith("GPU"):
            continue
        for column, kind in zip(columns, row[2].split(), strict=False):
            first, second = sorted((int(row[1]), int(column)))
            if first != second:
                found[first, second] = kind
    return found


def _matrix() -> str:
    path = shutil.which("nvidia-smi")
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, "topo", "-m"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _name(kind: str) -> str:
    nvlink = re.fullmatch(r"NV(\d+)", kind)
    return f"NVLink ({nvlink[1]} links)" if nvlink else _KINDS.get(kind, f"a link of kind {kind}")


def _list(some: list[Pair], every: list[Pair]) -> str:
    return "all" if some == every else ", ".join(f"{first}-{second}" for first, second in some)
