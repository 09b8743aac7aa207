"""Warming: loads a session's KV to the device ahead of its next turn. It changes and pins nothing."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass

from pensieve.engine.messages import ResidentTokens
from pensieve.errors import PensieveError
from pensieve.server import ids
from pensieve.server.failures import draining
from pensieve.server.history.binding import ServedModel
from pensieve.server.history.transcript import Transcript
from pensieve.server.links.engine_link import EngineLink, context_limit
from pensieve.server.settings import TurnSettings
from pensieve.server.turns.turns import Turns
from pensieve.store import Key
from pensieve.store.records import SessionRow


@dataclass(frozen=True, slots=True)
class WarmAnswer:
    """The answer to a request to warm a session."""

    refusal: str
    """Why it was refused, as in ``engine.messages.Warmed``; "" if it was accepted."""
    resident: ResidentTokens
    """Where its KV is now: accepted chunks may still be on their way."""
    row: SessionRow


class SessionWarmer:
    """Asks the engine once at a time per session: concurrent calls get the same answer."""

    def __init__(
        self,
        transcript: Transcript,
        link: EngineLink,
        turns: Turns,
        served: ServedModel,
        settings: TurnSettings,
        on_warmed: Callable[[str], None] | None = None,
    ) -> None:
        """``on_warmed`` is called with ``accepted``, the refusal, or the error's reason."""
        self._transcript = transcript
        self._link = link
        self._turns = turns
        self._served = served
        self._settings = settings
        self._on_warmed = on_warmed
        self._asking: dict[Key, asyncio.Task[WarmAnswer]] = {}

    async def warm(self, key: Key) -> WarmAnswer:
        """Raises the errors of reading the session, and Unavailable when no engine serves or the server is
        draining."""
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.create_task(self._ask(key), name="warm")
            asking.add_done_callback(lambda _: self._asking.pop(key))
        try:
            # Shielded: a caller that disconnects must not cancel the others' answer.
            return await asyncio.shield(asking)
        except PensieveError as error:
            # A copy for each caller: one exception raised in many tasks would chain their tracebacks.
            raise copy.copy(error) from None

    async def _ask(self, key: Key) -> WarmAnswer:
        outcome = "bug"
        try:
            answer = await self._answer(key)
            outcome = answer.refusal or "accepted"
            return answer
        except PensieveError as error:
            outcome = error.reason.lower()
            raise
        finally:
            if self._on_warmed is not None:
                self._on_warmed(outcome)

    async def _answer(self, key: Key) -> WarmAnswer:
        if self._turns.draining:
            raise draining()
        row = await self._transcript.store.load(key)
        if row.running is not None or self._turns.has_running_turn(key):
            return await self._refused("running", key, row)
        history = await self._transcript.history_at(key, row)
        self._served.check(history.config)
        renderer = self._transcript.renderer
        length = renderer.length(history)
        if not length:
            return await self._refused("nothing_to_do", key, row)
        if length >= context_limit(self._link.info):
            return await self._refused("no_room", key, row)
        if not self._turns.may_warm(key):
            return await self._refused("busy", key, row)
        tokens = await asyncio.to_thread(renderer.context, history)
        self._served.check_tokens(tokens, self._link.info.vocab_size)
        scope = self._settings.sharing_scope(key, history.config)
        standing = self._turns.qos_for(key)
        found = await self._link.warm(ids.session_key(key), tokens, scope=scope, qos=standing)
        resident = ResidentTokens(found.call, found.device_tokens, found.host_tokens)
        return WarmAnswer(found.refused, resident, row)

    async def _refused(self, why: str, key: Key, row: SessionRow) -> WarmAnswer:
        return WarmAnswer(why, await self._link.residency(ids.session_key(key)), row)
