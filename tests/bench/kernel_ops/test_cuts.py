"""Ways to cut attention that are compared: each fits into the memory of a graph, and they differ. Times need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pensieve.kernels.attention.capacity import capacity_for
from pensieve.kernels.attention.kinds import Geometry, classify
from pensieve.kernels.attention.plan import AttentionPlan
from pensieve.kernels.span_table import SpanTable
from support.replay.benches import load_bench


@pytest.mark.parametrize("kv_heads", [8, 10, 40])
def test_all_ways_fit(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = load_bench("kernel_ops/cuts", monkeypatch)
    where = Geometry(32 if kv_heads == 8 else 40, kv_heads, 128, 2, 132, hopper=True)
    differing = 0
    for name, spans in bench.steps():
        table = SpanTable.build(
            [new for new, _ in spans], [all_ - new for new, all_ in spans], range(len(spans))
        )
        kind, tokens = classify(table.host, where), table.num_tokens
        capacity = capacity_for(kind, tokens, len(spans), table.max_context, where)
        items = {}
        for way in bench.WAYS:
            with bench.cut_by(way):
                # ``pack`` alone needs no device.
                plan = AttentionPlan(tokens, where, torch.device("cpu"), kind=kind, capacity=capacity)
                items[way] = int(plan.pack(table.host)[0])
        assert items["whole"] <= items[bench.NOW], name
        differing += len(set(items.values())) == len(bench.WAYS)
    assert differing > 5


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = load_bench("kernel_ops/cuts", monkeypatch)
    rows = [
        {"step": name, "kind": "narrow", "heads": 40, "kv_heads": 10, "floor_us": 10.0,
         "us": {way: 20.0 * (1 + number) for number, way in enumerate(bench.WAYS)}}
        for name, _ in bench.steps()
    ]  # fmt: skip
    page = bench.as_markdown(rows)
    assert "contexts of one length, geometric mean: ÷ whole 0.500, ÷ evenly 0.333" in page
    assert page.count("| 0.50 | 0.50 | 0.33 |") == len(rows)
