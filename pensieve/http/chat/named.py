"""Turns in a session that the client names: it is there, or is made with the history that came with the call.

The name is the client's. So a session that was made for a call that is then refused must leave the name free: the
client comes back with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from pensieve.client import AsyncClient, AsyncSession, AsyncTurnStream, TurnOptions
from pensieve.errors import AlreadyExists, DataLoss, NotFound, PensieveError
from pensieve.http.common.calls import PATIENCE_S, Call, CallPlan, is_refusal
from pensieve.http.common.contents import Talk
from pensieve.http.common.imports import added, adding, answered, chunks_of, parted, roles_of

_RACES: Final = 8
"""How often the session is looked for again when other calls make it and take it back."""


@dataclass(slots=True)
class _Made:
    """A session that this call has made."""

    session: AsyncSession
    records: int = 1
    """How many this call has written. Where the session has another number, others have used it."""

    def note(self) -> None:
        self.records += 1

    async def take_back(self) -> None:
        """Free the name, unless others have used the session or a turn runs in it. A server may refuse even that."""
        with contextlib.suppress(PensieveError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self.session.delete(
                    expected_revision=self.records, allow_missing=True, unused_only=True
                )


@dataclass(frozen=True, slots=True)
class NamedTurn:
    """A turn that the service has accepted, in the session of that name."""

    session: AsyncSession
    stream: AsyncTurnStream
    _client: AsyncClient
    _call: Call
    _made: _Made | None

    @asynccontextmanager
    async def to_its_end(self) -> AsyncIterator[None]:
        """The block waits for the answer. A turn that is refused while it waits for its place leaves nothing either."""
        try:
            yield
        except PensieveError as error:
            if is_refusal(error):
                if self._made is not None:
                    await self._made.take_back()
                await self._call.refused(self._client, CallPlan(session=self.session.id))
            raise


async def begin(client: AsyncClient, name: str, talk: Talk, call: Call, options: TurnOptions) -> NamedTurn:
    """A turn of the session of that name; what is resent of its history is not read where it is there."""
    options["request_id"] = str(call.id)
    plan = CallPlan(session=name)
    await call.settled(client, plan)
    async with call.leaving_nothing(client, plan):
        for attempt in range(_RACES):
            try:
                session, stream = await _gone_on(client.session(name), talk, call, options)
                return NamedTurn(session, stream, client, call, None)
            except (NotFound, DataLoss) as error:
                if not _is_missing(error):
                    raise
            try:
                return await _begun(client, name, talk, call, options)
            except AlreadyExists as error:  # another call has just made it: go on in that one
                if error.reason != "SESSION_EXISTS" or attempt + 1 == _RACES:
                    raise
            except NotFound as error:  # another call had made it and has removed it again
                if not _is_missing(error) or attempt + 1 == _RACES:
                    raise
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _gone_on(
    session: AsyncSession, talk: Talk, call: Call, options: TurnOptions
) -> tuple[AsyncSession, AsyncTurnStream]:
    early, last = parted(talk.new)
    async with adding(session, early, call, last):
        return session, await answered(session, last, options)


async def _begun(client: AsyncClient, name: str, talk: Talk, call: Call, options: TurnOptions) -> NamedTurn:
    """The turn in a session that is made for it. A call that fails here takes it back."""
    early, last = parted(talk.new)
    first = (chunks_of(talk.history) or [()])[0]
    session = await client.create_session(
        session_id=name,
        system_prompt=talk.system or None,
        tools=talk.tools or None,
        initial_items=[one.given for one in first],
        followed_by=roles_of((*talk.history, *talk.new)[len(first) :]),
    )
    made = _Made(session)
    try:
        await added(session, talk.history[len(first) :], call, "history", follow=talk.new, note=made.note)
        await added(session, early, call, follow=last, note=made.note)
        stream = await answered(session, last, options)
    except PensieveError as error:
        if not _is_missing(error):
            await made.take_back()
        raise
    return NamedTurn(session, stream, client, call, made)


def _is_missing(error: PensieveError) -> bool:
    """Whether there is no session of the name, or the store has lost the one there was."""
    is_lost = error.reason == "HISTORY_REGRESSED" and error.metadata.get("current_revision") == "0"
    return error.reason == NotFound.default_reason or is_lost
