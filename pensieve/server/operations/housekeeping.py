"""Work that a server does in the background, unasked: it erases sessions whose time to live is over, looks how late
its event loop is, waits for the processes that were left to it, and tells a service manager how it is.
"""

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
from pensieve.store import HistoryStore

log = logging.getLogger(__name__)

PURGE_INTERVAL_S: Final = 60.0
"""An expired session is unreachable at once; this is how long its content may still lie on the disk."""

LAG_INTERVAL_S: Final = 0.25

ORPHAN_INTERVAL_S: Final = 5.0
"""Far longer than anybody here takes to wait for a process of its own that has ended."""


async def purge_forever(store: HistoryStore, interval_s: float = PURGE_INTERVAL_S) -> None:
    """Erase expired sessions every ``interval_s``, until cancelled. A store that is down is tried at the next round."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            purged = await store.purge_expired()
        except PensieveError as error:
            log.warning("expired sessions not erased: %s", error.reason)
            continue
        if purged:
            log.info("expired sessions erased: %d", purged)


async def watch_lag(observe: Callable[[float], None], interval_s: float = LAG_INTERVAL_S) -> None:
    """Tell ``observe`` every ``interval_s`` how many seconds late the event loop woke this task, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, loop.time() - due))


async def reap_orphans(own: Collection[int], interval_s: float = ORPHAN_INTERVAL_S) -> None:
    """Wait for processes that ended, are children of this one and were not started by it, until cancelled.

    As process 1 of a container, a server inherits what an engine that was killed has left behind: ranks, compilers.
    Each would stay a zombie. ``own``: the ids of children for which somebody waits, whose exit status is not taken.
    Nor is that of a process that a library has started and is about to wait for: only what was a zombie an interval
    ago, and still is one, counts.
    """
    before: set[tuple[int, str]] = set()
    while True:
        await asyncio.sleep(interval_s)
        found = {zombie for zombie in _zombies() if zombie[0] not in own}
        for pid, _ in found & before:
            with contextlib.suppress(ChildProcessError):  # somebody has waited for it after all
                os.waitpid(pid, os.WNOHANG)
                log.debug("a process that was left to this one has ended", extra={"pid": pid})
        before = found - before


def _zombies() -> set[tuple[int, str]]:
    """Children of this process that have ended and were not waited for: id, and when it started. Linux."""
    if sys.platform != "linux":
        return set()
    try:  # Nearly always there is none, and then nobody reads /proc. WNOWAIT: this only looks.
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:  # no children at all
        return set()
    processes = ((pid, process_fields(pid)) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))))
    ended = ["Z", str(os.getpid())]  # state and parent
    return {(pid, fields[19]) for pid, fields in processes if fields[:2] == ended}


class ManagerNotifier:
    """The way to it. A manager that does not listen is logged, and the server goes on."""

    def __init__(self, manager: ServiceManager | None) -> None:
        self._manager = manager

    def notify_ready(self) -> None:
        """Calls are taken from now on: what waits for this service may be started."""
        self._tell("READY=1")

    def notify_stopping(self) -> None:
        """The end was asked for."""
        self._tell("STOPPING=1")

    async def feed_watchdog(self) -> None:
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
