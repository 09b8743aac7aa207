"""What ``pensieve doctor`` says of the links between GPUs."""

from __future__ import annotations

import types

import pytest

from pensieve.cli import doctor as checks
from pensieve.cli.doctor import gpu_links, topology

TWO = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tPIX\t0-47\t0\t\tN/A
NIC0\tSYS\tPIX\t X \t\t\t\t

Legend:

  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
FOUR = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-7
GPU1\tNV4\t X \tSYS\tSYS\t0-7
GPU2\tSYS\tSYS\t X \tNV4\t8-15
GPU3\tSYS\tSYS\tNV4\t X \t8-15
"""


def torch(count: int, *, peers: bool = True) -> types.SimpleNamespace:
    cuda = types.SimpleNamespace(
        device_count=lambda: count, can_device_access_peer=lambda first, second: peers
    )
    return types.SimpleNamespace(cuda=cuda)


def test_the_matrix_is_read() -> None:
    assert topology(TWO) == {(0, 1): "NV18"}
    assert topology(FOUR) == {
        (0, 1): "NV4", (2, 3): "NV4", (0, 2): "SYS", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS"
    }  # fmt: skip
    assert topology("") == topology("Failed to initialize NVML") == {}


@pytest.mark.parametrize(
    ("matrix", "count", "peers", "state", "found"),
    [
        (TWO, 2, True, "ok", "NVLink (18 links) between all"),
        (
            FOUR,
            4,
            True,
            "ok",
            "NVLink (4 links) between 0-1, 2-3; PCIe and the link between CPUs between 0-2, 0-3, 1-2, 1-3",
        ),
        (TWO.replace("NV18", "PHB"), 2, True, "note", "PCIe through the CPU between all"),
        ("", 2, True, "note", "link type unknown between all"),
        (TWO, 2, False, "note", "NVLink (18 links) between all; no peer access all"),
    ],
)
def test_what_is_said(
    matrix: str, count: int, peers: bool, state: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_matrix", lambda: matrix)
    (check,) = gpu_links(torch(count, peers=peers))
    assert (check.state, check.found) == (state, found)
    assert bool(check.fix) is (state == "note")


def test_one_gpu_has_no_links() -> None:
    assert list(gpu_links(torch(1))) == []
