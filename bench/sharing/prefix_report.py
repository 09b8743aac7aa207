"""What ``prefix_attention`` says of its rows: ratios, whole decode steps, a table."""

from __future__ import annotations

from typing import Any

from kernel_ops.attention import DIM, PAGE
from sharing.prefix_ways import HEADS, KV_HEADS

LAYERS = 40
"""Of the model whose heads ``prefix_ways`` has."""
Row = dict[str, Any]


def with_ratios(row: Row) -> Row:
    """Add how the ways compare."""
    us = row["us"]
    parts = {name: value for name, value in us.items() if name not in ("shared", "private")}
    for name in ("shared", "planned"):
        if name in us and "product" in us:
            row[f"{name} ÷ product"] = round(us[name] / us["product"], 2)
    row["shared ÷ floor"] = round(us["shared"] / row["floor_us"], 2)
    if parts:
        name = min(parts, key=parts.__getitem__)
        row["fastest"] = name
        row["shared ÷ fastest"] = round(us["shared"] / parts[name], 2)
        row["fastest ÷ floor"] = round(parts[name] / row["floor_us"], 2)
    return row


def with_step(row: Row, products: dict[int, float]) -> Row:
    """Add what the fastest way would make of a whole decode step."""
    rest = products.get(row["sessions"])
    if rest is None or "fastest" not in row:
        return row
    us = row["us"]
    now, then = (rest + LAYERS * us[name] / 1e3 for name in ("shared", row["fastest"]))
    step: Row = {"products_ms": round(rest, 2), "shared_ms": round(now, 2), "fastest_ms": round(then, 2),
                 "shared ÷ fastest": round(now / then, 2)}  # fmt: skip
    for name in ("private", "product"):
        if name in us:
            step[f"{name}_ms"] = round(rest + LAYERS * us[name] / 1e3, 2)
    return {**row, "step": step}


def as_markdown(report: Row) -> str:
    """The rows as a table, and what failed."""
    ways = ("private", "shared", "product", "planned", "kernel + torch", "flash + torch", "cudnn + torch")
    lines = [
        f"`{report['command']}`", "",
        f"{report['device']}, torch {report['torch']}, Triton {report['triton']}, commit "
        f"{report['commit'] or 'unknown'}; copy {report.get('copy_tb_per_s', '?')} TB/s, bf16 product "
        f"{report.get('matrix_tflop_per_s', '?')} TFLOP/s. "
        f"One layer, bf16, {HEADS} heads, {KV_HEADS} KV heads of {DIM}, pages of {PAGE}; µs in a CUDA graph. "
        f"Step: {LAYERS} layers and the head, matrix products and attention only.", "",
        "| sessions | prefix | suffix | floor | bound | private floor | " + " | ".join(ways) + " | fastest "
        "| shared ÷ product | planned ÷ product | shared ÷ floor | shared ÷ fastest | fastest ÷ floor | served "
        "| step private ms | step shared ms | step product ms | step fastest ms | step ÷ |",
        "|---" * (18 + len(ways)) + "|",
    ]  # fmt: skip
    for row in report["rows"]:
        step = row.get("step", {})
        cells = [
            row["sessions"], row["prefix"], row["suffix"], row["floor_us"], row["bound"], row["private_floor_us"],
            *(row["us"].get(way, "") for way in ways), row.get("fastest", ""), row.get("shared ÷ product", ""),
            row.get("planned ÷ product", ""), row["shared ÷ floor"], row.get("shared ÷ fastest", ""),
            row.get("fastest ÷ floor", ""), "yes" if row["served"] else "no", step.get("private_ms", ""),
            step.get("shared_ms", ""), step.get("product_ms", ""), step.get("fastest_ms", ""),
            step.get("shared ÷ fastest", ""),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "Served: whether a server's rule takes the shape for worth it. Cuts of `product`: " + "; ".join(
        f"{row['sessions']}×({row['prefix']} + {row['suffix']}): {row['cuts'].get('product', 'none')}"
        for row in report["rows"]
    )]  # fmt: skip
    lines += ["", "Cuts of `planned` (pieces of the prefix, of each suffix, multiprocessors beside): " + "; ".join(
        f"{row['sessions']}×({row['prefix']} + {row['suffix']}): {row['cuts'].get('planned', 'none')}"
        for row in report["rows"]
    )]  # fmt: skip
    for small in report["checked"]:
        lines.append(
            f"* checked {small['shape']}: " + ", ".join(f"{k} {v:.1e}" for k, v in small["errors"].items())
        )
    lines += [f"* failed: {failure}" for failure in report["failures"]]
    return "\n".join(lines) + "\n"
