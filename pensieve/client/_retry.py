"""Decides whether and when a call is retried. Pure: the shells do the waiting.

A retry is safe because every mutation carries a request id that the SDK makes once. Reaction to each status:

===============================================  ==========================================================
UNAVAILABLE with any reason                       retry
no reason, and UNAVAILABLE, INTERNAL, UNKNOWN     retry: the connection died and the outcome is unknown; each
or CANCELLED not caused by the caller             proxy reports that in its own way
TURN_FENCED, STREAM_INCONSISTENT                  retry
SERVER_OVERLOADED                                 retry after RetryInfo
ENGINE_FAILED                                     retry once
STORE_FULL                                        retry slowly
everything else                                   raise
===============================================  ==========================================================
"""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pensieve.errors import InvalidArgument, PensieveError
from pensieve.rpc_status import BROKEN, TRANSPORT, TRANSPORT_FINAL

STREAM_INCONSISTENT = "STREAM_INCONSISTENT"
"""Reason of a stream that contradicts earlier data. The SDK makes it, and raises it only when retries end."""


class Verdict(enum.Enum):
    """How to react to an error."""

    RAISE = enum.auto()
    RESEND = enum.auto()
    RESEND_ONCE = enum.auto()
    RESEND_SLOWLY = enum.auto()


_BY_REASON = {
    "TURN_FENCED": Verdict.RESEND,
    "SERVER_OVERLOADED": Verdict.RESEND,
    "ENGINE_FAILED": Verdict.RESEND_ONCE,
    "STORE_FULL": Verdict.RESEND_SLOWLY,
    STREAM_INCONSISTENT: Verdict.RESEND,
    TRANSPORT_FINAL: Verdict.RAISE,
}


def verdict(error: PensieveError) -> Verdict:
    """Return the reaction to ``error``, as in the table above."""
    if error.reason == TRANSPORT:
        return Verdict.RESEND if error.metadata.get("grpc_code", error.code) in BROKEN else Verdict.RAISE
    if error.reason in _BY_REASON:
        return _BY_REASON[error.reason]
    return Verdict.RESEND if error.code == "UNAVAILABLE" else Verdict.RAISE


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retry budget of one call or turn. The default survives a restart of the server within a minute."""

    max_attempts: int | None = None
    """Most tries in a row without new output. 1 disables retries; None: limited by time only."""
    initial_s: float = 0.1
    """Upper bound of the first random wait in seconds; doubles with each failure."""
    max_s: float = 5.0
    """Upper bound of any random wait in seconds. A delay that the server asks for is added."""
    max_wait_s: float = 60.0
    """Most seconds of waits and silence in a row without new output. The clients' ``retry_for`` sets this."""


def retry_policy(policy: RetryPolicy | None, retry_for: float | None) -> RetryPolicy:
    """Combine a client's two arguments. Raises InvalidArgument for a negative ``retry_for``."""
    policy = policy or RetryPolicy()
    if retry_for is None:
        return policy
    if not retry_for >= 0.0:
        raise InvalidArgument.field("retry_for", "must be a number of seconds, at least 0")
    return replace(policy, max_wait_s=retry_for)


class Backoff:
    """Full-jitter exponential backoff inside a budget. ``clock``: monotonic seconds."""

    def __init__(
        self,
        policy: RetryPolicy,
        uniform: Callable[[float, float], float] = random.uniform,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._uniform = uniform
        self._clock = clock
        self._failures = 0
        self._spent = 0.0
        self._last_activity = clock()
        """Time of the last request to the peer or message from it."""

    def mark_activity(self) -> None:
        """Restart the clock of silence: a request was sent or a message arrived."""
        self._last_activity = self._clock()

    def reset(self) -> None:
        """Reset the budget: the peer made progress."""
        self._failures = 0
        self._spent = 0.0

    def wait_after(self, error: PensieveError, decision: Verdict, remaining_s: float | None = None) -> float:
        """Return the seconds until the next try.

        Raises ``error`` if the budget is used up or the deadline, ``remaining_s`` from now, comes first. Its
        message then states the number of tries and their duration.
        """
        wait = self.delay(at_least=error.retry_after_s, slowly=decision is Verdict.RESEND_SLOWLY)
        if wait is None or (remaining_s is not None and wait >= remaining_s):
            raise self._final_error(error, 0.0 if wait is None else wait)
        return wait

    def _final_error(self, error: PensieveError, unspent_s: float) -> PensieveError:
        """Return the last failure, with the number of tries and their duration if there were several."""
        if self._failures > 1:
            seconds = self._spent - unspent_s
            error.metadata |= {"tries": str(self._failures), "tried_for_s": f"{seconds:.1f}"}
            error.message += f" (given up after {self._failures} tries in {seconds:.1f} s)"
        return error

    def delay(self, *, at_least: float | None = None, slowly: bool = False) -> float | None:
        """Return the seconds until the next try, ``at_least`` those given; None if the budget is used up."""
        self._failures += 1
        if self._policy.max_attempts is not None and self._failures >= self._policy.max_attempts:
            return None
        ceiling = min(self._policy.max_s, self._policy.initial_s * 2.0 ** min(self._failures - 1, 32))
        # The sum, not the maximum: callers that got the same delay must not return at the same time.
        least = (at_least or 0.0) + (1.0 if slowly else 0.0)
        return self._spend(least, self._uniform(0.0, ceiling))

    def poll(self, wait: float) -> float | None:
        """Return the wait before asking again about another turn: not a failure, but it costs waiting time."""
        return self._spend(0.0, wait)

    def _spend(self, least: float, jitter: float) -> float | None:
        now = self._clock()
        self._spent += max(0.0, now - self._last_activity)
        self._last_activity = now
        left = self._policy.max_wait_s - self._spent
        if left <= 0 or least > left:
            return None
        wait = min(least + jitter, left)  # the last try is at the end of the budget, not before
        self._spent += wait
        self._last_activity += wait
        return wait
