"""Finds the request that kills engines, and blocks it.

When an engine dies, the requests of its current step become suspects. A retry is admitted, but only one
suspect at a time, beside all other requests, so that the next death shows which of them caused it. A suspect
that gets further than at the engine's death no longer runs alone; one that finishes is cleared. After a
session had a guilty request, its next turn is a suspect from the start.

A request is guilty if it was in two deaths and is the only such request, or the only such one admitted alone.
It is refused for a while; the others that died with it are cleared. Since some clients retry under new
request ids, or in a new session, ``Blocklist`` also refuses guilty contexts, and sessions with two guilty
requests.

A death caused from outside counts a quarter: enough to find a request whose memory use makes the system kill
the engine, too little for an operator's kills to convict a request.

``ProbationGate`` admits generations to an engine: quarantined requests are refused, suspects go in one at a time.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, TypeVar

from pensieve.core import SessionKey
from pensieve.engine.messages import Submit
from pensieve.errors import Internal, PensieveError
from pensieve.server.links.generations import OpenGeneration

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

GUILTY_DEATHS: Final = 2.0
"""From this sum of weights on, a request may be guilty."""
ISOLATED_DEATHS: Final = 1.0
"""From this count on, a suspect is admitted only when no other suspect is."""
EXTERNAL_WEIGHT: Final = 0.25
"""Weight of a death from outside."""
PRIOR_DEATH: Final = 0
"""Key for a death caused by another turn of the session."""
FRESH_TOKENS: Final = 8
"""A request with fewer output tokens at the death had just begun. Such requests are suspected first."""
MEMORY_S: Final = 600.0
"""How long a death counts, and how long a guilty request, its context, or a session with several is refused.
A session's probation lasts twice as long."""
MAX_REMEMBERED: Final = 10_000


@dataclass(slots=True)
class _Suspect:
    deaths: dict[int, float] = field(default_factory=dict)
    """Number of the death -> its weight."""
    isolated: bool = False
    tokens: int = 0
    """Output tokens at the time of the engine's death."""
    until: float = 0.0

    @property
    def count(self) -> float:
        return sum(self.deaths.values())


class Quarantine:
    """Requests have a name that all tries of one turn share. Used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: OrderedDict[str, _Suspect] = OrderedDict()
        self._guilty: OrderedDict[str, float] = OrderedDict()
        self._deaths = 0

    def check(self, name: str) -> None:
        """Raises Internal (REQUEST_QUARANTINED) for a guilty request."""
        until = self._guilty.get(name)
        if until is not None and self._clock() < until:
            raise quarantined()

    def must_run_alone(self, name: str) -> bool:
        """Whether it may run only while no other suspect does."""
        suspect = self._suspects.get(name)
        return suspect is not None and suspect.isolated and self._clock() < suspect.until

    def add_suspect(self, name: str) -> None:
        """Treat a request that has not run yet as if it had been in a death before."""
        if name not in self._suspects:
            until = self._clock() + MEMORY_S
            self._suspects[name] = _Suspect({PRIOR_DEATH: 1.0}, isolated=True, until=until)

    def on_progress(self, name: str, tokens: int) -> bool:
        """Record its output tokens. Returns whether it got further than at the engine's death."""
        suspect = self._suspects.get(name)
        if suspect is None:
            return True
        suspect.isolated &= tokens <= suspect.tokens
        return not suspect.isolated

    def on_success(self, name: str) -> None:
        self._suspects.pop(name, None)

    def on_engine_lost(self, batch: Mapping[str, int], *, killed_externally: bool) -> str | None:
        """An engine died in a step of these requests (name -> output tokens). Returns the guilty one, if any."""
        now = self._clock()
        self._expire(now)
        self._deaths += 1
        for name, tokens in batch.items():
            suspect = self._suspects.setdefault(name, _Suspect())
            suspect.deaths[self._deaths] = EXTERNAL_WEIGHT if killed_externally else 1.0
            suspect.tokens, suspect.until = tokens, now + MEMORY_S
            self._suspects.move_to_end(name)
        often = [name for name in batch if self._suspects[name].count >= GUILTY_DEATHS]
        alone = [name for name in often if self._suspects[name].isolated]
        guilty = alone if len(alone) == 1 else often
        if len(guilty) == 1:
            self._convict(guilty[0], now)
            return guilty[0]
        fresh = [name for name, tokens in batch.items() if tokens < FRESH_TOKENS]
        for name in batch if often or not fresh else fresh:
            self._suspects[name].isolated = self._suspects[name].count >= ISOLATED_DEATHS
        return None

    def _convict(self, guilty: str, now: float) -> None:
        explained = self._suspects.pop(guilty).deaths
        self._guilty[guilty] = now + MEMORY_S
        explained.pop(PRIOR_DEATH, None)
        for name, suspect in list(self._suspects.items()):
            for death in explained:
                suspect.deaths.pop(death, None)
            if not suspect.deaths:
                del self._suspects[name]

    def _expire(self, now: float) -> None:
        _prune(self._suspects, lambda suspect: suspect.until <= now, MAX_REMEMBERED)
        _prune(self._guilty, lambda until: until <= now, MAX_REMEMBERED)


def _prune(table: OrderedDict[K, V], is_over: Callable[[V], bool], most: int) -> None:
    """Remove the entries that are over, and then the oldest until at most ``most`` are left."""
    for key in [key for key, value in table.items() if is_over(value)]:
        del table[key]
    while len(table) > most:
        table.popitem(last=False)


def quarantined() -> Internal:
    return Internal(
        "this request has killed the engine twice; it is not tried again", reason="REQUEST_QUARANTINED"
    )


REFUSED_AFTER_TURNS: Final = 2
"""Guilty turns of one session after which all its turns are refused."""


@dataclass(slots=True)
class _Session:
    turns: int = 0
    refused_until: float = 0.0
    probation_until: float = 0.0


class Blocklist:
    """Guilty contexts, per tenant, and sessions with several guilty turns. Used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._contexts: OrderedDict[bytes, float] = OrderedDict()
        self.turns_total = 0
        self.sessions_total = 0

    def add(self, session: str, tenant: str, tokens: bytes) -> bool:
        """Add a guilty turn with its context (packed tokens). Returns whether its session is refused from now on."""
        now = self._clock()
        self._expire(now)
        self.turns_total += 1
        self._contexts[_digest(tenant, tokens)] = now + MEMORY_S
        record = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        record.turns += 1
        record.probation_until = now + 2 * MEMORY_S
        if record.turns < REFUSED_AFTER_TURNS:
            return False
        record.refused_until = now + MEMORY_S
        self.sessions_total += 1
        return True

    def check(self, session: str, tenant: str, tokens: bytes) -> None:
        """Raises Internal: SESSION_QUARANTINED for a blocked session, REQUEST_QUARANTINED for a blocked context."""
        now, record = self._clock(), self._sessions.get(session)
        if record is not None and now < record.refused_until:
            raise session_quarantined(record.refused_until - now)
        if self._contexts and now < self._contexts.get(_digest(tenant, tokens), 0.0):
            raise quarantined()

    def refuses(self, session: str) -> bool:
        record = self._sessions.get(session)
        return record is not None and self._clock() < record.refused_until

    def on_probation(self, session: str) -> bool:
        record = self._sessions.get(session)
        return record is not None and self._clock() < record.probation_until

    def _expire(self, now: float) -> None:
        """Make room for another session and context."""
        _prune(self._sessions, lambda record: record.probation_until <= now, MAX_REMEMBERED - 1)
        _prune(self._contexts, lambda until: until <= now, MAX_REMEMBERED - 1)


def session_quarantined(retry_after_s: float) -> Internal:
    return Internal(
        "turns of this session have killed the engine repeatedly; the session is refused for a while",
        reason="SESSION_QUARANTINED",
        retry_after_s=retry_after_s,
    )


def _digest(tenant: str, tokens: bytes) -> bytes:
    return blake2b(tokens, digest_size=16, key=blake2b(tenant.encode(), digest_size=16).digest()).digest()


WARM_SUSPICION_S: Final = 10.0
"""An engine that dies within this time after a session was warmed may have died of it."""

MOST_NAMED: Final = 8
"""Turns that the log names when an engine has died."""


@dataclass(slots=True)
class _Entry:
    generation: OpenGeneration
    command: Submit
    closed: bool = False
    """The listener is gone; the engine may still be working on it."""
    finished: bool = False
    """Finished; the announced step may still hold it, if that was planned before."""

    @property
    def origin(self) -> str:
        return self.command.origin


class ProbationGate:
    """Used on one event loop."""

    def __init__(
        self,
        send: Callable[[Submit], None],
        fail: Callable[[OpenGeneration, PensieveError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``send`` hands a command to the engine; ``fail`` ends a waiting generation that could not be sent later."""
        self._send = send
        self._fail = fail
        self._clock = clock
        self._quarantine = Quarantine(clock)
        self.blocklist = Blocklist(clock)
        self._admitted: dict[int, _Entry] = {}
        self._waiting: OrderedDict[int, _Entry] = OrderedDict()
        self._running_suspect: _Entry | None = None
        """The suspect that was admitted alone."""
        self._batch: frozenset[int] | None = None
        """Requests of the step that was announced last."""
        self._warmed_at: dict[SessionKey, float] = {}
        self._no_warm_until: dict[SessionKey, float] = {}
        """Sessions that an engine died soon after warming, and until when they are not warmed."""

    def may_warm(self, session: SessionKey) -> bool:
        """Whether a session may be warmed, which then counts as done. A refusal discloses no reason."""
        now = self._clock()
        if self._no_warm_until.get(session, 0.0) > now or self.blocklist.refuses(session):
            return False
        self._warmed_at = {one: at for one, at in self._warmed_at.items() if at > now - WARM_SUSPICION_S}
        self._warmed_at[session] = now
        return True

    def check(self, command: Submit) -> None:
        """Raises Internal (REQUEST_QUARANTINED, SESSION_QUARANTINED)."""
        self._quarantine.check(command.origin)
        self.blocklist.check(command.session, command.qos.tenant, command.tokens)

    def enter(self, generation: OpenGeneration, command: Submit) -> None:
        """Send the command, now or when this generation is next. Raises the errors of ``send``."""
        entry, origin = _Entry(generation, command), command.origin
        if origin and self.blocklist.on_probation(command.session):
            self._quarantine.add_suspect(origin)
        alone = self._quarantine.must_run_alone(origin)
        if alone and self._running_suspect is not None:
            self._waiting[generation.request] = entry
            return
        self._send(command)
        self._admitted[generation.request] = entry
        if alone:
            self._running_suspect = entry

    def on_closed(self, generation: OpenGeneration, *, finished: bool) -> None:
        """A generation has ended; ``finished``: the engine finished it."""
        self._waiting.pop(generation.request, None)
        entry = self._admitted.get(generation.request)
        if entry is None:
            return
        entry.closed, entry.finished = True, finished
        if self._batch is None or generation.request not in self._batch:
            del self._admitted[generation.request]
        if finished and entry.origin:
            self._quarantine.on_success(entry.origin)
        if entry is self._running_suspect:
            self._admit_next()

    def on_step_begin(self, requests: Iterable[int]) -> None:
        self._batch = frozenset(requests)
        for number in [one for one, entry in self._admitted.items() if entry.closed]:
            if number not in self._batch:
                del self._admitted[number]

    def on_tokens(self) -> None:
        """New tokens: the running suspect may have got further than at the engine's death."""
        suspect = self._running_suspect
        if suspect is not None and self._quarantine.on_progress(
            suspect.origin, suspect.generation.num_output_tokens
        ):
            self._admit_next()

    def on_engine_lost(self, *, killed_externally: bool) -> OpenGeneration | None:
        """Start over with another engine, and log the turns it was working on. Returns the guilty generation,
        if any."""
        accused = [
            entry
            for number, entry in self._admitted.items()
            if entry.origin and (self._batch is None or number in self._batch)
        ]
        at_work = [entry for entry in accused if not entry.finished]
        for entry in at_work[:MOST_NAMED]:
            fields = {**entry.generation.log_fields, "output_tokens": entry.generation.num_output_tokens}
            log.warning("the engine ended at work on this turn, of %d", len(at_work), extra=fields)
        self.reset()
        now = self._clock()
        self._no_warm_until = {
            session: until for session, until in self._no_warm_until.items() if until > now
        }
        if not killed_externally:
            fresh = [session for session, at in self._warmed_at.items() if at > now - WARM_SUSPICION_S]
            self._no_warm_until |= dict.fromkeys(fresh, now + MEMORY_S)
        self._warmed_at.clear()
        batch = {entry.origin: entry.generation.num_output_tokens for entry in accused}
        guilty = (
            self._quarantine.on_engine_lost(batch, killed_externally=killed_externally) if batch else None
        )
        for entry in [one for one in accused if guilty is not None and one.origin == guilty][:1]:
            command = entry.command
            if self.blocklist.add(command.session, command.qos.tenant, command.tokens):
                fields = dict(entry.generation.log_fields)
                log.error(
                    "turns of a session have ended the engine again and again: it is refused", extra=fields
                )
        return next((one.generation for one in at_work if guilty is not None and one.origin == guilty), None)

    def reset(self) -> None:
        """Forget all running and waiting generations."""
        self._admitted.clear()
        self._waiting.clear()
        self._running_suspect = self._batch = None

    def _admit_next(self) -> None:
        """Admit waiting generations up to the next suspect."""
        self._running_suspect = None
        while self._waiting and self._running_suspect is None:
            _, entry = self._waiting.popitem(last=False)
            try:
                self.enter(entry.generation, entry.command)
            except PensieveError as error:
                self._fail(entry.generation, error)
