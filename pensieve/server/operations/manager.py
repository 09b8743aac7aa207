"""What a service manager is told of this server, in systemd's protocol: sd_notify(3), a datagram for each change.

It hears that calls are taken, that the server drains, and for its watchdog that the event loop turns. Without a manager
nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from pensieve.machine import Manager

log = logging.getLogger(__name__)


class ManagerLink:
    """The way to it. A manager that does not listen is logged, and the server goes on."""

    def __init__(self, manager: Manager | None) -> None:
        self._manager = manager

    def serving(self) -> None:
        """Calls are taken from now on: what waits for this service may be started."""
        self._tell("READY=1")

    def draining(self) -> None:
        """The end was asked for."""
        self._tell("STOPPING=1")

    async def turn(self) -> None:
        """Say twice in each period of the watchdog that the loop turns, until cancelled. Returns if there is none."""
        while self._manager is not None and self._manager.watchdog_s is not None:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self._manager.watchdog_s / 2)

    def _tell(self, what: str) -> None:
        if self._manager is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(what.encode(), self._manager.address)
            except OSError as error:
                log.warning("the service manager was not told %s: %s", what, error)
