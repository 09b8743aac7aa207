"""Finds the session that a resent history ends in. Whoever is not found is given a new session with that history.

A turn goes to the service with a mark, which names all that is said before its answer. Who resends the conversation
names by it the turn that the last answer is of, to any door, whatever has been restarted. ``Heads`` only saves the
question.
"""

from __future__ import annotations

import functools
import re
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final

from pensieve.client import AsyncSession, AsyncTurnStream, FoundTurn, Role, Turn, TurnOptions
from pensieve.errors import Aborted, DataLoss, FailedPrecondition, NotFound
from pensieve.http.common.callers import Caller
from pensieve.http.common.contents import NamedTalk, Said, Talk
from pensieve.http.common.failures import HttpFailure
from pensieve.http.common.requests import may_be_a_retry

MOST_FOLLOWING: Final = 64
"""Roles of new messages that an import is told."""
_MADE_HERE: Final = re.compile(r"(?:chat|conv|resp)-[0-9a-f]{32}")
"""Sessions that the door made."""


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

    def ended(self, talk: NamedTalk, session_id: str, turn: Turn) -> None:
        """A turn was committed: whoever resends its conversation, with any of its answers, goes on from there."""
        if turn.output is None:
            return
        head = Head(session_id, turn.revision, turn.output.item, turn.request_id)
        self._put(talk, turn.text, head)
        for one in turn.candidates:
            if one.candidate != turn.chosen:
                self._put(talk, one.text, replace(head, candidate=one.candidate))

    def _put(self, talk: NamedTalk, answer: str, head: Head) -> None:
        self._heads[talk.after(answer)] = head
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
    heads: Heads | None,
    named: NamedTalk,
    turn_id: uuid.UUID,
    options: TurnOptions,
    ttl_s: float | None,
    *,
    family: str = "chat-",
    is_found: bool = True,
) -> tuple[AsyncSession, AsyncTurnStream]:
    """A turn that the service has accepted, in the session that the history is, or in a new one with that history.

    ``heads``: None for what neither finds nor ``is_found``. The names of what is made are made of ``turn_id``: a retry
    finds it.
    """
    options["request_id"] = str(turn_id)
    talk = named.talk
    if heads is not None and is_found:
        options["mark"] = named.mark
    own = f"{family}{turn_id.hex}"
    if may_be_a_retry(turn_id):
        session = caller.client.session(own)
        try:
            await _check_holds(session, talk)
            return session, await _accepted(session, talk, options)
        except (NotFound, DataLoss) as error:
            pass_unless_gone(error)  # This is the first try, or that one went on in a session that was there.
    if heads is not None and talk.history:
        # What is remembered may have become another session since a first try.
        head = None if may_be_a_retry(turn_id) else heads.find(named.before)
        if head is not None:
            try:
                return await _go_on(caller, head, talk, turn_id, own, options)
            except (NotFound, DataLoss) as error:
                pass_unless_gone(error)
                heads.forget(named.before)
        head = await _looked_up(caller, named, turn_id)
        if head is not None:
            try:
                return await _go_on(caller, head, talk, turn_id, own, options)
            except (NotFound, DataLoss) as error:
                pass_unless_gone(error)  # It has gone since.
    session = await caller.client.create_session(
        session_id=own,
        system_prompt=talk.system or None,
        tools=talk.tools or None,
        initial_items=[one.given for one in talk.history],
        followed_by=[one.role for one in talk.new[:MOST_FOLLOWING]],
        ttl=ttl_s,
        overflow="drop_oldest_turns" if talk.drops_oldest else None,
        request_id=str(uuid.uuid5(turn_id, "session")),
    )
    return session, await _accepted(session, talk, options)


def pass_unless_gone(error: NotFound | DataLoss) -> None:
    """Raises ``error`` unless the session, or what was said last in it, is not there.

    A store that has lost it says so to its operator. Who resends all of the conversation goes on from that.
    """
    if isinstance(error, DataLoss) and error.reason != "HISTORY_REGRESSED":
        raise error


async def _check_holds(session: AsyncSession, talk: Talk) -> None:
    """Raises HttpFailure (409) unless the session begins with the history; NotFound when it is not there."""
    tools = (await session.refresh()).tools
    told = [*([Said(Role.SYSTEM, talk.system)] if talk.system else []), *talk.history]
    held = (await session.items())[: len(told)]
    if tools != talk.tools or len(held) < len(told) or not all(map(talk.holds, held, told)):
        raise HttpFailure(
            409,
            "this Idempotency-Key was used for another request",
            kind="conflict_error",
            param="Idempotency-Key",
            code="request_id_reused",
        )


async def _looked_up(caller: Caller, named: NamedTalk, turn_id: uuid.UUID) -> Head | None:
    """The end that the service knows; of several the newest, or the one where an earlier try of this turn went."""
    if named.end is None:
        return None
    talk, (mark, told) = named.talk, named.end
    find = functools.partial(caller.client.find_turn, mark, request_id=str(turn_id))
    found = None if told.calls else await find(told.text)
    if found is None and not talk.form.plain:
        # The service knows answers as the model wrote them, with calls and thoughts: what the newest was is read here.
        found = _answered_so(await find(), talk, told)
    if found is None:
        return None
    turn, candidate = found.turn, found.candidate
    if turn.output is None:
        return None
    session_id = turn.session.removeprefix("sessions/")
    if not _MADE_HERE.fullmatch(session_id):
        return None  # Somebody else's mark: what the session is for is not known.
    return Head(
        session_id,
        turn.revision,
        turn.output.item,
        turn.request_id,
        None if candidate == turn.chosen else candidate,
    )


def _answered_so(found: FoundTurn | None, talk: Talk, told: Said) -> FoundTurn | None:
    """The turn with that of its candidates which the client was told as ``told``; None: it has none."""
    if found is None:
        return None
    turn = found.turn
    texts = [(found.candidate, turn.text), *((one.candidate, one.text) for one in turn.candidates)]
    number = next((number for number, text in texts if talk.knows_as(text, told)), None)
    return FoundTurn(turn, number) if number is not None else None


async def _go_on(
    caller: Caller, head: Head, talk: Talk, turn_id: uuid.UUID, own: str, options: TurnOptions
) -> tuple[AsyncSession, AsyncTurnStream]:
    """In the head's session, or in a branch of it named ``own``. Raises NotFound where neither can be."""
    session = caller.client.session(head.session_id)
    revision = head.revision
    try:
        if head.candidate is not None:
            revision = (await session.choose(head.turn_id, head.candidate)).revision
        return session, await _accepted(session, talk, {**options, "expected_revision": revision})
    except (Aborted, FailedPrecondition):
        pass  # Somebody has gone on from here already, or is about to: this is a branch.
    session = await session.fork(
        head.item,
        session_id=own,
        request_id=str(uuid.uuid5(turn_id, "fork")),
        candidate=head.candidate,
    )
    return session, await _accepted(session, talk, options)


async def _accepted(session: AsyncSession, talk: Talk, options: TurnOptions) -> AsyncTurnStream:
    stream = session.stream(items=[one.given for one in talk.new], **options)
    await stream.accepted()
    return stream
