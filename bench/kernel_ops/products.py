"""The products of a decode step by themselves, by each setting of torch's and each way of cuBLASLt's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common.gpu_timing import Contender, times
from kernel_ops.cublaslt import Lt
from kernel_ops.decode_steps import NOW, PRODUCTS, Steps, in_parts

from pensieve.engine.worker.program import preferred_blas
from pensieve.kernels.row_product import linear
from pensieve.model.ops import Product

Row = dict[str, Any]
REPLAYS = 5
PARTS = (2, 4)
"""Parts into which a product is split by hand; to add them up is not in the time."""
KEPT = 3
"""So many of the fastest of them are told."""


def weights_of(steps: Steps) -> dict[str, list[torch.Tensor]]:
    """The weights of each product over all layers, which take turns, so that none is found in the L2 cache."""
    layers = steps.layers
    return {
        "qkv": [layer.attention.qkv.weight for layer in layers],
        "o": [layer.attention.output.weight for layer in layers],
        "up": [layer.mlp.up.weight for layer in layers],
        "down": [layer.mlp.down.weight for layer in layers],
    }  # fmt: skip


def settings() -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """Those of ``PRODUCTS`` that this torch has."""
    found = {}
    for name, setting in PRODUCTS.items():
        with contextlib.suppress(AttributeError, RuntimeError), setting():
            found[name] = setting
    return found


def rows(steps: Steps, batch: int, bandwidth: float) -> list[Row]:
    """Microseconds of each product by each setting; ``floor``: its weights over the bandwidth."""
    made = []
    for name, weights in weights_of(steps).items():
        turned = [weight.t().contiguous() for weight in weights]
        x = torch.randn(batch, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)
        chosen = partial(preferred_blas, batch, x.device)
        contenders: dict[str, Contender] = {NOW: _by(chosen, x, weights, linear)}
        contenders |= {each: _by(setting, x, weights) for each, setting in settings().items()}
        contenders["weights turned"] = _turned(x, turned)
        contenders |= {f"{parts} parts": _parted(x, weights, parts) for parts in PARTS}
        taken = _times(contenders, len(weights), on_gpu=steps.on_gpu)
        floor = round(weights[0].nbytes / bandwidth * 1e6, 1)
        made.append(
            {"product": name, "batch": batch, "floor": floor}
            | {way: round(us, 1) for way, us in taken.items()}
        )
    return made


def survey(steps: Steps, batch: int) -> list[Row]:
    """The fastest ways of cuBLASLt, in turns, beside torch's own choice; checked against its product."""
    x = torch.ones(8, 8, dtype=torch.bfloat16, device=steps.device)
    torch.mm(x, x)  # so that torch has loaded the library
    lt, made = Lt(), []
    for name, weights in weights_of(steps).items():
        x = torch.randn(batch, weights[0].shape[1], dtype=torch.bfloat16, device="cuda")
        out = torch.empty(batch, len(weights[0]), dtype=torch.bfloat16, device="cuda")
        ways = lt.ways(x, weights[0], out)
        want = F.linear(x, weights[0]).float()
        contenders: dict[str, Contender] = {"torch": _by(nullcontext, x, weights)}
        for index, (split, way) in enumerate(ways):
            out.fill_(torch.nan)
            way(weights[0])
            if float((out.float() - want).norm() / want.norm()) < 1e-2:
                contenders[f"{index} (split {split})"] = _with(way, weights)
        taken = _times(contenders, len(weights), on_gpu=True)
        best = sorted(set(taken) - {"torch"}, key=lambda each: taken[each])[:KEPT]
        made.append({
            "product": name, "batch": batch, "ways": len(ways), "torch": round(taken["torch"], 1),
            **{f"best {place + 1}": f"{taken[each]:.1f}: {each}" for place, each in enumerate(best)},
        })  # fmt: skip
    return made


def _by(
    setting: Callable[[], AbstractContextManager[object]],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    product: Product = F.linear,
) -> Contender:
    def call(number: int) -> object:
        with setting():
            return product(x, weights[number], None)

    return call


def _turned(x: torch.Tensor, weights: list[torch.Tensor]) -> Contender:
    return lambda number: x @ weights[number]


def _parted(x: torch.Tensor, weights: list[torch.Tensor], parts: int) -> Contender:
    return lambda number: in_parts(x, weights[number], parts)


def _with(way: Callable[[torch.Tensor], None], weights: list[torch.Tensor]) -> Contender:
    return lambda number: way(weights[number])


def _times(contenders: dict[str, Contender], sets: int, *, on_gpu: bool) -> dict[str, float]:
    if on_gpu:
        return times(contenders, sets, sets, REPLAYS)
    taken = {}
    for name, contender in contenders.items():
        started = time.perf_counter()
        contender(0)
        taken[name] = (time.perf_counter() - started) * 1e6
    return taken
