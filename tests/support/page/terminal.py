"""A program in a pseudo-terminal: what it draws, what is typed, and how it leaves the terminal behind."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any, Self

PATIENCE_S = 60.0
_LAUNCH = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
"""It gets the terminal as its controlling one, so that Ctrl-C is a signal."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")


class Terminal:
    """``pensieve`` with these arguments."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 30, **environment: str) -> None:
        self._ours, self._theirs = os.openpty()
        self.size(columns, lines)
        self.before = termios.tcgetattr(self._theirs)
        self.raw = ""
        """All that it has written."""
        pensieve = Path(sys.executable).parent / "pensieve"
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", _LAUNCH, pensieve, *arguments],
            stdin=self._theirs, stdout=self._theirs, stderr=self._theirs,
            env=inherited | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | environment,
        )  # fmt: skip

    def size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, pattern: str) -> str:
        """Wait until what is drawn from now on has this; returns that, without control sequences."""
        begin = len(self.raw)
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern, drawn := _CONTROL.sub("", self.raw[begin:])):
            assert time.monotonic() < deadline, f"never drawn: {pattern}\n{drawn[-3000:]}"
            assert self._read(0.1) or self.process.poll() is None, (
                f"ended without {pattern}:\n{drawn[-3000:]}"
            )
        return drawn

    def end(self) -> int:
        """Wait for its end; the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(0.05) or self.process.poll() is None:
            assert time.monotonic() < deadline, self.raw[-3000:]
        return self.process.wait()

    @property
    def after(self) -> list[Any]:
        """How the terminal is set."""
        return termios.tcgetattr(self._theirs)

    def _read(self, patience_s: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], patience_s)
        if not ready:
            return False
        self.raw += os.read(self._ours, 1 << 16).decode(errors="replace")
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)
