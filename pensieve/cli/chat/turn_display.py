"""One turn under way: its pieces onto the terminal, a line while the server is away, Ctrl-C.

A thread reads the stream, and the main thread, which alone writes, takes what it read. So a stream that waits for a
server that is gone never holds up the clock on the terminal or Ctrl-C. An answer appears as it comes, or as Markdown of
which only the last block is drawn again.
"""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from pensieve.cli.chat.screen import TICK_S, Screen
from pensieve.cli.output import clean
from pensieve.client import Piece, Progress, TurnStream
from pensieve.errors import PensieveError

REDRAW_S = 0.08
_KEPT = {"html_inline": "text", "softbreak": "hardbreak"}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


class AnswerView(Protocol):
    """One answer on the terminal."""

    def add(self, text: str) -> None:
        """More of it."""

    def pause(self) -> None:
        """Something else is written now."""

    def end(self) -> None:
        """Nothing follows; the cursor is at the beginning of a line."""


def make_view(screen: Screen) -> AnswerView:
    """The view that suits the terminal."""
    return MarkdownView(screen.out) if screen.shows_markdown else PlainView(screen)


class PlainView:
    """The text as it comes."""

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

    def end(self) -> None:
        self.pause()


class MarkdownView:
    """Complete blocks are printed for good: a redraw costs the last block alone, however long the answer is."""

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
        """The end of the last block, as much of it as the terminal shows: what has scrolled away cannot be redrawn."""
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
    """Laid out for a terminal.

    Tags and line ends stay as they were written: rich would leave them out. Links show where they lead. Cleaned
    behind the parser too, since ``&#x202E;`` is a character only there.
    """
    shown = Markdown(clean(text), hyperlinks=False)
    for token in shown.parsed:
        if token.type == "html_block":
            token.type, token.tag, token.info = "fence", "code", "html"
        for child in token.children or ():
            child.content = clean(child.content)
            child.type = _KEPT.get(child.type, child.type)
    return shown


def split_blocks(text: str) -> tuple[str, str]:
    """(complete blocks, the rest): up to the last empty line outside a fence that no indented line follows."""
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
"""A server that says nothing for so long may compute a long context, or be gone without a trace."""


class LeaveChat(KeyboardInterrupt):
    """Ctrl-C was pressed again: not the answer is meant, but the chat."""


class _Interrupt:
    """Ctrl-C was pressed."""


Event = Piece | _Interrupt | PensieveError | None
"""None: the stream has ended in good order."""


class TurnDisplay:
    """Follows a stream to its end. ``show`` False: answers that are drawn side by side could not be read."""

    def __init__(self, stream: TurnStream, screen: Screen, *, show: bool) -> None:
        self._stream = stream
        self._screen = screen
        self._shows = show
        self._written = ""
        """What of the answer is on a pipe, which takes nothing back."""
        self._again: str | None = None
        """What a second attempt has said so far, while it repeats the first; None: this is the first."""
        self._view: AnswerView = make_view(screen)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._heard: tuple[int, Progress | None] = (0, None)
        """Resends and news at the last sign of life."""
        self._heard_at = time.monotonic()
        self._away_since: float | None = None
        self._stopping: threading.Thread | None = None

    def run(self) -> None:
        """Raises what the server says to the turn, and LeaveChat at the second Ctrl-C."""
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
            if isinstance(event, _Interrupt):
                self._stop()
            elif isinstance(event, Piece):
                self._is_here()
                if self._shows:
                    self._show(event)
            else:
                if self._stopping is not None and self._stopping.is_alive():
                    self._stopping.join(TICK_S)
                if event is not None and not self._stream.done:
                    if self._written:
                        self._screen.end_line()
                    raise event
                return

    def _show(self, piece: Piece) -> None:
        if piece.candidate:
            return
        if not self._screen.interactive:
            self._pipe(piece)
            return
        if piece.restarted:
            self._view.end()
            self._screen.note("(the server had to start this answer again)")
        self._view.add(piece.text)

    def _pipe(self, piece: Piece) -> None:
        """On a pipe: what a second attempt says again is left out; where it differs, the answer begins anew."""
        if piece.restarted:
            self._again = ""
        if self._again is None:
            self._written += piece.text
            self._screen.write(piece.text)
            return
        self._again += piece.text
        if self._written.startswith(self._again):
            return
        if self._again.startswith(self._written):
            self._screen.write(self._again[len(self._written) :])
        else:
            self._begin_anew()
            self._screen.write(self._again)
        self._written, self._again = self._again, None

    def finish_piped(self, text: str) -> None:
        """On a pipe: end the answer, whose text in history is ``text``."""
        if not text.startswith(self._written):
            self._begin_anew()
        self._screen.write_line(text[len(self._written) :])

    def _begin_anew(self) -> None:
        self._screen.end_line()
        self._screen.note("(the server had to start this answer again; it follows from its beginning)")
        self._written = ""

    def _is_here(self) -> None:
        self._heard = (self._stream.resumes, self._stream.progress)
        self._heard_at = time.monotonic()
        self._away_since = None

    def _tick(self) -> None:
        """Nothing came for a while: whether the server is away, and for how long."""
        resumes, progress = self._heard
        if self._stream.progress is not progress:
            self._is_here()
            self._screen.clear_status()
        elif self._stream.resumes > resumes:
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
                self._view.pause()
            self._screen.status(
                f"reconnecting… {now - self._away_since:.0f} s (Ctrl-C stops, your text is kept)"
            )
        elif self._stopping is not None:
            self._screen.status("stopping…")
        elif (waited := time.monotonic() - self._heard_at) > QUIET_S:
            self._view.pause()
            self._screen.status(f"waiting for the answer… {waited:.0f} s (Ctrl-C stops, your text is kept)")

    def _stop(self) -> None:
        """End the turn. A server that is away cannot be asked: then the stream is left, and its turn is discarded."""
        self._view.pause()
        if self._away_since is not None or self._stream.resumes > self._heard[0]:
            self._stream.close()
        elif self._stopping is None:
            # Beside this thread: the server could go away while it is asked.
            self._stopping = threading.Thread(target=self._cancel, name="stop-answer", daemon=True)
            self._stopping.start()

    def _cancel(self) -> None:
        shown = self._stream.token_count
        try:
            self._stream.cancel(keep="partial" if shown else "nothing", keep_output_tokens=shown or None)
        except PensieveError:
            self._stream.close()  # The server had not begun, or cannot be asked: its grace time ends the turn.

    @contextlib.contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Ctrl-C ends the answer, keeping what was received; the second raises LeaveChat."""
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
