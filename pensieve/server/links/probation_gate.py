"""Admits generations to an engine: quarantined requests are refused, suspects go in one at a time."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pensieve.core import SessionKey
from pensieve.engine.messages import Submit
from pensieve.errors import PensieveError
from pensieve.server.links.generations import OpenGeneration
from pensieve.server.links.quarantine import MEMORY_S, Blocklist, Quarantine

WARM_SUSPICION_S: Final = 10.0
"""An engine that dies within this time after a session was warmed may have died of it."""

MOST_NAMED: Final = 8
"""Turns that the log names when an engine has died."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    generation: OpenGeneration
    command: Submit
    origin: str
    closed: bool = False
    """The listener is gone; the engine may still be working on it."""
    finished: bool = False
    """Finished; the announced step may still hold it, if that was planned before."""


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

    def check(self, command: Submit, origin: str) -> None:
        """Raises Internal (REQUEST_QUARANTINED, SESSION_QUARANTINED). ``origin``: name shared by all tries of
        a turn, or ""."""
        self._quarantine.check(origin)
        self.blocklist.check(command.session, command.qos.tenant, command.tokens)

    def enter(self, generation: OpenGeneration, command: Submit, origin: str) -> None:
        """Send the command, now or when this generation is next. Raises the errors of ``send``."""
        entry = _Entry(generation, command, origin)
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
        """``well``: the engine finished it."""
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
                self.enter(entry.generation, entry.command, entry.origin)
            except PensieveError as error:
                self._fail(entry.generation, error)
