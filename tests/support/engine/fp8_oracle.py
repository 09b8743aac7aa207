"""transformers computing with 8-bit codes, in float64: weights have the values of their codes, and every row that a
projection reads is rounded to codes. Rounds by arithmetic of its own, not with torch's e4m3.
"""

from __future__ import annotations

import re
from typing import Any

import torch

PROJECTIONS = re.compile(r"layers\.\d+\.((self_attn|mlp)\.\w+_proj|fc[12])$")
"""Modules with codes: projections of attention and of dense MLPs."""


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., I], float64, each row rounded to 8-bit floats times the least power of two with which it fits."""
    most = x.abs().amax(-1, keepdim=True)
    exponent = torch.ceil(torch.log2(most / 448.0).clamp(min=-1000))
    exponent = exponent + (most > 448.0 * exponent.exp2()).double()  # where the logarithm was rounded
    exponent = exponent - (most <= 448.0 * (exponent - 1).exp2()).double()
    return rounded(x / exponent.exp2()) * exponent.exp2()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """``x``, of at most 448, with 3 bits after the first, down to steps of 2^-9; ties go to the even one."""
    _, exponent = torch.frexp(x)
    step = torch.exp2((exponent - 4).clamp(min=-9).double())
    return torch.round(x / step) * step


def as_fp8(model: Any, *, weights: bool = True, skipped: str = r"^$") -> Any:
    """Change a transformers model to float64 with rounded rows and, with ``weights``, rounded weights, but for modules
    that match ``skipped``."""
    model = model.double().eval()
    for name, module in model.named_modules():
        if PROJECTIONS.search(name) and not re.search(skipped, name):
            if weights:
                module.weight.data = rounded_rows(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (rounded_rows(inputs[0]),))
    return model
