"""Decides whether a call is sent again, and after how long. Pure: the shells do the waiting.

A replay is safe because every mutation carries a request id that the SDK made once. What a status means:

===============================================  ==========================================================
UNAVAILABLE with any reason                       send again
no reason, and UNAVAILABLE, INTERNAL, UNKNOWN     the connection died; each proxy reports that in its own way, the
or CANCELLED that nobody asked for                outcome is unknown: send again
TURN_FENCED, STREAM_INCONSISTENT                  send again
SERVER_OVERLOADED                                 send again after RetryInfo
ENGINE_FAILED                                     send again, once
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
"""Reason of a stream that contradicts what was received before; made by the SDK, never raised before retries end."""


class Verdict(enum.Enum):
    """What an error calls for."""

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
    """What ``error`` calls for, as in the table above."""
    if error.reason == TRANSPORT:
        return Verdict.RESEND if error.metadata.get("grpc_code", error.code) in BROKEN else Verdict.RAISE
    if error.reason in _BY_REASON:
        return _BY_REASON[error.reason]
    return Verdict.RESEND if error.code == "UNAVAILABLE" else Verdict.RAISE


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Budget of one call or turn. The default rides out a server that is killed and started again, for a minute."""

    max_attempts: int | None = None
    """Tries in a row without any new output; new output starts the count again. 1 switches retries off; None: as many
    as there is time for."""
    initial_s: float = 0.1
    """Upper end of the first random wait; doubles with each failure."""
    max_s: float = 5.0
    """Upper end of any random wait, beside what the server asks for."""
    max_wait_s: float = 60.0
    """Seconds in a row without new output, waits and silent servers both; not the time in which a server was heard.
    The clients' ``retry_for`` is this one by itself."""


def retry_policy(policy: RetryPolicy | None, retry_for: float | None) -> RetryPolicy:
    """What a client's two arguments mean together. Raises InvalidArgument for a ``retry_for`` that is no time."""
    policy = policy or RetryPolicy()
    if retry_for is None:
        return policy
    if not retry_for >= 0.0:
        raise InvalidArgument.field("retry_for", "must be seconds, at least 0")
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
        self._since = clock()
        """When the peer was heard or asked last."""

    def mark_activity(self) -> None:
        """The peer is asked, or was heard: silence counts from here."""
        self._since = self._clock()

    def reset(self) -> None:
        """The peer made progress."""
        self._failures = 0
        self._spent = 0.0

    def wait_after(self, error: PensieveError, what: Verdict, remaining_s: float | None = None) -> float:
        """Seconds until the next try. Raises ``error`` when there is none: the budget is used up, or the deadline,
        ``left_s`` from now, comes first. What is raised then says how often and how long it was tried.
        """
        wait = self.delay(at_least=error.retry_after_s, slowly=what is Verdict.RESEND_SLOWLY)
        if wait is None or (remaining_s is not None and wait >= remaining_s):
            raise self._final_error(error, 0.0 if wait is None else wait)
        return wait

    def _final_error(self, error: PensieveError, unspent_s: float) -> PensieveError:
        """The last failure, with how often and how long it was tried, where that was more than once."""
        if self._failures > 1:
            seconds = self._spent - unspent_s
            error.metadata |= {"tries": str(self._failures), "tried_for_s": f"{seconds:.1f}"}
            error.message += f" (given up after {self._failures} tries in {seconds:.1f} s)"
        return error

    def delay(self, *, at_least: float | None = None, slowly: bool = False) -> float | None:
        """Seconds until the next try; None when the budget is used up. ``clamp_logprob``: what the server asked for."""
        self._failures += 1
        if self._policy.max_attempts is not None and self._failures >= self._policy.max_attempts:
            return None
        ceiling = min(self._policy.max_s, self._policy.initial_s * 2.0 ** min(self._failures - 1, 32))
        # Added, not the larger of both: callers that were told the same delay must not come back together.
        least = (at_least or 0.0) + (1.0 if slowly else 0.0)
        return self._spend(least, self._uniform(0.0, ceiling))

    def poll(self, wait: float) -> float | None:
        """A wait for somebody else to finish: not a failure, but it costs waiting time."""
        return self._spend(0.0, wait)

    def _spend(self, least: float, jitter: float) -> float | None:
        now = self._clock()
        self._spent += max(0.0, now - self._since)
        self._since = now
        left = self._policy.max_wait_s - self._spent
        if left <= 0 or least > left:
            return None
        wait = min(least + jitter, left)  # the last try comes when the time is over, not somewhat before
        self._spent += wait
        self._since += wait
        return wait
