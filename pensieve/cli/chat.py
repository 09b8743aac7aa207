"""``pensieve chat``: a conversation in the terminal, with a given server or with one of its own.

On a terminal the answer appears as it is made. When stdin is not a terminal each line is a turn, and each answer goes
to stdout once it is in history, so that what a pipe carries is never taken back by a restart.
Ctrl-C during an answer stops the answer, keeps what was shown, and stays in the program.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import click
from rich.console import Console
from rich.table import Table

from pensieve.cli import candidates, completion
from pensieve.client import Client, FinishReason, Piece, Role, Session, Turn, TurnState, TurnStream
from pensieve.client import SamplingOptions as Sampling
from pensieve.errors import NotFound, PensieveError
from pensieve.options.completion import models
from pensieve.spawn import ServerProcess, SpawnError

log = logging.getLogger(__name__)

PROMPT = "[bold cyan]you>[/] "


@click.command(name="chat", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--target", metavar="HOST:PORT", help="Server to talk to; without it one is started for this chat."
)
@click.option(
    "--model",
    metavar="NAME",
    help="Model folder, hub id or `demo`, for the server that is started.",
    shell_complete=models,
)
@click.option("--store", metavar="URL", help="History store of the server that is started.")
@click.option(
    "--session",
    "session_id",
    metavar="ID",
    help="Session to go on with, or to make under this id.",
    shell_complete=completion.sessions,
)
@click.option("--system", metavar="TEXT", help="System prompt of a new session.")
@click.option("--temperature", type=click.FloatRange(min=0), metavar="T", help="0 is greedy.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest answer, in tokens.")
@click.option("--api-key", metavar="KEY", help="Credential for --target.")
@click.option("--tls", is_flag=True, help="TLS towards --target, with the system's root certificates.")
def chat(
    target: str | None,
    model: str | None,
    store: str | None,
    session_id: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
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
    if target is None and (api_key is not None or tls):
        raise click.UsageError("--api-key and --tls go with --target")
    sampling = Sampling()
    if temperature is not None:
        sampling["temperature"] = temperature
    if max_tokens is not None:
        sampling["max_output_tokens"] = max_tokens
    try:
        with contextlib.ExitStack() as stack:
            if target is None:
                target = stack.enter_context(_own_server(model, store)).target
            client = stack.enter_context(Client(target, api_key=api_key, tls=tls))
            session = _open_session(client, session_id, system)
            ChatLoop(session, sampling, interactive=sys.stdin.isatty()).run()
    except (PensieveError, SpawnError) as error:
        raise click.ClickException(str(error)) from error


def _own_server(model: str | None, store: str | None) -> ServerProcess:
    arguments = ["--admin", "127.0.0.1:0"]
    for flag, value in (("--model", model), ("--store", store)):
        if value is not None:
            arguments += [flag, value]
    return ServerProcess(*arguments, start_timeout_s=600.0)


def _open_session(client: Client, session_id: str | None, system: str | None) -> Session:
    """The named session if it exists, a new one otherwise."""
    if session_id is not None:
        session = client.session(session_id)
        try:
            session.refresh()
        except NotFound as error:
            if error.reason != "SESSION_NOT_FOUND":
                raise
        else:
            if system is not None:
                raise click.UsageError(f"--system does not go with {session.name}, which exists already")
            return session
    return client.create_session(session_id=session_id, system_prompt=system)


class ChatLoop:
    """The loop. Answers and what a command was asked for go to stdout, everything else to stderr."""

    def __init__(self, session: Session, sampling: Sampling, *, interactive: bool) -> None:
        self._session = session
        self._sampling = sampling
        self._interactive = interactive
        self._out = Console(highlight=False, soft_wrap=True)
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True, style="dim")
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/receipt": (self._receipt, "where the last turn's context came from"),
            "/history": (self._history, "the conversation so far"),
            "/regenerate": (self._regenerate, "another answer to the last question"),
            "/candidates": (
                lambda n: candidates.set_number(n, self._sampling, self._notes),
                "[N]  draw N answers to each question from here on",
            ),
            "/choose": (
                lambda k: candidates.choose(k, self._session, self._out, self._notes),
                "K  go on from answer K of the last turn",
            ),
            "/rewind": (self._rewind, "[N]  forget the last N turns (1)"),
            "/fork": (self._fork, "go on in a copy; the original stays as it is"),
            "/help": (self._help, "this"),
            "/quit": (self._quit, "leave (also Ctrl-D)"),
        }
        self._running = True
        self._is_warm = False
        """A turn has just ended: what it left is where the next one wants it."""

    def run(self) -> None:
        """Until /quit or the end of input. Raises PensieveError when not interactive: a pipe must not go on."""
        if self._interactive:
            self._notes.print(f"{self._session.name} — /help shows the commands, Ctrl-C stops an answer")
        for line in self._lines():
            try:
                self._handle(line.strip())
            except PensieveError as error:
                if not self._interactive:
                    raise
                self._notes.print(f"{error}", style="red", markup=False)
            if not self._running:
                return

    def _lines(self) -> Iterator[str]:
        if not self._interactive:
            yield from sys.stdin
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # Line editing for input().
        while True:
            self._warm()
            try:
                yield self._out.input(PROMPT)
            except KeyboardInterrupt:
                self._out.print()
                self._notes.print("/quit or Ctrl-D leaves")
            except EOFError:
                self._out.print()
                return

    def _handle(self, line: str) -> None:
        if not line:
            return
        if not line.startswith("/"):
            self._answer(self._session.stream(line, **self._sampling))
            return
        name, _, argument = line.partition(" ")
        if name not in self._commands:
            self._notes.print(f"no command {name}; /help shows them", markup=False)
            return
        self._commands[name][0](argument.strip())

    def _warm(self) -> None:
        """While the user types, let the server bring what the next turn needs. Beside the prompt, which never waits."""
        info = self._session.info
        has_history = self._session.last_turn is not None or (info is not None and info.item_count > 0)
        if has_history and not self._is_warm:
            threading.Thread(target=_warm, args=(self._session,), name="warm", daemon=True).start()
        self._is_warm = False

    # -- answers

    def _answer(self, stream: TurnStream) -> None:
        several = self._sampling.get("candidates", 1) > 1  # side by side they could not be read
        with stream, _interrupt_stops(stream):
            while (piece := next(stream, None)) is not None:
                if not several:
                    self._show(piece)
        if not stream.done or stream.turn.state is TurnState.DISCARDED:
            self._notes.print("(stopped; nothing was kept)")
            return
        turn = stream.turn
        self._is_warm = True
        if self._interactive and not several:
            self._out.print()  # behind the pieces
        if several or turn.candidates:
            candidates.show(turn, self._out)
        elif not self._interactive:
            click.echo(turn.text)
        if not self._interactive:
            return
        if turn.finish_reason not in (FinishReason.EOS, FinishReason.STOP_SEQUENCE, FinishReason.STOP_TOKEN):
            self._notes.print(f"({_reason(turn)})")
        self._notes.print(_summary(turn))

    def _show(self, piece: Piece) -> None:
        if not self._interactive or piece.candidate:
            return
        if piece.restarted:
            self._out.print()
            self._notes.print("(the server had to start this answer again)")
        self._out.out(piece.text, end="", highlight=False)

    # -- commands

    def _receipt(self, _: str) -> None:
        turn = self._session.last_turn
        if turn is None:
            self._notes.print("no turn yet")
            return
        usage = turn.usage
        table = Table(title=f"turn of revision {turn.revision}", show_header=False)
        for label, value in (
            ("context", f"{usage.context_tokens} tokens"),
            ("  on the device", f"{usage.gpu_cached_tokens}"),
            ("  swapped in", f"{usage.swapped_in_tokens}"),
            ("  recomputed", f"{usage.recomputed_tokens}"),
            ("  new", f"{usage.new_tokens}"),
            ("answer", f"{usage.output_tokens} tokens, {_reason(turn)}"),
            ("queue", f"{usage.queue_s * 1e3:.1f} ms"),
            ("restore", f"{usage.restore_s * 1e3:.1f} ms"),
            ("prefill", f"{usage.prefill_s * 1e3:.1f} ms"),
            ("decode", f"{usage.decode_s * 1e3:.1f} ms"),
            ("seed", f"{turn.seed}"),
        ):
            table.add_row(label, value)
        self._out.print(table)

    def _history(self, _: str) -> None:
        for item in self._session.items():
            who = item.role.name.lower() if isinstance(item.role, Role) else f"role {item.role}"
            self._out.out(f"{item.item} {who}: {item.text}", highlight=False)

    def _regenerate(self, _: str) -> None:
        last = self._session.last_user_item()
        self._answer(self._session.stream(replace_after_item=last, **self._sampling))

    def _rewind(self, argument: str) -> None:
        if argument and not argument.isdecimal():
            self._notes.print("/rewind takes the number of turns to forget")
            return
        items = self._session.items()
        starts = [item.item for item in items if item.role == Role.USER]
        count = min(int(argument or 1), len(starts))
        if count == 0:
            self._notes.print("nothing to forget")
            return
        keep = [item.item for item in items if item.item < starts[-count]]
        self._session.rewind(to_item=max(keep, default=0))
        self._notes.print(f"forgot {count} of {len(starts)} turns")

    def _fork(self, _: str) -> None:
        origin = self._session
        self._session = origin.fork()
        self._notes.print(f"now in {self._session.name}, a copy of {origin.name}")

    def _help(self, _: str) -> None:
        for name, (_function, text) in self._commands.items():
            self._notes.print(f"{name:12} {text}", markup=False)

    def _quit(self, _: str) -> None:
        self._running = False


def _warm(session: Session) -> None:
    try:
        log.debug("warmed: %s", session.warm())
    except PensieveError as error:
        log.debug("not warmed: %s", error)  # A wish: the next turn only takes longer.


def _reason(turn: Turn) -> str:
    known = isinstance(turn.finish_reason, FinishReason)
    return turn.finish_reason.name.lower() if known else f"reason {turn.finish_reason}"  # type: ignore[union-attr]


def _summary(turn: Turn) -> str:
    usage = turn.usage
    return (
        f"{usage.context_tokens} tokens of context = {usage.gpu_cached_tokens} on the device + "
        f"{usage.swapped_in_tokens} swapped in + {usage.recomputed_tokens} recomputed + {usage.new_tokens} new"
    )


@contextlib.contextmanager
def _interrupt_stops(stream: TurnStream) -> Iterator[None]:
    """Ctrl-C ends the answer, keeping what was received; a second one is an ordinary KeyboardInterrupt.

    The handler only starts a thread: it interrupts a read of the very connection that the cancel call needs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only.
        return
    stopper = threading.Thread(target=_stop, args=(stream,), name="stop-answer")
    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stopper.start()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if stopper.ident is not None:
            stopper.join()


def _stop(stream: TurnStream) -> None:
    shown = stream.token_count
    try:
        stream.cancel(keep="partial" if shown else "nothing", keep_output_tokens=shown or None)
    except PensieveError:
        stream.close()  # The server had not begun, or cannot be asked: its grace time ends the turn.
