"""Background work of a server: erase expired sessions, measure event loop lag, reap orphans, notify the service
manager."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Collection
from typing import Final

from pensieve.errors import PensieveError
from pensieve.lifeline import process_fields
from pensieve.machine import ServiceManager
from pensieve.server.failures import report_bug
from pensieve.store import HistoryStore

log = logging.getLogger(__name__)

PURGE_INTERVAL_S: Final = 60.0
"""An expired session is unreachable at once; its content may stay on disk this much longer."""

LAG_INTERVAL_S: Final = 0.25

ORPHAN_INTERVAL_S: Final = 5.0
"""Far longer than any code here takes to wait for its own child."""


async def purge_forever(store: HistoryStore, interval_s: float = PURGE_INTERVAL_S) -> None:
    """Erase expired sessions every ``interval_s`` until cancelled. After any error, retry in the next round."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            purged = await store.purge_expired()
        except PensieveError as error:
            log.warning("expired sessions not erased: %s", error.reason)
            continue
        except Exception as error:
            report_bug(error, "erasing expired sessions")
            continue
        if purged:
            log.info("expired sessions erased: %d", purged)


async def watch_lag(observe: Callable[[float], None], interval_s: float = LAG_INTERVAL_S) -> None:
    """Report to ``observe``, every ``interval_s`` until cancelled, how many seconds late the event loop woke this
    task."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, loop.time() - due))


async def reap_orphans(own: Collection[int], interval_s: float = ORPHAN_INTERVAL_S) -> None:
    """Reap zombie children that this process did not start, until cancelled.

    As process 1 of a container, a server inherits the orphans of a killed engine: ranks, compilers. Each would stay a
    zombie. ``own``: ids of children that other code waits for; their status is not taken. A library may have started
    a process and be about to wait for it, so only a zombie seen in two successive rounds is reaped.
    """
    before: set[tuple[int, str]] = set()
    while True:
        await asyncio.sleep(interval_s)
        try:
            found = {zombie for zombie in _zombies() if zombie[0] not in own}
        except OSError as error:  # no descriptor is free
            log.warning("orphaned processes not looked for: %s", error.strerror)
            continue
        for pid, _ in found & before:
            with contextlib.suppress(ChildProcessError):  # other code has reaped it
                os.waitpid(pid, os.WNOHANG)
                log.debug("reaped an orphaned process", extra={"pid": pid})
        before = found - before


def _zombies() -> set[tuple[int, str]]:
    """Return the zombie children of this process as (id, start time). Linux only."""
    if sys.platform != "linux":
        return set()
    try:  # cheap check first, so that /proc is rarely read; WNOWAIT only looks
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:  # no children at all
        return set()
    processes = ((pid, process_fields(pid)) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))))
    ended = ["Z", str(os.getpid())]  # state and parent
    return {(pid, fields[19]) for pid, fields in processes if fields[:2] == ended}


class ManagerNotifier:
    """Notifies the service manager. Failures are logged, and the server goes on."""

    def __init__(self, manager: ServiceManager | None) -> None:
        self._manager = manager
        if manager is not None:
            # Opened once: a keepalive must not need a descriptor when callers have taken all of them.
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    def close(self) -> None:
        if self._manager is not None:
            self._socket.close()

    def notify_ready(self) -> None:
        self._send("READY=1")

    def notify_stopping(self) -> None:
        self._send("STOPPING=1")

    async def feed_watchdog(self) -> None:
        """Send a keepalive twice per watchdog period until cancelled. Returns at once without a watchdog."""
        while self._manager is not None and self._manager.watchdog_s is not None:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._manager.watchdog_s / 2)

    def _send(self, message: str) -> None:
        if self._manager is None:
            return
        try:
            self._socket.sendto(message.encode(), self._manager.address)
        except OSError as error:
            log.warning("the service manager could not be notified of %s: %s", message, error)
