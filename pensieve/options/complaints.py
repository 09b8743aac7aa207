"""The form of a line that tells what went wrong: the command as it was typed, a colon, and what is wrong."""

from __future__ import annotations

import click


def complain(message: str, command: str | None = None) -> None:
    """Write such a line to stderr. ``command``: such as ``pensieve store check``; by default the one that runs."""
    if command is None:
        command = click.get_current_context().command_path
    click.echo(f"{command}: {message}", err=True)
