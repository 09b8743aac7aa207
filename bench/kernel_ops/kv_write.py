"""Times of the KV write with rotation, fused into one launch, against the bytes that it has to move."""

from __future__ import annotations

import torch
from common.gpu_timing import Ceilings, times
from kernel_ops.attention import DIM, HEADS, PAGE, Row

from pensieve.kernels.arguments import HeadPrep
from pensieve.kernels.kv_write import kv_write

TOKENS = (1, 64, 256, 2048, 8192)
SETS = 4


def measure(tokens: int, heads: int, kv_heads: int, ceilings: Ceilings) -> Row:
    """One row: in place, on tensors that take turns."""
    pages = -(-tokens // PAGE) + 1
    pools = [
        torch.zeros(pages, 2, kv_heads, PAGE, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)
    ]
    shape = (tokens, heads + 2 * kv_heads, DIM)
    qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
    slots = torch.randperm(pages * PAGE, device="cuda")[:tokens]
    angles = torch.randn(tokens, DIM // 2, device="cuda")
    prep = HeadPrep(angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16))
    assert prep.cos is not None
    # Queries and keys are read and written, values are read; keys and values are written to the pool.
    moved = tokens * DIM * 2 * (2 * heads + 4 * kv_heads) + 2 * prep.cos.nbytes
    floor, bound = ceilings.floor_us(moved, 0)
    us = times({"pensieve": lambda index: kv_write(pools[index], qkv[index], slots, prep)}, SETS, 20, 15)[
        "pensieve"
    ]
    return {
        "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "floor_us": round(floor, 2), "bound": bound,
        "us": {"pensieve": round(us, 2)}, "share_of_ceiling": round(floor / us, 2),
        "tb_per_s": round(moved / us / 1e6, 2),
    }  # fmt: skip


def section(ceilings: Ceilings) -> tuple[list[Row], str]:
    """Every number of tokens for every ratio of heads; and the table."""
    report = [measure(tokens, *heads, ceilings) for heads in HEADS for tokens in TOKENS]
    lines = [
        f"bf16, heads of {DIM}, pages of {PAGE}, rotated queries and keys; small steps are as long as a launch.",
        "",
        "| tokens | heads | floor µs | pensieve µs | floor ÷ pensieve | TB/s |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['tokens']} | {row['heads']}/{row['kv_heads']} | {row['floor_us']} | {row['us']['pensieve']} "
        f"| {row['share_of_ceiling']} | {row['tb_per_s']} |"
        for row in report
    ]
    return report, "\n".join(lines) + "\n"
