"""How far the cache was from one that knows the future: the turns of the last minutes, played again.

A process of its own does that (``pensieve.simulate.hindsight``), at the lowest priority and for a bounded time, so that
neither this process nor the engine waits for it; and only when somebody looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from typing import Any, Final

import msgspec

from pensieve.debug import child_environment
from pensieve.errors import PensieveError
from pensieve.server.child import waited_for
from pensieve.server.ids import session_key
from pensieve.server.links.engine_link import EngineLink
from pensieve.server.page.recent import KEPT_S, RecentTurns
from pensieve.server.values import TurnEnd

log = logging.getLogger(__name__)

SCHEMA: Final = "pensieve.gap/1"
COUNTED_S: Final = 10 * 60.0
"""What came back in so long counts."""
MOST_TURNS: Final = 1500
"""Turns that are played again, the latest ones: a few seconds of processor time."""
FILLING: Final = 1 / 3
"""Part of the time that only fills the cache that is compared with, unless that was empty in truth."""
FEWEST: Final = 20
"""Of fewer that came back nothing is said."""
FRESH_S: Final = 60.0
"""Nobody has it computed again so soon."""
LIMIT_S: Final = 120.0
"""The process is ended after so long: where all cores are busy it gets little of them."""


class HistorySources(msgspec.Struct, frozen=True):
    """Where the history of turns that came back was, as shares of their tokens; together 1."""

    device: float
    host: float
    recomputed: float


class GapDocument(msgspec.Struct, frozen=True):
    """The answer to ``/gap.json``."""

    schema: str
    problem: str
    """Why there are no figures; "" when there are."""
    time_s: float = 0.0
    """Unix time of the figures."""
    over_s: float = 0.0
    turns: int = 0
    """That came back in this time."""
    history_tokens: int = 0
    measured: HistorySources | None = None
    """By the receipts."""
    replayed: HistorySources | None = None
    """By this server's policy, played again: what it differs from the measured by is the error of playing again."""
    clairvoyant: HistorySources | None = None
    """By the policy that knows when each session comes back."""


class HindsightFigures(msgspec.Struct, frozen=True):
    """What the process answers."""

    turns: int
    history_tokens: int
    measured: HistorySources
    replayed: HistorySources
    clairvoyant: HistorySources


class GapFinder:
    """Used on one event loop. ``close`` ends what is under way."""

    def __init__(self, link: EngineLink, recent: RecentTurns, cache: dict[str, Any]) -> None:
        """``cache``: the options of the cache that its sizes and costs do not tell."""
        self._link = link
        self._recent = recent
        self._cache = cache
        self._found = GapDocument(SCHEMA, "being computed")
        self._computed_at = -FRESH_S
        self._under_way: asyncio.Task[None] | None = None

    async def gap(self) -> GapDocument:
        """The latest figures; new ones are computed meanwhile if these are old."""
        now = time.monotonic()
        if self._under_way is None and now - self._computed_at >= FRESH_S:
            self._under_way = asyncio.create_task(self._compute(now), name="gap")
        return self._found

    async def settled(self) -> GapDocument:
        """As ``gap``, when what is under way is over."""
        await self.gap()
        if self._under_way is not None:
            await asyncio.wait({self._under_way})
        return self._found

    async def close(self) -> None:
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.wait({self._under_way})

    async def _compute(self, now: float) -> None:
        try:
            self._found = await self._figures(now)
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("the gap to the clairvoyant policy was not found: %s", type(error).__name__)
            self._found = GapDocument(SCHEMA, "it could not be computed")
        finally:
            self._computed_at = time.monotonic()
            self._under_way = None

    async def _figures(self, now: float) -> GapDocument:
        turns = self._turns(now)
        seen: set[str] = set()
        again = 0
        for session, *_, counted in turns:
            again += session in seen and counted
            seen.add(session)
        if again < FEWEST:
            few = f"{again} turns came back in the last {COUNTED_S / 60:.0f} minutes; {FEWEST} are needed"
            return GapDocument(SCHEMA, few)
        try:
            info = self._link.info
        except PensieveError:
            return GapDocument(SCHEMA, "no engine serves")
        order = {
            **self._cache,
            "device_chunks": info.device_capacity_tokens // info.chunk_tokens,
            "host_chunks": info.host_capacity_tokens // info.chunk_tokens,
            "chunk_tokens": info.chunk_tokens,
            "attention_cost": info.attention_cost,
            "other_cost": info.other_cost,
            "turns": turns,
        }
        figures = msgspec.json.decode(await _ask(msgspec.json.encode(order)), type=HindsightFigures)
        return GapDocument(
            SCHEMA,
            "",
            time.time(),
            round(now - min(ended for _, _, ended, *_, counted in turns if counted), 3),
            figures.turns,
            figures.history_tokens,
            figures.measured,
            figures.replayed,
            figures.clairvoyant,
        )

    def _turns(self, now: float) -> list[tuple[Any, ...]]:
        """Those that were admitted, by time: see ``pensieve.simulate.hindsight.PastTurn``."""
        admitted = (end for end in self._recent.since(now - KEPT_S) if end.usage.context_tokens)
        ends = list(itertools.islice(admitted, MOST_TURNS))
        counted_from = now - COUNTED_S
        if ends and (self._recent.forgotten or len(ends) == MOST_TURNS):
            counted_from = max(counted_from, now - (1 - FILLING) * (now - ends[-1].ended_at))
        return sorted((_row(end, counted_from) for end in ends), key=lambda turn: float(turn[1]))


def _row(end: TurnEnd, counted_from: float) -> tuple[Any, ...]:
    usage = end.usage
    return (
        session_key(end.key),
        end.arrived_at + usage.queue_s,
        end.ended_at,
        usage.context_tokens,
        max(usage.context_tokens - end.new_tokens, 0),
        usage.output_tokens,
        (usage.gpu_cached_tokens, usage.swapped_in_tokens, usage.recomputed_tokens),
        end.ended_at > counted_from,
    )


async def _ask(order: bytes) -> bytes:
    """The answer of the process, which is none if it failed. Raises OSError or TimeoutError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "pensieve.simulate.hindsight"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(failpoints=False),
        cwd="/",  # see ``pensieve.server.child``
    )
    with waited_for(process.pid):
        try:
            async with asyncio.timeout(LIMIT_S):
                answer, _ = await process.communicate(order)
            return answer
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
