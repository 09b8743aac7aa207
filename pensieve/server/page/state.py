"""The state of a server as one document, for the page and ``pensieve top``: ``docs/page.md``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

import pensieve
from pensieve.engine.messages import EngineReady, SessionStrip, Stats
from pensieve.errors import PensieveError
from pensieve.feed import (
    SCHEMA,
    HttpDoorState,
    MemoryState,
    QueueState,
    RateState,
    ServerState,
    SessionLine,
    SessionList,
    StateDocument,
    TierState,
)
from pensieve.server.conversations import Conversations
from pensieve.server.operations.health import HealthMonitor
from pensieve.server.page.recent import RecentTurns
from pensieve.server.page.watching import SessionNote, SessionNotes, StripPoller
from pensieve.store import Key

DEFAULT_LIMIT: Final = 200
_MIN_RATE_S: Final = 0.8


class StateView:
    """Builds state documents. Used on one event loop; ``close`` cancels a running engine query."""

    def __init__(
        self,
        conversations: Conversations,
        health: HealthMonitor,
        recent: RecentTurns,
        http_door: Callable[[], HttpDoorState | None] = lambda: None,
        *,
        shows_text: bool = False,
    ) -> None:
        """``shows_text``: session documents include the text of their items."""
        self._settings = conversations.settings
        self._gate = conversations.gate
        self._link = conversations.link
        self.store = conversations.store
        self._health = health
        self.recent = recent
        self._http_door = http_door
        self.shows_text = shows_text
        self._strips = StripPoller(self._link)
        self._notes = SessionNotes(self.store)
        self._before: tuple[float, Stats] | None = None
        self._rates: RateState | None = None

    async def close(self) -> None:
        await self._strips.close()

    async def document(self, limit: int, after: int) -> StateDocument:
        """Return a document with ``limit`` sessions after the first ``after``."""
        sessions = await self._sessions(limit, after)
        now = time.monotonic()
        stats = self._link.stats
        info = self._info()
        return StateDocument(
            schema=SCHEMA,
            time_s=time.time(),
            server=ServerState(
                version=pensieve.__version__,
                model=self._settings.model,
                replica=self._settings.replica,
                problem=self._health.problem,
                device=info.device,
                dtype=info.dtype,
                weights=info.weights or info.dtype,
                kv=info.kv or info.dtype,
                chunk_tokens=info.chunk_tokens,
                context_limit=info.context_limit,
                shows_text=self.shows_text,
                door=self._http_door(),
            ),
            device=TierState(
                info.device_capacity_tokens, stats.device_used, stats.device_free, stats.device_reclaimable
            ),
            host=TierState(info.host_capacity_tokens, stats.host_used, stats.host_free),
            device_memory=MemoryState(
                stats.device_held, stats.device_wanted, stats.device_floor, stats.device_ceiling
            ),
            queue=QueueState(stats.running, stats.queued, self._gate.waiting, self._gate.expected_wait_s),
            totals=msgspec.structs.asdict(stats),
            engine_restarts=self._link.restarts_total,
            rates=self._rate(now, stats),
            lately=self.recent.summary(now),
            sessions=sessions,
        )

    async def session_line(self, key: Key) -> SessionLine | None:
        """Return one session's line, or None when nothing of it is cached."""
        snapshot = await self._strips.strips()
        name = f"{key.tenant}/{key.session_id}"
        found = [one for one in snapshot.sessions if one.session == name] if snapshot is not None else []
        return _line(found[0], None) if found else None

    def _info(self) -> EngineReady:
        try:
            return self._link.info
        except PensieveError:
            return EngineReady(0, 0, "", "", 0, 0, 0)

    async def _sessions(self, limit: int, after: int) -> SessionList:
        snapshot = await self._strips.strips()
        if snapshot is None:
            return SessionList(0, 0, None, after, None, ())
        strips = snapshot.sessions[after : after + limit]
        notes = await self._notes.read([(key_of(one), one.tokens) for one in strips if not one.is_candidate])
        return SessionList(
            total=len(snapshot.sessions),
            running=sum(one.running and not one.warming for one in snapshot.sessions),
            age_s=round(time.monotonic() - snapshot.at, 3),
            first=after,
            next=after + limit if limit > 0 and after + limit < len(snapshot.sessions) else None,
            rows=tuple(_line(one, notes.get(key_of(one))) for one in strips),
        )

    def _rate(self, now: float, stats: Stats) -> RateState | None:
        """Return the rates since the previous call. Calls in quick succession get the same rates."""
        if self._before is None or stats.steps_total < self._before[1].steps_total:
            self._before, self._rates = (now, stats), None
            return None
        then, before = self._before
        seconds = now - then
        if seconds < _MIN_RATE_S:
            return self._rates

        def rate(count: float, count_before: float) -> float:
            return round((count - count_before) / seconds, 3)

        self._before = now, stats
        self._rates = RateState(
            over_s=round(seconds, 3),
            steps=rate(stats.steps_total, before.steps_total),
            output_tokens=rate(stats.output_total, before.output_total),
            swap_in_bytes=rate(stats.swap_in_bytes_total, before.swap_in_bytes_total),
            swap_out_bytes=rate(stats.swap_out_bytes_total, before.swap_out_bytes_total),
            dropped_tokens=rate(stats.dropped_total, before.dropped_total),
        )
        return self._rates


def key_of(strip: SessionStrip) -> Key:
    tenant, _, name = strip.session.partition("/")
    return Key(tenant, name.partition("#")[0])


def _line(strip: SessionStrip, note: SessionNote | None) -> SessionLine:
    key = key_of(strip)
    candidate = strip.session.rpartition("#")[2] if "#" in strip.session else "0"
    return SessionLine(
        session=strip.session,
        tenant=key.tenant,
        id=key.session_id,
        candidate=int(candidate),
        state="warming" if strip.warming else "running" if strip.running else "idle",
        idle_s=round(strip.idle_s, 3),
        tokens=strip.tokens,
        strip=strip.strip,
        tail=strip.tail,
        labels=note.labels if note is not None else None,
        items=note.items if note is not None else None,
        created_s=note.created_s if note is not None else None,
    )
