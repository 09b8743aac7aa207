"""Finds the session that a resent history ends in. A history that is not found gets a new session.

Each turn goes to the service with a mark, a digest of all messages before its answer. A client that resends the
conversation names by it the turn of the last answer, at any door and after any restart. ``HeadCache`` only
saves the lookup.
"""

from __future__ import annotations

import contextlib
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
    Ahead,
    Call,
    CallPlan,
    Source,
    append_items,
    batches_of,
    begin_turn,
    execute_plan,
    find_own_session,
    following_roles,
    is_absent,
    is_free,
    new_session_id,
    set_on_branch,
    split_new,
)
from pensieve.http.common.contents import HashedHistory, Message, MessageHistory, overflow_policy
from pensieve.http.common.requests import seed_for

_MADE_BY_DOOR: Final = re.compile(r"(?:chat|conv|resp)-[0-9a-f]{32}")
"""Sessions that a door made."""


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a conversation."""

    session_id: str
    revision: int
    item: int
    turn_id: str
    candidate: int | None = None
    """Set when the answer is a candidate of the turn that is not committed."""


class HeadCache:
    """``NamedTalk.key_after`` → head, least recently used dropped first. Runs on one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heads: OrderedDict[bytes, Head] = OrderedDict()

    def find(self, key: bytes) -> Head | None:
        head = self._heads.get(key)
        if head is not None:
            self._heads.move_to_end(key)
        return head

    def remove(self, key: bytes) -> None:
        self._heads.pop(key, None)

    def record_turn(self, transcript: HashedHistory, session_id: str, turn: Turn) -> None:
        """Record a committed turn: a client that resends its conversation with any of its answers continues
        from there."""
        if turn.output is None:
            return
        head = Head(session_id, turn.revision, turn.output.item, turn.request_id)
        self._put(transcript, turn.text, head)
        for one in turn.candidates:
            if one.candidate != turn.chosen:
                self._put(transcript, one.text, replace(head, candidate=one.candidate))

    def _put(self, transcript: HashedHistory, answer: str, head: Head) -> None:
        self._heads[transcript.key_after(answer)] = head
        while len(self._heads) > self._limit:
            self._heads.popitem(last=False)


async def note_before_end(
    chunks: AsyncIterator[bytes], stream: AsyncTurnStream, note: Callable[[Turn], None]
) -> AsyncIterator[bytes]:
    """Yield ``chunks``; call ``note`` before the last one, so before the client can come back."""
    noted = False
    async for chunk in chunks:
        if stream.done and not noted:
            noted = True
            note(stream.turn)
        yield chunk


@dataclass(frozen=True, slots=True)
class TurnStarter:
    """Begins a turn in the session that its history ends in, or in a new session with that history."""

    caller: Caller
    heads: HeadCache | None
    """None: the turn neither looks for a session nor can be found."""
    hashed: HashedHistory
    call: Call
    options: TurnOptions
    ttl_s: float | None
    """Idle lifetime of a new session. None: it never expires, or, as a branch, when its source does."""

    async def begin(self, family: str = "chat-") -> tuple[AsyncSession, AsyncTurnStream]:
        """Return the session and the turn, which the service has accepted there. A refusal leaves no session
        behind. ``family``: prefix of a new session's name."""
        self.options["request_id"] = str(self.call.id)
        self.options.setdefault("seed", seed_for(self.call.id))
        if self.heads is not None:
            self.options["mark"] = self.hashed.mark
        own = new_session_id(family)
        client = self.caller.client
        if self.call.is_retryable:
            # Another door may have changed what this cache holds: only the service is asked.
            plan = CallPlan(own)
            if (head := await self._look_up()) is not None:
                with contextlib.suppress(NotFound):  # Gone since.
                    plan = await self._plan(head, own)
            plan = await self.call.claim_plan(client, plan)
            async with self.call.undo_on_refusal(client, plan):
                try:
                    return await self._execute(plan)
                except (NotFound, DataLoss) as error:
                    if isinstance(error, NotFound) and not is_absent(error):
                        raise  # Erased, perhaps with this turn.
                    raise_unless_gone(error)
                    return await self._execute(CallPlan(plan.own))
        async with self.call.undo_on_refusal(client, CallPlan(own)):
            return await self._begin_once(own)

    async def look_ahead(self, own: str) -> Ahead:
        """Return where the turn would begin, without beginning it. A session that has to be made gets the id
        ``own``. The call must not be retryable."""
        early, last = split_new(self.hashed.transcript.new)
        if self.heads is not None and self.hashed.transcript.history:
            head = self.heads.find(self.hashed.history_key) or await self._look_up()
            if head is not None:
                session = self.caller.client.session(head.session_id)
                branch = CallPlan(own, source=Source(head.session_id, head.item, head.candidate))
                try:
                    revision = (await session.refresh()).revision
                    if not early and head.candidate is None and revision == head.revision:
                        return session, last
                    return await self._make_session(branch, own), last
                except (NotFound, DataLoss) as error:
                    raise_unless_gone(error)
        return await self._make_session(CallPlan(own), own), last

    async def _begin_once(self, own: str) -> tuple[AsyncSession, AsyncTurnStream]:
        heads = self.heads
        if heads is not None and self.hashed.transcript.history:
            if (head := heads.find(self.hashed.history_key)) is not None:
                try:
                    return await self._execute(await self._plan(head, own))
                except (NotFound, DataLoss) as error:
                    raise_unless_gone(error)
                    heads.remove(self.hashed.history_key)
            if (head := await self._look_up()) is not None:
                try:
                    return await self._execute(await self._plan(head, own))
                except (NotFound, DataLoss) as error:
                    raise_unless_gone(error)  # Deleted since.
        return await self._execute(CallPlan(own))

    async def _plan(self, head: Head, own: str) -> CallPlan:
        """Continue in the head's session, or in a branch of it. Raises NotFound where neither is possible."""
        session = self.caller.client.session(head.session_id)
        branch = CallPlan(own, source=Source(head.session_id, head.item, head.candidate))
        revision = head.revision
        if split_new(self.hashed.transcript.new)[0]:
            return branch  # Items appended without a turn must not go to a session that others continue.
        if self.call.is_retryable:
            # Once the turn is there, a retry cannot choose the candidate again.
            if head.candidate is not None or not await is_free(session, revision, self.call.id):
                return branch
        elif head.candidate is not None:
            try:
                revision = (await session.choose(head.turn_id, head.candidate)).revision
            except (Aborted, FailedPrecondition):
                return branch  # Another request has continued from here, or is about to.
        return msgspec.structs.replace(branch, session=head.session_id, revision=revision)

    async def _execute(self, plan: CallPlan) -> tuple[AsyncSession, AsyncTurnStream]:
        async def make(own: str) -> AsyncSession:
            return await self._make_session(plan, own)

        async def turn(session: AsyncSession, more: TurnOptions) -> AsyncTurnStream:
            last = split_new(self.hashed.transcript.new)[1]
            return await begin_turn(session, last, {**self.options, **more})

        return await execute_plan(self.caller.client, self.call, plan, make, turn)

    async def _make_session(self, plan: CallPlan, own: str) -> AsyncSession:
        client, transcript = self.caller.client, self.hashed.transcript
        early, last = split_new(transcript.new)
        if plan.source is not None:
            session = await find_own_session(client, self.call, plan)
            if session is None:
                try:
                    session = await client.session(plan.source.session).fork(
                        plan.source.item,
                        session_id=own,
                        request_id=str(uuid.uuid5(self.call.id, "fork")),
                        candidate=plan.source.candidate,
                        ttl=self.ttl_s,
                    )
                except NotFound:
                    if not self.call.is_retryable:
                        raise  # the caller looks for another end
                    # Changed or deleted since. Every try takes this path, since the claim says where it begins.
                    return await self._make_session(CallPlan(own), own)
            await set_on_branch(
                session,
                {"overflow": overflow_policy(drops_oldest=transcript.drops_oldest), "default_sampling": {}},
            )
            return await append_items(session, early, self.call, follow=last)
        if transcript.summary and (made := await find_own_session(client, self.call, plan)) is not None:
            return made  # an earlier try may have made it with another summary
        past = (*transcript.history, *early)
        first = (batches_of(past) or [()])[0]
        session = await client.create_session(
            session_id=own,
            system_prompt=transcript.system or None,
            tools=transcript.tools or None,
            summary=transcript.summary or None,
            subject=transcript.subject or None,
            initial_items=[one.sdk_input for one in first],
            followed_by=following_roles((*past, *last)[len(first) :]),
            ttl=self.ttl_s,
            overflow=overflow_policy(drops_oldest=transcript.drops_oldest),
            request_id=str(uuid.uuid5(self.call.id, "session")),
        )
        return await append_items(session, past[len(first) :], self.call, follow=last)

    async def _look_up(self) -> Head | None:
        """Return the end that the service finds: of several, that of an earlier try of this turn, else the newest."""
        if self.heads is None or self.hashed.last_answer is None:
            return None
        transcript, (mark, message) = self.hashed.transcript, self.hashed.last_answer
        find = functools.partial(self.caller.client.find_turn, mark, request_id=str(self.call.id))
        found = None if message.calls else await find(message.text)
        if found is None and not transcript.form.plain:
            # The service matches answers as the model wrote them, with calls and thoughts. Parse the newest here.
            found = _with_candidate(await find(), transcript, message)
        if found is None:
            return None
        turn, candidate = found.turn, found.candidate
        if turn.output is None:
            return None
        session_id = turn.session.removeprefix("sessions/")
        if not _MADE_BY_DOOR.fullmatch(session_id):
            return None  # Another program's mark: the purpose of its session is unknown.
        return Head(
            session_id,
            turn.revision,
            turn.output.item,
            turn.request_id,
            None if candidate == turn.chosen else candidate,
        )


def raise_unless_gone(error: NotFound | DataLoss) -> None:
    """Raise ``error`` unless the session, or its last answer, is gone. A store that has lost it tells its
    operator. A client that resends the whole conversation continues from what it sent."""
    if isinstance(error, DataLoss) and error.reason != "HISTORY_REGRESSED":
        raise error


def _with_candidate(
    found: FoundTurn | None, transcript: MessageHistory, message: Message
) -> FoundTurn | None:
    """Return the turn with the candidate whose text the client sent as ``message``; None if it has none."""
    if found is None:
        return None
    turn = found.turn
    texts = [(found.candidate, turn.text), *((one.candidate, one.text) for one in turn.candidates)]
    number = next((number for number, text in texts if transcript.matches_answer(text, message)), None)
    return FoundTurn(turn, number) if number is not None else None
