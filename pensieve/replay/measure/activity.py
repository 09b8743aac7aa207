"""Counts open conversations during a replay, with the times to first token meanwhile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pensieve.replay.records import TurnRecord

TTFT_LIMIT_S = 2.0
_BIN_TURNS = 20
"""With fewer turns the 95th percentile would be the maximum."""
_MAX_BINS = 20
RULE = (
    "A conversation is active from the moment its first turn is sent until its last answer ends, pauses included. "
    f"Turns in order of sending are cut into at most {_MAX_BINS} bins of at least {_BIN_TURNS} turns. The number is "
    "the mean of active conversations in the fullest bin whose p95 time to first token, and that of every less full "
    f"bin, is at most {TTFT_LIMIT_S:g} s; a failed turn counts as infinitely late. A ≥ says that no bin was above the "
    "limit."
)


def active_sessions(
    records: Sequence[TurnRecord],
    outside: Sequence[TurnRecord] = (),
    window: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """``mean`` and ``max`` of active conversations, ``ttft_p95_s``, ``bins``, and the result of ``RULE``.

    ``records`` are judged. The other turns of the run, ``outside``, only make their conversations active.
    ``window``: its start and end; None: from the first send to the last end.
    """
    spans = list(_open_times([*records, *outside]).values())
    start, end = window or (
        min((first for first, _ in spans), default=0.0),
        max((last for _, last in spans), default=0.0),
    )
    bins = _bins(records, spans)
    return {
        "mean": _mean_open(spans, start, end),
        "max": _max_open(spans, start, end),
        "limit_s": TTFT_LIMIT_S,
        "ttft_p95_s": _p95(records) if records else None,
        **largest_within_limit(bins),
        "bins": bins,
    }


def largest_within_limit(bins: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Apply ``RULE`` to bins, which may come from several runs of one system.

    ``largest_within_limit`` is None without bins, or if the emptiest is too late. ``limit_reached`` is False
    if no bin was above the limit: the system may hold more than was offered.
    """
    largest: float | None = None
    for entry in sorted(bins, key=lambda entry: float(entry["active"])):
        late = entry["ttft_p95_s"]
        if late is None or late > TTFT_LIMIT_S:
            return {"largest_within_limit": largest, "limit_reached": True}
        largest = float(entry["active"])
    return {"largest_within_limit": largest, "limit_reached": False}


def _send_time(record: TurnRecord) -> float:
    """Time of sending; the due time if the conversation could not be opened."""
    return record.sent_s or record.due_s


def _open_times(records: Sequence[TurnRecord]) -> dict[int, tuple[float, float]]:
    found: dict[int, tuple[float, float]] = {}
    for record in records:
        start, end = found.get(record.conversation, (math.inf, -math.inf))
        found[record.conversation] = min(start, _send_time(record)), max(end, record.done_s)
    return found


def _bins(records: Sequence[TurnRecord], spans: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    ordered = sorted(records, key=_send_time)
    count = min(_MAX_BINS, len(ordered) // _BIN_TURNS)
    cuts = [len(ordered) * index // count for index in range(count + 1)] if count else []
    found = []
    for begin, end in itertools.pairwise(cuts):
        start = _send_time(ordered[begin])
        stop = _send_time(ordered[end]) if end < len(ordered) else max(record.done_s for record in ordered)
        active, ttft = _mean_open(spans, start, stop), _p95(ordered[begin:end])
        found.append(
            {"start_s": start, "end_s": stop, "turns": end - begin, "active": active, "ttft_p95_s": ttft}
        )
    return found


def _mean_open(spans: Sequence[tuple[float, float]], start: float, stop: float) -> float:
    """Mean number of open conversations from start to stop; if these are equal, the number at that instant."""
    if stop <= start:
        return float(sum(begin <= start <= end for begin, end in spans))
    return sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in spans) / (stop - start)


def _max_open(spans: Sequence[tuple[float, float]], start: float, stop: float) -> int:
    inside = [(max(begin, start), min(end, stop)) for begin, end in spans if begin <= stop and end >= start]
    # At equal times ends come first: a client that continues with another conversation has one open.
    edges = sorted([(begin, 1) for begin, _ in inside] + [(end, -1) for _, end in inside])
    now = maximum = 0
    for _, change in edges:
        now += change
        maximum = max(maximum, now)
    return maximum


def _p95(records: Sequence[TurnRecord]) -> float | None:
    """Nearest-rank 95th percentile of the time to first token; None if that turn has none."""
    times = sorted(math.inf if record.error or record.ttft_s is None else record.ttft_s for record in records)
    value = times[math.ceil(0.95 * len(times)) - 1]
    return None if math.isinf(value) else value
