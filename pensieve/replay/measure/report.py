"""Condenses a replay to numbers, and checks receipts; bench/README.md describes the JSON."""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from pensieve import __version__
from pensieve.replay.measure.activity import active_sessions
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
