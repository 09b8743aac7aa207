"""A program on a terminal of its own, typed at and read by a test. Bounded: what does not come is shown."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LIMIT_S = 60.0
CTRL_C, CTRL_D, CTRL_U, UP, TAB = "\x03", "\x04", "\x15", "\x1b[A", "\t"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]")
# The program has to own the terminal, or Ctrl-C would be a character like any other.
_OWNS = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class TypedProgram:
    """Use as a context manager: the program is killed in the end if it still runs."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, rows: int = 40, columns: int = 100
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        base = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWNS, sys.executable, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**base, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        os.close(slave)
        self.raw = ""
        self._mark = 0
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="terminal", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                data = b""
            with self._changed:
                self.raw += data.decode("utf-8", "replace")
                self._changed.notify_all()
            if not data:
                return

    @property
    def text(self) -> str:
        """All that was written, without colours and movements."""
        return _ESCAPES.sub("", self.raw)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def enter(self, line: str) -> None:
        self.type(f"{line}\r")

    def expect(self, words: str) -> str:
        """Waits for words behind those that were waited for before; what came until then."""
        deadline = time.monotonic() + LIMIT_S
        with self._changed:
            while (found := self.text.find(words, self._mark)) < 0:
                left = deadline - time.monotonic()
                assert left > 0 and self._changed.wait(left), f"no {words!r} in {self.text[self._mark :]!r}"
            before = self.text[self._mark : found]
            self._mark = found + len(words)
            return before

    def prompt(self) -> str:
        """Waits for the prompt."""
        return self.expect("you> ")

    def finish(self) -> str:
        """Waits for the end; everything that was written."""
        assert self.process.wait(LIMIT_S) is not None
        self._reader.join(LIMIT_S)
        return self.text

    def __enter__(self) -> TypedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        os.close(self._master)


def chat_program(target: str, home: Path, *arguments: str, **environment: str) -> TypedProgram:
    """``pensieve chat`` with its files below ``home``."""
    return TypedProgram(
        ["-P", "-m", "pensieve", "chat", "--target", target, *arguments],
        {"XDG_STATE_HOME": str(home), **environment},
    )
