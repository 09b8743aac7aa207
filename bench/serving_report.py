"""Condenses one load to numbers and all loads to a page."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from serving_load import Session
from serving_run import Protocol, Seen

from pensieve.replay.report import statistics

SOURCES = {"device": "hit", "host": "swapped in", "recomputed": "recomputed", "new": "new"}
GIB = 1 << 30
SAMPLED = ("batch_tokens", "running_requests", "queued_requests", "cached_sessions")


def fingerprint(sessions: Sequence[Session]) -> str:
    """Equal for equal sessions: figures are compared only between runs of the same."""
    text = json.dumps([asdict(session) for session in sessions])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def summarise(rate: float, sessions: Sequence[Session], protocol: Protocol, seen: Seen) -> dict[str, Any]:
    """Times in seconds. A turn counts when it completed inside the window; a token when it arrived in it."""
    begin, length = protocol.window_start_s, protocol.window_s
    everything = [turn for result in seen.results for turn in result.turns]
    turns = [turn for turn in everything if begin <= turn.done_s <= protocol.seconds]
    ttft: dict[bool, list[float]] = {True: [], False: []}
    for turn in turns:
        ttft[turn.turn > 0].append(turn.first_s - turn.sent_s)
    arrivals = np.concatenate([result.arrivals for result in seen.results])
    arrivals = arrivals[(arrivals[:, 0] >= begin) & (arrivals[:, 0] <= protocol.seconds)]
    failures: Counter[str] = Counter()
    for result in seen.results:
        failures.update(result.failures)
    return {
        "rate": rate,
        "sessions": {"count": len(sessions), "sha256": fingerprint(sessions)},
        "turns": {
            "in_window": len(turns),
            "completed": len(everything),
            "failed": sum(failures.values()),
            "unfinished": sum(result.unfinished for result in seen.results),
        },
        "failures": dict(failures),
        "failure_examples": [text for result in seen.results for text in result.failure_examples][:10],
        "turns_per_s": len(turns) / length,
        "output_tokens_per_s": sum(turn.output_tokens for turn in turns) / length,
        "streamed_tokens_per_s": float(arrivals[:, 1].sum()) / length,
        "messages_per_s": len(arrivals) / length,
        "normalised_latency_s": statistics((turn.done_s - turn.sent_s) / turn.output_tokens for turn in turns),
        "ttft_s": {
            "all": statistics(ttft[False] + ttft[True]),
            "cold": statistics(ttft[False]),
            "warm": statistics(ttft[True]),
        },
        "inter_token_s": statistics(_gaps(arrivals)),
        "completion_delay_s": statistics(_after_last_token(turns)),
        "client": {
            "lag_s": statistics(turn.sent_s - turn.due_s for turn in turns),
            "cpu_share": [round(result.cpu_share, 3) for result in seen.results],
        },
        "receipts": _receipts(turns),
        "server": seen.metrics,
    }  # fmt: skip


def _gaps(arrivals: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Time per token after a stream's first message: a message of n tokens is n gaps of an n-th each."""
    later = arrivals[~np.isnan(arrivals[:, 2])]
    counts = later[:, 1].astype(int)
    return np.repeat(later[:, 2] / later[:, 1], counts)


def _after_last_token(turns: Sequence[Any]) -> list[float]:
    """What the engine's own clock leaves of a turn's latency: transport, rendering, commit."""
    return [
        turn.done_s - turn.sent_s
        - sum((turn.usage.queue_s, turn.usage.restore_s, turn.usage.prefill_s, turn.usage.decode_s))
        for turn in turns
    ]  # fmt: skip


def _receipts(turns: Sequence[Any]) -> dict[str, int]:
    usages = [turn.usage for turn in turns]
    return {
        "context": sum(usage.context_tokens for usage in usages),
        "gpu_cached": sum(usage.gpu_cached_tokens for usage in usages),
        "swapped_in": sum(usage.swapped_in_tokens for usage in usages),
        "recomputed": sum(usage.recomputed_tokens for usage in usages),
        "new": sum(usage.new_tokens for usage in usages),
        "violations": sum(not usage.reconciles for usage in usages),
    }


def markdown(report: dict[str, Any]) -> str:
    """The page."""
    machine, protocol = report["machine"], report["protocol"]
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value != "absent")
    lines = [
        "# Serving: a ShareGPT-like load through gRPC",
        "",
        f"`{report['command']}`",
        "",
        f"{report['device'] or machine['cpu']}, {machine['cores']} cores, {machine['system']}; {versions}; commit "
        f"{report['commit'] or 'unknown'}; {report['created']}.",
        "",
        f"Model {report['model']}; server: `{report['serve']}`. Load for {protocol['seconds']:g} s, measured over the "
        f"last {protocol['window_s']:g} s; think time {protocol['think_s']:g} s; seed = rate; "
        f"{protocol['clients']} client processes.",
        "",
        "| offered req/s | turns done /s | output tok/s | streamed tok/s | normalised latency mean / p90 ms "
        "| TTFT p50 / p90 ms | cold | warm | inter-token p50 / p99 ms | failed | client lag p99 ms |",
        "|" + "---|" * 11,
    ]
    for run in report["runs"]:
        lines.append(_row(run))
    for run in report["runs"]:
        lines += ["", f"## Offered {run['rate']:g}", "", *_details(run)]
    if report["problems"]:
        lines += ["", "Problems: " + "; ".join(report["problems"]) + "."]
    return "\n".join(lines) + "\n"


def _ms(statistic: dict[str, Any], *keys: str) -> str:
    return " / ".join("–" if statistic[key] is None else f"{statistic[key] * 1e3:.1f}" for key in keys)


def _row(run: dict[str, Any]) -> str:
    ttft = run["ttft_s"]
    cells = (
        f"{run['rate']:g}",
        f"{run['turns_per_s']:.1f}",
        f"{run['output_tokens_per_s']:.0f}",
        f"{run['streamed_tokens_per_s']:.0f}",
        _ms(run["normalised_latency_s"], "mean", "p90"),
        *(_ms(ttft[kind], "p50", "p90") for kind in ("all", "cold", "warm")),
        _ms(run["inter_token_s"], "p50", "p99"),
        str(run["turns"]["failed"]),
        _ms(run["client"]["lag_s"], "p99"),
    )
    return "| " + " | ".join(cells) + " |"


def _details(run: dict[str, Any]) -> list[str]:
    counters: dict[str, float] = run["server"].get("counters", {})

    def grown(name: str, labels: str = "") -> float:
        return counters.get(f"pensieve_{name}_total" + (f"{{{labels}}}" if labels else ""), 0.0)

    turns, sources = run["turns"], SOURCES.items()
    tokens = (f"{grown('context_tokens', _label('source', key)):.0f} {name}" for key, name in sources)
    swaps = (f"{grown('swap_bytes', _label('direction', way)) / GIB:.2f} GiB {way}" for way in ("in", "out"))
    failures = ", ".join(f"{reason} {count}" for reason, count in run["failures"].items())
    lines = [
        f"* turns: {turns['in_window']} in the window, {turns['completed']} in all, {turns['unfinished']} under way at "
        f"the end, {turns['failed']} failed" + (f" ({failures})" if failures else ""),
        "* context tokens of turns admitted in the window: " + ", ".join(tokens),
        "* copied between the tiers: " + ", ".join(swaps) + f"; dropped {grown('dropped_tokens'):.0f} tokens",
    ]
    steps, busy = grown("steps"), grown("step_seconds")
    if steps:
        share = busy / run["server"]["seconds"]
        lines.append(
            f"* {steps:.0f} steps of {busy / steps * 1e3:.2f} ms on average, {share:.0%} of the time"
        )
    lines += _samples(run["server"].get("gauges", {})) + _shares(counters, busy)
    lines.append(
        f"* a client process used {max(run['client']['cpu_share'], default=0):.0%} of a core at most"
    )
    return lines


def _label(key: str, value: str) -> str:
    return f'{key}="{value}"'


def _samples(gauges: dict[str, Any]) -> list[str]:
    found = ((name, gauges.get(f"pensieve_{name}")) for name in SAMPLED)
    texts = [f"{name.replace('_', ' ')} {one['mean']:.0f} ({one['max']:.0f})" for name, one in found if one]
    return ["* sampled, mean (max): " + ", ".join(texts)] if texts else []


def _shares(counters: dict[str, float], busy: float) -> list[str]:
    """Of the step time by part, if the engine tells."""
    prefix = "pensieve_step_part_seconds_total{"
    parts = {name[len(prefix) :].split('"')[1]: value for name, value in counters.items() if prefix in name}
    if not parts or not busy:
        return []
    ordered = sorted(parts.items(), key=lambda pair: -pair[1])
    return ["* share of the step time: " + ", ".join(f"{name} {value / busy:.1%}" for name, value in ordered)]
