"""Times of attention with windows, beside the same steps of layers that see everything.

The geometries are those of Gemma 3, gpt-oss and a Mistral with windows. A step is timed both ways in turn, so their
ratio holds whatever else the device does.
"""

from __future__ import annotations

from typing import Any

import torch
from common.gpu_timing import times
from kernel_ops.attention import FEW_CALLS, Spans, make_data, ours

Row = dict[str, Any]
GEOMETRIES = {
    "gemma3-12b": (16, 8, 256, 1024, False),
    "gpt-oss": (64, 8, 64, 128, True),
    "mistral": (32, 8, 128, 1024, False),
}
"""Query heads, KV heads, head size, window, and whether there are sinks."""
STEPS: dict[str, Spans] = {
    "decode_B64_c8192": [(1, 8192)] * 64,
    "decode_B8_c8192": [(1, 8192)] * 8,
    "prefill_8k": [(8192, 8192)],
    "turn_8x256_hist4k": [(256, 4352)] * 8,
    "mixed": [*[(1, 4096)] * 60, (300, 4396), (80, 2000)],
}


def measure(model: str, step: str) -> Row:
    """One row: microseconds with the window and without."""
    heads, kv_heads, dim, window, has_sinks = GEOMETRIES[model]
    data = make_data(STEPS[step], heads, kv_heads, dim=dim)
    sinks = torch.randn(heads, device="cuda") if has_sinks else None
    out = torch.empty_like(data.q)
    ways = {"window": ours(data, out, window, sinks), "whole": ours(data, out, None, sinks)}
    us = times(ways, len(data.pools), *FEW_CALLS)
    seen = sum(min(context, window + new - 1) for new, context in STEPS[step])
    return {
        "model": model, "step": step, "window": window, "us": {way: round(value, 1) for way, value in us.items()},
        "ratio": round(us["window"] / us["whole"], 3),
        "keys_ratio": round(seen / sum(context for _, context in STEPS[step]), 3),
    }  # fmt: skip


def section(only: str) -> tuple[list[Row], str]:
    """All steps whose name contains ``only``, for every model; and the table."""
    rows = [measure(model, step) for model in GEOMETRIES for step in STEPS if only in step]
    lines = [
        "bf16, pages of 32; keys: the share of the context's keys that some query of a span sees.",
        "",
        "| model | step | window | with window µs | whole µs | ratio | keys |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['step']} | {row['window']} | {row['us']['window']} | {row['us']['whole']} "
            f"| {row['ratio']} | {row['keys_ratio']} |"
        )
    return rows, "\n".join(lines) + "\n"
