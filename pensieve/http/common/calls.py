"""Carries out one call exactly once: every retry goes to the session of the first try.

A turn's request id is unique within its session only. So a call with an ``Idempotency-Key`` first claims the id
for the session that it chose, and every retry follows the plan of the first claim. The service stores claims,
so they outlive doors and servers.
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
from typing import Final, TypeAlias

import msgspec
from starlette.requests import Request

from pensieve.client import (
    AsyncClient,
    AsyncSession,
    AsyncTurnStream,
    Compaction,
    Role,
    SessionChanges,
    SessionInfo,
    TurnOptions,
    TurnState,
)
from pensieve.client.claims import claim, release_claim
from pensieve.errors import (
    Aborted,
    ContextLimitExceeded,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PensieveError,
    ResourceExhausted,
    TurnInProgress,
)
from pensieve.http.common.contents import Message
from pensieve.http.common.failures import HttpFailure, invalid_field
from pensieve.http.common.requests import request_id_for

COMPACTION_CALLS: Final = 10
"""Calls for one summary; each takes up to a minute."""
UNDO_TIMEOUT_S: Final = 2.0
"""Timeout of the cleanup after a refused call; the refusal waits for it."""
_NOT_COMPARED: Final = frozenset(
    {
        "model",  # There is one.
        "stream", "stream_options",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
    }
)  # fmt: skip
"""Fields that may differ between two tries of a call: how the answer is delivered, and fields without effect."""


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    session: str
    item: int
    candidate: int | None = None


class CallPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The session in which a turn is to begin. Stored with the claim."""

    own: str = ""
    """A new session for this call alone."""
    session: str = ""
    """An existing session to continue. If it has moved on, the turn begins in ``own`` instead."""
    revision: int | None = None
    source: Source | None = None
    """Where ``own`` is forked from, if the request does not say."""

    @property
    def first(self) -> str:
        return self.session or self.own


@dataclass(frozen=True, slots=True)
class Call:
    """Shared by all tries of one call."""

    id: uuid.UUID
    fingerprint: str = ""
    """Digest of the whole call; "" without an ``Idempotency-Key``: such a call is never retried."""

    @property
    def is_retryable(self) -> bool:
        return bool(self.fingerprint)

    @classmethod
    def from_request(cls, request: Request, body: msgspec.Struct, *said: object) -> Call:
        """``said``: parts of the call beside its body, such as the session that its path names."""
        turn_id = request_id_for(request)
        if not request.headers.get("idempotency-key"):
            return cls(turn_id)
        fields = {
            name: getattr(body, name)
            for name in body.__struct_fields__
            if name not in _NOT_COMPARED and getattr(body, name) is not None
        }
        data = _encoder.encode([request.url.path.rstrip("/"), *said, fields])
        return cls(turn_id, hashlib.blake2b(data, digest_size=16).hexdigest())

    def as_unstored(self) -> Call:
        """Return the call for ``store: false``: another turn, in sessions of its own. So a retry that is not to
        be stored erases nothing that the first try stored."""
        return replace(self, id=uuid.uuid5(self.id, "unstored")) if self.is_retryable else self

    async def claim_plan(self, client: AsyncClient, plan: CallPlan) -> CallPlan:
        """Return the plan that all tries of this call follow. Raises AlreadyExists when another call used the key."""
        if not self.is_retryable:
            return plan
        encoded = msgspec.json.encode(plan).decode()
        _, encoded = await claim(client, str(self.id), plan.first, fingerprint=self.fingerprint, plan=encoded)
        return msgspec.json.decode(encoded, type=CallPlan)

    @asynccontextmanager
    async def undo_on_refusal(
        self, client: AsyncClient, plan: CallPlan, more: Mapping[str, uuid.UUID] = MappingProxyType({})
    ) -> AsyncIterator[None]:
        """Run the call by ``plan`` in the block. When it is refused, delete the sessions made for it, and the
        claim.

        ``more``: names of sessions that are made beside the plan's own, with the request ids of their turns.
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
        """Delete the sessions made for the call, and its claim. ``more``: see ``undo_on_refusal``."""
        # The refusal is the answer even if the cleanup fails: an overloaded server may refuse that too.
        with contextlib.suppress(PensieveError, TimeoutError):
            async with asyncio.timeout(UNDO_TIMEOUT_S):
                await self._undo(client, plan, more)

    async def _undo(self, client: AsyncClient, plan: CallPlan, more: Mapping[str, uuid.UUID]) -> None:
        own = {plan.own: self.id, **more} if plan.own else {}
        if self.is_retryable:
            # First, so that a deleted session is known to have been deleted with its claim.
            await release_claim(client, str(self.id), plan.first)
        for name, turn_id in own.items():
            session = client.session(name)
            if not self.is_retryable:
                await session.delete(allow_missing=True)
                continue
            # In this order: a turn that another try commits in between changes the revision.
            with contextlib.suppress(NotFound, Aborted):
                revision = (await session.refresh()).revision
                if not await has_turn(session, turn_id):
                    await session.delete(expected_revision=revision, allow_missing=True)


async def has_turn(session: AsyncSession, turn_id: uuid.UUID) -> bool:
    """Whether the session has, or had, this turn. An erased turn counts: it is not made again."""
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
    """Return the plan's session and its turn, which the service has accepted.

    ``make`` creates the plan's own session; for one call this happens once. ``begin`` begins the turn with
    extra options. Raises TurnInProgress when a retry finds another turn in its session that does not end.
    """
    if plan.session:
        session = client.session(plan.session)
        options: TurnOptions = {"expected_revision": plan.revision}
        if call.is_retryable and plan.own:
            # All tries must begin the turn in the same session. That a session has moved on is final: all of them
            # see it and fork. That it is busy is temporary: they wait.
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
    """Return the plan's own session if another try has made it. Raises NotFound (SESSION_DELETED) when it was
    erased since."""
    if not call.is_retryable:
        return None
    session = client.session(plan.own)
    try:
        await session.refresh()
    except NotFound as error:
        if is_absent(error):
            return None
        raise
    return session


def is_absent(error: PensieveError) -> bool:
    """Whether no session has the name: none had, or it has expired. One that was erased keeps its name."""
    return error.reason in (NotFound.default_reason, "SESSION_EXPIRED")


async def set_on_branch(branch: AsyncSession, settings: SessionChanges) -> None:
    """Give a new branch these settings. It comes with those of its source, which its owner may have changed over
    gRPC since the turn that the branch continues."""
    assert branch.info is not None
    if branch.info.revision > 1 or all(getattr(branch.info, name) == it for name, it in settings.items()):
        return
    with contextlib.suppress(Aborted):  # Another try has made the changes.
        await branch.update(**settings, expected_revision=1)


async def check_subject(session: AsyncSession, subject: str | None) -> None:
    """Raise HttpFailure (400) for another subject than the session's. None or "": the session's."""
    if subject and (await session.refresh()).subject != subject:
        raise invalid_field(
            "subject", "is not the conversation's: leave it out, or begin a conversation with it"
        )


def new_session_id(family: str) -> str:
    return f"{family}{uuid.uuid4().hex}"


Ahead: TypeAlias = tuple[AsyncSession, Sequence[Message]]
"""The session that a turn would begin in, and the items that it would bring."""


async def count_ahead(client: AsyncClient, look_ahead: Callable[[str], Awaitable[Ahead]]) -> int:
    """Return the tokens of the context that a turn would start from. Leaves nothing behind.

    ``look_ahead`` finds where the turn would begin. It makes a session that does not exist yet, under the id that
    it is given.
    """
    async with _scratch_session(client) as own:
        session, new = await look_ahead(own)
        return (await session.count_tokens(items=[one.sdk_input for one in new])).context_tokens


async def warm_ahead(
    client: AsyncClient, look_ahead: Callable[[str], Awaitable[Ahead]], ttl_s: float
) -> AsyncSession:
    """Have the context computed that a turn would start from, as far as there is room. ``look_ahead``: as in
    ``count_ahead``; a session that it makes has this idle lifetime from the beginning.

    New items are computed in a session of their own, of this idle lifetime, which is returned. The turn then finds
    its beginning cached.
    """
    async with _scratch_session(client, kept=True) as own:
        session, new = await look_ahead(own)
        if new and session.id != own:
            session = await session.fork(session_id=own, ttl=ttl_s)
        await append_items(session, new, Call(uuid.uuid4()))
        await session.warm()
        return session


async def compact_ahead(
    client: AsyncClient, look_ahead: Callable[[str], Awaitable[Ahead]], ttl_s: float, *, with_new: bool
) -> tuple[SessionInfo, Compaction, Sequence[Message]]:
    """Compact the context that a turn would start from, in a session of its own, of this idle lifetime. Return that
    session's metadata, with the summary, and the items that the turn would bring. ``with_new``: these are summarised,
    too. ``look_ahead``: as in ``warm_ahead``. Raises FailedPrecondition (NOTHING_TO_COMPACT, SUMMARY_EMPTY)."""
    async with _scratch_session(client, kept=True) as own:
        session, new = await look_ahead(own)
        if session.id != own:
            session = await session.fork(session_id=own, ttl=ttl_s)
        if with_new:
            await append_items(session, new, Call(uuid.uuid4()))
        done = await compact_session(session, str(uuid.uuid4()))
        await client.session(done.branch).delete(allow_missing=True)
        return done.session, done, new


async def compact_session(session: AsyncSession, request_id: str) -> Compaction:
    """Replace the whole context by a summary, however long the model takes to write it."""
    for _ in range(COMPACTION_CALLS):
        try:
            return await session.compact(keep_turns=0, request_id=request_id)
        except DeadlineExceeded:
            continue  # the model goes on writing, and the same request finds it
    raise DeadlineExceeded("the summary is not written yet: send the request again later")


@asynccontextmanager
async def _scratch_session(client: AsyncClient, *, kept: bool = False) -> AsyncIterator[str]:
    """Yield the id of a session that the block may make. It is deleted after the block, or, if ``kept``, when
    the block fails."""
    own = new_session_id("chat-")
    try:
        yield own
    except BaseException:
        kept = False
        raise
    finally:
        if not kept:
            with contextlib.suppress(PensieveError):  # it expires
                await client.session(own).delete(allow_missing=True)


def is_refusal(error: PensieveError | HttpFailure) -> bool:
    """Whether the error is final: the turn is not running, and no earlier try was answered."""
    if isinstance(error, HttpFailure):
        return error.status == 400
    return isinstance(error, InvalidArgument | ContextLimitExceeded | ResourceExhausted | FailedPrecondition)


_encoder = msgspec.json.Encoder(order="deterministic")


MAX_APPENDED_ITEMS: Final = 1024
MAX_TURN_ITEMS: Final = 64
MAX_FOLLOWING_ROLES: Final = 64
"""Roles of following items that it takes with appended ones."""


def batches_of(items: Sequence[Message]) -> list[Sequence[Message]]:
    """Split ``items`` into batches of at most ``MAX_APPENDED_ITEMS``. Consecutive tool results stay together where
    possible: many templates render them as one message."""
    found: list[Sequence[Message]] = []
    begin = 0
    while begin < len(items):
        end = cut = min(begin + MAX_APPENDED_ITEMS, len(items))
        while begin < cut < len(items) and items[cut].role is Role.TOOL:
            cut -= 1
        end = cut if cut > begin else end
        found.append(items[begin:end])
        begin = end
    return found


def following_roles(items: Sequence[Message]) -> list[Role]:
    """Return the roles of the items after appended ones: a template may render earlier answers differently from
    the last."""
    return [one.role for one in items[:MAX_FOLLOWING_ROLES]]


def split_new(new: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """Return the items to append before the turn, and those to send with the turn. The second part is empty
    when the items end in more tool results than a turn takes."""
    cut = max(0, len(new) - MAX_TURN_ITEMS)
    while 0 < cut < len(new) and new[cut].role is Role.TOOL:
        cut += 1
    return new[:cut], new[cut:]


async def begin_turn(session: AsyncSession, new: Sequence[Message], options: TurnOptions) -> AsyncTurnStream:
    """Begin a turn with these items and wait until it is accepted. Without items, the turn answers the
    session's last ones."""
    if not new:
        options = {**options, "replace_after_item": (await session.items())[-1].item}
    stream = session.stream(items=[one.sdk_input for one in new], **options)
    await stream.accepted()
    return stream


async def append_items(
    session: AsyncSession,
    items: Sequence[Message],
    call: Call,
    part: str = "items",
    *,
    follow: Sequence[Message] = (),
    note: Callable[[], None] = lambda: None,
) -> AsyncSession:
    """Append these items to the session; a retry appends none twice.

    ``part`` tells apart several groups that one call appends to one session. ``follow``: the items that will
    follow. ``note`` is called for each record that this writes.
    """
    if items and call.is_retryable and await has_turn(session, call.id):
        return session
    behind = 0
    for number, chunk in enumerate(batches_of(items)):
        given, tries = [one.sdk_input for one in chunk], 0
        behind += len(chunk)
        roles = following_roles((*items, *follow)[behind:])
        # Items that an earlier try appended and rewound are gone, but their request id is used.
        while True:
            name = _request_id(call, f"{part} {number} {tries}")
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
    """Append items, run the block, which begins the turn with ``follow``, and rewind when the turn is refused."""
    if not items:
        yield
        return
    before = (await session.items())[-1:]
    first = (await session.refresh()).revision
    await append_items(session, items, call, follow=follow)
    try:
        yield
    except PensieveError as error:
        if is_refusal(error) or not call.is_retryable:
            # Aborted: the session has moved on, and the items stay.
            with contextlib.suppress(PensieveError):
                await session.rewind(
                    to_item=before[0].item if before else 0, expected_revision=first + len(batches_of(items))
                )
        raise


def _request_id(call: Call, name: str) -> str:
    # After a refusal the key may serve another call, which appends other items.
    return str(uuid.uuid5(call.id, f"{call.fingerprint} {name}"))
