"""Chooses the measured part of a replay, tests whether the load was steady, and validates the client's timing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pensieve.replay.measure.report import statistics, value_at
from pensieve.replay.records import Outcome, TurnRecord

METRICS = (
    "turns_per_s", "output_tokens_per_s", "normalised_latency_s.mean", "normalised_latency_s.p90",
    *(f"ttft_s.{kind}.{point}" for kind in ("cold", "warm") for point in ("p50", "p90", "p99")),
    "inter_token_s.p50", "inter_token_s.p99",
)  # fmt: skip

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, two-sided 5 %, with 1, 2, … degrees of freedom; beyond 30 the last value is slightly too wide."""
BINS = 10
_PARTS = 100
_LARGEST_TREND = 0.2
_T_95 = T_975[BINS - 3]
"""The value for a line through ``BINS`` levels: ``BINS`` − 2 degrees of freedom."""


def client_lag(outcome: Outcome, max_lag_s: float) -> dict[str, Any]:
    """Lateness of the client's sends and of its event loops, and whether the measurement is valid.

    The rule: at most 1 % of the sends, and of the timer ticks of each process, were later than ``max_lag_s``.
    """
    records = (*outcome.records, *outcome.outside, *outcome.cut_short)
    send = statistics(record.sent_s - record.due_s for record in records if record.sent_s)
    loop = statistics(itertools.chain.from_iterable(outcome.loop_lag_s))
    each = [statistics(lags)["p99"] or 0.0 for lags in outcome.loop_lag_s]
    checks = (("turns were sent", send["p99"] or 0.0), ("its event loop was", max(each, default=0.0)))
    reasons = [
        f"{what} {late:.3f} s late at the 99th percentile, more than {max_lag_s:g} s"
        for what, late in checks
        if late > max_lag_s
    ]
    return {
        "send_lag_s": send,
        "loop_lag_s": loop,
        "loop_lag_p99_s": each,
        "max_lag_s": max_lag_s,
        "valid": not reasons,
        "reason": " and ".join(reasons),
    }


def intervals(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and 95 % confidence interval of each metric over seeds, per target and load with several seeds."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for summary in summaries:
        groups.setdefault((summary["target"], summary["rate"], summary["clients"]), []).append(summary)
    return [
        {
            "target": target,
            "rate": rate,
            "clients": clients,
            "seeds": [summary["seed"] for summary in group],
            "metrics": {path: _interval([value_at(summary, path) for summary in group]) for path in METRICS},
        }
        for (target, rate, clients), group in groups.items()
        if len(group) > 1
    ]


def _interval(values: Sequence[float | None]) -> dict[str, float | int | None]:
    known = np.array([value for value in values if value is not None], np.float64)
    if len(known) < 2:
        return {"mean": float(known[0]) if len(known) else None, "low": None, "high": None, "n": len(known)}
    mean = float(known.mean())
    t = T_975[min(len(known) - 1, len(T_975)) - 1]
    half = t * float(known.std(ddof=1)) / math.sqrt(len(known))
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": len(known)}


@dataclass(frozen=True, slots=True)
class Window:
    """The requested window. By default the whole replay is measured."""

    warm_up_s: float | None = None
    window_s: float | None = None
    """Measured time after the warm-up; None: until the last conversation starts, after which the load only falls."""
    steady: bool = False


def sent_turns(outcome: Outcome) -> list[TurnRecord]:
    return [*outcome.records, *outcome.cut_short]


def running_turns(
    records: Sequence[TurnRecord], start: float, end: float, bins: int = BINS
) -> NDArray[np.float64]:
    """Mean number of turns in flight in each of ``bins`` equal parts of ``start`` to ``end``."""
    edges = np.linspace(start, end, bins + 1)
    sent = np.array([record.sent_s for record in records if record.sent_s])
    done = np.array([record.done_s for record in records if record.sent_s])
    inside = [
        np.clip(np.minimum(done, b) - np.maximum(sent, a), 0, None).sum()
        for a, b in itertools.pairwise(edges)
    ]
    return np.array(inside) / max((end - start) / bins, 1e-9)


def has_trend(levels: NDArray[np.float64]) -> bool:
    """Whether a line fitted to ``BINS`` levels changes by more than 20 % of their mean, significantly (5 %)."""
    mean = float(levels.mean())
    if not mean:
        return False
    x = np.arange(len(levels)) - (len(levels) - 1) / 2
    slope = float(x @ levels / (x @ x))
    error = np.sqrt(float(((levels - mean - slope * x) ** 2).sum()) / (len(levels) - 2) / float(x @ x))
    return bool(abs(slope) * len(levels) > _LARGEST_TREND * mean and abs(slope) > _T_95 * error)


def steady_start(records: Sequence[TurnRecord], end: float) -> tuple[float, bool]:
    """Return the start of the steady part before ``end``, and whether that part is steady.

    The rule: the number of turns in flight, averaged over each hundredth of the time to ``end``, is cut where
    the rest has the smallest marginal standard error (MSER: squared deviations from the mean over the square
    of their number), within the first half. The rest is steady if it has no trend; otherwise turns pile up,
    or the replay is too short.
    """
    levels = running_turns(records, 0.0, end, _PARTS)
    # Each kept level adds to the sum of squares, and more to its divisor while levels are alike: the quotient
    # is smallest if the cut drops only the start.
    errors = [
        float(((rest := levels[cut:]) - rest.mean()) @ (rest - rest.mean())) / len(rest) ** 2
        for cut in range(_PARTS // 2)
    ]
    start = int(np.argmin(errors)) * end / _PARTS
    return start, not has_trend(running_turns(records, start, end))


def cut_to_window(outcome: Outcome, wanted: Window) -> tuple[Outcome, dict[str, Any]]:
    """Reduce an outcome to the turns that ended inside the window; also return the report's ``window``.

    If the load ends before the warm-up, the whole replay is measured and counts as not steady. Turns that
    were cut short only count as in flight, and their conversations as active. Histories do not count.
    """
    rule, start, end, steady = _bounds(outcome, wanted)
    whole = rule == "whole"
    parts: dict[bool, list[TurnRecord]] = {True: [], False: []}
    for record in outcome.records:
        parts[record.done_s > 0 and (whole or start <= record.done_s < end)].append(record)
    inside, outside = tuple(parts[True]), tuple(parts[False])
    entry = {
        "rule": rule,
        "start_s": start,
        "end_s": end,
        "run_s": outcome.duration_s,
        "steady": steady,
        "turns_outside": len(outside),
        "failed_outside": sum(bool(record.error) for record in outside),
        "cut_short": sum(bool(record.sent_s) for record in outcome.cut_short),
    }
    outside += outcome.cut_short
    if whole:
        return replace(outcome, records=inside, outside=outside), entry
    return replace(
        outcome, records=inside, outside=outside, duration_s=end - start, window_s=(start, end)
    ), entry


def _bounds(outcome: Outcome, wanted: Window) -> tuple[str, float, float, bool | None]:
    """(rule, start, end, steady) of the window; steady is None if it was not requested."""
    duration = outcome.duration_s
    last_start = max((record.sent_s for record in outcome.records if record.turn == 0), default=0.0)
    # If all conversations start at once the load only falls: it ends with the replay.
    load_end = last_start if last_start > 0.1 * duration else duration
    if wanted.steady:
        start, steady = steady_start(outcome.records, load_end)
        return "steady", start, load_end, steady
    if wanted.warm_up_s is None and wanted.window_s is None:
        return "whole", 0.0, duration, None
    start = wanted.warm_up_s or 0.0
    end = load_end if wanted.window_s is None else min(start + wanted.window_s, duration)
    if end <= start:
        return "whole", 0.0, duration, False
    return "given", start, end, not has_trend(running_turns(sent_turns(outcome), start, end))
