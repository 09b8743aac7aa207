"""``pensieve chat``: a conversation in the terminal, with a given server or one started for the chat.

The answer appears as it is generated. If stdin is not a terminal, each line is a turn. A pipe cannot take back
its output, so an answer that changes after a restart is written again in full.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import shlex
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from pensieve.cli.chat import sessions
from pensieve.cli.chat.commands import COMMAND, Commands
from pensieve.cli.chat.dialogue import Dialogue, warm
from pensieve.cli.chat.prompt import Prompt, UnsentFolder, is_text
from pensieve.cli.chat.screen import LeaveChat, Screen
from pensieve.cli.output import BadModel, clean, describe_error, describe_unreachable, usage_error
from pensieve.client import Client, RetryPolicy, SamplingOptions, Session
from pensieve.client import SamplingOptions as Sampling
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.model.arch import ModelError
from pensieve.model.resolve import resolve_model
from pensieve.model.smollm2 import SMOLLM2
from pensieve.options.commands import complete_session_ids, models, print_error, tls_identity
from pensieve.options.serve import state_directory
from pensieve.own_server import OwnServer, explain_failure
from pensieve.spawn import NOT_STARTED, SpawnError

log = logging.getLogger(__name__)

MAX_LINE_CHARS = 1 << 20
"""Longest line from a pipe, with its end: more than any context holds."""
DELETED_REASONS = ("SESSION_DELETED", "SESSION_NOT_FOUND")
"""Reasons that mean the session was erased."""


class ChatLoop:
    """Reads lines and runs them. Answers and output of commands go to stdout, all else to stderr.

    ``folder`` stores the history of typed lines and the unanswered ones; None: nothing is written.
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
        self.prompt = Prompt(
            self.screen, folder and folder / "history", lambda typed: self.commands.complete(typed)
        )
        unsent = UnsentFolder(folder and folder / "unsent")
        self.dialogue = Dialogue(client, session, sampling, self.screen, unsent)
        self.commands = Commands(self.dialogue, self.prompt)

    @property
    def session(self) -> Session:
        return self.dialogue.session

    def run(self) -> None:
        """Run until /quit or the end of input. Raises PensieveError if not interactive: a pipe must not continue."""
        for line in self._lines():
            try:
                self._handle(line.strip())
            except PensieveError as error:
                if not self.screen.interactive:
                    raise
                self.screen.error(str(error))
                if error.reason in DELETED_REASONS:
                    self.screen.note(
                        "Ctrl-U clears the line; /new starts another conversation and keeps the line"
                    )
            if self.commands.leaving:
                return

    def greet(self) -> None:
        """Show the session and the end of its conversation, and resume a line left unanswered."""
        if not self.screen.interactive:
            return
        self.screen.note(f"{self.session.name} — /help lists the commands, Ctrl-C stops an answer")
        try:
            info = self.session.info
            if info is not None and info.item_count:
                sessions.show_tail(self.session, self.screen)
            self.dialogue.resume_unsent()
        except PensieveError as error:
            self.screen.error(str(error))
        except LeaveChat:
            raise
        except KeyboardInterrupt:
            self.screen.note("(stopped)")

    def _lines(self) -> Iterator[str]:
        if not self.screen.interactive:
            yield from _piped_lines()
            return
        interrupted = False
        while True:
            self._warm()
            kept = self.dialogue.unsent
            try:
                line = self.prompt.read(kept.text if kept is not None else "")
                interrupted = False
                if not line and kept is not None:
                    self.dialogue.drop_unsent()
                    self.screen.note("dropped")
                yield line
            except UnicodeDecodeError:
                self.screen.error(str(_decode_error("that")))
            except KeyboardInterrupt:
                self.screen.notes.print()
                if interrupted:
                    return
                interrupted = True
                self.screen.note("to leave, press Ctrl-C again, or use Ctrl-D or /bye")
            except EOFError:
                self.screen.notes.print()
                return

    def _handle(self, line: str) -> None:
        if not line:
            return
        if not is_text(line):
            raise _decode_error("that")
        try:
            if COMMAND.fullmatch(line):
                self.commands.run(line)
            else:
                self.dialogue.ask(line)
        except LeaveChat:
            raise
        except KeyboardInterrupt:
            self.screen.note("(stopped)")

    def _warm(self) -> None:
        """Warm the session while the user types. In a thread, so the prompt never waits."""
        session = self.session
        info = session.info
        has_history = session.last_turn is not None or (info is not None and info.item_count > 0)
        if has_history and not self.dialogue.is_warm:
            threading.Thread(target=lambda: log.debug("%s", warm(session)), name="warm", daemon=True).start()
        self.dialogue.is_warm = False


def _piped_lines() -> Iterator[str]:
    """Yield the lines of stdin. Raises InvalidArgument at one that cannot be decoded: its meaning is unknown."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    lines = iter(lambda: sys.stdin.readline(MAX_LINE_CHARS + 1), "")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_CHARS:
            raise InvalidArgument(
                f"line {number} of the input is longer than {MAX_LINE_CHARS:,} characters; it was not sent"
            )
        if not is_text(line):
            raise _decode_error(f"line {number} of the input")
        yield line


def _decode_error(what: str) -> InvalidArgument:
    return InvalidArgument(f"{what} is not {sys.stdin.encoding.upper()}; it was not sent")


CONNECT_TIMEOUT_S = 10.0
"""A server that does not answer within this time when the chat begins counts as a wrong address."""
DEFAULT_PIPE_TOKENS = 2048
"""Default length limit of an answer to a pipe, where no user stops a model that repeats itself."""
INTERACTIVE_RETRY = RetryPolicy(max_wait_s=math.inf)
"""A user sees the wait, and can end it with Ctrl-C."""


@dataclass(frozen=True, slots=True)
class ChosenServer:
    """The server of a chat: the one at ``target``, or one of its own."""

    target: str | None
    model: str | None
    store: str | None
    api_key: str | None
    tls: bool
    tls_identity: Path | None

    def check(self) -> None:
        """Raise UsageError for options that do not go together."""
        if self.target is not None and (self.model is not None or self.store is not None):
            raise click.UsageError(
                "--model and --store apply to a server started by the chat, not to --target"
            )
        typed_key = self.api_key is not None and not _key_from_variable()
        if self.target is None and (typed_key or self.tls or self.tls_identity):
            raise click.UsageError("--api-key, --tls and --tls-identity require --target")

    def client(self, target: str, retry: RetryPolicy | None, **options: Any) -> Client:
        """Return a client of the server, which is at ``target`` now."""
        key = None if self.target is None else self.api_key
        return Client(
            target, api_key=key, tls=self.tls, credentials=self.tls_identity, retry=retry, **options
        )

    def resume_command(self) -> list[str]:
        """Return the command that finds the same server or history; empty if the history ends with the chat."""
        if self.target is None and (self.store or "").startswith("memory:"):
            return []
        words = ["pensieve", "chat"]
        for flag, value in (("--target", self.target), ("--model", self.model), ("--store", self.store)):
            words += [flag, value] if value is not None else []
        words += ["--api-key", "KEY"] if self.api_key is not None and not _key_from_variable() else []
        words += ["--tls-identity", str(self.tls_identity)] if self.tls_identity else []
        return words + (["--tls"] if self.tls else [])

    def start(self) -> OwnServer:
        """Return the server that the chat starts."""
        # Download the model with a progress bar: the output of the server is not shown.
        if self.model == SMOLLM2:
            try:
                resolve_model(self.model)
            except ModelError as error:
                raise BadModel(str(error)) from error
        arguments: list[str] = []
        for flag, value in (("--model", self.model), ("--store", self.store)):
            if value is not None:
                arguments += [flag, value]
        return OwnServer(*arguments)

    def check_address(self, target: str, *, interactive: bool) -> None:
        """Raise ClickException if no server answers. Unlike a lost server, a wrong address is not waited for."""
        policy = RetryPolicy(max_wait_s=CONNECT_TIMEOUT_S)
        try:
            with self.client(target, policy, timeout=CONNECT_TIMEOUT_S) as client:
                Screen(interactive=interactive).call_with_status(client.server_info)
        except PensieveError as error:
            if error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                raise click.ClickException(describe_unreachable(error, target)) from error
            raise
        except KeyboardInterrupt:
            raise click.Abort from None


@click.command(name="chat", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--target", metavar="HOST:PORT", help="Address of the server; default: start one for this chat."
)
@click.option(
    "--model",
    metavar="NAME",
    help="Model folder, GGUF file, hub id, `smollm2` or `demo`, for a server started by the chat.",
    shell_complete=models,
)
@click.option("--store", metavar="URL", help="History store, for a server started by the chat.")
@click.option(
    "--session",
    "session_id",
    metavar="ID",
    help="Session to continue: its id, a unique prefix of it, or `last`.",
    shell_complete=complete_session_ids,
)
@click.option(
    "--new", is_flag=True, help="Start a new session without asking; with --session: under that id."
)
@click.option("--system", metavar="TEXT", help="System prompt of a new session.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), metavar="T", help="Sampling temperature; 0: greedy."
)
@click.option(
    "--max-tokens",
    "max_output_tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Longest answer, in tokens.",
)
@click.option("--plain", is_flag=True, help="Print answers as plain text, without Markdown layout.")
@click.option("--no-history", is_flag=True, help="Do not store typed lines in files.")
@click.option("--api-key", metavar="KEY", envvar="PENSIEVE_API_KEY", help="API key for --target.")
@click.option("--tls", is_flag=True, help="Use TLS to --target, with the system's root certificates.")
@tls_identity()
def chat(
    session_id: str | None, new: bool, system: str | None, plain: bool, no_history: bool, **given: Any
) -> None:
    """Chat in the terminal with a server, or with one started for the chat.

    If stdin is not a terminal, each line of it is a turn. /help in the chat lists its commands.
    """
    values = {name: given.pop(name) for name in ("temperature", "max_output_tokens")}
    sampling = cast(Sampling, {name: value for name, value in values.items() if value is not None})
    server = ChosenServer(**given)
    server.check()
    target = server.target
    interactive = sys.stdin.isatty()
    if not interactive:
        sampling.setdefault("max_output_tokens", DEFAULT_PIPE_TOKENS)
    try:
        with contextlib.ExitStack() as stack:
            if target is None:
                own = stack.enter_context(server.start())
                stack.callback(_report_failed_restart, own)
                target = own.target
            else:
                server.check_address(target, interactive=interactive)
            retry = INTERACTIVE_RETRY if interactive else None
            client = stack.enter_context(server.client(target, retry))
            screen = Screen(interactive=interactive)
            try:
                session = _open_session(client, screen, session_id, new, system)
            except sessions.NoSuchSession as error:
                raise click.ClickException(str(error)) from None
            folder = None if no_history or not interactive else state_directory() / "chat"
            _run_chat(
                ChatLoop(client, session, sampling, interactive=interactive, plain=plain, folder=folder),
                server.resume_command(),
            )
    except SpawnError as error:
        # An option that the server refuses is one that the chat passed on.
        kind = click.UsageError if error.status == 2 else click.ClickException
        raise kind(clean(explain_failure(error), lines=False)) from error
    except PensieveError as error:
        if target is None:  # its own server: the user has typed no address
            raise click.ClickException(clean(str(error), lines=False)) from error
        raise usage_error(error) or click.ClickException(describe_error(error, target)) from error


def _key_from_variable() -> bool:
    """Whether a variable has set the key. It may be meant for other commands, so it is no error here."""
    return click.get_current_context().get_parameter_source("api_key") is ParameterSource.ENVIRONMENT


def _run_chat(loop: ChatLoop, resume_command: list[str]) -> None:
    """Run the chat. However it ends, print the command that continues it."""
    try:
        loop.greet()
        loop.run()
    except KeyboardInterrupt:
        loop.screen.notes.print()
    finally:
        if loop.screen.interactive and resume_command:
            loop.screen.note(f"to continue: {shlex.join([*resume_command, '--session', loop.session.id])}")


def _report_failed_restart(own: OwnServer) -> None:
    if own.failure:
        print_error(f"cannot restart the server: {own.failure.removeprefix(NOT_STARTED)}")


def _open_session(
    client: Client, screen: Screen, wanted: str | None, new: bool, system: str | None
) -> Session:
    if wanted is not None and not new:
        session = sessions.find_session(client, wanted)
        if system is not None:
            raise click.UsageError(f"--system is for a new session, but {session.name} exists already")
        return session
    if wanted is None and not new and system is None and screen.interactive:
        picked = _pick_session(client, screen)
        if picked is not None:
            return picked
    return client.create_session(session_id=wanted, system_prompt=system)


def _pick_session(client: Client, screen: Screen) -> Session | None:
    """Let the user pick a recent conversation; None for a new one."""
    found = screen.call_with_status(lambda: sessions.recent(client))
    if not found:
        return None
    sessions.show_recent(found, screen)
    prompt = Prompt(screen, None, lambda _: [])
    while True:
        try:
            typed = prompt.ask("number to continue, or Enter for a new conversation: ")
        except (EOFError, KeyboardInterrupt):
            screen.notes.print()
            raise click.Abort from None
        if not typed:
            return None
        if typed.isdecimal() and 0 < int(typed) <= len(found):
            return sessions.find_session(client, found[int(typed) - 1].info.id)
        try:
            return sessions.find_session(client, typed)
        except sessions.NoSuchSession as error:
            screen.note(str(error).partition("; with --new")[0])
        except InvalidArgument:  # a message, typed one prompt too early
            screen.note("that is neither a number in the list nor an id; press Enter before typing a message")
