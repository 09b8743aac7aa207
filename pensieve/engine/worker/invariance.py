"""The promise of ``--invariant``, and the test at start-up that this machine keeps it.

A token's bits depend only on the tokens before it: not on the batch, the chunks of its prefill, what the cache held, or
the number of steps. On a CPU all operations run in calls of fixed shapes (``pensieve.kernels.invariant``). On a GPU
matrix products do without split-K, the only way in which the number of rows changes the order of additions, and
attention is cut at fixed positions. None of this is documented by the libraries, so the shapes of the model are tried
on this machine before it serves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from pensieve.model.arch import Arch
from pensieve.model.transformer import Transformer
from pensieve.model.weights import ExpertWeights, Linear, MlpWeights, Weights

log = logging.getLogger(__name__)

CPU_ROWS = (1, 5, 16, 40)
GPU_ROWS = (16, 24, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of rows that must give the same bits."""


HEAD_ROWS = 512
"""Most rows that are tried with the head, whose result is wide."""


class NotInvariant(ValueError):
    """This machine, or this model, cannot keep the promise. The message names what differs."""


def require(arch: Arch, device: str) -> None:
    """Raise NotInvariant, with the reason, for a model whose layers have no fixed order of operations. ``device``:
    ``cpu`` or ``cuda``."""
    if any(layer.state is not None for layer in arch.layers):
        raise NotInvariant(
            f"invariant: {arch.family} has recurrent layers, which round differently token by token and by blocks; "
            "start without --invariant"
        )
    if arch.experts is not None and device == "cuda":
        raise NotInvariant(
            f"invariant: {arch.family} has a mixture of experts, whose products on a GPU depend on the rows of an "
            "expert; start without --invariant"
        )


def check(model: Transformer, most_rows: int) -> None:
    """Try the model's products, norms and attention with several numbers of rows, up to ``most_rows``. Raises
    NotInvariant with the first shape whose result for a row depends on the number or the order of the rows."""
    started = time.monotonic()
    embedding = model.weights.embedding
    on_gpu = embedding.device.type == "cuda"
    if on_gpu:
        use_plain_products()
    sizes = [size for size in GPU_ROWS if size <= most_rows] or [GPU_ROWS[0]] if on_gpu else CPU_ROWS
    generator = torch.Generator(embedding.device).manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=embedding.device)
        return values.to(embedding.dtype)

    tried = set[tuple[int, ...]]()
    with torch.inference_mode():
        for name, linear in _products(model.weights):
            out, inner = linear.weight.shape
            if (out, inner, linear.bias is not None) in tried:
                continue
            tried.add((out, inner, linear.bias is not None))
            # The head computes sampled rows only.
            most = [size for size in sizes if size <= HEAD_ROWS or name != "the head"]
            _try_rows(
                f"{name}, {inner} to {out}",
                lambda x, one=linear: model.ops.linear(x, one.weight, one.bias),
                random(most[-1], inner),
                most,
            )
        norm = model.weights.final_norm
        width = embedding.shape[1]
        _try_rows(
            f"the norm of {width}",
            lambda x: model.ops.norm(x, norm.weight, norm.bias, model.arch.norm_eps),
            random(sizes[-1], width),
            sizes,
        )
    log.info("invariant: %d shapes checked in %.1f s", len(tried) + 1, time.monotonic() - started)


def use_plain_products() -> None:
    """Products without split-K and without sums in a lower precision, for this process."""
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        setattr(torch.backends.cuda.matmul, name, (False, False))
    torch.backends.cuda.preferred_blas_library("cublaslt")


def _try_rows(
    name: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, sizes: Sequence[int]
) -> None:
    """Raise NotInvariant unless each row of ``function(x)`` has the same bits beside any number of others, and in any
    place."""
    whole = function(x)
    for rows in sizes:
        for what, first in ((f"{rows} rows", 0), (f"the last {rows} rows", len(x) - rows)):
            part = function(x[first : first + rows])
            same = whole[first : first + rows]
            if not torch.equal(part, same):
                most = (part.double() - same.double()).abs().max().item()
                raise NotInvariant(
                    f"invariant: {name}: {what} alone differ from the same among {len(x)} by up to {most:.3g} on this "
                    "machine; start without --invariant"
                )


def _products(weights: Weights) -> Iterator[tuple[str, Linear]]:
    for layer in weights.layers:
        if layer.attention is not None:
            yield "attention's first product", layer.attention.qkv
            yield "attention's last product", layer.attention.output
        if isinstance(layer.mlp, MlpWeights):
            yield "the MLP's first product", layer.mlp.up
            yield "the MLP's last product", layer.mlp.down
        elif isinstance(layer.mlp, ExpertWeights):
            yield "the router", layer.mlp.router
    yield "the head", weights.head
