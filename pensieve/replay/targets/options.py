"""Options of ``pensieve replay`` for targets."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import click

from pensieve.replay.targets.base import Target
from pensieve.replay.targets.started_target import StartedTarget


def parse_target(value: str, api_key: str | None = None, *, name: str | None = None) -> Target:
    """Make a target from ``pensieve://HOST:PORT`` or ``http://HOST:PORT[/v1/responses]``. Raises BadParameter."""
    scheme, separator, address = value.partition("://")
    if scheme == "http":
        address = address.removesuffix("/v1/responses")
    host, colon, port = address.rpartition(":")
    if not (separator and host and colon and port.isdigit()) or scheme not in ("pensieve", "http"):
        raise click.BadParameter(
            f"{value!r} is not pensieve://HOST:PORT or http://HOST:PORT[/v1/responses]", param_hint="--target"
        )
    if scheme == "pensieve":
        from pensieve.replay.targets.grpc_target import PensieveTarget

        return PensieveTarget(address, name=name or value, api_key=api_key)
    try:
        from pensieve.replay.targets.openai_target import OpenAITarget
    except ImportError as error:
        raise click.UsageError(
            f"http:// targets need an extra: pip install 'pensieve[replay]' ({error})"
        ) from error
    return OpenAITarget(value, name=name, api_key=api_key)


def parse_start(value: str, api_key: str | None, *, name: str | None, timeout_s: float) -> Target:
    """Make a started target from ``[URL ][NAME=VALUE …]COMMAND``. Raises BadParameter."""
    first, _, rest = value.partition(" ")
    url = first if re.match(r"\w+://", first) else None
    command = rest if url else value
    if url:
        parse_target(url, api_key)  # report a bad address now
    if not command.strip():
        raise click.BadParameter(f"{value!r} has no command", param_hint="--start")
    return StartedTarget(
        command, url, lambda address: parse_target(address, api_key), name=name, timeout_s=timeout_s
    )


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for targets; the command gets them as ``targets``, a list of Target."""

    @click.option(
        "--target",
        "targets",
        multiple=True,
        metavar="pensieve://HOST:PORT|http://HOST:PORT[/v1/responses]",
        help="Pensieve, or a server with the OpenAI protocol, to replay against; with the path the server keeps the "
        "history. Repeat it to compare several, one after the other.",
    )
    @click.option(
        "--start",
        "starts",
        multiple=True,
        metavar="[http://HOST:PORT ][NAME=VALUE …]COMMAND",
        help="Start a target for its measurement and stop it afterwards, with these variables in its environment. It "
        "is up when it answers at the address; without an address, when it prints the ready line of `pensieve serve`.",
    )
    @click.option(
        "--start-timeout",
        type=click.FloatRange(0, min_open=True),
        default=600.0,
        metavar="S",
        show_default=True,
        help="How long a started target may take to be up.",
    )
    @click.option(
        "--name", "names", multiple=True, help="Name in the report: one for each --target, then each --start."
    )
    @click.option(
        "--api-key", envvar="PENSIEVE_API_KEY", show_envvar=True, help="Bearer token for the servers."
    )
    @functools.wraps(command)
    def wrapped(
        targets: tuple[str, ...], starts: tuple[str, ...], start_timeout: float, names: tuple[str, ...],
        api_key: str | None, **others: Any,
    ) -> Any:  # fmt: skip
        if not targets and not starts:
            raise click.UsageError("give a --target or a --start")
        if names and len(names) != len(targets) + len(starts):
            raise click.UsageError("give a --name for each --target and --start, or none")
        labels: Iterator[str | None] = iter(names or [None] * (len(targets) + len(starts)))
        found = [parse_target(value, api_key, name=next(labels)) for value in targets]
        found += [parse_start(value, api_key, name=next(labels), timeout_s=start_timeout) for value in starts]
        return command(targets=found, **others)

    return wrapped
