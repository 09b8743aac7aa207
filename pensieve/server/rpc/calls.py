"""The calls that are being handled: how many each caller may have, how one is ended from outside, and who counts them.

A caller may begin one more call while it has fewer than ``SHARE`` times as many as there are places left. So one caller
alone gets four fifths of the places, two get four ninths each, and whoever comes new finds one: the dynamic thresholds
of Choudhury and Hahne (1998) for a shared buffer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import grpc

from pensieve.errors import PensieveError, ResourceExhausted
from pensieve.server.rpc.auth import Identity

SHARE: Final = 4
CLOCK_SLACK_S: Final = 0.1
_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}

Handler = Callable[[Any, Any], Awaitable[Any]]


class RunningCall:
    """One call, as the task that handles it. Made in that task."""

    def __init__(self, identity: Identity, caller: str, connection: str = "") -> None:
        """``caller`` names who shares the limits on calls and bodies with this one. ``connection`` is where it comes
        in, "" where many callers share one."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.identity = identity
        self.caller = caller
        self.connection = connection
        self.error: PensieveError | None = None
        """What the call was ended with, if it was."""
        self._over = False

    def end(self, error: PensieveError) -> None:
        """Interrupt the handler; the call ends with ``error``. The first of several errors counts."""
        if self.error is None and not self._over:
            self.error = error
            self._task.cancel()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Where ``end`` works. Raises its error in place of the cancellation that carried it."""
        try:
            yield
        except asyncio.CancelledError:
            if self.error is None:
                raise  # the client's doing, or the server's end
            self._task.uncancel()
            raise self.error from None
        finally:
            self._over = True
        if self.error is not None:
            # Ended in the very step in which the handler returned: the cancellation is still to come.
            self._task.uncancel()
            raise self.error


class Calls:
    """All calls of one server. Used on one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: set[RunningCall] = set()
        self._of_caller: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def entered(self, call: RunningCall) -> Iterator[None]:
        """Count the call. Raises ResourceExhausted when there are too many, or its caller has too many of them."""
        left = self._most - len(self._running)
        if left <= 0 or self._of_caller[call.caller] >= SHARE * left:
            raise ResourceExhausted("too many calls at once", retry_after_s=1.0)
        self._running.add(call)
        self._of_caller[call.caller] += 1
        try:
            yield
        finally:
            self._running.discard(call)
            self._of_caller[call.caller] -= 1
            if not self._of_caller[call.caller]:
                del self._of_caller[call.caller]

    def recheck(self, problem: Callable[[Identity], PensieveError | None]) -> int:
        """End the calls whose credential has become a problem; returns how many."""
        ended = 0
        for call in list(self._running):
            error = problem(call.identity)
            if error is not None:
                call.end(error)
                ended += 1
        return ended


class CallObserver(Protocol):
    """Who counts. ``method`` is the bare name of it, ``code`` as gRPC writes it."""

    def started(self, method: str) -> None: ...

    def handled(self, method: str, code: str, seconds: float) -> None: ...


def counted(handler: Handler, method: str, observer: CallObserver) -> Handler:
    """``handler``, whose calls ``observer`` hears of. ``method``: as the wire names it."""
    name = method.rpartition("/")[2]

    async def counting(requests: Any, context: Any) -> Any:
        began = time.monotonic()
        observer.started(name)
        cancelled = False
        try:
            return await handler(requests, context)
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            observer.handled(name, _code(context, cancelled), time.monotonic() - began)

    return counting


def _code(context: Any, cancelled: bool) -> str:
    """How the call ended. One that was cancelled has no status: its caller gave up, or its time was over."""
    if cancelled:
        left = context.time_remaining()
        # The caller's clock may be a little ahead: its time began before the call came here.
        return "CANCELLED" if left is None or left > CLOCK_SLACK_S else "DEADLINE_EXCEEDED"
    code: grpc.StatusCode | int | None = context.code()
    name: str = code.name if isinstance(code, grpc.StatusCode) else _NAMES.get(code or 0, "UNKNOWN")
    return name
