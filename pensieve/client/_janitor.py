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

import grpc

from pensieve.client._steps import Flow, Invoke, Sleep
from pensieve.errors import PensieveError
from pensieve.rpc_status import from_rpc_error

Job = Callable[[], None]
Begin = Callable[[Invoke], Any]
"""Makes the call of a step and returns it at once, as a future of gRPC."""


class Watch:
    """One blocking read under observation. ``expired`` is set before its call is cancelled."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        """Monotonic time; None while nobody reads, so that a slow consumer is not taken for a silent server."""
        self.call: Any = None
        self.expired = False


class Errand:
    """A flow that nobody waits for: what it does next."""

    def __init__(self, flow: Flow[None], begin: Begin) -> None:
        self.flow = flow
        self.begin = begin
        self.call: Any = None
        """Kept: gRPC would not end a call that is dropped."""
        self.due: float | None = None
        """Monotonic time at which it goes on; None while a call is under way."""


class Janitor:
    """Started by the first stream; ``close`` runs what is queued and waits for the thread."""

    TICK_S = 1.0

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._watches: set[Watch] = set()
        self._errands: set[Errand] = set()
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

    def perform(self, flow: Flow[None], begin: Begin) -> None:
        """Go through ``flow``, from now on, as far as it gets before ``close``."""
        errand = Errand(flow, begin)
        self._jobs.put(lambda: self._go_on(errand))

    def close(self, timeout: float) -> None:
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        until: float | None = None
        """Once it is closed: when it ends at the latest."""
        while until is None or (self._errands and time.monotonic() < until):
            try:
                job = self._jobs.get(timeout=self._pause(until))
            except queue.Empty:
                self._check()
                continue
            if job is None:
                until = time.monotonic() + 1.0
            else:
                job()
            del job  # It may hold a call.
        for errand in self._errands:
            if errand.call is not None:
                errand.call.cancel()

    def _pause(self, until: float | None) -> float | None:
        """How long to wait for a job before ``_check``; None, with nothing under observation: until a job comes."""
        times = (
            [watch.deadline for watch in list(self._watches)] + [one.due for one in self._errands] + [until]
        )
        nearest = min((one for one in times if one is not None), default=None)
        if nearest is None:
            return self.TICK_S if self._watches else None
        return min(self.TICK_S, max(0.005, nearest - time.monotonic()))

    def _check(self) -> None:
        now = time.monotonic()
        for watch in list(self._watches):
            deadline, call = watch.deadline, watch.call
            if deadline is not None and deadline <= now and call is not None and not watch.expired:
                watch.expired = True
                call.cancel()
        for errand in list(self._errands):
            if errand.due is not None and errand.due <= now:
                self._go_on(errand)

    def _go_on(self, errand: Errand, error: PensieveError | None = None) -> None:
        """Take the next step of a flow, all of them in this thread."""
        errand.call = errand.due = None
        self._errands.add(errand)
        try:
            step = errand.flow.send(None) if error is None else errand.flow.throw(error)
        except (StopIteration, PensieveError):
            self._errands.discard(errand)
            return
        if isinstance(step, Sleep):
            errand.due = time.monotonic() + step.seconds
            return
        errand.call = errand.begin(step)
        errand.call.add_done_callback(lambda call: self._jobs.put(lambda: self._ended(errand, call)))

    def _ended(self, errand: Errand, call: Any) -> None:
        self._go_on(errand, None if call.code() is grpc.StatusCode.OK else from_rpc_error(call))
