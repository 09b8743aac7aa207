"""``pensieve top``: the command line."""

from __future__ import annotations

import sys

import click

from pensieve.cli import output
from pensieve.cli.top.feed import AdminFeed, FeedError, decode
from pensieve.cli.top.screen import TopLook, screen
from pensieve.cli.top.terminal import blocks, watch
from pensieve.cli.top.view import ORDERS, View
from pensieve.feed import MOST_LISTED
from pensieve.options.serve import ServeOptions
from pensieve.options.values import address

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
            document = feed.document(MOST_LISTED)
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
    whole = console.width == output.UNBOUND
    look = TopLook(first, PLAIN_WIDTH if whole else console.width, blocks(console), whole=whole)
    for line in screen(look, view):
        console.print(line, no_wrap=True, overflow="crop")
