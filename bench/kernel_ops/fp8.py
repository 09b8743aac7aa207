"""Products of 8-bit codes beside bfloat16's, with all that comes with them: codes of the inputs, and scales."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common.gpu_timing import Contender, times
from common.provenance import table

from pensieve.engine.worker.program import preferred_blas
from pensieve.kernels import fp8_product, fp8_reference

SHAPES = {"qkv": (7680, 5120), "o": (5120, 5120), "up": (27648, 5120), "down": (5120, 13824)}
"""Outputs and inputs of the products of a 13B model with 10 KV heads."""
ROWS = (1, 16, 64, 128, 256, 2048)
SET_BYTES = 400 << 20
"""Weights that take turns: more than the L2 cache holds."""


def section() -> tuple[list[dict[str, Any]], str]:
    """Microseconds of each part; ``÷ bf16``: of the whole, and of the product alone."""
    rows = [row for name in SHAPES for row in _rows(name)]
    return rows, "\n".join(table(rows)) + "\n"


def _rows(name: str) -> list[dict[str, Any]]:
    out, inner = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(0)
    sets = -(-SET_BYTES // (out * inner))
    weights = [
        torch.randn(out, inner, generator=generator, device="cuda").bfloat16() / inner**0.5
        for _ in range(sets)
    ]
    coded = [fp8_reference.quantise_rows(weight.float()) for weight in weights]
    made = []
    for count in ROWS:
        x = torch.randn(count, inner, generator=generator, device="cuda").bfloat16()
        codes, scales = fp8_product.quantise_rows(x)
        sums = fp8_product.multiply(codes, coded[0][0], torch.bfloat16)
        want = F.linear(x.float(), coded[0][0].float() * coded[0][1][:, None])
        got = fp8_product.scaled_linear(x, *coded[0], None).float()
        error = float((got - want).norm() / want.norm())
        contenders: dict[str, Contender] = {
            "bf16": partial(_plain, x, weights),
            "fp8": partial(_scaled, x, coded),
            "product": partial(_multiplied, codes, coded),
            "codes": lambda _, x=x: fp8_product.quantise_rows(x),
            "scales": lambda _, sums=sums, scales=scales: fp8_product.rescale(
                sums, scales, coded[0][1], None, torch.bfloat16
            ),
        }
        taken = times(contenders, sets, 2 * sets, 9)
        made.append(
            {"product": name, "rows": count}
            | {f"{way} µs": round(us, 1) for way, us in taken.items()}
            | {
                "÷ bf16": round(taken["fp8"] / taken["bf16"], 2),
                "product ÷ bf16": round(taken["product"] / taken["bf16"], 2),
                "error": f"{error:.1e}",
            }
        )
    return made


def _plain(x: torch.Tensor, weights: list[torch.Tensor], number: int) -> torch.Tensor:
    with preferred_blas(len(x), x.device):
        return F.linear(x, weights[number])


def _scaled(x: torch.Tensor, coded: list[tuple[torch.Tensor, torch.Tensor]], number: int) -> torch.Tensor:
    return fp8_product.scaled_linear(x, *coded[number], None)


def _multiplied(
    codes: torch.Tensor, coded: list[tuple[torch.Tensor, torch.Tensor]], number: int
) -> torch.Tensor:
    return fp8_product.multiply(codes, coded[number][0], torch.bfloat16)
