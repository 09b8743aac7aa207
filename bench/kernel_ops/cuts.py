"""What the cutting of narrow items is worth: steps with contexts of all lengths, cut as the server does and otherwise.

A step's contexts are exponentially distributed, as those of conversations about are, or all of one length. ``whole``:
nothing is cut; ``evenly``: by the rules for wide items, which take contexts to be about as long as each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from common.gpu_timing import Ceilings, Contender, times
from kernel_ops.attention import DIM, HEADS, make_data, ours

from pensieve.kernels.attention import work_lists
from pensieve.kernels.attention.kinds import Geometry, classify
from pensieve.kernels.attention.plan import geometry_for
from pensieve.kernels.attention.tiles import Tile
from pensieve.kernels.attention.wide_cuts import wide_pieces
from pensieve.kernels.span_table import Ints

Row = dict[str, Any]
Spans = list[tuple[int, int]]
"""(query tokens, tokens of context including them)"""
DECODES = (4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 256)
BESIDE = ((20, (38,)), (36, (38,)), (56, (38,)), (56, (150,)), (56, (8,)), (90, (38, 60)))
"""(decodes, tokens of the turns beside them, each on a history)."""
MEAN, LONGEST, HISTORY = 1100, 8800, 1000
CALLS, REPLAYS = 8, 9
NOW = "now"


def whole(steps: Ints, tile: Tile, geometry: Geometry) -> Ints:
    return np.ones(len(steps), np.int64)


def evenly(steps: Ints, tile: Tile, geometry: Geometry) -> Ints:
    return wide_pieces(steps, np.ones(len(steps), np.bool_), tile, geometry)


WAYS: dict[str, Callable[[Ints, Tile, Geometry], Ints]] = {
    NOW: work_lists.narrow_pieces, "whole": whole, "evenly": evenly
}  # fmt: skip


def steps() -> Iterator[tuple[str, Spans]]:
    """Names and spans of the steps that are timed."""

    def drawn(count: int) -> Spans:
        contexts = np.random.default_rng(count).exponential(MEAN, count).clip(1, LONGEST)
        return [(1, int(context) + 1) for context in contexts]

    for count in DECODES:
        yield f"{count} decodes", drawn(count)
        yield f"{count} decodes of {MEAN}", [(1, MEAN)] * count
    for count, turns in BESIDE:
        new = " and ".join(map(str, turns))
        yield f"{count} decodes, turn of {new}", drawn(count) + [(turn, HISTORY + turn) for turn in turns]


@contextmanager
def cut_by(way: str) -> Iterator[None]:
    with mock.patch.object(work_lists, "narrow_pieces", WAYS[way]):
        yield


def measure(name: str, spans: Spans, heads: int, kv_heads: int, ceilings: Ceilings) -> Row:
    data = make_data(spans, heads, kv_heads)
    floor, _ = ceilings.floor_us(data.least_bytes, data.flops)
    out = torch.empty_like(data.q)
    contenders: dict[str, Contender] = {}
    for way in WAYS:
        with cut_by(way):
            contenders[way] = ours(data, out)
    taken = times(contenders, len(data.pools), CALLS, REPLAYS)
    return {
        "step": name, "heads": heads, "kv_heads": kv_heads, "floor_us": round(floor, 1),
        "kind": classify(data.spans.host, geometry_for(heads, data.pools[0])).value,
        "us": {way: round(value, 1) for way, value in taken.items()},
    }  # fmt: skip


def rows(ceilings: Ceilings) -> list[Row]:
    return [
        measure(name, spans, heads, kv_heads, ceilings)
        for heads, kv_heads in HEADS
        for name, spans in steps()
    ]


def as_markdown(report: list[Row]) -> str:
    """The rows as a table, and what they come to."""
    others = [way for way in WAYS if way != NOW]
    lines = [
        f"bf16, heads of {DIM}; contexts exponentially distributed about {MEAN}, at most {LONGEST}, or all of one "
        "length; floor: least bytes over what a copy reaches. `÷`: the server's way over the other.",
        "",
        "| step | kind | heads | floor µs | now µs | floor ÷ now | "
        + " | ".join(f"÷ {way}" for way in others)
        + " |",
        "|---|---|---|---|---|---|" + "---|" * len(others),
    ]
    for row in report:
        us = row["us"]
        ratios = " | ".join(f"{us[NOW] / us[way]:.2f}" for way in others)
        lines.append(
            f"| {row['step']} | {row['kind']} | {row['heads']}/{row['kv_heads']} | {row['floor_us']} | {us[NOW]} "
            f"| {row['floor_us'] / us[NOW]:.2f} | {ratios} |"
        )
    for title, same in (("contexts of all lengths", False), ("contexts of one length", True)):
        mine = [row for row in report if (" of " in row["step"] and "turn" not in row["step"]) == same]
        told = ", ".join(
            f"÷ {way} {_mean([r['us'][NOW] / r['us'][way] for r in mine]):.3f}" for way in others
        )
        lines += ["", f"* {title}, geometric mean: {told}"]
    return "\n".join(lines) + "\n"


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
