"""Callers of a server whose page may be open: turns one after the other over many sessions, in a process of theirs."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from pensieve.client import AsyncClient

WORDS = "the fox was in the garden and the neighbour told me what the name of the dog is "
LONGEST = 6000
"""Tokens of a context, from which on its session is left alone."""


@dataclass(frozen=True, slots=True)
class Talk:
    """What the callers do until ``until``, on the clock that all processes share."""

    address: str
    sessions: int
    callers: int
    output: int
    names: tuple[str, ...] = ()


def begin(talk: Talk) -> tuple[str, ...]:
    """Make the sessions, each with one turn; their names. In a process of its own."""
    return asyncio.run(_begin(talk))


def converse(talk: Talk, until: float) -> list[float]:
    """Make turns; when each ended. In a process of its own."""
    return asyncio.run(_converse(talk, until))


async def _begin(talk: Talk) -> tuple[str, ...]:
    names: list[str] = []
    async with AsyncClient(talk.address) as client:

        async def caller() -> None:
            while len(names) < talk.sessions:
                names.append("")
                at = len(names) - 1
                session = await client.create_session(labels={"title": f"talk {at}"})
                await session.send(WORDS * random.Random(at).randrange(1, 12), max_output_tokens=talk.output)
                names[at] = session.id

        await asyncio.gather(*(caller() for _ in range(talk.callers)))
    return tuple(names)


async def _converse(talk: Talk, until: float) -> list[float]:
    ended: list[float] = []
    async with AsyncClient(talk.address) as client:

        async def caller(number: int) -> None:
            mine = [client.session(name) for name in talk.names[number :: talk.callers]]
            rng = random.Random(number)
            while time.monotonic() < until and mine:
                session = rng.choice(mine)
                turn = await session.send(WORDS, max_output_tokens=talk.output)
                ended.append(time.monotonic())
                if turn.usage.context_tokens > LONGEST:
                    mine.remove(session)

        await asyncio.gather(*(caller(number) for number in range(talk.callers)))
    return ended
