"""How an answer appears while it is made: as it comes, or as Markdown of which only the last block is drawn again."""

from __future__ import annotations

import re
import time
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from pensieve.cli.chat.screen import Screen
from pensieve.cli.untrusted import clean

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


def view_of(screen: Screen) -> AnswerView:
    """The view that suits the terminal."""
    return MarkdownView(screen.out) if screen.renders else PlainView(screen)


class PlainView:
    """The text as it comes."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._in_line = False

    def add(self, text: str) -> None:
        if text:
            self._screen.piece(text)
            self._in_line = not text.endswith("\n")

    def pause(self) -> None:
        if self._in_line:
            self._screen.line()
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
