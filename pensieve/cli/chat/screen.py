"""Output of a chat: answers to stdout, all else to stderr, without control characters on a terminal.

``TurnDisplay`` shows one running turn: its pieces, a status line while the server is unreachable, and Ctrl-C.
A thread reads the stream, and the main thread, which alone writes, takes its events. So a stream that waits for
a lost server blocks neither the clock in the status line nor Ctrl-C. An answer appears as it is generated; with
Markdown only its last block is redrawn.
"""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol, TypeVar

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from pensieve.cli.output import clean
from pensieve.client import Piece, Progress, TurnStream
from pensieve.errors import PensieveError

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


REDRAW_S = 0.08
_TOKEN_TYPES = {"html_inline": "text", "softbreak": "hardbreak"}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


class AnswerView(Protocol):
    """Draws one answer on the terminal."""

    def add(self, text: str) -> None:
        """Append a part of the answer."""

    def pause(self) -> None:
        """Stop drawing, because something else is written next."""

    def end(self) -> None:
        """Finish the answer, with the cursor at the beginning of a line."""


def make_view(screen: Screen) -> AnswerView:
    return MarkdownView(screen.out) if screen.shows_markdown else PlainView(screen)


class PlainView:
    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._in_line = False

    def add(self, text: str) -> None:
        if text:
            self._screen.write(text)
            self._in_line = not text.endswith("\n")

    def pause(self) -> None:
        if self._in_line:
            self._screen.end_line()
            self._in_line = False

    end = pause


class MarkdownView:
    """Prints complete blocks for good, so a redraw costs only the last block, however long the answer is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._live: Live | None = None
        self._drawn_at = 0.0

    def add(self, text: str) -> None:
        done, self._rest = split_blocks(self._rest + text)
        if done:
            self.pause()
            self._console.print(markdown(done), soft_wrap=False)
        if time.monotonic() - self._drawn_at >= REDRAW_S:
            self._draw()

    def pause(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def end(self) -> None:
        self.pause()
        if self._rest.strip():
            self._console.print(markdown(self._rest), soft_wrap=False)
        self._rest = ""

    def _draw(self) -> None:
        """Draw the end of the last block, at most one screen: lines that have scrolled away cannot be redrawn."""
        if not self._rest.strip():
            return
        self._drawn_at = time.monotonic()
        lines = self._console.render_lines(markdown(self._rest), pad=False)
        shown = lines[-max(1, self._console.height - 2) :]
        drawn = Segments([part for line in shown for part in (*line, Segment.line())])
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(drawn, refresh=True)


def markdown(text: str) -> Markdown:
    """Lay out an answer for the terminal.

    HTML tags and line ends, which rich would drop, stay as written. Links show their targets. The parsed text
    is cleaned, too: ``&#x202E;`` becomes a control character only in the parser.
    """
    shown = Markdown(clean(text), hyperlinks=False)
    for token in shown.parsed:
        if token.type == "html_block":
            token.type, token.tag, token.info = "fence", "code", "html"
        for child in token.children or ():
            child.content = clean(child.content)
            child.type = _TOKEN_TYPES.get(child.type, child.type)
    return shown


def split_blocks(text: str) -> tuple[str, str]:
    """Split at the last empty line outside a fence that no indented line follows."""
    fence, position, border = "", 0, 0
    for line in text.splitlines(keepends=True):
        blank_before = text[:position].endswith("\n\n")
        if not fence and blank_before and line[0] not in " \t\n":
            border = position
        position += len(line)
        match = _FENCE.match(line)
        if match and not fence:
            fence = match[1]
        elif match and match[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
    return text[:border], text[border:]


QUIET_S = 3.0
"""After this long without a message, the server may be computing a long context, or be lost."""


class LeaveChat(KeyboardInterrupt):
    """Ctrl-C was pressed a second time: leave the chat, not only the answer."""


class _Interrupt:
    """Ctrl-C was pressed."""


Event = Piece | _Interrupt | PensieveError | None
"""None: the stream ended without an error."""


class TurnDisplay:
    """Follows a stream to its end. ``show=False``: do not draw pieces, since several candidates would interleave."""

    def __init__(self, stream: TurnStream, screen: Screen, *, show: bool) -> None:
        self._stream = stream
        self._screen = screen
        self._shows = show
        self._written = ""
        """The part of the answer that is on the pipe, which cannot be taken back."""
        self._retry_text: str | None = None
        """Text of a second attempt while it repeats the first; None during the first."""
        self._view: AnswerView = make_view(screen)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._last_seen: tuple[int, Progress | None] = (0, None)
        """Number of resends, and latest progress, at the last message."""
        self._last_seen_at = time.monotonic()
        self._away_since: float | None = None
        self._stopping: threading.Thread | None = None

    def run(self) -> None:
        """Follow the stream. Raises the turn's error, and LeaveChat at the second Ctrl-C."""
        reader = threading.Thread(target=self._read, name="answer", daemon=True)
        try:
            with self._interrupts():
                reader.start()
                self._follow()
        finally:
            self._stream.close()
            self._screen.clear_status()
            self._view.end()

    def _read(self) -> None:
        try:
            for piece in self._stream:
                self._events.put(piece)
        except PensieveError as error:
            self._events.put(error)
        else:
            self._events.put(None)

    def _follow(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=TICK_S)
            except queue.Empty:
                self._tick()
                continue
            match event:
                case _Interrupt():
                    self._stop()
                case Piece():
                    self._mark_alive()
                    if self._shows:
                        self._show(event)
                case error:
                    self._finish(error)
                    return

    def _finish(self, error: PensieveError | None) -> None:
        """The stream has ended. Raises its error, unless the turn was complete before."""
        if self._stopping is not None:
            self._stopping.join(TICK_S)
        if error is not None and not self._stream.done:
            if self._written:
                self._screen.end_line()
            raise error

    def _show(self, piece: Piece) -> None:
        if piece.candidate:
            return
        if not self._screen.interactive:
            self._write_piped(piece)
            return
        if piece.restarted:
            self._view.end()
            self._screen.note("(the server had to restart this answer)")
        self._view.add(piece.text)

    def _write_piped(self, piece: Piece) -> None:
        """Write to a pipe: skip text that a second attempt repeats; if it differs, write the answer again."""
        if piece.restarted:
            self._retry_text = ""
        if self._retry_text is None:
            self._written += piece.text
            self._screen.write(piece.text)
            return
        self._retry_text += piece.text
        if self._written.startswith(self._retry_text):
            return
        if self._retry_text.startswith(self._written):
            self._screen.write(self._retry_text[len(self._written) :])
        else:
            self._restart_output()
            self._screen.write(self._retry_text)
        self._written, self._retry_text = self._retry_text, None

    def finish_piped(self, text: str) -> None:
        """Finish the answer on a pipe. ``text``: the answer as history has it."""
        if not text.startswith(self._written):
            self._restart_output()
        self._screen.write_line(text[len(self._written) :])

    def _restart_output(self) -> None:
        self._screen.end_line()
        self._screen.note("(the server had to restart this answer; it follows from its beginning)")
        self._written = ""

    def _mark_alive(self) -> None:
        self._last_seen = (self._stream.resumes, self._stream.progress)
        self._last_seen_at = time.monotonic()
        self._away_since = None

    def _tick(self) -> None:
        """Nothing arrived for a while: show whether the server is unreachable, and for how long."""
        resumes, progress = self._last_seen
        if self._stream.progress is not progress:
            self._mark_alive()
            self._screen.clear_status()
        elif self._stream.resumes > resumes:
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                self._view.pause()
            self._screen.status(
                f"reconnecting… {now - self._away_since:.0f} s (Ctrl-C stops and keeps your text)"
            )
        elif self._stopping is not None:
            self._screen.status("stopping…")
        elif (waited := time.monotonic() - self._last_seen_at) > QUIET_S:
            self._view.pause()
            self._screen.status(f"waiting for the answer… {waited:.0f} s (Ctrl-C stops and keeps your text)")

    def _stop(self) -> None:
        """End the turn. If the server is unreachable, close the stream, which discards the turn."""
        self._view.pause()
        if self._away_since is not None or self._stream.resumes > self._last_seen[0]:
            self._stream.close()
        elif self._stopping is None:
            # In a thread: the server could become unreachable during the call.
            self._stopping = threading.Thread(target=self._cancel, name="stop-answer", daemon=True)
            self._stopping.start()

    def _cancel(self) -> None:
        shown = self._stream.token_count
        try:
            self._stream.cancel(keep="partial" if shown else "nothing", keep_output_tokens=shown or None)
        except PensieveError:
            self._stream.close()  # The turn had not begun, or the server is unreachable: its grace time ends the turn.

    @contextlib.contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Make Ctrl-C end the answer, keeping the received part; the second one raises LeaveChat."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only.
            return
        before = signal.getsignal(signal.SIGINT)

        def on_interrupt(signum: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, _leave)
            self._events.put(_Interrupt())

        signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _leave(signum: int, frame: FrameType | None) -> None:
    raise LeaveChat
