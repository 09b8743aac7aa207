"""What one tenant may use, whatever the load: turns at once, queued tokens, tokens a minute."""

from __future__ import annotations

from typing import Final

from pensieve.errors import ResourceExhausted
from pensieve.server.tenants import TenantLimits, quota_exceeded

WINDOW_S: Final = 60.0
TURN_RETRY_S: Final = 1.0
"""When to try again after a limit on what runs or waits: turns end at any time."""


class TokenBucket:
    """A limit per minute that may be used up at once, and comes back evenly. A debt is worked off."""

    def __init__(self, now: float) -> None:
        self._used = 0.0
        self._at = now

    def wait_s(self, tokens: float, limit: float, now: float) -> float:
        """Seconds until ``tokens`` may be taken; 0: now. Whatever asks for more than the limit waits for all of it."""
        self._flow(limit, now)
        return max(self._used + min(tokens, limit) - limit, 0.0) * WINDOW_S / limit

    def take(self, tokens: float, limit: float, now: float) -> None:
        """Count tokens as used; fewer than none gives some back."""
        self._flow(limit, now)
        self._used = max(self._used + tokens, 0.0)

    def _flow(self, limit: float, now: float) -> None:
        self._used = max(self._used - (now - self._at) * limit / WINDOW_S, 0.0)
        self._at = now


class Account:
    """One tenant's use of the server."""

    def __init__(self, tenant: str, now: float) -> None:
        self._tenant = tenant
        self.turns = 0
        """That run or wait."""
        self.minute = TokenBucket(now)

    def refusal(
        self, limits: TenantLimits, queued: int, tokens: int, work: float, now: float
    ) -> ResourceExhausted | None:
        """Why a further turn goes beyond a limit, if it does. ``queued``: input tokens that wait already.

        ``tokens``, ``work``: of the turn, its input and all that it is expected to use.
        """
        if limits.turns_at_once is not None and self.turns >= limits.turns_at_once:
            return quota_exceeded(
                self._tenant, "turns_at_once", f"{limits.turns_at_once} turns at once", TURN_RETRY_S
            )
        if limits.queued_tokens is not None and queued and queued + tokens > limits.queued_tokens:
            return quota_exceeded(
                self._tenant, "queued_tokens", f"{limits.queued_tokens} queued tokens", TURN_RETRY_S
            )
        if limits.tokens_per_minute is not None:
            wait = self.minute.wait_s(work, limits.tokens_per_minute, now)
            if wait > 0:
                return quota_exceeded(
                    self._tenant, "tokens_per_minute", f"{limits.tokens_per_minute} tokens a minute", wait
                )
        return None
