"""Sessions and contexts of turns that have ended engines: what else of them is refused, and for how long.

A client that never gives up begins each turn under a new request id, and some begin a new session with the same history
for it. The quarantine of a request stops neither.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from pensieve.errors import Internal
from pensieve.server.links.quarantine import quarantined

MEMORY_S: Final = 600.0
"""How long a session or a context is refused. A session stays on probation as long again."""
TURNS: Final = 2
"""Condemned turns of one session after which all its turns are refused."""
MAX_REMEMBERED: Final = 10_000


@dataclass(slots=True)
class _Session:
    turns: int = 0
    """Condemned ones."""
    refused_until: float = 0.0
    probation_until: float = 0.0


class Condemned:
    """Used on one event loop. A context belongs to a tenant: no tenant can have another's refused."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._contexts: OrderedDict[bytes, float] = OrderedDict()
        self.turns_total = 0
        self.sessions_total = 0

    def add(self, session: str, tenant: str, tokens: bytes) -> bool:
        """A turn was found guilty. Returns whether its session is refused from now on.

        ``tokens``: its whole context, packed.
        """
        now = self._clock()
        self._forget(now)
        self.turns_total += 1
        self._contexts[_digest(tenant, tokens)] = now + MEMORY_S
        record = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        record.turns += 1
        record.probation_until = now + 2 * MEMORY_S
        if record.turns < TURNS:
            return False
        record.refused_until = now + MEMORY_S
        self.sessions_total += 1
        return True

    def check(self, session: str, tenant: str, tokens: bytes) -> None:
        """Raises Internal: SESSION_QUARANTINED for a refused session, REQUEST_QUARANTINED for a condemned context."""
        now, record = self._clock(), self._sessions.get(session)
        if record is not None and now < record.refused_until:
            raise session_quarantined(record.refused_until - now)
        if self._contexts and now < self._contexts.get(_digest(tenant, tokens), 0.0):
            raise quarantined()

    def refuses(self, session: str) -> bool:
        """Whether all turns of this session are refused now."""
        record = self._sessions.get(session)
        return record is not None and self._clock() < record.refused_until

    def on_probation(self, session: str) -> bool:
        """Whether a turn of this session was found guilty lately: its next turn is a suspect from the start."""
        record = self._sessions.get(session)
        return record is not None and self._clock() < record.probation_until

    def _forget(self, now: float) -> None:
        for session in [one for one, record in self._sessions.items() if record.probation_until <= now]:
            del self._sessions[session]
        for context in [one for one, until in self._contexts.items() if until <= now]:
            del self._contexts[context]
        while len(self._sessions) >= MAX_REMEMBERED:
            self._sessions.popitem(last=False)
        while len(self._contexts) >= MAX_REMEMBERED:
            self._contexts.popitem(last=False)


def session_quarantined(retry_after_s: float) -> Internal:
    return Internal(
        "turns of this session have ended the engine again and again; the session is refused for a while",
        reason="SESSION_QUARANTINED",
        retry_after_s=retry_after_s,
    )


def _digest(tenant: str, tokens: bytes) -> bytes:
    return blake2b(tokens, digest_size=16, key=blake2b(tenant.encode(), digest_size=16).digest()).digest()
