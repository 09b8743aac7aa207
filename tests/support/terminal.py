"""A program on a terminal of its own, typed at and read by a test. Bounded: what does not come is shown."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

PATIENCE_S = 60.0
CTRL_C, CTRL_D, CTRL_U, UP, TAB = "\x03", "\x04", "\x15", "\x1b[A", "\t"
PENSIEVE = (str(Path(sys.executable).parent / "pensieve"),)
_LAUNCH = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
"""It gets the terminal as its controlling one, so that Ctrl-C and a closed terminal are signals."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]|\x1b(?:\[[0-9;?]*[ -/]*)?\Z")
_NOT_INHERITED = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")


class Terminal:
    """``pensieve`` with these arguments, or another program with them. Use as a context manager: it is killed then."""

    def __init__(
        self,
        *arguments: str,
        program: Sequence[str] = PENSIEVE,
        columns: int = 80,
        lines: int = 30,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._ours, theirs = os.openpty()
        self._ours_is_open = True
        self.size(columns, lines)
        self.before = self.settings
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", _LAUNCH, *program, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=inherited | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | dict(environment or {}),
        )
        os.close(theirs)
        self.raw = ""
        """All that it has written."""
        self._mark = 0
        """Of ``text``: what a test has waited for ends here."""
        self._changed = threading.Condition()
        self._stop_reading, self._told = os.pipe()
        self._reader = threading.Thread(target=self._read, name="terminal", daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """All that it has written, without colours and movements."""
        return _CONTROL.sub("", self.raw)

    @property
    def settings(self) -> list[Any]:
        """How the terminal is set."""
        return termios.tcgetattr(self._ours)

    def size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Keys as UTF-8; ``\\udcXX`` is the byte XX by itself."""
        os.write(self._ours, keys.encode(errors="surrogateescape"))

    def enter(self, line: str) -> None:
        self.type(f"{line}\r")

    def expect(self, words: str) -> str:
        """Waits for words behind what was waited for before; what came until then."""

        def look(new: str) -> tuple[str, int] | None:
            at = new.find(words)
            return (new[:at], at + len(words)) if at >= 0 else None

        return self._wait(look, repr(words))

    def until(self, pattern: str) -> str:
        """Waits until what is drawn from now on has this; all of that."""
        return self._wait(lambda new: (new, len(new)) if re.search(pattern, new) else None, pattern)

    def prompt(self) -> str:
        """Waits for the prompt of a chat."""
        return self.expect("you> ")

    def end(self) -> int:
        """Waits for its end; the exit code."""
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status

    def finish(self) -> str:
        """Waits for its end; everything that it wrote."""
        self.end()
        return self.text

    def close(self) -> None:
        """Closes the terminal, as a window is closed."""
        if self._ours_is_open:
            os.write(self._told, b".")
            self._reader.join(5)
            for fd in (self._ours, self._stop_reading, self._told):
                os.close(fd)
            self._ours_is_open = False

    def _wait(self, look: Callable[[str], tuple[str, int] | None], what: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                ended = not self._reader.is_alive()
                new = self.text[self._mark :]
                if (found := look(new)) is not None:
                    self._mark += found[1]
                    return found[0]
                left = deadline - time.monotonic()
                assert left > 0 and not ended, (
                    f"{'ended without' if ended else 'never drawn:'} {what}\n{new[-3000:]!r}"
                )
                self._changed.wait(min(left, 1.0))

    def _read(self) -> None:
        """Whatever it writes, until nobody can any more."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            ready, _, _ = select.select([self._ours, self._stop_reading], [], [])
            data = b""
            with contextlib.suppress(OSError):  # the other side has been closed by all who had it
                data = os.read(self._ours, 1 << 16) if self._ours in ready else b""
            with self._changed:
                self.raw += decoder.decode(data)
                self._changed.notify_all()
            if not data:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.close()


def chat_program(target: str, home: Path, *arguments: str, **environment: str) -> Terminal:
    """``pensieve chat`` with its files below ``home``."""
    return Terminal(
        *("chat", "--target", target, *arguments),
        columns=100,
        lines=40,
        environment={"XDG_STATE_HOME": str(home), **environment},
    )
