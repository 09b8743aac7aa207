"""The loop of a chat: a line, its answer, the next line."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from pensieve.cli.chat import sessions
from pensieve.cli.chat.commands import COMMAND, Commands
from pensieve.cli.chat.flight import LeaveChat
from pensieve.cli.chat.prompt import Prompt, is_text
from pensieve.cli.chat.screen import Screen
from pensieve.cli.chat.talk import Dialogue, warm
from pensieve.cli.chat.unsent import UnsentFolder
from pensieve.client import Client, SamplingOptions, Session
from pensieve.errors import InvalidArgument, PensieveError

log = logging.getLogger(__name__)

MOST_CHARS = 1 << 20
"""The longest line of a pipe, its end included: more than any context takes."""
GONE = ("SESSION_DELETED", "SESSION_NOT_FOUND")
"""Reasons of a session that somebody else has erased."""


class ChatLoop:
    """Answers and what a command was asked for go to stdout, everything else to stderr.

    ``folder`` holds the history of typed lines and those that were not answered; None: nothing is written.
    """

    def __init__(
        self,
        client: Client,
        session: Session,
        sampling: SamplingOptions,
        *,
        interactive: bool,
        plain: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.screen = Screen(interactive=interactive, plain=plain)
        self.prompt = Prompt(self.screen, folder and folder / "history", self._complete)
        unsent = UnsentFolder(folder and folder / "unsent")
        self.talk = Dialogue(client, session, sampling, self.screen, unsent)
        self.commands = Commands(self.talk, self.prompt)

    @property
    def session(self) -> Session:
        """The one that is talked in now."""
        return self.talk.session

    def run(self) -> None:
        """Until /quit or the end of input. Raises PensieveError when not interactive: a pipe must not go on."""
        for line in self._lines():
            try:
                self._handle(line.strip())
            except PensieveError as error:
                if not self.screen.interactive:
                    raise
                self.screen.error(str(error))
                if error.reason in GONE:
                    self.screen.note(
                        "Ctrl-U clears the line; /new begins another conversation, and it goes along"
                    )
            if self.commands.leaving:
                return

    def greet(self) -> None:
        """Where we are, how the conversation ended last time, and what became of a line that was left."""
        if not self.screen.interactive:
            return
        self.screen.note(f"{self.session.name} — /help shows the commands, Ctrl-C stops an answer")
        try:
            info = self.session.info
            if info is not None and info.item_count:
                sessions.show_tail(self.session, self.screen)
            self.talk.take_up()
        except PensieveError as error:
            self.screen.error(str(error))
        except LeaveChat:
            raise
        except KeyboardInterrupt:
            self.screen.note("(stopped)")

    def _lines(self) -> Iterator[str]:
        if not self.screen.interactive:
            yield from _piped()
            return
        interrupted = False
        while True:
            self._warm()
            kept = self.talk.kept
            try:
                line = self.prompt.read(kept.text if kept is not None else "")
                interrupted = False
                if not line and kept is not None:
                    self.talk.drop_kept()
                    self.screen.note("dropped")
                yield line
            except UnicodeDecodeError:
                self.screen.error(str(_no_text("that")))
            except KeyboardInterrupt:
                self.screen.notes.print()
                if interrupted:
                    return
                interrupted = True
                self.screen.note("Ctrl-C again, Ctrl-D or /bye leaves")
            except EOFError:
                self.screen.notes.print()
                return

    def _handle(self, line: str) -> None:
        if not line:
            return
        if not is_text(line):
            raise _no_text("that")
        try:
            if COMMAND.fullmatch(line):
                self.commands.run(line)
            else:
                self.talk.ask(line)
        except LeaveChat:
            raise
        except KeyboardInterrupt:
            self.screen.note("(stopped)")

    def _complete(self, typed: str) -> list[str]:
        return self.commands.complete(typed)

    def _warm(self) -> None:
        """While the user types, let the server bring what the next turn needs. Beside the prompt, which never waits."""
        session = self.session
        info = session.info
        has_history = session.last_turn is not None or (info is not None and info.item_count > 0)
        if has_history and not self.talk.is_warm:
            threading.Thread(target=lambda: log.debug("%s", warm(session)), name="warm", daemon=True).start()
        self.talk.is_warm = False


def _piped() -> Iterator[str]:
    """Lines of stdin. Raises InvalidArgument at one that is no text: what was meant cannot be known."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    lines = iter(lambda: sys.stdin.readline(MOST_CHARS + 1), "")
    for number, line in enumerate(lines, 1):
        if len(line) > MOST_CHARS:
            raise InvalidArgument(
                f"line {number} of the input is longer than {MOST_CHARS:,} characters; it was not sent"
            )
        if not is_text(line):
            raise _no_text(f"line {number} of the input")
        yield line


def _no_text(what: str) -> InvalidArgument:
    return InvalidArgument(f"{what} is not {sys.stdin.encoding.upper()}; it was not sent")
