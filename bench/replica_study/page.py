"""The page and the picture of ``bench/replica_study/run.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from common.provenance import portable

from pensieve.config import CacheConfig
from pensieve.replay.presentation.columns import NOTHING, number
from pensieve.replay.presentation.plot_style import INK, WIDE_IN, grid, legend, look, plain_numbers, sample
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.scenario.routing import Router
from pensieve.simulate.scenario.settings import Settings

Row = Mapping[str, Any]
HIT: Final = 0.8
"""Back to normal: the share of the history of those sessions that had to move, an N-th of all, that is found cached."""
SESSIONS: Final = 100_000
"""So many are put on rings to see how even they are."""
LEASE_S: Final = 10
NAMES: Final = {"hash": "consistent hash", "bounded": "the same, loads bounded", "random": "random"}


def write(found: Mapping[str, Row], folder: Path, times: tuple[int, int]) -> None:
    """``replicas.md`` and ``replicas.png``. ``times``: when replica 0 is lost, and when it is back."""
    (folder / "replicas.md").write_text("\n".join(markdown(found, times)) + "\n", encoding="utf-8")
    lost = [row for row in found.values() if row["lost"]]
    if lost:
        _picture(lost, folder / "replicas.png", times)


def markdown(found: Mapping[str, Row], times: tuple[int, int]) -> Iterator[str]:
    """The page, line by line."""
    commits = ", ".join(sorted({row["commit"] for row in found.values()}))
    yield "# Replicas, in simulation\n"
    yield (
        "Servers on one store, each a 13B model on one H200 with 37 GiB of KV on the device and 205 GiB on the host, "
        "under the built-in ShareGPT-like load with pauses of 30 s (mean); policy `gittins`. Shares are of the history "
        "tokens; times in ms; the busiest replica's turns as a multiple of the mean. What follows from it is said in "
        "[several servers](../../docs/several-servers.md#how-many).\n"
    )
    yield f"Commit {commits}. All of it: `{portable(['python', 'bench/replica_study/run.py'])}`\n"
    yield "## One against many\n"
    yield from _table(
        ("replicas", "router", "points", "turns/s each", "hit %", "recomputed %", "TTFT warm p50", "p99", "cold p99",
         "ms/token", "busiest", "its TTFT warm p99"),
        2, (_steady(row) for row in found.values() if not row["lost"]),
    )  # fmt: skip
    yield f"\n## How even a ring is\n\nThe busiest replica's sessions over the mean, of {SESSIONS:,} sessions.\n"
    sizes, points = (4, 16, 64), (16, 160, 1600)
    yield from _table(
        ("points of each replica", *(f"{size} replicas" for size in sizes)), 1,
        ((f"{each:,}", *(f"{evenness(size, each):.2f}" for size in sizes)) for each in points),
    )  # fmt: skip
    lost_s, back_s = times
    yield (
        f"\n## One is lost, and comes back {back_s - lost_s} s later\n\nBy parts of 10 s. Until normal: the seconds "
        f"after which in such a part {HIT:.0%} of the history of an N-th of the sessions, those that had to move, is "
        "found cached. The p99 is that of the worst part, over the turns of all replicas, without the one in which "
        "the turns that were under way begin again, when their leases have lapsed "
        f"({LEASE_S} s): they wait for that long, and are in a column of their own.\n"
    )
    yield "![Hit share and time to first token around a loss](replicas.png)\n"
    yield from _table(
        ("replicas", "turns/s each", "", "hit % before", "lowest", "until normal [s]", "tokens recomputed",
         "TTFT warm p99 before", "worst", "turns begun again"),
        3, (cells for row in found.values() if row["lost"] for cells in _loss(row, times)),
    )  # fmt: skip
    yield "\n## Commands\n"
    yield from (f"* {name}: `{row['command']}`" for name, row in found.items())


def evenness(replicas: int, points: int) -> float:
    """The busiest replica's share of the sessions over the mean."""
    machine = Machine()
    settings = Settings(machine, CacheConfig(1, 1), machine.cost(32, 32), 32, replicas=replicas, routing="hash",
                        ring_points=points)  # fmt: skip
    router = Router(settings, lambda replica: 0)
    counts = Counter(router.replica(session, 0, lost=False) for session in range(SESSIONS))
    return max(counts.values()) * replicas / SESSIONS


def _steady(row: Row) -> tuple[str, ...]:
    tokens, ttft, several = row["tokens"], row["ttft_s"], row["replicas"] > 1
    history = tokens["context"] - tokens["new"]
    busiest = max(row["by_replica"], key=lambda its: int(its["turns"]))
    mean = sum(its["turns"] for its in row["by_replica"]) / row["replicas"]
    ringed = several and row["routing"] != "random"
    return (
        str(row["replicas"]), NAMES[row["routing"]] if several else NOTHING,
        f"{row['ring_points']:,}" if ringed else NOTHING, f"{row['rate']:g}", f"{100 * row['hit_rate']:.1f}",
        f"{100 * tokens['recomputed'] / history:.1f}", _ms(ttft["warm"]["p50"]), _ms(ttft["warm"]["p99"]),
        _ms(ttft["cold"]["p99"]), number(row["normalised_latency_s"]["mean"], ".1f", 1e3),
        f"{busiest['turns'] / mean:.2f}" if several else NOTHING,
        _ms(busiest["ttft_s"]["warm"]["p99"]) if several else NOTHING,
    )  # fmt: skip


def _loss(row: Row, times: tuple[int, int]) -> Iterator[tuple[str, ...]]:
    lost_s, back_s = times
    line = row["timeline"]
    before = [part for part in line if part["start_s"] < lost_s]
    usual, usual_s = _hit(before), _median([part["ttft_s"]["warm"]["p99"] for part in before])
    for what, start, end in (("lost", lost_s, back_s), ("back", back_s, float("inf"))):
        parts = [part for part in line if start <= part["start_s"] < end]
        others = [
            part for part in parts
            if not (what == "lost" and start + LEASE_S - 10 < part["start_s"] <= start + LEASE_S)
        ]  # fmt: skip
        enough = 1 - (1 - HIT) / row["replicas"]
        normal = next((part["start_s"] - start for part in parts if part["hit_rate"] >= enough), None)
        worst = max(part["ttft_s"]["warm"]["p99"] for part in others)
        yield (
            str(row["replicas"]), f"{row['rate']:g}", what, f"{100 * usual:.1f}",
            f"{100 * min(part['hit_rate'] for part in parts):.1f}", number(normal, ".0f"),
            f"{sum(part['tokens']['recomputed'] for part in parts):,}", _ms(usual_s), _ms(worst),
            str(row["repeated_turns"]) if what == "lost" else NOTHING,
        )  # fmt: skip


def _hit(parts: Sequence[Row]) -> float:
    found = sum(part["tokens"]["gpu_cached"] + part["tokens"]["swapped_in"] for part in parts)
    return float(found / sum(part["tokens"]["history"] for part in parts))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _ms(seconds: float | None) -> str:
    return number(seconds, ",.0f", 1e3)


def _table(heads: Sequence[str], names: int, rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * names + "|---:" * (len(heads) - names) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def _picture(rows: Sequence[Row], file: Path, times: tuple[int, int]) -> None:
    figure, (hits, delays) = grid(2, 2, WIDE_IN, 3.6)
    samples = []
    for number_, row in enumerate(rows):
        own, line = look(number_), row["timeline"]
        at = [part["start_s"] - times[0] for part in line]
        hits.plot(at, [100 * part["hit_rate"] for part in line], color=own.colour, linewidth=1.4)
        delays.plot(
            at, [1e3 * part["ttft_s"]["warm"]["p99"] for part in line], color=own.colour, linewidth=1.4
        )
        samples.append((f"{row['replicas']} replicas, {row['rate']:g} turns/s each", sample(own.colour)))
    for axes in (hits, delays):
        for when in times:
            axes.axvline(when - times[0], color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel("seconds after the loss")
    hits.set_ylabel("history found cached [%]")
    delays.set_ylabel("warm time to first token, p99 [ms]")
    delays.set_yscale("log")
    plain_numbers(delays.yaxis)
    legend(figure, samples)
    figure.savefig(file, dpi=150, facecolor="white", metadata={"Software": None})
