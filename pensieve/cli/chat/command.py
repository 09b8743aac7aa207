"""``pensieve chat``: a conversation in the terminal, with a given server or with one of its own.

The answer appears as it is made. When stdin is not a terminal each line is a turn; what a pipe carries is never taken
back, so an answer that a restart changed is written again behind what was there.
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
from pathlib import Path

import click
from click.core import ParameterSource

from pensieve.cli import completion
from pensieve.cli.chat import sessions
from pensieve.cli.chat.commands import COMMAND, Commands
from pensieve.cli.chat.dialogue import Dialogue, warm
from pensieve.cli.chat.prompt import Prompt, is_text
from pensieve.cli.chat.screen import Screen
from pensieve.cli.chat.turn_display import LeaveChat
from pensieve.cli.chat.unsent import UnsentFolder
from pensieve.cli.output import clean
from pensieve.cli.server_errors import BadModel, describe_error, describe_unreachable, usage_error
from pensieve.client import Client, RetryPolicy, SamplingOptions, Session
from pensieve.client import SamplingOptions as Sampling
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.model.arch import ModelError
from pensieve.model.resolve import resolve_model
from pensieve.model.smollm2 import SMOLLM2
from pensieve.options.commands import models, print_error
from pensieve.options.serve import state_directory
from pensieve.own_server import OwnServer, explain_failure
from pensieve.spawn import NOT_STARTED, SpawnError

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
        self.dialogue = Dialogue(client, session, sampling, self.screen, unsent)
        self.commands = Commands(self.dialogue, self.prompt)

    @property
    def session(self) -> Session:
        """The one that is talked in now."""
        return self.dialogue.session

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
            self.dialogue.resume_unsent()
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
            kept = self.dialogue.unsent
            try:
                line = self.prompt.read(kept.text if kept is not None else "")
                interrupted = False
                if not line and kept is not None:
                    self.dialogue.drop_unsent()
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
                self.dialogue.ask(line)
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
        if has_history and not self.dialogue.is_warm:
            threading.Thread(target=lambda: log.debug("%s", warm(session)), name="warm", daemon=True).start()
        self.dialogue.is_warm = False


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


FIRST_ANSWER_S = 10.0
"""A server that says nothing for so long when the chat begins is taken for a wrong address."""
MOST_TOKENS = 2048
"""The longest answer to a pipe unless an option says otherwise: no one is there to stop a model that repeats itself."""
ON_A_TERMINAL = RetryPolicy(max_wait_s=math.inf)
"""Somebody sees the wait, and ends it with Ctrl-C."""


@click.command(name="chat", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--target", metavar="HOST:PORT", help="Server to talk to; without it one is started for this chat."
)
@click.option(
    "--model",
    metavar="NAME",
    help="Model folder, GGUF file, hub id, `smollm2` or `demo`, for the server that is started.",
    shell_complete=models,
)
@click.option("--store", metavar="URL", help="History store of the server that is started.")
@click.option(
    "--session",
    "session_id",
    metavar="ID",
    help="Session to go on with: its id, the beginning of it, or `last`.",
    shell_complete=completion.complete_session_ids,
)
@click.option("--new", is_flag=True, help="A new session without asking; with --session under that id.")
@click.option("--system", metavar="TEXT", help="System prompt of a new session.")
@click.option("--temperature", type=click.FloatRange(min=0), metavar="T", help="0 is greedy.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest answer, in tokens.")
@click.option("--plain", is_flag=True, help="Answers as they come, not laid out as Markdown.")
@click.option("--no-history", is_flag=True, help="Keep nothing that is typed in files.")
@click.option("--api-key", metavar="KEY", envvar="PENSIEVE_API_KEY", help="Credential for --target.")
@click.option("--tls", is_flag=True, help="TLS towards --target, with the system's root certificates.")
def chat(
    target: str | None,
    model: str | None,
    store: str | None,
    session_id: str | None,
    new: bool,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
    plain: bool,
    no_history: bool,
    api_key: str | None,
    tls: bool,
) -> None:
    """Chat in the terminal, with a server or with one of its own.

    Reads plain lines when stdin is not a terminal. /help inside shows the commands.
    """
    if target is not None and (model is not None or store is not None):
        raise click.UsageError(
            "--model and --store are for a server of its own; they do not go with --target"
        )
    if _comes_from_outside("api_key"):
        shown_key = None
        api_key = api_key if target is not None else None
    else:
        shown_key = api_key
    if target is None and (api_key is not None or tls):
        raise click.UsageError("--api-key and --tls go with --target")
    sampling = Sampling()
    if temperature is not None:
        sampling["temperature"] = temperature
    if max_tokens is not None:
        sampling["max_output_tokens"] = max_tokens
    interactive = sys.stdin.isatty()
    if not interactive:
        sampling.setdefault("max_output_tokens", MOST_TOKENS)
    again = _resume_line(target, model, store, shown_key, tls)
    try:
        with contextlib.ExitStack() as stack:
            if target is None:
                _fetch(model)
                own = stack.enter_context(_own_server(model, store))
                stack.callback(_say_why, own)
                target = own.target
            else:
                _check_address(target, api_key, tls, interactive=interactive)
            retry = ON_A_TERMINAL if interactive else None
            client = stack.enter_context(Client(target, api_key=api_key, tls=tls, retry=retry))
            screen = Screen(interactive=interactive)
            try:
                session = _open_session(client, screen, session_id, new, system)
            except sessions.NoSuchSession as error:
                raise click.ClickException(str(error)) from None
            folder = None if no_history or not interactive else state_directory() / "chat"
            _talk(
                ChatLoop(client, session, sampling, interactive=interactive, plain=plain, folder=folder),
                again,
            )
    except SpawnError as error:
        # An option that the server refuses was one of ours.
        kind = click.UsageError if error.status == 2 else click.ClickException
        raise kind(clean(explain_failure(error), lines=False)) from error
    except PensieveError as error:
        if target is None:  # its own: nobody has typed an address
            raise click.ClickException(clean(str(error), lines=False)) from error
        raise usage_error(error) or click.ClickException(describe_error(error, target)) from error


def _comes_from_outside(parameter: str) -> bool:
    """Whether a variable has set it: one that is meant for other commands, too, does no harm here."""
    return click.get_current_context().get_parameter_source(parameter) is ParameterSource.ENVIRONMENT


def _talk(loop: ChatLoop, again: list[str]) -> None:
    """To its end, however it ends: then the line that goes on with it."""
    try:
        loop.greet()
        loop.run()
    except KeyboardInterrupt:
        loop.screen.notes.print()
    finally:
        if loop.screen.interactive and again:
            loop.screen.note(f"to go on: {shlex.join([*again, '--session', loop.session.id])}")


def _say_why(own: OwnServer) -> None:
    if own.failure:
        print_error(f"the server could not be started again: {own.failure.removeprefix(NOT_STARTED)}")


def _resume_line(
    target: str | None, model: str | None, store: str | None, api_key: str | None, tls: bool
) -> list[str]:
    """The command that finds the same server, or the same history; empty where history ends with the chat."""
    if target is None and (store or "").startswith("memory:"):
        return []
    words = ["pensieve", "chat"]
    for flag, value in (("--target", target), ("--model", model), ("--store", store)):
        words += [flag, value] if value is not None else []
    return words + (["--api-key", "KEY"] if api_key is not None else []) + (["--tls"] if tls else [])


def _fetch(model: str | None) -> None:
    """Get a model that is fetched once, with a bar: the server that is started for the chat is not heard."""
    if model == SMOLLM2:
        try:
            resolve_model(model)
        except ModelError as error:
            raise BadModel(str(error)) from error


def _own_server(model: str | None, store: str | None) -> OwnServer:
    arguments: list[str] = []
    for flag, value in (("--model", model), ("--store", store)):
        if value is not None:
            arguments += [flag, value]
    return OwnServer(*arguments)


def _check_address(target: str, api_key: str | None, tls: bool, *, interactive: bool) -> None:
    """Raises ClickException when no server answers there: a wrong address is not waited for as a lost server is."""
    policy = RetryPolicy(max_wait_s=FIRST_ANSWER_S)
    try:
        with Client(target, api_key=api_key, tls=tls, retry=policy, timeout=FIRST_ANSWER_S) as client:
            Screen(interactive=interactive).call_with_status(client.server_info)
    except PensieveError as error:
        if error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            raise click.ClickException(describe_unreachable(error, target)) from error
        raise
    except KeyboardInterrupt:
        raise click.Abort from None


def _open_session(
    client: Client, screen: Screen, wanted: str | None, new: bool, system: str | None
) -> Session:
    """The session that the options name, or the one that is picked. Raises NoSuchSession."""
    if wanted is not None and not new:
        session = sessions.find_session(client, wanted)
        if system is not None:
            raise click.UsageError(f"--system does not go with {session.name}, which exists already")
        return session
    if wanted is None and not new and system is None and screen.interactive:
        picked = _pick(client, screen)
        if picked is not None:
            return picked
    return client.create_session(session_id=wanted, system_prompt=system)


def _pick(client: Client, screen: Screen) -> Session | None:
    """One of the recent conversations; None for a new one."""
    found = screen.call_with_status(lambda: sessions.recent(client))
    if not found:
        return None
    sessions.show_recent(found, screen)
    prompt = Prompt(screen, None, lambda _: [])
    while True:
        try:
            typed = prompt.ask("go on with (a number), or Enter for a new conversation: ")
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
        except InvalidArgument:  # a message, typed a question too early
            screen.note("that is no number of the list and no id; a message comes after Enter")
