"""The admin port as commands name it: its option, the key to it, and errors in one line; ``pensieve memory``."""

from __future__ import annotations

import json
import socket
from typing import Any, Final

import click

from pensieve import rpc_status
from pensieve.cli.output import binary_size, clean
from pensieve.client.admin import device_memory
from pensieve.config import parse_cache_size
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.options.serve import ServeOptions
from pensieve.options.values import address

TIMEOUT_S: Final = 5.0
"""A server that does not answer within this time counts as lost."""
ADVICE: Final = "the address is in the server's ready line: admin=…"


def default_admin() -> str | None:
    """Return the default address of a server's admin port; None if that is any free port."""
    usual = ServeOptions().admin
    return None if usual.endswith(":0") else usual


class AdminAddress(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions
    name = "HOST:PORT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            found = address(str(value).removeprefix("http://").rstrip("/"))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if found.endswith(":0"):
            self.fail("port 0 is not an address to connect to", param, ctx)
        return found


def admin_option(command: Any) -> Any:
    """Decorator: add ``--admin``."""
    return click.option(
        "--admin",
        type=AdminAddress(),
        default=default_admin(),
        show_default=True,
        help="Admin address of the server, from its ready line.",
    )(command)


def api_key_option(command: Any) -> Any:
    """Decorator: add ``--api-key``."""
    return click.option(
        "--api-key",
        metavar="KEY",
        envvar="PENSIEVE_API_KEY",
        help="API key with the scope admin, if the server has --api-keys.",
    )(command)


def require_admin(admin: str | None) -> str:
    """Return the address. Raises UsageError if none was given and there is no default."""
    if admin is None:
        raise click.UsageError(
            "--admin is required: HOST:PORT of the admin port, from the server's ready line"
        )
    return admin


def split_admin(address: str) -> tuple[str, int]:
    """Return host, without brackets, and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def unreachable(address: str, error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"{address} does not answer"
    return f"cannot connect to {address}: {error.strerror or error}"


def not_admin_port(address: str) -> str:
    return f"{address} is not an admin port of pensieve; {ADVICE}"


def refused(address: str, reason: str, message: str, *, unauthenticated: bool) -> str:
    """Describe a refusal by the server itself."""
    if unauthenticated:
        return f"{address} requires an API key with the scope admin: pass --api-key, or set PENSIEVE_API_KEY ({reason})"
    return f"{address}: {message} ({reason})"


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
