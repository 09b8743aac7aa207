"""The state of a server as one document, for the page and ``pensieve top``: ``docs/page.md``.

Turns of the last minutes are recorded whether or not the page is open: rates, latencies and charts come from them.
Cached sessions are polled while it is open: strips from the engine, labels from the store.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

import pensieve
from pensieve.engine.messages import EngineReady, SessionStrip, Stats
from pensieve.errors import PensieveError
from pensieve.feed import (
    SCHEMA,
    ContextSources,
    HttpDoorState,
    MemoryState,
    Percentiles,
    QueueState,
    RateState,
    RecentSummary,
    ServerState,
    SessionLine,
    SessionList,
    StateDocument,
    TierState,
)
from pensieve.server.conversations import Conversations
from pensieve.server.links.engine_link import EngineLink
from pensieve.server.operations.health import HealthMonitor
from pensieve.server.values import TurnEnd
from pensieve.store import HistoryStore, Key

MAX_AGE_S: Final = 15 * 60.0
MAX_TURNS: Final = 20_000
"""Limit on the turns kept, some 10 MB."""
SUMMARY_S: Final = 60.0
BUCKET_S: Final = 5.0
BUCKETS: Final = 120


class Bucket(msgspec.Struct, frozen=True):
    """One chart point: ``BUCKET_S`` seconds. Latencies are medians."""

    turns: int
    output_tokens: int
    first_token_s: float | None
    token_s: float | None
    context: ContextSources


class RecentTurns:
    """Turns that ended recently. Used on one event loop; times are on its clock."""

    def __init__(self) -> None:
        self._ends: deque[TurnEnd] = deque()

    def turn_ended(self, end: TurnEnd) -> None:
        self._ends.append(end)
        while self._ends[0].ended_at < end.ended_at - MAX_AGE_S or len(self._ends) > MAX_TURNS:
            self._ends.popleft()

    def since(self, then: float) -> Iterator[TurnEnd]:
        """Yield the turns that ended after ``then``, newest first."""
        for end in reversed(self._ends):
            if end.ended_at <= then:
                return
            yield end

    def summary(self, now: float) -> RecentSummary:
        """Summarise the last ``SUMMARY_S`` seconds."""
        return _summary(list(self.since(now - SUMMARY_S)))

    def series(self, now: float) -> list[Bucket]:
        """Return the last ``BUCKETS`` whole buckets, oldest first. Their borders are multiples of ``BUCKET_S``."""
        end_of_last = now // BUCKET_S
        ends: list[list[TurnEnd]] = [[] for _ in range(BUCKETS)]
        for end in self.since((end_of_last - BUCKETS) * BUCKET_S):
            at = BUCKETS - 1 - int(end_of_last - 1 - end.ended_at // BUCKET_S)
            if 0 <= at < BUCKETS:
                ends[at].append(end)
        return [_bucket(one) for one in ends]


def _summary(ends: Sequence[TurnEnd]) -> RecentSummary:
    usages = [end.usage for end in ends]
    return RecentSummary(
        over_s=SUMMARY_S,
        turns=len(ends),
        failed=sum(not end.committed for end in ends),
        turns_per_s=len(ends) / SUMMARY_S,
        output_tokens_per_s=sum(usage.output_tokens for usage in usages) / SUMMARY_S,
        first_token_s=_percentiles(
            [end.first_token_at - end.arrived_at for end in ends if end.first_token_at is not None]
        ),
        token_s=_percentiles([token for token in map(_token_s, ends) if token is not None]),
        queue_s=_percentiles([end.usage.queue_s for end in ends if end.first_token_at is not None]),
        context=ContextSources(
            sum(usage.gpu_cached_tokens for usage in usages),
            sum(usage.swapped_in_tokens for usage in usages),
            sum(usage.recomputed_tokens for usage in usages),
            sum(usage.new_tokens for usage in usages),
        ),
    )


def _bucket(ends: Sequence[TurnEnd]) -> Bucket:
    summary = _summary(ends)
    return Bucket(
        turns=len(ends),
        output_tokens=sum(end.usage.output_tokens for end in ends),
        first_token_s=None if summary.first_token_s is None else summary.first_token_s.p50,
        token_s=None if summary.token_s is None else summary.token_s.p50,
        context=summary.context,
    )


def _token_s(end: TurnEnd) -> float | None:
    """Return the turn's mean seconds between output tokens, or None with fewer than two."""
    if end.first_token_at is None or end.usage.output_tokens < 2:
        return None
    return (end.ended_at - end.first_token_at) / (end.usage.output_tokens - 1)


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return Percentiles(
        round(ordered[last // 2], 6),
        round(ordered[round(0.95 * last)], 6),
        round(ordered[round(0.99 * last)], 6),
    )


FRESH_S: Final = 0.4
PATIENCE_S: Final = 2.0
"""Timeout for an engine in a long step. After it the previous strips are shown, with their age."""


@dataclass(frozen=True, slots=True)
class StripSnapshot:
    """Strips of all cached sessions at one time, the most active first."""

    at: float
    sessions: Sequence[SessionStrip] = ()


class StripPoller:
    """Polls the engine for strips. Used on one event loop; ``close`` cancels a running query."""

    def __init__(self, link: EngineLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._latest: StripSnapshot | None = None
        self._query: asyncio.Task[None] | None = None

    async def strips(self) -> StripSnapshot | None:
        """Return the latest strips, at most ``FRESH_S`` old if the engine answers in time. None if there are none."""
        if self._latest is None or self._clock() - self._latest.at >= FRESH_S:
            if self._query is None or self._query.done():
                self._query = asyncio.create_task(self._take(), name="strips")
            await asyncio.wait({self._query}, timeout=PATIENCE_S)
        return self._latest

    async def close(self) -> None:
        if self._query is not None:
            self._query.cancel()
            await asyncio.wait({self._query})

    async def _take(self) -> None:
        try:
            strips = await self._link.read_strips()
        except PensieveError:
            self._latest = None  # no engine serves: its cache is gone
            return
        strips.sort(key=lambda one: (not one.running, one.idle_s, one.session))
        self._latest = StripSnapshot(self._clock(), strips)


MOST_READ: Final = 20
"""Sessions read from the store per poll. The rest are shown without notes until a later poll."""
MOST_KEPT: Final = 10_000
NOTE_FRESH_S: Final = 60.0
CHANGED_S: Final = 5.0
NOTE_PATIENCE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class SessionNote:
    labels: dict[str, str]
    items: int
    created_s: float


@dataclass(frozen=True, slots=True)
class _CachedNote:
    note: SessionNote | None
    at: float
    tokens: int
    """Context length in the cache at that time. A different length means that there was a turn."""


class SessionNotes:
    """Labels and counts of the sessions on the page, read from the store now and then."""

    def __init__(self, store: HistoryStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._notes: OrderedDict[Key, _CachedNote] = OrderedDict()

    async def read(self, wanted: Iterable[tuple[Key, int]]) -> dict[Key, SessionNote]:
        """Return the known notes of sessions, given with their context lengths. Important sessions come first."""
        wanted = list(wanted)
        now = self._clock()
        due = [(key, tokens) for key, tokens in wanted if self._is_due(key, tokens, now)][:MOST_READ]
        if due:
            reading = {asyncio.create_task(self._load(key, tokens, now)) for key, tokens in due}
            _, late = await asyncio.wait(reading, timeout=NOTE_PATIENCE_S)
            for one in late:
                one.cancel()
        while len(self._notes) > MOST_KEPT:
            self._notes.popitem(last=False)
        cached = ((key, self._notes.get(key)) for key, _ in wanted)
        return {key: kept.note for key, kept in cached if kept is not None and kept.note is not None}

    def _is_due(self, key: Key, tokens: int, now: float) -> bool:
        cached = self._notes.get(key)
        return cached is None or now - cached.at > (NOTE_FRESH_S if cached.tokens == tokens else CHANGED_S)

    async def _load(self, key: Key, tokens: int, now: float) -> None:
        note = None
        try:
            row = await self._store.load(key)
            note = SessionNote(row.labels, row.item_count, row.create_ms / 1e3)
        except PensieveError:
            pass  # deleted, or the store is down: shown without a note
        self._notes[key] = _CachedNote(note, now, tokens)
        self._notes.move_to_end(key)


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
