"""Output of a chat: answers to stdout, all else to stderr, without control characters on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console

from pensieve.cli.output import clean

T = TypeVar("T")

TICK_S = 0.25
STATUS_AFTER_S = 1.0
"""A call that takes longer shows a status line."""


class Screen:
    """Both streams, and a status line while the chat waits. For the main thread only."""

    def __init__(self, *, interactive: bool, plain: bool = False) -> None:
        self.out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        self.notes = Console(
            stderr=True, highlight=False, soft_wrap=True, style="dim", markup=False, emoji=False
        )
        self.interactive = interactive
        self.plain = plain
        self._status = ""
        self._status_at = 0.0

    @property
    def can_redraw(self) -> bool:
        return self.interactive and _is_terminal(self.notes) and not self.notes.is_dumb_terminal

    @property
    def shows_markdown(self) -> bool:
        return self.can_redraw and not self.plain and _is_terminal(self.out)

    def note(self, text: str, style: str | None = None) -> None:
        self.clear_status()
        self.notes.print(self._safe(text, self.notes), style=style)

    def error(self, text: str) -> None:
        self.note(text, "red")

    def write_line(self, text: str) -> None:
        self.write(f"{text}\n")

    def write(self, text: str) -> None:
        self.clear_status()
        self.out.out(self._safe(text, self.out), end="", highlight=False)
        self.out.file.flush()

    def end_line(self) -> None:
        self.write("\n")

    def status(self, text: str) -> None:
        """Show what the chat waits for. If lines cannot be redrawn, print it only now and then."""
        if self.can_redraw:
            width = max(10, self.notes.width - 1)
            self.notes.file.write(f"\r\x1b[2K{clean(text)[:width]}")
            self.notes.file.flush()
        elif self.interactive and (not self._status or time.monotonic() - self._status_at > 10):
            self.notes.print(clean(text))
            self._status_at = time.monotonic()
        self._status = text

    def clear_status(self) -> None:
        if self._status and self.can_redraw:
            self.notes.file.write("\r\x1b[2K")
            self.notes.file.flush()
        self._status = ""

    def call_with_status(self, call: Callable[[], T]) -> T:
        """Return a call's result, with a status line if it takes long. Ctrl-C leaves the call running."""
        if not self.interactive:
            return call()
        found: list[T] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                found.append(call())
            except BaseException as error:  # handed to the thread that asked
                failed.append(error)

        thread = threading.Thread(target=work, name="call", daemon=True)
        began = time.monotonic()
        thread.start()
        try:
            while thread.is_alive():
                thread.join(TICK_S)
                waited = time.monotonic() - began
                if thread.is_alive() and waited > STATUS_AFTER_S:
                    self.status(f"waiting for the server… {waited:.0f} s (Ctrl-C stops)")
        finally:
            self.clear_status()
        if failed:
            raise failed[0]
        return found[0]

    def _safe(self, text: str, console: Console) -> str:
        return clean(text) if self.interactive or _is_terminal(console) else text


def _is_terminal(console: Console) -> bool:
    """Ask the stream itself: rich also believes the environment."""
    return console.file.isatty()


def can_edit() -> bool:
    """Whether lines can be typed in the line editor, which draws on stdout."""
    return sys.stdin.isatty() and sys.stdout.isatty()
