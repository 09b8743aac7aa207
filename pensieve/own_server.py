"""A private server for one program, restarted when it dies. Clients reconnect as with any other server."""

from __future__ import annotations

import logging
import os
import threading
import time
from types import TracebackType
from typing import Final, Self

from pensieve.options.serve import state_directory
from pensieve.spawn import ServerKilled, ServerProcess, SpawnError

log = logging.getLogger(__name__)

LOOK_S: Final = 0.1
TRIES: Final = 3
START_TIMEOUT_S: Final = 600.0
"""Enough for a large model on a slow disk."""


def explain_failure(error: SpawnError) -> str:
    """Describe a failure in one line. The full log, if longer, goes into a file that the line names."""
    if not error.more:
        return error.line
    path = state_directory() / "own-server.log"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"{error.log}\n")
    except OSError as failed:
        return f"{error.line} (its log cannot be written to {path}: {failed.strerror})"
    return f"{error.line} (its log: {path})"


class OwnServer:
    """Context manager for a private server. ``target`` is HOST:PORT, the same after each restart. Raises SpawnError.

    Data that must survive a crash needs a store on disk. Servers start in parallel if all are created before the
    first is entered.
    """

    def __init__(self, *arguments: str) -> None:
        """Begin to start a server with these options of ``pensieve serve``."""
        self._arguments = arguments
        self.target = ""
        self._server = self._start()
        self.deaths = 0
        """How often it has died after it was ready."""
        self.failure = ""
        self._ready, self._closing = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="own-server", daemon=True)

    def __enter__(self) -> Self:
        self._wait_first()
        self.target = self._server.target
        self._ready.set()
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._watcher.join()
        self._server.__exit__(kind, error, trace)

    def close(self) -> None:
        if not self.target:
            self._server.kill()

    def kill(self) -> None:
        """Send SIGKILL, like a power failure. Returns at once; the restart follows."""
        self._ready.clear()
        self._server.kill()

    def wait_ready(self) -> ServerProcess:
        """Return the running server, once it is ready. Raises SpawnError if it cannot be restarted."""
        while True:
            self._ready.wait()
            if self.failure:
                raise SpawnError(self.failure)
            server = self._server
            if server.running:
                return server
            time.sleep(LOOK_S)  # dead, and the watcher has not noticed yet

    def _start(self) -> ServerProcess:
        listen = self.target or "127.0.0.1:0"
        return ServerProcess(*self._arguments, start_timeout_s=START_TIMEOUT_S, listen=listen, wait=False)

    def _wait_first(self) -> None:
        for tries_left in reversed(range(TRIES)):
            try:
                return self._server.wait_ready()
            except ServerKilled:  # killed from outside: invalid options raise a plain SpawnError
                if not tries_left:
                    raise
                self._server = self._start()

    def _watch(self) -> None:
        failures = 0
        while not self._closing.wait(LOOK_S):
            if self._server.running:
                continue
            self._ready.clear()
            self.deaths += not failures
            self._server.kill()  # closes its pipes
            try:
                self._server = self._start()
                self._wait_ready()
                failures, self.failure = 0, ""
            except SpawnError as error:
                failures += 1
                log.debug("the server did not start again: %s", error)
                if failures < TRIES:
                    continue
                self.failure = explain_failure(error)
            self._ready.set()
            if self.failure:
                return

    def _wait_ready(self) -> None:
        """Wait for the restart, but kill the server if the context is left meanwhile."""
        done = threading.Event()

        def leave() -> None:
            while not done.wait(LOOK_S):
                if self._closing.is_set():
                    self._server.kill()
                    return

        waiter = threading.Thread(target=leave, name="leave-own-server", daemon=True)
        waiter.start()
        try:
            self._server.wait_ready()
        finally:
            done.set()
            waiter.join()
