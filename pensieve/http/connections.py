"""Bounds the callers' connections, in total and those of unknown callers ("strangers"), which are evicted
first.

Also bounds how many strangers' requests are processed at once; the others cost no more than their connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
from collections.abc import Callable, Collection
from typing import Final, Protocol

from pensieve.hosts import owned_network

RESERVED_FILES: Final = 128
"""File descriptors for other purposes: connections to the service, listeners, modules."""
UNLIMITED: Final = 65536
ADDRESS_SHARE: Final = 8
"""An address may open another connection while it holds fewer than this times the free ones."""


MAX_STRANGERS_AT_ONCE: Final = 16
"""Strangers' requests that are processed at once."""
STRANGER_TIMEOUT_S: Final = 0.1
"""A request that is not admitted by then no longer occupies a place: refusals of guessed keys are delayed."""


class Connection(Protocol):
    @property
    def idle(self) -> bool: ...

    def evict(self) -> None:
        """Close at once, to make room."""


class StrangerQueue:
    """The requests of strangers, newest first: an old one has had its time. Runs on one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Connection, Callable[[], None]] = {}
        self._processing: dict[Connection, asyncio.TimerHandle] = {}

    def enter(self, one: Connection, start: Callable[[], None]) -> None:
        """Call ``start`` when it is this request's turn."""
        if len(self._processing) < MAX_STRANGERS_AT_ONCE:
            self._start(one, start)
        else:
            self._waiting[one] = start

    def leave(self, one: Connection) -> bool:
        """Remove a request that was admitted or refused, or whose connection closed. Return whether it was
        being processed."""
        self._waiting.pop(one, None)
        if (timer := self._processing.pop(one, None)) is None:
            return False
        timer.cancel()
        if self._waiting:
            self._start(*self._waiting.popitem())
        return True

    def _start(self, one: Connection, start: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._processing[one] = loop.call_later(STRANGER_TIMEOUT_S, self.leave, one)
        start()


class Connections:
    """All connections of one door. Runs on one event loop."""

    def __init__(self, proxies: Collection[str] = (), files: int | None = None) -> None:
        """``proxies``: networks whose addresses stand for many callers. ``files``: file descriptors that the
        process may open. Half of the descriptors are for callers, a quarter for strangers."""
        if files is None:
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            files = UNLIMITED if files == resource.RLIM_INFINITY else min(files, UNLIMITED)
        self.max_connections = max(files // 2 - RESERVED_FILES, files // 4)
        self.max_strangers = max(files // 4 - RESERVED_FILES // 2, files // 8)
        self._proxies = [ipaddress.ip_network(one, strict=False) for one in proxies]
        self._strangers: dict[str, dict[Connection, None]] = {}
        """By address, oldest first."""
        self._known: dict[Connection, None] = {}
        self._address: dict[Connection, str] = {}
        self._count_of_address: dict[str, int] = {}
        self.queue = StrangerQueue()
        self.admissions = 0

    def __len__(self) -> int:
        return len(self._address)

    @property
    def strangers(self) -> int:
        return len(self._address) - len(self._known)

    def on_connect(self, one: Connection, address: str) -> bool:
        """Count a new connection, evicting another when there are too many. Return False if there is no room
        for it."""
        address = owned_network(address)
        full = len(self) >= self.max_connections and not self._make_room()
        free = max(0, self.max_connections - len(self))
        crowded = self._count_of_address.get(address, 0) >= ADDRESS_SHARE * max(
            1, free
        ) and not self._is_proxy(address)
        self._address[one] = address
        self._count_of_address[address] = self._count_of_address.get(address, 0) + 1
        self._strangers.setdefault(address, {})[one] = None
        if full or (crowded and not self._evict_stranger(address, besides=one)):
            return False
        if self.strangers > self.max_strangers:
            self._evict_stranger(max(self._strangers, key=lambda name: len(self._strangers[name])))
        return True

    def replace(self, before: Connection, one: Connection) -> bool:
        """Count ``one`` in place of ``before``. Return False if ``before`` does not count any more."""
        if (address := self._address.pop(before, None)) is None:
            return False
        peers = self._known if before in self._known else self._strangers[address]
        del peers[before]
        peers[one] = None
        self._address[one] = address
        return True

    def on_admitted(self, one: Connection) -> None:
        self.admissions += self.queue.leave(one)
        if one in self._address and one not in self._known:
            self._forget_stranger(one)
            self._known[one] = None

    def on_last_answer(self, one: Connection) -> None:
        """The connection got its last answer; from now on it may be evicted like a stranger's."""
        if one in self._known:
            del self._known[one]
            self._strangers.setdefault(self._address[one], {})[one] = None

    def on_close(self, one: Connection) -> None:
        if one not in self._address:
            return
        self.queue.leave(one)
        if one in self._known:
            del self._known[one]
        else:
            self._forget_stranger(one)
        address = self._address.pop(one)
        self._count_of_address[address] -= 1
        if not self._count_of_address[address]:
            del self._count_of_address[address]

    def _make_room(self) -> bool:
        """Evict a stranger, or else an idle connection of a known caller."""
        if self._strangers:
            return self._evict_stranger(max(self._strangers, key=lambda name: len(self._strangers[name])))
        idle = next((one for one in self._known if one.idle), None)
        return idle is not None and self._evict(idle)

    def _evict_stranger(self, address: str, besides: Connection | None = None) -> bool:
        """Evict the oldest stranger of an address, and return whether there was one."""
        found = next((one for one in self._strangers.get(address, ()) if one is not besides), None)
        return found is not None and self._evict(found)

    def _evict(self, one: Connection) -> bool:
        self.on_close(one)  # first, so that it is not evicted twice
        one.evict()
        return True

    def _forget_stranger(self, one: Connection) -> None:
        strangers = self._strangers.get(address := self._address[one], {})
        strangers.pop(one, None)
        if not strangers:
            self._strangers.pop(address, None)

    def _is_proxy(self, address: str) -> bool:
        try:
            found = ipaddress.ip_network(address)
        except ValueError:
            return False
        return any(found.version == one.version and found.subnet_of(one) for one in self._proxies)  # type: ignore[arg-type]
