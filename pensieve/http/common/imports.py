"""Brings many items into sessions, in several calls where one may not hold all of them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from pensieve.client import AsyncSession, AsyncTurnStream, Role, TurnOptions
from pensieve.errors import Aborted, PensieveError
from pensieve.http.common.calls import Call, has_turn, is_refusal
from pensieve.http.common.contents import Said

MOST_ADDED: Final = 1024
"""Items that the service takes in one call."""
MOST_NEW: Final = 64
"""Items that it takes with a turn."""
MOST_FOLLOWING: Final = 64
"""Roles of later items that it takes with items that are added."""


def chunks_of(items: Sequence[Said]) -> list[Sequence[Said]]:
    """``items`` in calls of at most ``MOST_ADDED``.

    Results of tools that follow each other stay together where they can: many templates write them as one message.
    """
    found: list[Sequence[Said]] = []
    begin = 0
    while begin < len(items):
        end = cut = min(begin + MOST_ADDED, len(items))
        while begin < cut < len(items) and items[cut].role is Role.TOOL:
            cut -= 1
        end = cut if cut > begin else end
        found.append(items[begin:end])
        begin = end
    return found


def roles_of(items: Sequence[Said]) -> list[Role]:
    """Roles of what follows items that are added: a template may write earlier answers in another way than the last."""
    return [one.role for one in items[:MOST_FOLLOWING]]


def parted(new: Sequence[Said]) -> tuple[Sequence[Said], Sequence[Said]]:
    """What is added to the session before the turn, and what goes with the turn.

    Nothing goes with it when the items end in more results of tools than it takes.
    """
    cut = max(0, len(new) - MOST_NEW)
    while 0 < cut < len(new) and new[cut].role is Role.TOOL:
        cut += 1
    return new[:cut], new[cut:]


async def answered(session: AsyncSession, new: Sequence[Said], options: TurnOptions) -> AsyncTurnStream:
    """The turn with these items, or without any behind those that the session ends in, once it is accepted."""
    if not new:
        options = {**options, "replace_after_item": (await session.items())[-1].item}
    stream = session.stream(items=[one.given for one in new], **options)
    await stream.accepted()
    return stream


async def added(
    session: AsyncSession,
    items: Sequence[Said],
    call: Call,
    part: str = "items",
    *,
    follow: Sequence[Said] = (),
    note: Callable[[], None] = lambda: None,
) -> AsyncSession:
    """The session with these items behind its own. Another try of the call adds none of them again.

    ``part``: tells apart what one call adds to one session in several parts. ``follow``: items that come behind these.
    ``note`` is called for each record that the session has of this.
    """
    if items and call.may_be_repeated and await has_turn(session, call.id):
        return session
    behind = 0
    for number, chunk in enumerate(chunks_of(items)):
        given, tries = [one.given for one in chunk], 0
        behind += len(chunk)
        roles = roles_of((*items, *follow)[behind:])
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
async def adding(
    session: AsyncSession, items: Sequence[Said], call: Call, follow: Sequence[Said]
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
        if is_refusal(error) or not call.may_be_repeated:
            with contextlib.suppress(PensieveError):
                await _take_back(session, before[0].item if before else 0, first + len(chunks_of(items)))
        raise


async def _take_back(session: AsyncSession, item: int, revision: int) -> None:
    with contextlib.suppress(Aborted):  # Others have gone on from here: the items stay.
        await session.rewind(to_item=item, expected_revision=revision)


def _id(call: Call, name: str) -> str:
    # A key that was refused is free for another call: what that one adds is something else.
    return str(uuid.uuid5(call.id, f"{call.fingerprint} {name}"))
