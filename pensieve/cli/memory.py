"""``pensieve memory``: show or change the size of a server's device tier, by AdminService on its admin port."""

from __future__ import annotations

import json
import socket
from typing import Final

import click

from pensieve import rpc_status
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
from pensieve.cli.output import binary_size, clean
from pensieve.client.admin import device_memory
from pensieve.config import parse_cache_size
from pensieve.errors import InvalidArgument, PensieveError

ANSWER_S: Final = 30.0
"""Longest wait for an answer. The engine gives it between two steps."""


@click.command(name="memory", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("size", required=False)
@admin_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; sizes are in bytes.")
@api_key_option
def memory(size: str | None, admin: str | None, as_json: bool, api_key: str | None) -> None:
    """Show the size of a server's device cache, or set it to SIZE: 16GiB, 512MiB, 4096tokens.

    SIZE lies in the range that the server was started with (--device-cache FLOOR..CEILING). The command returns at
    once; the memory that is held follows within seconds, except for what running turns use.
    """
    admin = require_admin(admin)
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise click.UsageError("--api-key: must consist of printable ASCII characters, such as ck_ID_SECRET")
    if size is not None:
        try:
            parse_cache_size(size, 1)
        except ValueError as error:
            raise click.UsageError(f"SIZE: {error}") from None
    sizes = _call(admin, key, size)
    if as_json:
        click.echo(json.dumps({"device": sizes}))
        return
    texts = {name: binary_size(number) for name, number in sizes.items()}
    width = max(map(len, texts.values()))
    for name, text in texts.items():
        click.echo(f"{name:<7}  {text:>{width}}")


def _call(admin: str, key: str, size: str | None) -> dict[str, int]:
    """Return the sizes. Raises ClickException, or UsageError for a refused size."""
    try:  # gRPC does not say in the system's words why it cannot connect
        socket.create_connection(split_admin(admin), TIMEOUT_S).close()
    except OSError as error:
        raise click.ClickException(f"{unreachable(admin, error)}; {ADVICE}") from error
    try:
        return device_memory(admin, size, api_key=key, timeout_s=ANSWER_S)
    except PensieveError as error:
        raise _exception(admin, size, error) from error


def _exception(admin: str, size: str | None, error: PensieveError) -> click.ClickException:
    message = clean(error.message, lines=False)
    if isinstance(error, InvalidArgument) and error.violations:
        return click.UsageError(f"SIZE {size}: {clean(error.violations[0][1], lines=False)}")
    if error.reason == "DEVICE_CACHE_FIXED":
        return click.UsageError(f"SIZE {size}: {message}")
    if error.reason.startswith(rpc_status.TRANSPORT):
        if error.metadata["grpc_code"] == "DEADLINE_EXCEEDED":
            return click.ClickException(f"{unreachable(admin, TimeoutError())}; {ADVICE}")
        return click.ClickException(not_admin_port(admin))
    unauthenticated = error.code == "UNAUTHENTICATED"
    return click.ClickException(refused(admin, error.reason, message, unauthenticated=unauthenticated))
