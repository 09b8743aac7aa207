"""Entry point of the door of ``pensieve serve --http``: ``python -P -m pensieve.http.child``.

The process inherits a listening socket and one end of a socket pair, on which it talks with the server, one
word a line.

| from the server | effect |
|---|---|
| ``metrics`` | answers ``metrics N`` and the N bytes of the page |
| ``drain`` | takes no more calls; running ones end |
| ``finish`` | running calls end with an error |
| end of file | the process exits; if it is stuck, the kernel kills it |

| to the server | meaning |
|---|---|
| ``ready`` | calls are served |
| ``alive`` | every ``ALIVE_S`` while the event loop runs |
| ``away``, ``back`` | the service cannot be reached; it can again |

It ignores SIGINT, SIGTERM and SIGHUP, which a terminal or a service manager sends to both: the server acts on
them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from pathlib import Path
from typing import Final

import click
import msgspec
from prometheus_client import generate_latest

from pensieve.config import DoorSettings
from pensieve.http.app import HttpMetrics, make_app
from pensieve.http.common.door import HttpDoor, Readiness
from pensieve.http.run import ManagedServer, TlsFiles, run_to_end, running, tune_gc
from pensieve.lifeline import die_with_parent, leave_signals_to_parent
from pensieve.logs import log_options

log = logging.getLogger("pensieve.http.child")  # the same when this module is __main__


ALIVE_S: Final = 0.5
"""Well below the silence after which the server takes the door for hung."""
CHECK_INTERVAL_S: Final = 1.0
FAILURES_UNTIL_AWAY: Final = 2
"""Interval of checks whether the service can be reached, and failures in a row before ``away``."""


async def _obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: ManagedServer) -> None:
    """Obey the server's commands until it closes the connection."""
    door, metrics = server.config.app.state.door, server.config.app.state.metrics  # type: ignore[union-attr]
    assert isinstance(door, HttpDoor) and isinstance(metrics, HttpMetrics)
    while line := await reader.readline():
        match line.strip():
            case b"metrics":
                page = generate_latest(metrics.registry)
                writer.write(b"metrics %d\n%b" % (len(page), page))
            case b"drain":
                server.should_exit = True
            case b"finish":
                await door.close()
    server.should_exit = server.force_exit = True


async def _send_alive(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(ALIVE_S)
        writer.write(b"alive\n")


async def _send_availability(writer: asyncio.StreamWriter, readiness: Readiness) -> None:
    """Send ``away`` after ``FAILURES_UNTIL_AWAY`` failed checks in a row, and ``back`` when one succeeds again."""
    failures = 0
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        reached = not await readiness.unreachable()
        if reached and failures >= FAILURES_UNTIL_AWAY:
            writer.write(b"back\n")
        failures = 0 if reached else failures + 1
        if failures == FAILURES_UNTIL_AWAY:
            writer.write(b"away\n")


async def _serve(
    settings: DoorSettings, listener: socket.socket, control: socket.socket, tls: TlsFiles | None
) -> None:
    reader, writer = await asyncio.open_connection(sock=control)
    app = make_app(settings)
    async with running(app, listener, tls, settings.proxies) as server:
        tune_gc()
        writer.write(b"ready\n")
        commands = asyncio.create_task(_obey(reader, writer, server), name="control")
        commands.add_done_callback(_on_control_end)
        alive = asyncio.create_task(_send_alive(writer), name="life")
        service = asyncio.create_task(_send_availability(writer, app.state.door.readiness), name="service")
    for task in (alive, service, commands):
        task.cancel()
    writer.close()


def _on_control_end(task: asyncio.Task[None]) -> None:
    """Exit when the control task has failed: without its server the process would run for ever."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the door lost its server", exc_info=error)
        sys.exit(1)


@click.command()
@click.option("--listener", type=int, required=True)
@click.option("--control", type=int, required=True)
@click.option("--parent", type=int, required=True)
@click.option("--settings", required=True)
@click.option("--tls", nargs=2, type=click.Path(path_type=Path))
@click.option("--tls-client-ca", type=click.Path(path_type=Path))
@log_options
def main(
    listener: int,
    control: int,
    parent: int,
    settings: str,
    tls: tuple[Path, Path] | None,
    tls_client_ca: Path | None,
) -> None:
    """Run the door of a server. ``settings``: ``DoorSettings`` as JSON."""
    leave_signals_to_parent()
    if not die_with_parent(parent):
        return
    files = TlsFiles(*tls, tls_client_ca) if tls else None
    try:
        sockets = socket.socket(fileno=listener), socket.socket(fileno=control)
        run_to_end(_serve(msgspec.json.decode(settings, type=DoorSettings), *sockets, files))
    except (OSError, ValueError) as error:
        click.echo(f"the HTTP door: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
