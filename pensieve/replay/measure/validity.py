"""Whether a measurement may be believed: the client's own lag; and how far repeats of it agree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pensieve.replay.measure.report import at, statistics
from pensieve.replay.records import Outcome

METRICS = (
    "turns_per_s", "output_tokens_per_s", "normalised_latency_s.mean", "normalised_latency_s.p90",
    *(f"ttft_s.{kind}.{point}" for kind in ("cold", "warm") for point in ("p50", "p90", "p99")),
    "inter_token_s.p50", "inter_token_s.p99",
)  # fmt: skip
"""What gets confidence intervals, as paths into a summary."""

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, two-sided 5 %, with 1, 2, … degrees of freedom; with more than 30 the last is a little too wide."""


def client_lag(outcome: Outcome, max_lag_s: float) -> dict[str, Any]:
    """How late the client sent, and how late its event loops looked at answers; valid when both are in time.

    The rule: of sends, and of the timer ticks of each process, at most one in a hundred was later than ``max_lag_s``.
    """
    records = (*outcome.records, *outcome.outside, *outcome.cut_short)
    send = statistics(record.sent_s - record.due_s for record in records if record.sent_s)
    loop = statistics(itertools.chain.from_iterable(outcome.loop_lag_s))
    each = [statistics(lags)["p99"] or 0.0 for lags in outcome.loop_lag_s]
    checks = [
        ("turns were sent", send["p99"] or 0.0),
        *(("its event loop was", late) for late in sorted(each)[-1:]),
    ]
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
    """Mean over the seeds and 95 % confidence interval of each metric, for each target and load with several seeds."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for summary in summaries:
        groups.setdefault((summary["target"], summary["rate"], summary["clients"]), []).append(summary)
    return [
        {
            "target": target,
            "rate": rate,
            "clients": clients,
            "seeds": [summary["seed"] for summary in group],
            "metrics": {path: _interval([at(summary, path) for summary in group]) for path in METRICS},
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
