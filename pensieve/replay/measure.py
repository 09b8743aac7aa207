"""Condenses a replay to numbers: windows, receipts, latencies, and whether the measurement is valid.

``summarise`` makes a report's entry; bench/README.md describes the JSON. ``active_sessions`` counts open conversations,
with the times to first token meanwhile. The measured part of a replay is chosen here, too, and the load is tested for
steadiness, the client's timing for lateness.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pensieve import __version__
from pensieve.replay.records import Outcome, TurnRecord

SCHEMA = "pensieve.replay/1"
SOURCES = ("gpu_cached", "swapped_in", "recomputed", "new")
_MAX_EXAMPLES = 20


def receipt_violations(records: Iterable[TurnRecord]) -> list[str]:
    """Check receipts; return one sentence per broken rule. Turns without a receipt are skipped."""
    problems: list[str] = []
    last: dict[int, TurnRecord] = {}
    for record in sorted(records, key=lambda record: (record.conversation, record.turn)):
        if record.usage is None or record.error:
            continue
        problems += _check_receipt(record)
        before = last.get(record.conversation)
        if before is not None and before.turn == record.turn - 1:
            problems += _check_against_previous(before, record)
        last[record.conversation] = record
    return problems


def _check_receipt(record: TurnRecord) -> list[str]:
    usage, where, problems = record.usage, _where(record), []
    assert usage is not None
    if not usage.reconciles:
        problems.append(
            f"{where}: context {usage.context_tokens} is not gpu {usage.gpu_cached_tokens} + "
            f"swapped {usage.swapped_in_tokens} + recomputed {usage.recomputed_tokens} + new {usage.new_tokens}"
        )
    if usage.output_tokens != record.output_tokens:
        problems.append(
            f"{where}: {record.output_tokens} tokens arrived, the receipt says {usage.output_tokens}"
        )
    if record.turn == 0 and usage.recomputed_tokens:
        problems.append(f"{where}: a first turn has {usage.recomputed_tokens} recomputed tokens")
    return problems


def _check_against_previous(before: TurnRecord, record: TurnRecord) -> list[str]:
    """Check a receipt against the turn before.

    The context may be larger than history and new input: input that another session has cached is not new.
    """
    assert before.usage is not None and record.usage is not None
    usage, where, problems = record.usage, _where(record), []
    history = before.usage.context_tokens + before.usage.output_tokens
    previous = f"the turn before had {before.usage.context_tokens} + output {before.usage.output_tokens}"
    if usage.context_tokens < history + usage.new_tokens:
        problems.append(
            f"{where}: context {usage.context_tokens}, but {previous}, and {usage.new_tokens} are new"
        )
    if usage.recomputed_tokens > history:
        problems.append(f"{where}: {usage.recomputed_tokens} are recomputed, but {previous}")
    return problems


def _where(record: TurnRecord) -> str:
    return f"conversation {record.conversation}, turn {record.turn}"


def summarise(outcome: Outcome) -> dict[str, Any]:
    """The ``targets`` entry of one target. Durations in seconds; statistics without values are null."""
    done = [record for record in outcome.records if not record.error]
    failed = [record for record in outcome.records if record.error]
    broken = receipt_violations(outcome.records)
    output = sum(record.output_tokens for record in done)
    return {
        "target": outcome.target,
        "details": outcome.info.details,
        "vocab_size": outcome.info.vocab_size,
        "context_limit": outcome.info.context_limit,
        "duration_s": outcome.duration_s,
        "turns": {"completed": len(done), "failed": len(failed), "skipped": outcome.skipped_turns},
        "turns_per_s": len(done) / outcome.duration_s if outcome.duration_s else None,
        "output_tokens_per_s": output / outcome.duration_s if outcome.duration_s else None,
        "normalised_latency_s": statistics(
            record.latency_s / record.output_tokens for record in done if record.output_tokens
        ),
        "latency_s": statistics(record.latency_s for record in done),
        "ttft_s": {
            "cold": statistics(_ttft(record for record in done if record.turn == 0)),
            "warm": statistics(_ttft(record for record in done if record.turn > 0)),
        },
        "ttft_quantiles_s": {
            "cold": quantiles(_ttft(record for record in done if record.turn == 0)),
            "warm": quantiles(_ttft(record for record in done if record.turn > 0)),
        },
        "inter_token_s": statistics(gap for record in done for gap in _gaps(record)),
        "tokens": _tokens(done),
        "by_turn": _by_turn(done),
        "receipts": {
            "checked": sum(record.usage is not None for record in done),
            "violations": len(broken),
            "examples": broken[:_MAX_EXAMPLES],
        },
        "active_sessions": active_sessions(outcome.records, outcome.outside, outcome.window_s),
        "errors": dict(Counter(record.error for record in failed)),
        "error_examples": [record.message for record in failed[:_MAX_EXAMPLES]],
        "client_lag_s": statistics(record.sent_s - record.due_s for record in done),
    }


def is_clean(summary: dict[str, Any]) -> bool:
    turns = summary["turns"]
    return not (turns["failed"] or turns["skipped"] or summary["receipts"]["violations"])


def value_at(summary: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None if an older report lacks the field."""
    value: Any = summary
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def statistics(values: Iterable[float]) -> dict[str, float | int | None]:
    array = np.fromiter(values, dtype=np.float64)
    if not len(array):
        return {"count": 0, "mean": None, "p50": None, "p90": None, "p95": None, "p99": None, "max": None}
    p50, p90, p95, p99 = (float(value) for value in np.percentile(array, [50, 90, 95, 99]))
    return {
        "count": len(array),
        "mean": float(array.mean()),
        "p50": p50,
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "max": float(array.max()),
    }


def quantiles(values: Iterable[float]) -> list[float] | None:
    array = np.fromiter(values, dtype=np.float64)
    return [float(value) for value in np.percentile(array, np.arange(101))] if len(array) else None


def environment() -> dict[str, Any]:
    """Machine and versions, as far as they can change a number."""
    names = ("torch", "transformers", "tokenizers", "numpy", "grpcio", "protobuf", "redis")
    versions = {"pensieve": __version__, "python": platform.python_version()}
    versions |= {name: version_of(name) for name in names}
    release = platform.release().partition("-")[0]  # the distributor's suffix says nothing about speed
    machine = {"system": f"{platform.system()} {release}", "cpu": _cpu(), "cores": _cores()}
    return {"machine": machine, "versions": versions}


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _cpu() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _ttft(records: Iterable[TurnRecord]) -> Iterable[float]:
    return (record.ttft_s for record in records if record.ttft_s is not None)


def _gaps(record: TurnRecord) -> Iterable[float]:
    """Time per token between pieces: a piece of n tokens is n gaps of equal length."""
    for (_, earlier), (count, later) in zip(record.arrivals, record.arrivals[1:], strict=False):
        for _ in range(count):
            yield (later - earlier) / count


def _tokens(records: Sequence[TurnRecord]) -> dict[str, int]:
    usages = [record.usage for record in records if record.usage is not None]
    return {
        "context": sum(usage.context_tokens for usage in usages),
        "gpu_cached": sum(usage.gpu_cached_tokens for usage in usages),
        "swapped_in": sum(usage.swapped_in_tokens for usage in usages),
        "recomputed": sum(usage.recomputed_tokens for usage in usages),
        "new": sum(usage.new_tokens for usage in usages),
        "output": sum(record.output_tokens for record in records),
    }


def _by_turn(records: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    numbers = sorted({record.turn for record in records})
    rows = []
    for number in numbers:
        group = [record for record in records if record.turn == number]
        rows.append(
            {
                "turn": number,
                "turns": len(group),
                "ttft_s": statistics(_ttft(group)),
                "tokens": _tokens(group),
            }
        )
    return rows


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
