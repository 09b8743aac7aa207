"""A disk that fails, made of a preloaded library: fsync, writes, reads and truncations of some files, from outside.

``IoErrors`` compiles ``io_errors.c`` with the C compiler of the machine. A process that was started with its
``environment`` meets the errors that are ordered with ``fail``, until ``heal``; other files are left alone.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).with_name("io_errors.c")
ALL = -1


class IoErrors:
    """Orders over the files whose path begins with ``under``, for any number of processes."""

    def __init__(self, folder: Path, under: Path) -> None:
        """``folder``: an existing one for the library and the orders; it must not lie below ``under``."""
        self._library = folder / "io_errors.so"
        self._orders = folder / "io_errors.orders"
        self._under = under
        command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]
        subprocess.run(
            [*command, str(self._library), str(SOURCE), "-ldl", "-lpthread"], check=True, timeout=60
        )

    @property
    def environment(self) -> dict[str, str]:
        """What a process must have in its environment, beside all else."""
        return {
            "LD_PRELOAD": str(self._library),
            "IO_ERRORS_UNDER": str(self._under),
            "IO_ERRORS_ORDERS": str(self._orders),
        }

    def fail(
        self, *calls: str, error: int = errno.EIO, skip: int = 0, times: int = ALL, delay_ms: int = 0
    ) -> None:
        """From now on let ``calls`` (``sync``, ``write``, ``read``, ``truncate``) fail with ``error``.

        The first ``skip`` of each kind pass, and after ``times`` failures the rest do. ``error=0`` with ``delay_ms`` is
        a slow disk. Takes the place of earlier orders.
        """
        fresh = self._orders.with_suffix(".new")
        fresh.write_text("".join(f"{name} {error} {skip} {times} {delay_ms}\n" for name in calls))
        os.replace(fresh, self._orders)

    def heal(self) -> None:
        """Let everything pass again."""
        self._orders.unlink(missing_ok=True)

    def met(self) -> Counter[str]:
        """How many calls of each kind were affected so far."""
        try:
            lines = Path(f"{self._orders}.log").read_text().splitlines()
        except FileNotFoundError:
            return Counter()
        return Counter(line.split()[0] for line in lines)
