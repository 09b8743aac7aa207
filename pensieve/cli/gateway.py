"""``pensieve gateway``: the OpenAI HTTP API in a process of its own, in front of a server."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from pensieve.options.commands import tls_identity
from pensieve.options.serve import ServeOptions
from pensieve.options.table import HTTP_LIMITS
from pensieve.options.values import Parser, duration, is_loopback, names, origins, split_address

_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
_DOOR_FIELDS: Final = {
    "http_max_body": "max_body_bytes",
    "http_patience_s": "patience_s",
    "http_cors_origin": "cors_origins",
    "http_host": "hosts",
}
"""Field of ``ServeOptions`` → field of ``DoorSettings``."""


def _http_limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: add the HTTP options that ``pensieve serve`` has, too, without ``http-``."""
    defaults = ServeOptions()
    for option in reversed(HTTP_LIMITS):
        default = getattr(defaults, option.field)
        shown = "" if default is None else f"  [default: {default:g}{option.unit}]"
        command = click.option(
            f"--{option.name.removeprefix('http-')}",
            _DOOR_FIELDS[option.field],
            multiple=option.parse in (origins, names),
            callback=_callback_for(option.parse, default),
            metavar=option.metavar,
            help=option.help + shown,
        )(command)
    return command


def _callback_for(parse: Parser, default: object = None) -> Callable[..., object]:
    def parsed(_: click.Context, __: click.Parameter, value: object) -> object:
        try:
            return default if value in (None, ()) else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return parsed


@click.command(name="gateway", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", required=True, metavar="HOST:PORT", help="gRPC address of the server.")
@click.option(
    "--listen",
    default="127.0.0.1:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="HTTP address to listen on.",
)
@click.option("--tls", is_flag=True, help="Use TLS to --target, with the system's root certificates.")
@tls_identity()
@click.option("--tls-cert", type=_FILE, metavar="FILE", help="PEM certificate chain; enables HTTPS.")
@click.option("--tls-key", type=_FILE, metavar="FILE", help="PEM private key of --tls-cert.")
@click.option(
    "--insecure-i-know",
    is_flag=True,
    help="Allow a network address without TLS, or with a server that needs no keys, behind your own protection.",
)
@click.option(
    "--heartbeat",
    "heartbeat_s",
    default="10s",
    show_default=True,
    metavar="TIME",
    callback=_callback_for(duration(0.1, 3600)),
    help="Longest silence on a stream before a keep-alive message.",
)
@_http_limits
def gateway(
    target: str,
    listen: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure_i_know: bool,
    **given: Any,
) -> None:
    """Serve the OpenAI HTTP API in front of a Pensieve server.

    A gateway holds no state: any number can serve one server. Prints one line when ready, `ready
    http=HOST:PORT`.
    """
    door = importlib.import_module("pensieve.http.run")
    _address("target", target)
    host, port = _address("listen", listen)
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    on_loopback = is_loopback(listen)
    if not (on_loopback or insecure_i_know or tls_cert):
        raise click.UsageError(
            f"--listen: {listen} is not loopback; pass --tls-cert and --tls-key, "
            "or --insecure-i-know behind your own protection"
        )
    files = door.TlsFiles(tls_cert, tls_key) if tls_cert is not None else None
    try:
        if files is not None:
            files.context()  # fail before the ready line
    except OSError as error:
        raise click.UsageError(str(error)) from error
    given["max_body_bytes"] <<= 20
    given["tls_identity"] = str(given["tls_identity"] or "")
    for words in ("cors_origins", "hosts"):
        given[words] = tuple((given[words] or "").split())
    settings = door.DoorSettings(
        target, on_loopback=on_loopback, wants_keys=not (on_loopback or insecure_i_know), **given
    )
    if settings.wants_keys and asyncio.run(door.needs_no_key(settings)):
        raise click.UsageError(
            f"--listen: {listen} is not loopback, and the server at {target} requires no API key; start it with "
            "--api-keys, or pass --insecure-i-know behind your own protection"
        )
    try:
        listener = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        # Python adds the address to ``strerror``; resolver errors have negative numbers of their own.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise click.UsageError(f"--listen: cannot listen on {listen}: {why}") from error
    with listener:
        click.echo(f"ready http={listen.rpartition(':')[0]}:{listener.getsockname()[1]}")
        try:
            door.run_to_end(door.serve(settings, listener, files))
        except (OSError, ValueError) as error:
            raise click.ClickException(f"cannot serve: {error}") from error


def _address(option: str, value: str) -> tuple[str, int]:
    try:
        return split_address(value)
    except ValueError as error:
        raise click.UsageError(f"--{option}: {error}") from None
