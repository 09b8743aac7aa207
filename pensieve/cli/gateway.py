"""``pensieve gateway``: the HTTP door as a process of its own, in front of a server."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from pathlib import Path
from typing import Final

import click

from pensieve.options.values import split_address

_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


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
@click.option(
    "--max-body",
    default="4",
    show_default=True,
    type=click.IntRange(1, 64),
    metavar="MIB",
    help="Largest request.",
)
@click.option(
    "--patience",
    default=20.0,
    show_default=True,
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long a call waits for a server that is away or busy, before it is answered 503 or 429.",
)
@click.option(
    "--cors-origin", multiple=True, metavar="ORIGIN", help="Let pages of this origin call; repeatable."
)
def gateway(
    target: str,
    listen: str,
    tls: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    max_body: int,
    patience: float,
    cors_origin: tuple[str, ...],
) -> None:
    """Serve OpenAI's HTTP protocols from a Pensieve server.

    Holds no state: any number may stand in front of one server. Prints one line, `ready http=HOST:PORT`.
    """
    door = importlib.import_module("pensieve.http.run")
    _address("target", target)
    host, port = _address("listen", listen)
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    files = door.TlsFiles(tls_cert, tls_key) if tls_cert is not None else None
    settings = door.DoorSettings(
        target, tls, max_body_bytes=int(max_body) << 20, patience_s=patience, cors_origins=cors_origin
    )
    try:
        listener = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        # Python adds the address to ``strerror``; errors of names have numbers of their own.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise click.UsageError(f"--listen: cannot listen on {listen}: {why}") from error
    with listener:
        click.echo(f"ready http={listen.rpartition(':')[0]}:{listener.getsockname()[1]}")
        try:
            with asyncio.Runner(loop_factory=door.loop_factory()) as runner:
                runner.run(door.serve(settings, listener, files))
        except (OSError, ValueError) as error:
            raise click.ClickException(f"cannot serve: {error}") from error


def _address(option: str, value: str) -> tuple[str, int]:
    try:
        return split_address(value)
    except ValueError as error:
        raise click.UsageError(f"--{option}: {error}") from None
