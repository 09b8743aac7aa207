"""One call and where it is carried out: a repeated call goes where its first try went.

The request id of a turn is unique within its session only. So a call with an ``Idempotency-Key`` first claims the id
for the session that it has chosen, and every try follows the plan of the first claim. The service keeps the claim, so
it outlives doors and servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import msgspec
from starlette.requests import Request

from pensieve.client import AsyncClient, AsyncSession, AsyncTurnStream, Role, TurnOptions, TurnState
from pensieve.client.claims import claim, release_claim
from pensieve.errors import (
    Aborted,
    ContextLimitExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PensieveError,
    ResourceExhausted,
    TurnInProgress,
)
from pensieve.http.common.contents import Message
from pensieve.http.common.failures import HttpFailure
from pensieve.http.common.requests import request_id_for

PATIENCE_S: Final = 2.0
"""How long is tried to take back what a refused call had made: the refusal waits for it."""
_NO_PART_OF_A_CALL: Final = frozenset(
    {
        "model",  # There is one.
        "stream", "stream_options",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
    }
)  # fmt: skip
"""Fields that may differ between two tries of one call: how the answer is delivered, and what has no effect on it."""


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a branch is cut off."""

    session: str
    item: int
    candidate: int | None = None


class CallPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """In which session a turn is to begin."""

    own: str = ""
    """A session that is made for this call alone."""
    session: str = ""
    """One that was there, to be gone on with; if it has moved on, the turn begins in ``own`` instead."""
    revision: int | None = None
    """The revision of ``session`` that the turn expects; None accepts any."""
    source: Source | None = None
    """What ``own`` branches off from, where the request does not say."""

    @property
    def first(self) -> str:
        """The session that is tried first."""
        return self.session or self.own


@dataclass(frozen=True, slots=True)
class Call:
    """What tries of one call have in common."""

    id: uuid.UUID
    """Request id of its turn."""
    fingerprint: str = ""
    """Digest of all that the call says; empty: it has no ``Idempotency-Key``, and is never repeated."""

    @property
    def is_retryable(self) -> bool:
        return bool(self.fingerprint)

    @classmethod
    def from_request(cls, request: Request, body: msgspec.Struct, *said: object) -> Call:
        """``said``: what the call says beside its body, such as the session that its path names."""
        turn_id = request_id_for(request)
        if not request.headers.get("idempotency-key"):
            return cls(turn_id)
        fields = {
            name: getattr(body, name)
            for name in body.__struct_fields__
            if name not in _NO_PART_OF_A_CALL and getattr(body, name) is not None
        }
        data = _encoder.encode([request.url.path.rstrip("/"), *said, fields])
        return cls(turn_id, hashlib.blake2b(data, digest_size=16).hexdigest())

    def as_unstored(self) -> Call:
        """The same call if it is not to be stored: another turn, in sessions of its own.

        A call that is repeated with its key, but not to be stored this time, erases nothing that the first one stored.
        """
        return replace(self, id=uuid.uuid5(self.id, "unstored")) if self.is_retryable else self

    async def claim_plan(self, client: AsyncClient, plan: CallPlan) -> CallPlan:
        """The plan that all tries of this call follow. Raises AlreadyExists when the key is another call's."""
        if not self.is_retryable:
            return plan
        told = msgspec.json.encode(plan).decode()
        _, told = await claim(client, str(self.id), plan.first, fingerprint=self.fingerprint, plan=told)
        return msgspec.json.decode(told, type=CallPlan)

    @asynccontextmanager
    async def undo_on_refusal(
        self, client: AsyncClient, plan: CallPlan, more: Mapping[str, uuid.UUID] = MappingProxyType({})
    ) -> AsyncIterator[None]:
        """The block carries out the call by ``plan``. A refusal leaves no session that was made for it, and no claim.

        ``more``: sessions that are made beside the plan's own, with the request ids of their turns.
        """
        try:
            yield
        except (PensieveError, HttpFailure) as error:
            if not self.is_retryable or is_refusal(error):
                await self.undo(client, plan, more)
            raise

    async def undo(
        self, client: AsyncClient, plan: CallPlan, more: Mapping[str, uuid.UUID] = MappingProxyType({})
    ) -> None:
        """Take back what was made for the call by ``plan``, and its claim. ``more``: see ``leaving_nothing``."""
        # The refusal is the answer, whatever comes of this: a server that is overloaded may refuse it, too.
        with contextlib.suppress(PensieveError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._take_back(client, plan, more)

    async def _take_back(self, client: AsyncClient, plan: CallPlan, more: Mapping[str, uuid.UUID]) -> None:
        own = {plan.own: self.id, **more} if plan.own else {}
        if self.is_retryable:
            # First, so that a session that is gone is known to have gone for that.
            await release_claim(client, str(self.id), plan.first)
        for name, turn_id in own.items():
            session = client.session(name)
            if not self.is_retryable:
                await session.delete(allow_missing=True)
                continue
            # In this order: a turn that another try confirms in between has made the revision another one.
            with contextlib.suppress(NotFound, Aborted):
                revision = (await session.refresh()).revision
                if not await has_turn(session, turn_id):
                    await session.delete(expected_revision=revision, allow_missing=True)


async def has_turn(session: AsyncSession, turn_id: uuid.UUID) -> bool:
    """Whether another try of a call has its turn in the session, or had it: an erased one is not made anew."""
    try:
        turn = await session.get_turn(str(turn_id))
    except NotFound as error:
        return error.reason == "CONTENT_ERASED"
    return turn.state is not TurnState.DISCARDED


async def execute_plan(
    client: AsyncClient,
    call: Call,
    plan: CallPlan,
    make: Callable[[str], Awaitable[AsyncSession]],
    begin: Callable[[AsyncSession, TurnOptions], Awaitable[AsyncTurnStream]],
) -> tuple[AsyncSession, AsyncTurnStream]:
    """The session of the plan, and the turn there, which the service has accepted.

    ``make``: the plan's own session; the same call makes it once. ``begin``: the turn, with these options more.
    Raises TurnInProgress where a repeated call finds another turn in its session and that does not end.
    """
    if plan.session:
        session = client.session(plan.session)
        options: TurnOptions = {"expected_revision": plan.revision}
        if call.is_retryable and plan.own:
            # All tries must begin the turn in one place. That a session has moved on is final: all of them see it and
            # make the branch. That it is busy is not.
            options["wait_if_busy"] = True
        try:
            return session, await begin(session, options)
        except (Aborted, FailedPrecondition) as error:
            busy = error.reason == TurnInProgress.default_reason
            if not plan.own or (busy and call.is_retryable):
                raise
            if isinstance(error, FailedPrecondition):
                raise
    session = await make(plan.own)
    return session, await begin(session, {})


async def is_free(session: AsyncSession, revision: int, turn_id: uuid.UUID) -> bool:
    """Whether a turn can begin at this revision of the session now. Raises NotFound."""
    info = await session.refresh()
    return info.revision == revision and info.active_request_id in (None, "", str(turn_id))


async def find_own_session(client: AsyncClient, call: Call, plan: CallPlan) -> AsyncSession | None:
    """The plan's own session if another try has made it. Raises NotFound (SESSION_DELETED) when it was erased since."""
    if not call.is_retryable:
        return None
    session = client.session(plan.own)
    try:
        await session.refresh()
    except NotFound as error:
        if error.reason == NotFound.default_reason:
            return None
        raise
    return session


def new_session_id(family: str) -> str:
    """A name for a session that is made for one call."""
    return f"{family}{uuid.uuid4().hex}"


def is_refusal(error: PensieveError | HttpFailure) -> bool:
    """Whether the call was refused for good: nothing of it is under way, and nothing of it was answered before."""
    if isinstance(error, HttpFailure):
        return error.status == 400
    return isinstance(error, InvalidArgument | ContextLimitExceeded | ResourceExhausted | FailedPrecondition)


_encoder = msgspec.json.Encoder(order="deterministic")


MOST_ADDED: Final = 1024
"""Items that the service takes in one call."""
MOST_NEW: Final = 64
"""Items that it takes with a turn."""
MOST_FOLLOWING: Final = 64
"""Roles of later items that it takes with items that are added."""


def batches_of(items: Sequence[Message]) -> list[Sequence[Message]]:
    """``items`` in calls of at most ``MOST_ADDED``.

    Results of tools that follow each other stay together where they can: many templates write them as one message.
    """
    found: list[Sequence[Message]] = []
    begin = 0
    while begin < len(items):
        end = cut = min(begin + MOST_ADDED, len(items))
        while begin < cut < len(items) and items[cut].role is Role.TOOL:
            cut -= 1
        end = cut if cut > begin else end
        found.append(items[begin:end])
        begin = end
    return found


def following_roles(items: Sequence[Message]) -> list[Role]:
    """Roles of what follows items that are added: a template may write earlier answers in another way than the last."""
    return [one.role for one in items[:MOST_FOLLOWING]]


def split_new(new: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """What is added to the session before the turn, and what goes with the turn.

    Nothing goes with it when the items end in more results of tools than it takes.
    """
    cut = max(0, len(new) - MOST_NEW)
    while 0 < cut < len(new) and new[cut].role is Role.TOOL:
        cut += 1
    return new[:cut], new[cut:]


async def answered(session: AsyncSession, new: Sequence[Message], options: TurnOptions) -> AsyncTurnStream:
    """The turn with these items, or without any behind those that the session ends in, once it is accepted."""
    if not new:
        options = {**options, "replace_after_item": (await session.items())[-1].item}
    stream = session.stream(items=[one.sdk_input for one in new], **options)
    await stream.accepted()
    return stream


async def added(
    session: AsyncSession,
    items: Sequence[Message],
    call: Call,
    part: str = "items",
    *,
    follow: Sequence[Message] = (),
    note: Callable[[], None] = lambda: None,
) -> AsyncSession:
    """The session with these items behind its own. Another try of the call adds none of them again.

    ``part``: tells apart what one call adds to one session in several parts. ``follow``: items that come behind these.
    ``note`` is called for each record that the session has of this.
    """
    if items and call.is_retryable and await has_turn(session, call.id):
        return session
    behind = 0
    for number, chunk in enumerate(batches_of(items)):
        given, tries = [one.sdk_input for one in chunk], 0
        behind += len(chunk)
        roles = following_roles((*items, *follow)[behind:])
        # What a try has added and taken back again is not there any more, and its request id is used.
        while True:
            name = _id(call, f"{part} {number} {tries}")
            there = await session.append(given, followed_by=roles, request_id=name)
            note()
            if len(there) == len(given):
                break
            tries += 1
    return session


@asynccontextmanager
async def adding_items(
    session: AsyncSession, items: Sequence[Message], call: Call, follow: Sequence[Message]
) -> AsyncIterator[None]:
    """Adds items before the block begins the turn with ``follow``, and takes them back when that is refused."""
    if not items:
        yield
        return
    before = (await session.items())[-1:]
    first = (await session.refresh()).revision
    await added(session, items, call, follow=follow)
    try:
        yield
    except PensieveError as error:
        if is_refusal(error) or not call.is_retryable:
            with contextlib.suppress(PensieveError):
                await _take_back(session, before[0].item if before else 0, first + len(batches_of(items)))
        raise


async def _take_back(session: AsyncSession, item: int, revision: int) -> None:
    with contextlib.suppress(Aborted):  # Others have gone on from here: the items stay.
        await session.rewind(to_item=item, expected_revision=revision)


def _id(call: Call, name: str) -> str:
    # A key that was refused is free for another call: what that one adds is something else.
    return str(uuid.uuid5(call.id, f"{call.fingerprint} {name}"))
