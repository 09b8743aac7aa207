"""A wall clock that jumps, made of a preloaded library: ``clock_steps.c``, compiled with the machine's C compiler."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock_steps.c")


class ClockSteps:
    """The wall clock of all processes that were started with its ``environment``."""

    def __init__(self, folder: Path) -> None:
        """``folder``: an existing one, for the library and the shift."""
        self._library = folder / "clock_steps.so"
        self._file = folder / "clock_steps.shift"
        self._file.write_bytes(struct.pack("=q", 0))
        command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]
        subprocess.run([*command, str(self._library), str(SOURCE), "-ldl"], check=True, timeout=60)

    @property
    def environment(self) -> dict[str, str]:
        """What a process must have in its environment, beside all else."""
        return {"LD_PRELOAD": str(self._library), "CLOCK_STEPS_FILE": str(self._file)}

    def set(self, seconds: int) -> None:
        """From now on the clock is so much ahead of the true one; negative: behind."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", seconds))
