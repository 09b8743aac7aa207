"""Memory of the machine as a container may use it."""

from __future__ import annotations

from pathlib import Path

from pensieve.machine import memory, usable_cores

GIB = 1 << 30


def files(folder: Path, available_gib: int, **cgroup: str) -> tuple[Path, Path]:
    meminfo = folder / "meminfo"
    meminfo.write_text(f"MemTotal:  99999999 kB\nMemAvailable:  {available_gib * (GIB // 1024)} kB\n")
    for name, text in cgroup.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return meminfo, folder


def test_without_a_container(tmp_path: Path) -> None:
    meminfo, cgroup = files(tmp_path, 3)
    assert memory(meminfo, cgroup).available == 3 * GIB
    assert memory(meminfo, cgroup).total > 0


def test_a_container_bounds_it(tmp_path: Path) -> None:
    meminfo, cgroup = files(tmp_path, 300, memory_max=f"{2 * GIB}\n", memory_current=f"{GIB}\n")
    assert memory(meminfo, cgroup) == memory(meminfo, cgroup)
    assert memory(meminfo, cgroup).available == GIB
    assert memory(meminfo, cgroup).total == 2 * GIB
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\n")
    assert memory(meminfo, cgroup).available == GIB + GIB // 2


def test_a_container_without_limit(tmp_path: Path) -> None:
    meminfo, cgroup = files(tmp_path, 3, memory_max="max\n", memory_current=f"{GIB}\n")
    assert memory(meminfo, cgroup).available == 3 * GIB


def test_no_such_files(tmp_path: Path) -> None:
    found = memory(tmp_path / "absent", tmp_path / "absent")
    assert found.available == found.total > 0


def test_here() -> None:
    assert 0 < memory().available <= memory().total
    assert usable_cores() >= 1
