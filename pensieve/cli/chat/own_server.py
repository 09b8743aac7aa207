"""The server that a chat starts for itself. If it dies it is started again, and the chat goes on as with any other."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

from pensieve.spawn import ServerProcess, SpawnError

log = logging.getLogger(__name__)

LOOK_S = 0.5
TRIES = 3
"""Starts in a row that may fail: a server that cannot start is not tried for ever."""


class OwnServer:
    """A context manager; ``target`` is HOST:PORT in each of its lives. Raises SpawnError if the first one fails."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._server = ServerProcess(*arguments, start_timeout_s=600.0)
        self.target = self._server.target
        self.failure = ""
        """Why it could not be started again."""
        self._leaving = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="own-server", daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        self._watcher.join()
        self._server.__exit__(kind, error, trace)

    def _watch(self) -> None:
        failures = 0
        while not self._leaving.wait(LOOK_S):
            if self._server.running:
                continue
            try:
                self._server = ServerProcess(*self._arguments, listen=self.target, wait=False)
                self._wait_ready()
                failures = 0
            except SpawnError as error:
                failures += 1
                self.failure = str(error)
                log.debug("the server did not start again: %s", error)
                if failures == TRIES:
                    return

    def _wait_ready(self) -> None:
        """Whoever leaves meanwhile does not wait for it."""
        done = threading.Event()

        def leave() -> None:
            while not done.wait(LOOK_S / 5):
                if self._leaving.is_set():
                    self._server.kill()
                    return

        waiter = threading.Thread(target=leave, name="leave-own-server", daemon=True)
        waiter.start()
        try:
            self._server.wait_ready()
        finally:
            done.set()
            waiter.join()
