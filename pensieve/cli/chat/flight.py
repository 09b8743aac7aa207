"""One turn under way: its pieces onto the terminal, a line while the server is away, Ctrl-C.

A thread reads the stream, and the main thread, which alone writes, takes what it read. So a stream that waits for a
server that is gone never holds up the clock on the terminal or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from pensieve.cli.chat.screen import TICK_S, Screen
from pensieve.cli.chat.views import AnswerView, view_of
from pensieve.client import Piece, Progress, TurnStream
from pensieve.errors import PensieveError

QUIET_S = 3.0
"""A server that says nothing for so long may compute a long context, or be gone without a trace."""


class LeaveChat(KeyboardInterrupt):
    """Ctrl-C was pressed again: not the answer is meant, but the chat."""


class _Interrupt:
    """Ctrl-C was pressed."""


Event = Piece | _Interrupt | PensieveError | None
"""None: the stream has ended in good order."""


class Flight:
    """Follows a stream to its end. ``show`` False: answers that are drawn side by side could not be read."""

    def __init__(self, stream: TurnStream, screen: Screen, *, show: bool) -> None:
        self._stream = stream
        self._screen = screen
        self._shows = show
        self._written = ""
        """What of the answer is on a pipe, which takes nothing back."""
        self._again: str | None = None
        """What a second attempt has said so far, while it repeats the first; None: this is the first."""
        self._view: AnswerView = view_of(screen)
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
                        self._screen.line()
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
            self._screen.piece(piece.text)
            return
        self._again += piece.text
        if self._written.startswith(self._again):
            return
        if self._again.startswith(self._written):
            self._screen.piece(self._again[len(self._written) :])
        else:
            self._begin_anew()
            self._screen.piece(self._again)
        self._written, self._again = self._again, None

    def settle(self, text: str) -> None:
        """On a pipe: end the answer, whose text in history is ``text``."""
        if not text.startswith(self._written):
            self._begin_anew()
        self._screen.say(text[len(self._written) :])

    def _begin_anew(self) -> None:
        self._screen.line()
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
