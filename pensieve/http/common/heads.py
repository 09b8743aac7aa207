"""Finds the session that a resent history ends in. Whoever is not found is given a new session with that history.

A turn goes to the service with a mark, which names all that is said before its answer. Who resends the conversation
names by it the turn that the last answer is of, to any door, whatever has been restarted. ``HeadCache`` only saves the
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

import msgspec

from pensieve.client import AsyncSession, AsyncTurnStream, FoundTurn, Turn, TurnOptions
from pensieve.errors import Aborted, DataLoss, FailedPrecondition, NotFound
from pensieve.http.common.callers import Caller
from pensieve.http.common.calls import (
    Call,
    CallPlan,
    Source,
    added,
    answered,
    batches_of,
    execute_plan,
    find_own_session,
    following_roles,
    is_free,
    new_session_id,
    split_new,
)
from pensieve.http.common.contents import Message, NamedTalk, Transcript
from pensieve.http.common.requests import seed_for

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


class HeadCache:
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

    def record_turn(self, talk: NamedTalk, session_id: str, turn: Turn) -> None:
        """A turn was committed: whoever resends its conversation, with any of its answers, goes on from there."""
        if turn.output is None:
            return
        head = Head(session_id, turn.revision, turn.output.item, turn.request_id)
        self._put(talk, turn.text, head)
        for one in turn.candidates:
            if one.candidate != turn.chosen:
                self._put(talk, one.text, replace(head, candidate=one.candidate))

    def _put(self, talk: NamedTalk, answer: str, head: Head) -> None:
        self._heads[talk.key_after(answer)] = head
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


@dataclass(frozen=True, slots=True)
class TurnStarter:
    """A turn on its way to the session that its history is, or to a new one with that history."""

    caller: Caller
    heads: HeadCache | None
    """None for what neither finds nor is found."""
    named: NamedTalk
    call: Call
    options: TurnOptions
    ttl_s: float | None
    """Idle lifetime of a session that is made."""

    async def begin(
        self, family: str = "chat-", *, is_found: bool = True
    ) -> tuple[AsyncSession, AsyncTurnStream]:
        """The session, and the turn that the service has accepted there. A refusal leaves nothing behind.

        ``family``: how the name of a session begins that is made. ``is_found``: whether the turn can be found by its
        history.
        """
        self.options["request_id"] = str(self.call.id)
        self.options.setdefault("seed", seed_for(self.call.id))
        if self.heads is not None and is_found:
            self.options["mark"] = self.named.mark
        own = new_session_id(family)
        client = self.caller.client
        if self.call.is_retryable:
            # What is remembered here may be another door's no more: the service alone is asked.
            head = await self._looked_up()
            plan = await self.call.claim_plan(
                client, CallPlan(own) if head is None else await self._plan(head, own)
            )
            async with self.call.undo_on_refusal(client, plan):
                try:
                    return await self._carried_out(plan)
                except DataLoss as error:
                    pass_unless_gone(error)
                    return await self._carried_out(CallPlan(plan.own))
        async with self.call.undo_on_refusal(client, CallPlan(own)):
            return await self._begun_once(own)

    async def _begun_once(self, own: str) -> tuple[AsyncSession, AsyncTurnStream]:
        heads = self.heads
        if heads is not None and self.named.talk.history:
            head = heads.find(self.named.history_key)
            if head is not None:
                try:
                    return await self._carried_out(await self._plan(head, own))
                except (NotFound, DataLoss) as error:
                    pass_unless_gone(error)
                    heads.forget(self.named.history_key)
            head = await self._looked_up()
            if head is not None:
                try:
                    return await self._carried_out(await self._plan(head, own))
                except (NotFound, DataLoss) as error:
                    pass_unless_gone(error)  # It has gone since.
        return await self._carried_out(CallPlan(own))

    async def _plan(self, head: Head, own: str) -> CallPlan:
        """Go on in the head's session, or in a branch of it. Raises NotFound where neither can be."""
        session = self.caller.client.session(head.session_id)
        branch = CallPlan(own, source=Source(head.session_id, head.item, head.candidate))
        revision = head.revision
        if split_new(self.named.talk.new)[0]:
            return (
                branch  # What comes first is added without a turn: not to a session that others go on from.
            )
        if self.call.is_retryable:
            # A choice among candidates cannot be made again once the turn is there.
            free = head.candidate is None and await is_free(session, revision, self.call.id)
            return (
                msgspec.structs.replace(branch, session=head.session_id, revision=revision)
                if free
                else branch
            )
        if head.candidate is not None:
            try:
                revision = (await session.choose(head.turn_id, head.candidate)).revision
            except (Aborted, FailedPrecondition):
                return branch  # Somebody has gone on from here already, or is about to.
        return msgspec.structs.replace(branch, session=head.session_id, revision=revision)

    async def _carried_out(self, plan: CallPlan) -> tuple[AsyncSession, AsyncTurnStream]:
        async def make(own: str) -> AsyncSession:
            return await self._made(plan, own)

        async def turn(session: AsyncSession, more: TurnOptions) -> AsyncTurnStream:
            last = split_new(self.named.talk.new)[1]
            return await answered(session, last, {**self.options, **more})

        return await execute_plan(self.caller.client, self.call, plan, make, turn)

    async def _made(self, plan: CallPlan, own: str) -> AsyncSession:
        client, talk = self.caller.client, self.named.talk
        early, last = split_new(talk.new)
        if plan.source is not None:
            session = await find_own_session(client, self.call, plan)
            if session is None:
                session = await client.session(plan.source.session).fork(
                    plan.source.item,
                    session_id=own,
                    request_id=str(uuid.uuid5(self.call.id, "fork")),
                    candidate=plan.source.candidate,
                )
            return await added(session, early, self.call, follow=last)
        past = (*talk.history, *early)
        first = batches_of(past)[:1]
        session = await client.create_session(
            session_id=own,
            system_prompt=talk.system or None,
            tools=talk.tools or None,
            initial_items=[one.sdk_input for chunk in first for one in chunk],
            followed_by=following_roles((*past, *last)[sum(map(len, first)) :]),
            ttl=self.ttl_s,
            overflow="drop_oldest_turns" if talk.drops_oldest else None,
            request_id=str(uuid.uuid5(self.call.id, "session")),
        )
        return await added(session, past[sum(map(len, first)) :], self.call, follow=last)

    async def _looked_up(self) -> Head | None:
        """The end that the service knows; of several the newest, or the one where an earlier try of this turn went."""
        if self.heads is None or self.named.end is None:
            return None
        talk, (mark, told) = self.named.talk, self.named.end
        find = functools.partial(self.caller.client.find_turn, mark, request_id=str(self.call.id))
        found = None if told.calls else await find(told.text)
        if found is None and not talk.form.plain:
            # The service knows answers as the model wrote them, with calls and thoughts: what the newest was is read
            # here.
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


def pass_unless_gone(error: NotFound | DataLoss) -> None:
    """Raises ``error`` unless the session, or what was said last in it, is not there.

    A store that has lost it says so to its operator. Who resends all of the conversation goes on from that.
    """
    if isinstance(error, DataLoss) and error.reason != "HISTORY_REGRESSED":
        raise error


def _answered_so(found: FoundTurn | None, talk: Transcript, told: Message) -> FoundTurn | None:
    """The turn with that of its candidates which the client was told as ``told``; None: it has none."""
    if found is None:
        return None
    turn = found.turn
    texts = [(found.candidate, turn.text), *((one.candidate, one.text) for one in turn.candidates)]
    number = next((number for number, text in texts if talk.matches_answer(text, told)), None)
    return FoundTurn(turn, number) if number is not None else None
