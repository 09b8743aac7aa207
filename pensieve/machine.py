"""Facts about this machine: cores and memory, bounded by the container's limits; user folders; the service manager."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Main memory, in bytes."""

    total: int
    available: int
    """Memory available without swapping and within the container's limit."""


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """A service manager that expects notifications: sd_notify(3)."""

    address: str
    """Its datagram socket; abstract addresses begin with a zero byte."""
    watchdog_s: float | None
    """It kills this process after this long without a notification; None: no watchdog."""


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> MachineMemory:
    """Return the kernel's memory figures, bounded by the limit of a control group (version 2)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = total
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    except OSError:  # not Linux
        return MachineMemory(total, total)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None or limit >= total:
        return MachineMemory(total, available)
    # The page cache counts as used there, but the kernel frees it as soon as a process needs memory.
    return MachineMemory(limit, min(available, limit - used + _file_pages(cgroup / "memory.stat")))


def user_directory(variable: str, below_home: str) -> Path:
    """Return the ``pensieve`` folder below the one that an ``XDG_…_HOME`` variable names, or below ``below_home``."""
    base = os.environ.get(variable, "")
    # The XDG specification says to ignore relative paths here.
    return (Path(base) if Path(base).is_absolute() else _home() / below_home) / "pensieve"


def user_path(name: str) -> Path:
    """Expand ``~`` and ``~NAME`` as a shell does; unknown users stay unexpanded."""
    return Path(os.path.expanduser(name))


def _home() -> Path:
    """Return the user's home, or the root folder for an unknown user, as container runtimes do."""
    home = user_path("~")
    return home if home != Path("~") else Path("/")


def service_manager() -> ServiceManager | None:
    """Return the service manager named by NOTIFY_SOCKET and WATCHDOG_USEC, or None."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return None
    period, watched_pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    watched = period.isdecimal() and int(period) > 0 and watched_pid in ("", str(os.getpid()))
    return ServiceManager(
        f"\0{address[1:]}" if address[0] == "@" else address, int(period) / 1e6 if watched else None
    )


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no file or it says ``max``."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_pages(path: Path) -> int:
    try:
        fields = dict(line.split(" ", 1) for line in path.read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get("inactive_file", 0))
