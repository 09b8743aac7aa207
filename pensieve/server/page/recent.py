"""Turns of the last minutes, for rates, latencies and charts. Recorded whether or not the page is open."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from pensieve.feed import ContextSources, Percentiles, RecentSummary
from pensieve.server.values import TurnEnd

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
