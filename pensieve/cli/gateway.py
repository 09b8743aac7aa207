"""``pensieve gateway``: the HTTP door as a process of its own, in front of a server."""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from pensieve.options.door import LIMITS, origins
from pensieve.options.option import Option
from pensieve.options.serve import ServeOptions

_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


def _limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the flags of ``pensieve serve`` that every door has, without ``http-`` before their names."""
    defaults = ServeOptions()
    for option in reversed(LIMITS):
        default = getattr(defaults, option.field)
        shown = "" if default is None else f"  [default: {default:g}{option.unit}]"
        command = click.option(
            f"--{option.name.removeprefix('http-')}",
            option.field,
            multiple=option.parse is origins,
            callback=_parsed_by(option, default),
            metavar=option.metavar,
            help=option.help + shown,
        )(command)
    return command


def _parsed_by(option: Option, default: object) -> Callable[..., object]:
    def parsed(_: click.Context, __: click.Parameter, value: object) -> object:
        try:
            return default if value in (None, ()) else option.parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return parsed


@click.command(name="gateway", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", required=True, metavar="HOST:PORT", help="The server to stand in front of.")
@click.option(
    "--listen",
    default="127.0.0.1:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to take HTTP calls.",
)
@click.option("--tls", is_flag=True, help="TLS towards --target, with the system's root certificates.")
@click.option("--tls-cert", type=_FILE, metavar="FILE", help="PEM certificate chain: take calls over TLS.")
@click.option("--tls-key", type=_FILE, metavar="FILE", help="PEM private key.")
@_limits
def gateway(
    target: str,
    listen: str,
    tls: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    http_max_body: int,
    http_patience_s: float,
    http_cors_origin: str | None,
) -> None:
    """Serve OpenAI's HTTP protocols from a Pensieve server.

    Holds no state: any number may stand in front of one server. Prints one line, `ready http=HOST:PORT`.
    """
    try:
        door = importlib.import_module("pensieve.http.run")
    except ImportError as error:
        raise click.ClickException(f"cannot load the door: {error}; pip install 'pensieve[http]'") from error
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        raise click.UsageError(f"--listen: {listen!r} is not HOST:PORT")
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    files = door.TlsFiles(tls_cert, tls_key) if tls_cert is not None else None
    settings = door.DoorSettings(
        target,
        tls,
        max_body_bytes=http_max_body << 20,
        patience_s=http_patience_s,
        cors_origins=tuple((http_cors_origin or "").split()),
    )
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), backlog=2048)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {listen}: {error.strerror}") from error
    with listener:
        click.echo(f"ready http={host}:{listener.getsockname()[1]}")
        try:
            with asyncio.Runner(loop_factory=door.loop_factory()) as runner:
                runner.run(door.serve(settings, listener, files))
        except (OSError, ValueError) as error:
            raise click.ClickException(f"cannot serve: {error}") from error
