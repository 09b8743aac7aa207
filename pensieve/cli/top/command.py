"""``pensieve top``: one thread polls the feed, the main thread draws and reads keys.

However the program ends, the terminal is restored.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from http import HTTPStatus
from types import FrameType
from typing import Final

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live

from pensieve.cli import output
from pensieve.cli.admin import (
    ADVICE,
    TIMEOUT_S,
    admin_option,
    api_key_option,
    not_admin_port,
    refused,
    require_admin,
    split_admin,
    unreachable,
)
from pensieve.cli.top.screen import ORDERS, TopFrame, View, render
from pensieve.feed import MAX_LISTED, SCHEMA, StateDocument

MAX_BYTES: Final = 1 << 26


class FeedError(Exception):
    """No state is available. The message is one line."""


class AdminFeed:
    """Client of one admin port. Thread-safe."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self.address = address
        self._host, self._port = split_admin(address)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def state(self, limit: int) -> StateDocument:
        """Return the state with the ``limit`` most active sessions. Raises FeedError."""
        return decode(self.document(limit), self.address)

    def document(self, limit: int) -> bytes:
        """Return the same as the received JSON. Raises FeedError."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.connect()
            # The port answers only requests for its address, not for a name that a browser may have resolved to it.
            connection.request(
                "GET", f"/state.json?limit={limit}", headers={"Host": _peer(connection.sock), **self._headers}
            )
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES)
        except OSError as error:
            raise FeedError(unreachable(self.address, error)) from error
        except (http.client.HTTPException, ValueError) as error:
            raise FeedError(not_admin_port(self.address)) from error
        finally:
            connection.close()
        if answer.status != HTTPStatus.OK:
            raise FeedError(_error_line(self.address, answer.status, body))
        return body


def decode(document: bytes, address: str) -> StateDocument:
    """Decode a state. Raises FeedError for another document or schema."""
    try:
        state = msgspec.json.decode(document, type=StateDocument)
    except msgspec.DecodeError as error:
        raise FeedError(not_admin_port(address)) from error
    if state.schema != SCHEMA:
        raise FeedError(f"{address} sends {state.schema!r}; this version of pensieve reads {SCHEMA!r}")
    return state


def _peer(sock: socket.socket) -> str:
    host = str(sock.getpeername()[0])
    return f"[{host}]" if ":" in host else host


def _error_line(address: str, status: int, body: bytes) -> str:
    try:
        said = json.loads(body)
        reason, message = str(said["reason"]), str(said["message"])
    except (ValueError, KeyError, TypeError):
        return not_admin_port(address)
    return refused(address, reason, message, unauthenticated=status == HTTPStatus.UNAUTHORIZED)


REDRAW_S = 1.0
"""Longest time between redraws, for the clock of a server that is lost."""


def blocks(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


class FeedThread(threading.Thread):
    """Polls the feed. ``wake`` becomes readable when there is news."""

    def __init__(self, feed: AdminFeed, first: StateDocument, view: View, interval_s: float) -> None:
        super().__init__(name="feed", daemon=True)
        self._feed = feed
        self._view = view
        self._interval_s = interval_s
        self._again = threading.Event()
        self.latest = first
        self.trouble: tuple[float, str] | None = None
        """Monotonic time since which there has been no answer, and why."""
        self.wake, self._wake_write_fd = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._wake_write_fd, False)

    @property
    def wake_fd(self) -> int:
        """File descriptor to write a byte to in order to wake the loop."""
        return self._wake_write_fd

    def ask_now(self) -> None:
        self._again.set()

    def run(self) -> None:
        while True:
            self._again.wait(self._interval_s)
            self._again.clear()
            try:
                self.latest = self._feed.state(self._view.wanted)
                self.trouble = None
            except FeedError as error:
                since = self.trouble[0] if self.trouble is not None else time.monotonic()
                self.trouble = since, str(error)
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
                os.write(self._wake_write_fd, b".")


def watch(feed: AdminFeed, first: StateDocument, view: View, interval_s: float, console: Console) -> None:
    """Show the live screen until a key ends it. Raises KeyboardInterrupt, and SystemExit on SIGTERM and SIGHUP."""
    thread = FeedThread(feed, first, view, interval_s)
    with (
        _signals(thread.wake_fd),
        _single_keys() as keyboard,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        thread.start()
        while not view.done:
            trouble = thread.trouble
            frame = TopFrame(
                thread.latest,
                console.width,
                blocks(console),
                time.monotonic() - trouble[0] if trouble is not None else None,
                trouble[1] if trouble is not None else "",
            )
            lines = render(frame, view, console.height)
            live.update(Group(*lines), refresh=True)
            _wait(thread, keyboard, view)


def _wait(thread: FeedThread, keyboard: int | None, view: View) -> None:
    """Wait for news, a key, a resize of the window, or the redraw interval."""
    watched = [thread.wake, *([keyboard] if keyboard is not None else [])]
    ready, _, _ = select.select(watched, [], [], REDRAW_S)
    if thread.wake in ready:
        os.read(thread.wake, 4096)
    if keyboard is not None and keyboard in ready:
        typed = os.read(keyboard, 1024)
        if not typed:
            view.done = True  # the terminal is gone
        wanted = view.wanted
        view.on_keys(typed.decode(errors="replace"))
        if view.wanted > wanted:
            thread.ask_now()


@contextlib.contextmanager
def _single_keys() -> Iterator[int | None]:
    """Read single keys without echo; None if there is no keyboard."""
    if not sys.stdin.isatty():
        yield None
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _signals(wake_fd: int) -> Iterator[None]:
    """Turn signals that end the program into SystemExit, and wake the loop when the window is resized."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None] | signal.Handlers] = {
        signal.SIGTERM: leave,
        signal.SIGHUP: leave,
        signal.SIGWINCH: lambda signum, frame: None,
        signal.SIGTSTP: signal.SIG_IGN,  # otherwise the shell would get the terminal in this mode
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    wake_before = signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wake_before)
        for number, handler in before.items():
            signal.signal(number, handler)


PLAIN_SESSIONS = 20
PLAIN_WIDTH = 120
"""Width of a plain page's bars and figures if the output has no width. Names and labels are added to it."""


@click.command(name="top", context_settings={"help_option_names": ["-h", "--help"]})
@admin_option
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=3600),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between updates.",
)
@click.option(
    "--sort",
    type=click.Choice(list(ORDERS)),
    default="activity",
    show_default=True,
    help="Order of the sessions.",
)
@click.option("--once", is_flag=True, help="Print one plain page and exit; the default without a terminal.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the feed's JSON document (docs/page.md) and exit."
)
@api_key_option
def top(
    admin: str | None, interval: float, sort: str, once: bool, as_json: bool, api_key: str | None
) -> None:
    """Show a server's activity: load, latencies, tiers, and where each session's chunks are.

    Keys: q quits, s changes the order, / filters, j and k scroll.
    """
    admin = require_admin(admin)
    feed = AdminFeed(admin, api_key)
    view = View(order=sort)
    console = output.stdout()
    try:
        if as_json:
            document = feed.document(MAX_LISTED)
            decode(document, admin)  # refuses documents of other programs
            click.echo(document)
            return
        live = sys.stdout.isatty() and not console.is_dumb_terminal and not once
        view.page = console.height if live else PLAIN_SESSIONS
        first = feed.state(view.wanted)
    except FeedError as error:
        unreachable = isinstance(error.__cause__, OSError)
        raise click.ClickException(f"{error}; {ADVICE}" if unreachable else str(error)) from error
    if live:
        watch(feed, first, view, interval, console)
        return
    whole = console.width == output.UNBOUNDED_WIDTH
    frame = TopFrame(first, PLAIN_WIDTH if whole else console.width, blocks(console), whole=whole)
    for line in render(frame, view):
        console.print(line, no_wrap=True, overflow="crop")
