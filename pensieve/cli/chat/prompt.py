"""Typed lines: an editor with history and completion where there is a terminal for it, ``\"\"\"`` for several lines.

The editor is the interpreter's own ``readline``: it edits, searches, completes, takes pasted lines as one text, and
costs no dependency and no time to import.
"""

from __future__ import annotations

import contextlib
import json
import locale
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

from pensieve.cli.chat.screen import Screen, can_edit
from pensieve.cli.chat.unsent import write_private
from pensieve.cli.output import clean

NUDGE_S: Final = 0.05


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """While the main thread reads a line with ``input``, no Ctrl-C is lost.

    The interpreter's editor looks for signals only where one ends its waiting for keys (``readline.c`` of CPython). One
    that comes a moment earlier, between the drawing of the prompt or of a key and the waiting, would be seen at the
    next key. So a thread that hears of it ends the waiting by another signal, until the interrupt has left ``input``.
    """
    here, over = threading.get_ident(), threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def nudge() -> None:
        while number := os.read(reading, 1)[0]:
            while number == signal.SIGINT and not over.wait(NUDGE_S):
                signal.pthread_kill(here, signal.SIGURG)

    thread = threading.Thread(target=nudge, name="ctrl-c", daemon=True)
    handler = signal.signal(signal.SIGURG, lambda *_: None)  # ignored, it would end no waiting
    told = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(told)
        os.write(writing, b"\0")
        thread.join()
        signal.signal(signal.SIGURG, handler)
        os.close(reading)
        os.close(writing)


PROMPT = "you> "
MORE = "...> "
QUOTES = '"""'
HISTORY_KEPT = 1000

Complete = Callable[[str], list[str]]
"""All lines that begin with what is typed."""


class Prompt:
    """Reads what the user says. ``history`` None: nothing is remembered."""

    def __init__(self, screen: Screen, history: Path | None, complete: Complete) -> None:
        self._screen = screen
        self._history = history
        self._complete = complete
        self._found: list[str] = []
        self._readline = _readline() if can_edit() else None
        if self._readline is not None:
            self._set_up(self._readline)

    def read(self, prefill: str = "") -> str:
        """One message, of several lines between ``\"\"\"``. Raises EOFError, and KeyboardInterrupt for Ctrl-C."""
        if prefill and (self._readline is None or not _is_typeable(prefill)):
            # Nothing can be typed ahead: shown, and taken by Enter alone.
            self._screen.note(f"not sent: {prefill}")
            self._screen.note("Enter sends it; another text is sent instead")
            return self._message(PROMPT, "") or prefill
        return self._message(PROMPT, prefill)

    def ask(self, question: str) -> str:
        """A short answer, which history does not keep."""
        return self._line(question, "").strip()

    def edit(self, text: str) -> str:
        """The text as the user changed it."""
        return self._message("edit> ", text)

    def _message(self, prompt: str, prefill: str) -> str:
        text = self._line(prompt, prefill).strip()
        if text.startswith(QUOTES):
            parts = [text.removeprefix(QUOTES)]
            while not parts[-1].rstrip().endswith(QUOTES):
                parts.append(self._line(MORE, ""))
            text = "\n".join(parts).rstrip().removesuffix(QUOTES).strip("\n")
        self._remember(text)
        return text

    def _line(self, prompt: str, prefill: str) -> str:
        shown = prompt
        if self._readline is None:
            self._screen.notes.print(prompt, end="", style="bold cyan")
            shown = ""
        elif self._screen.notes.color_system is not None and not self._screen.notes.no_color:
            shown = f"\x01\x1b[1;36m\x02{prompt}\x01\x1b[0m\x02"  # \x01, \x02: no width
        if self._readline is not None and prefill and _is_typeable(prefill):
            insert = self._readline.insert_text
            self._readline.set_startup_hook(lambda: insert(clean(prefill)))
        try:
            with heard() if self._readline is not None else contextlib.nullcontext():
                return input(shown)
        finally:
            if self._readline is not None:
                self._readline.set_startup_hook(None)

    # -- the editor

    def _set_up(self, readline: ModuleType) -> None:
        readline.set_auto_history(False)
        readline.clear_history()
        readline.set_completer_delims("")
        readline.set_completer(self._completion)
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        for line in filter(_is_typeable, self._load()):
            readline.add_history(line)

    def _completion(self, text: str, state: int) -> str | None:
        if state == 0:
            self._found = self._complete(text)
        return self._found[state] if state < len(self._found) else None

    def _remember(self, text: str) -> None:
        if not text or not is_text(text) or self._readline is None:
            return
        if _is_typeable(text):
            self._readline.add_history(text)
        if self._history is None:
            return
        with contextlib.suppress(OSError):  # history is a comfort: a full disk must not cost the message
            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{json.dumps(text, ensure_ascii=False)}\n")

    def _load(self) -> list[str]:
        """Lines of earlier chats, each a JSON string: a message may have several lines."""
        if self._history is None:
            return []
        try:
            lines = self._history.read_text("utf-8").splitlines()
            if len(lines) > 2 * HISTORY_KEPT:
                lines = lines[-HISTORY_KEPT:]
                write_private(self._history, "".join(f"{line}\n" for line in lines))
        except (OSError, UnicodeDecodeError):
            return []
        found = []
        for line in lines[-HISTORY_KEPT:]:
            with contextlib.suppress(ValueError):  # half a line, of a chat that was killed
                found.append(clean(str(json.loads(line))))
        return found


def is_text(typed: str) -> bool:
    """Whether all of it could be read: what could not stands in it as halves of characters."""
    return not any("\ud800" <= one <= "\udfff" for one in typed)


def _is_typeable(text: str) -> bool:
    """Whether the editor can hold it, which knows the characters of the locale alone."""
    try:
        text.encode(locale.getencoding())
    except UnicodeEncodeError:
        return False
    return True


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # an interpreter that was built without
        return None
    if sys.flags.utf8_mode:
        # The interpreter reads UTF-8 whatever the locale, and in "C" (containers, cron) the editor would not.
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    return readline
