"""Reads typed lines, with history and completion if there is a terminal. ``\"\"\"`` encloses several lines.

The editor is Python's own ``readline``: it edits, searches, completes, takes a paste of several lines as one text, and
needs no dependency and no time to import.

The typed line that is not answered yet is kept in a file of its session. It is written before the turn is sent, with
the turn's request id. Sending it again, in this chat or after a crash, therefore sends the same turn, and history has
it once.
"""

from __future__ import annotations

import contextlib
import json
import locale
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from urllib.parse import quote

from pensieve.cli.chat.screen import Screen, can_edit
from pensieve.cli.output import clean

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unsent:
    """A turn that may or may not have reached the server."""

    text: str
    request_id: str
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``Session.stream``; a retry must repeat them."""


class UnsentFolder:
    """One private file per session. ``folder`` None: nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._memory: dict[str, Unsent] = {}

    def get(self, session: str) -> Unsent | None:
        """Return the line kept for a session. ``session``: its id."""
        if session in self._memory or self._folder is None:
            return self._memory.get(session)
        try:
            saved = json.loads(self._path(self._folder, session).read_text("utf-8"))
            return Unsent(str(saved["text"]), str(saved["request_id"]), dict(saved["options"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("cannot read the unsent line of %s: %s", session, error)
            return None

    def put(self, session: str, unsent: Unsent) -> None:
        """Keep a line. If the disk fails, only a crash of the chat loses it."""
        self._memory[session] = unsent
        if self._folder is None:
            return
        path = self._path(self._folder, session)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(path, json.dumps(asdict(unsent)))
        except OSError as error:
            log.warning("the unsent line is kept in memory only: %s", error)

    def drop(self, session: str) -> None:
        """Delete the line: it is answered or no longer wanted."""
        self._memory.pop(session, None)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._path(self._folder, session).unlink(missing_ok=True)

    @staticmethod
    def _path(folder: Path, session: str) -> Path:
        return folder / f"{quote(session, safe='')}.json"


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically by one that only its user can read. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


NUDGE_S: Final = 0.05


@contextlib.contextmanager
def wake_on_interrupt() -> Iterator[None]:
    """Let no Ctrl-C be lost while the main thread reads a line with ``input``.

    The interpreter's editor handles signals only when one interrupts its wait for keys (``readline.c`` of
    CPython). A Ctrl-C just before that wait, after the prompt or a key was drawn, would take effect only at the
    next key. So a thread that is woken by the Ctrl-C interrupts the wait by another signal, until the interrupt
    has left ``input``.
    """
    main_thread, finished = threading.get_ident(), threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def nudge() -> None:
        while number := os.read(reading, 1)[0]:
            while number == signal.SIGINT and not finished.wait(NUDGE_S):
                signal.pthread_kill(main_thread, signal.SIGURG)

    thread = threading.Thread(target=nudge, name="ctrl-c", daemon=True)
    handler = signal.signal(signal.SIGURG, lambda *_: None)  # SIG_IGN would not interrupt the wait
    previous_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        signal.set_wakeup_fd(previous_fd)
        os.write(writing, b"\0")
        thread.join()
        signal.signal(signal.SIGURG, handler)
        os.close(reading)
        os.close(writing)


PROMPT = "you> "
CONTINUATION = "...> "
QUOTES = '"""'
HISTORY_KEPT = 1000

Complete = Callable[[str], list[str]]


class Prompt:
    """Reads the user's lines. ``history`` None: nothing is stored."""

    def __init__(self, screen: Screen, history: Path | None, complete: Complete) -> None:
        self._screen = screen
        self._history = history
        self._complete = complete
        self._matches: list[str] = []
        self._readline = _readline() if can_edit() else None
        if self._readline is not None:
            self._set_up(self._readline)

    def read(self, prefill: str = "") -> str:
        """Read one message, which may have several lines. Raises EOFError, KeyboardInterrupt."""
        if prefill and (self._readline is None or not _is_typeable(prefill)):
            # The line cannot be prefilled: show the text, and let Enter accept it.
            self._screen.note(f"not sent: {prefill}")
            self._screen.note("Enter sends it; type another text to send that instead")
            return self._message(PROMPT, "") or prefill
        return self._message(PROMPT, prefill)

    def ask(self, question: str) -> str:
        """Read a short answer, which is not stored in history."""
        return self._line(question, "").strip()

    def edit(self, text: str) -> str:
        return self._message("edit> ", text)

    def _message(self, prompt: str, prefill: str) -> str:
        text = self._line(prompt, prefill).strip()
        if text.startswith(QUOTES):
            parts = [text.removeprefix(QUOTES)]
            while not parts[-1].rstrip().endswith(QUOTES):
                parts.append(self._line(CONTINUATION, ""))
            text = "\n".join(parts).rstrip().removesuffix(QUOTES).strip("\n")
        self._remember(text)
        return text

    def _line(self, prompt: str, prefill: str) -> str:
        shown = prompt
        if self._readline is None:
            self._screen.notes.print(prompt, end="", style="bold cyan")
            shown = ""
        elif self._screen.notes.color_system is not None and not self._screen.notes.no_color:
            shown = f"\x01\x1b[1;36m\x02{prompt}\x01\x1b[0m\x02"  # \x01, \x02 enclose text without width
        if self._readline is not None and prefill and _is_typeable(prefill):
            insert = self._readline.insert_text
            self._readline.set_startup_hook(lambda: insert(clean(prefill)))
        try:
            with wake_on_interrupt() if self._readline is not None else contextlib.nullcontext():
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
            self._matches = self._complete(text)
        return self._matches[state] if state < len(self._matches) else None

    def _remember(self, text: str) -> None:
        if not text or not is_text(text) or self._readline is None:
            return
        if _is_typeable(text):
            self._readline.add_history(text)
        if self._history is None:
            return
        with contextlib.suppress(OSError):  # history is optional: a full disk must not lose the message
            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{json.dumps(text, ensure_ascii=False)}\n")

    def _load(self) -> list[str]:
        """Return the lines of earlier chats. Each is a JSON string, since a message may have several lines."""
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
            with contextlib.suppress(ValueError):  # a partial line, of a chat that was killed
                found.append(clean(str(json.loads(line))))
        return found


def is_text(typed: str) -> bool:
    """Whether the whole input was decoded: undecodable bytes appear as lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in typed)


def _is_typeable(text: str) -> bool:
    """Whether the editor can hold the text: it supports only the characters of the locale."""
    try:
        text.encode(locale.getencoding())
    except UnicodeEncodeError:
        return False
    return True


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # an interpreter that was built without it
        return None
    if sys.flags.utf8_mode:
        # In UTF-8 mode the interpreter ignores the locale, but in "C" (containers, cron) the editor would not.
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    return readline
