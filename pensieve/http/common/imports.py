"""Brings many items into sessions, in several calls where one may not hold all of them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
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
    session: AsyncSession, items: Sequence[Said], call: Call, part: str = "items"
) -> AsyncSession:
    """The session with these items behind its own. Another try of the call adds none of them again.

    ``part``: tells apart what one call adds to one session in several parts.
    """
    if items and call.may_be_repeated and await has_turn(session, call.id):
        return session
    for number, chunk in enumerate(chunks_of(items)):
        given, tries = [one.given for one in chunk], 0
        # What a try has added and taken back again is not there any more, and its request id is used.
        while len(await session.append(given, request_id=_id(call, f"{part} {number} {tries}"))) < len(given):
            tries += 1
    return session


@asynccontextmanager
async def adding(session: AsyncSession, items: Sequence[Said], call: Call) -> AsyncIterator[None]:
    """Adds items before the block begins the turn, and takes them back when that is refused."""
    if not items:
        yield
        return
    before = (await session.items())[-1:]
    first = (await session.refresh()).revision
    await added(session, items, call)
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
    return str(uuid.uuid5(call.id, name))
