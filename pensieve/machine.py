"""What this machine has: cores and memory, as far as a process in a container may use them; the user's folders; what
has started this process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory, in bytes."""

    total: int
    available: int
    """What can be had without swapping and within the limit of the container."""


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """A service manager that wants to hear of this process: sd_notify(3)."""

    address: str
    """Of its datagram socket; one that begins with a zero byte has no file."""
    watchdog_s: float | None
    """It ends a process that it has not heard of for so long, in seconds."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> Memory:
    """The memory that the kernel reports, bounded by the limit of a control group (version 2)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = total
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    except OSError:  # not Linux
        return Memory(total, total)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None or limit >= total:
        return Memory(total, available)
    # Pages of files count as used there, but the kernel gives them up as soon as a process asks for memory.
    return Memory(limit, min(available, limit - used + _file_pages(cgroup / "memory.stat")))


def user_directory(variable: str, below_home: str) -> Path:
    """The ``pensieve`` folder below the one that an ``XDG_…_HOME`` variable names, or below ``below_home``."""
    base = os.environ.get(variable, "")
    # The XDG rules say that a relative path there is to be ignored.
    return (Path(base) if Path(base).is_absolute() else _home() / below_home) / "pensieve"


def user_path(name: str) -> Path:
    """A path that a user typed, with ``~`` and ``~NAME`` read as a shell does: left as they are when unknown."""
    return Path(os.path.expanduser(name))


def _home() -> Path:
    """The user's home; the root folder, as container runtimes have it, for a user that the system does not know."""
    home = user_path("~")
    return home if home != Path("~") else Path("/")


def service_manager() -> ServiceManager | None:
    """Who has started this process, by NOTIFY_SOCKET and WATCHDOG_USEC; None when nobody wants to hear of it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return None
    period, meant = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    watched = period.isdecimal() and int(period) > 0 and meant in ("", str(os.getpid()))
    return ServiceManager(
        f"\0{address[1:]}" if address[0] == "@" else address, int(period) / 1e6 if watched else None
    )


def _number(path: Path) -> int | None:
    """The number in a file; None when there is no file or it says ``max``."""
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
