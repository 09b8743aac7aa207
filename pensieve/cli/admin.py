"""The admin port as commands name it: its option, the key to it, and errors in one line."""

from __future__ import annotations

from typing import Any, Final

import click

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
