"""A disk that fails, made of a preloaded library: fsync, writes, reads and truncations of some files, from outside.

``IoErrors`` compiles ``io_errors.c`` with the C compiler of the machine. A process that was started with its
``environment`` meets the errors that are ordered with ``fail``, until ``heal``; other files are left alone.
``power_cut`` gives the files as they would be found after one: with what was flushed, and without what a failed flush
has lost for ever.
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
        """``folder``: an existing one for the library and the orders; its files must not begin with ``under``.

        A second object over the same folder, in whatever process, gives orders like the first.
        """
        self._library = folder / "io_errors.so"
        self._orders = folder / "io_errors.orders"
        self._under = under
        self._disk = folder / "io_errors.disk"
        self._disk.mkdir(exist_ok=True)
        if self._library.exists():
            return
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
            "IO_ERRORS_DISK": str(self._disk),
        }

    def fail(
        self,
        *calls: str,
        error: int = errno.EIO,
        skip: int = 0,
        times: int = ALL,
        delay_ms: int | tuple[int, int] = 0,
        name: str = "*",
    ) -> None:
        """From now on let ``calls`` (``sync``, ``write``, ``read``, ``truncate``) fail with ``error``.

        The first ``skip`` of each kind pass, and after ``times`` failures the rest do. ``error=0`` with ``delay_ms`` is
        a slow disk; of two numbers, each call waits for a time between them. ``name``: of the one file that is
        concerned, without folder. Takes the place of earlier orders.
        """
        delay = f"{delay_ms[0]}-{delay_ms[1]}" if isinstance(delay_ms, tuple) else f"{delay_ms}"
        fresh = self._orders.with_suffix(".new")
        fresh.write_text("".join(f"{call} {error} {skip} {times} {delay} {name}\n" for call in calls))
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

    def power_cut(self, into: Path) -> None:
        """Copy the files as the disk holds them to the folder ``into``, under their names.

        Of the names themselves nothing is forgotten: a file that was made, renamed or deleted stays so.
        """
        into.mkdir()
        for path in self._under.parent.glob(f"{self._under.name}*"):
            on_disk = self._disk / str(path.stat().st_ino)
            (into / path.name).write_bytes(on_disk.read_bytes() if on_disk.exists() else b"")
