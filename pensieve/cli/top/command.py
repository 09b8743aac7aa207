"""``pensieve top``: the command line, and the live screen: one thread asks the feed, the main one draws and reads keys.

However it ends, the terminal is given back as it was.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType

import click
from rich.console import Console, Group
from rich.live import Live

from pensieve.cli import output
from pensieve.cli.top.feed import AdminFeed, FeedError, decode
from pensieve.cli.top.screen import ORDERS, TopFrame, View, render
from pensieve.feed import MAX_LISTED, StateDocument
from pensieve.options.serve import ServeOptions
from pensieve.options.values import address

REDRAW_S = 1.0
"""At least so often, for the clock of a server that is gone."""


def blocks(console: Console) -> bool:
    """Whether the terminal shows block characters."""
    return console.encoding.lower().startswith("utf")


class FeedThread(threading.Thread):
    """Asks the feed again and again. ``wake`` becomes readable when there is news."""

    def __init__(self, feed: AdminFeed, first: StateDocument, view: View, interval_s: float) -> None:
        super().__init__(name="feed", daemon=True)
        self._feed = feed
        self._view = view
        self._interval_s = interval_s
        self._again = threading.Event()
        self.latest = first
        self.trouble: tuple[float, str] | None = None
        """Since when there has been no answer, and why."""
        self.wake, self._told = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._told, False)

    @property
    def wake_fd(self) -> int:
        """What a byte is written to in order to wake."""
        return self._told

    def ask_now(self) -> None:
        """Without waiting for the interval to pass."""
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
                os.write(self._told, b".")


def watch(feed: AdminFeed, first: StateDocument, view: View, interval_s: float, console: Console) -> None:
    """Until a key ends it. Raises KeyboardInterrupt, and SystemExit on SIGTERM and SIGHUP."""
    thread = FeedThread(feed, first, view, interval_s)
    with (
        _signals(thread.wake_fd),
        _single_keys() as keyboard,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        thread.start()
        while not view.done:
            trouble = thread.trouble
            look = TopFrame(
                thread.latest,
                console.width,
                blocks(console),
                time.monotonic() - trouble[0] if trouble is not None else None,
                trouble[1] if trouble is not None else "",
            )
            lines = render(look, view, console.height)
            live.update(Group(*lines), refresh=True)
            _wait(thread, keyboard, view)


def _wait(thread: FeedThread, keyboard: int | None, view: View) -> None:
    """For news, a key, a new size of the window, or time to pass."""
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
    """Keys come one by one and unseen; None: there is no keyboard."""
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
    """What would end the program leaves through ``finally``; a new size of the window wakes the loop."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None] | signal.Handlers] = {
        signal.SIGTERM: leave,
        signal.SIGHUP: leave,
        signal.SIGWINCH: lambda signum, frame: None,
        signal.SIGTSTP: signal.SIG_IGN,  # the shell would get the terminal as it is now
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
"""On a plain page."""
PLAIN_WIDTH = 120
"""Of its bars and figures where nothing has a width; names and labels come on top."""


def default_admin() -> str | None:
    """Where a server has its admin port if it was not told where."""
    usual = ServeOptions().admin
    return None if usual.endswith(":0") else usual


class AdminAddress(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions
    """HOST:PORT, with ``http://`` before it or without."""

    name = "HOST:PORT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            found = address(str(value).removeprefix("http://").rstrip("/"))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if found.endswith(":0"):
            self.fail("port 0 is no address to ask at", param, ctx)
        return found


@click.command(name="top", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--admin",
    type=AdminAddress(),
    default=default_admin(),
    show_default=True,
    help="Admin port of the server, as its ready line names it.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=3600),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds from one look to the next.",
)
@click.option(
    "--sort",
    type=click.Choice(list(ORDERS)),
    default="activity",
    show_default=True,
    help="Which sessions come first.",
)
@click.option("--once", is_flag=True, help="One plain page, then end; so it is without a terminal.")
@click.option(
    "--json", "as_json", is_flag=True, help="The feed's document, as docs/page.md has it, then end."
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="PENSIEVE_API_KEY",
    help="A key with the scope admin, where the server has --api-keys.",
)
def top(
    admin: str | None, interval: float, sort: str, once: bool, as_json: bool, api_key: str | None
) -> None:
    """Show what a server is doing: load, latencies, tiers, and where each session's chunks lie.

    Keys: q quits, s sorts, / filters, j and k scroll.
    """
    if admin is None:
        raise click.UsageError(
            "--admin is wanted: HOST:PORT of an admin port, as a server's ready line names it"
        )
    feed = AdminFeed(admin, api_key)
    view = View(order=sort)
    console = output.stdout()
    try:
        if as_json:
            document = feed.document(MAX_LISTED)
            decode(document, admin)  # whatever else answers there is refused
            click.echo(document)
            return
        live = sys.stdout.isatty() and not console.is_dumb_terminal and not once
        view.page = console.height if live else PLAIN_SESSIONS
        first = feed.state(view.wanted)
    except FeedError as error:
        raise click.ClickException(str(error)) from error
    if live:
        watch(feed, first, view, interval, console)
        return
    whole = console.width == output.UNBOUNDED_WIDTH
    look = TopFrame(first, PLAIN_WIDTH if whole else console.width, blocks(console), whole=whole)
    for line in render(look, view):
        console.print(line, no_wrap=True, overflow="crop")
