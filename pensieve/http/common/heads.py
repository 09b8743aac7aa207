"""Finds the session that a resent history ends in. Only a short cut: whoever is not found is given a new session."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from pensieve.client import AsyncSession, AsyncTurnStream, Turn, TurnOptions
from pensieve.errors import Aborted, FailedPrecondition, NotFound
from pensieve.http.common.callers import Caller
from pensieve.http.common.contents import Talk, digest


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a conversation."""

    session_id: str
    revision: int
    """Of the session right after the answer."""
    item: int
    """The answer's."""
    turn_id: str
    candidate: int | None = None
    """The answer is this candidate of the turn, and the session still ends in another one."""


class Heads:
    """What was said → where it ends; least recently used forgotten first. One event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heads: OrderedDict[bytes, Head] = OrderedDict()

    def find(self, key: bytes) -> Head | None:
        head = self._heads.get(key)
        if head is not None:
            self._heads.move_to_end(key)
        return head

    def forget(self, key: bytes) -> None:
        self._heads.pop(key, None)

    def ended(self, scope: bytes, talk: Talk, session_id: str, turn: Turn) -> None:
        """A turn was committed: whoever resends its conversation, with any of its answers, goes on from there."""
        if turn.output is None:
            return
        head = Head(session_id, turn.revision, turn.output.item, turn.request_id)
        self._put(scope, talk, turn.text, head)
        for one in turn.candidates:
            if one.candidate != turn.chosen:
                self._put(scope, talk, one.text, replace(head, candidate=one.candidate))

    def _put(self, scope: bytes, talk: Talk, answer: str, head: Head) -> None:
        answered = talk.answered(answer)
        self._heads[digest(scope, talk.beginning, (*talk.history, *talk.new, answered))] = head
        while len(self._heads) > self._limit:
            self._heads.popitem(last=False)


async def noting(
    chunks: AsyncIterator[bytes], stream: AsyncTurnStream, note: Callable[[Turn], None]
) -> AsyncIterator[bytes]:
    """``chunks``; the turn is noted before the client can have the last one and come back."""
    noted = False
    async for chunk in chunks:
        if stream.done and not noted:
            noted = True
            note(stream.turn)
        yield chunk


async def begin(
    caller: Caller,
    heads: Heads,
    talk: Talk,
    turn_id: uuid.UUID,
    options: TurnOptions,
    ttl_s: float | None,
    *,
    family: str = "chat-",
    drops_oldest: bool = False,
) -> tuple[AsyncSession, AsyncTurnStream]:
    """A turn that the service has accepted, in the session that the history is, or in a new one with that history.

    The names of what is made are made of ``turn_id``: a retry finds it.
    """
    options["request_id"] = str(turn_id)
    key = digest(caller.scope, talk.beginning, talk.history)
    head = heads.find(key) if talk.history else None
    if head is not None:
        try:
            return await _go_on(caller, head, talk, turn_id, options)
        except NotFound:
            heads.forget(key)
    session = await caller.client.create_session(
        session_id=f"{family}{turn_id.hex}",
        system_prompt=talk.system or None,
        tools=talk.tools or None,
        initial_items=[one.given for one in talk.history],
        ttl=ttl_s,
        overflow="drop_oldest_turns" if drops_oldest else None,
        request_id=str(uuid.uuid5(turn_id, "session")),
    )
    return session, await _accepted(session, talk, options)


async def _go_on(
    caller: Caller, head: Head, talk: Talk, turn_id: uuid.UUID, options: TurnOptions
) -> tuple[AsyncSession, AsyncTurnStream]:
    session = caller.client.session(head.session_id)
    revision = head.revision
    try:
        if head.candidate is not None:
            revision = (await session.choose(head.turn_id, head.candidate)).revision
        return session, await _accepted(session, talk, {**options, "expected_revision": revision})
    except (Aborted, FailedPrecondition):
        # Somebody has gone on from here already, or is about to: this is a branch.
        if head.candidate is not None:
            raise NotFound("another answer was gone on with") from None
    session = await session.fork(
        head.item, session_id=f"chat-{turn_id.hex}", request_id=str(uuid.uuid5(turn_id, "fork"))
    )
    return session, await _accepted(session, talk, options)


async def _accepted(session: AsyncSession, talk: Talk, options: TurnOptions) -> AsyncTurnStream:
    stream = session.stream(items=[one.given for one in talk.new], **options)
    await stream.accepted()
    return stream
