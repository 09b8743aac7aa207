"""The one helper thread of a sync client: ends silent streams and cleans up after streams that were dropped.

It exists for two reasons. A blocking read has no timeout of its own. And a call object that is dropped without
``cancel`` is never collected and never cancelled by grpc, while a finaliser may run anywhere, even inside grpc under a
lock; so finalisers only put a job into a ``SimpleQueue``, whose ``put`` is made for that.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

Job = Callable[[], Any]
"""A function that returns None, or a call to be kept until it ends by itself."""


class Watch:
    """One blocking read under observation. ``expired`` is set before its call is cancelled."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        """Monotonic time; None while nobody reads, so that a slow consumer is not taken for a silent server."""
        self.call: Any = None
        self.expired = False


class Janitor:
    """Started by the first stream; ``close`` runs what is queued and waits for the thread."""

    TICK_S = 1.0

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._watches: set[Watch] = set()
        self._calls: set[Any] = set()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pensieve-client", daemon=True)
                self._thread.start()

    def watch(self, watch: Watch) -> None:
        self._jobs.put(lambda: self._watches.add(watch))

    def unwatch(self, watch: Watch) -> None:
        self._jobs.put(lambda: self._watches.discard(watch))

    def submit(self, job: Job) -> None:
        """Run ``job`` soon."""
        self._jobs.put(job)

    def close(self, timeout: float) -> None:
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._pause())
            except queue.Empty:
                self._check()
                continue
            if job is None:
                break
            call = job()
            if call is not None:
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
        deadline = time.monotonic() + 1.0
        while self._calls and time.monotonic() < deadline:
            time.sleep(0.01)
        for call in list(self._calls):
            call.cancel()

    def _pause(self) -> float | None:
        """How long to wait for a job before the watches are checked; None, without any watch: until a job comes."""
        deadlines = [watch.deadline for watch in list(self._watches) if watch.deadline is not None]
        if not self._watches:
            return None
        nearest = min(deadlines, default=float("inf")) - time.monotonic()
        return min(self.TICK_S, max(0.005, nearest))

    def _check(self) -> None:
        now = time.monotonic()
        for watch in list(self._watches):
            deadline, call = watch.deadline, watch.call
            if deadline is not None and deadline <= now and call is not None and not watch.expired:
                watch.expired = True
                call.cancel()
