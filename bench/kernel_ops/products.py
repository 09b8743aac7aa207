"""The products of a decode step by themselves, by the program's choice of library and by each setting of torch's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common.gpu_timing import Contender, times
from kernel_ops.decode_steps import NOW, PRODUCTS, Steps

from pensieve.engine.worker.program import preferred_blas
from pensieve.kernels.row_product import linear
from pensieve.model.ops import Product

REPLAYS = 5


def weights_of(steps: Steps) -> dict[str, list[torch.Tensor]]:
    """The weights of each product over all layers, which take turns, so that none is found in the L2 cache."""
    layers = steps.layers
    return {
        "qkv": [layer.attention.qkv.weight for layer in layers],
        "o": [layer.attention.output.weight for layer in layers],
        "up": [layer.mlp.up.weight for layer in layers],
        "down": [layer.mlp.down.weight for layer in layers],
    }  # fmt: skip


def rows(steps: Steps, batch: int, bandwidth: float) -> list[dict[str, Any]]:
    """Microseconds of each product by each setting; ``floor``: its weights over the bandwidth."""
    made = []
    for name, weights in weights_of(steps).items():
        x = torch.randn(batch, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)
        contenders: dict[str, Contender] = {
            NOW: _by(partial(preferred_blas, batch, x.device), x, weights, linear)
        }
        for each, setting in PRODUCTS.items():
            with contextlib.suppress(AttributeError, RuntimeError), setting():  # not in every torch
                contenders[each] = _by(setting, x, weights, F.linear)
        taken = _times(contenders, len(weights), on_gpu=steps.on_gpu)
        floor = round(weights[0].nbytes / bandwidth * 1e6, 1)
        made.append(
            {"product": name, "batch": batch, "floor": floor}
            | {way: round(us, 1) for way, us in taken.items()}
        )
    return made


def _by(
    setting: Callable[[], AbstractContextManager[object]],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    product: Product,
) -> Contender:
    def call(number: int) -> object:
        with setting():
            return product(x, weights[number], None)

    return call


def _times(contenders: dict[str, Contender], sets: int, *, on_gpu: bool) -> dict[str, float]:
    if on_gpu:
        return times(contenders, sets, sets, REPLAYS)
    taken = {}
    for name, contender in contenders.items():
        started = time.perf_counter()
        contender(0)
        taken[name] = (time.perf_counter() - started) * 1e6
    return taken
