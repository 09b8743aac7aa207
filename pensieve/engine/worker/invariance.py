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
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from pensieve.config import KvDtypeName
from pensieve.kernels import invariant, kv_codec, reference
from pensieve.kernels.arguments import HeadPrep, Logits
from pensieve.kernels.attention.kinds import PIECE_KEYS
from pensieve.kernels.spans import Spans, make_spans
from pensieve.model.arch import Arch
from pensieve.model.transformer import Transformer
from pensieve.model.weights import AttentionWeights, ExpertWeights, Linear, MlpWeights, NormWeights, Weights

log = logging.getLogger(__name__)

CPU_ROWS = (1, 5, 16, 40)
GPU_ROWS = (
    *range(16, 257, 8),
    *range(272, 513, 16),
    640,
    *(size * 512 for size in (2, 3, 4, 6, 8, 12, 16, 32, 64)),
)
"""Numbers of rows that must give the same bits."""
HEAD_ROWS = 512
"""Most rows that are tried with the head, whose result is wide."""
NORM_ROWS = 2048
"""Most rows that are tried with the norm of heads: more than with which ordinary steps take other programs."""


PAGE, CONTEXT, TRIED = 32, 2560, 150
"""Tokens of a page and of the context with which attention is tried, and how many of its last tokens attend."""
HEAD_UNIT = 8
"""Values of 16 bytes, in a type of 2 bytes."""


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
            f"invariant: {arch.family} has a mixture of experts, and its products on a GPU were never shown to be "
            "invariant; start without --invariant"
        )


def with_even_head(weights: Weights) -> Weights:
    """Pad the head to a multiple of ``HEAD_UNIT`` rows, by a copy if it has another number. Rows of an odd number of
    values are not aligned, and the library then takes kernels that add in another order for few rows."""
    head = weights.head
    missing = -len(head.weight) % HEAD_UNIT
    if not missing:
        return weights
    bias = None if head.bias is None else F.pad(head.bias, (0, missing))
    return replace(weights, head=replace(head, weight=F.pad(head.weight, (0, 0, 0, missing)), bias=bias))


def check(model: Transformer, most_rows: int, kv_dtype: KvDtypeName = "auto") -> None:
    """Try the model's products, norms and attention with many numbers of rows, up to ``most_rows``. On a GPU, call
    ``use_plain_products`` before. Raises NotInvariant with the first shape whose result for a row depends on the number
    of rows or on the row's place."""
    started = time.monotonic()
    embedding = model.weights.embedding
    on_gpu = embedding.device.type == "cuda"
    rows = [size for size in GPU_ROWS if size <= most_rows] or [GPU_ROWS[0]] if on_gpu else list(CPU_ROWS)
    generator = torch.Generator(embedding.device).manual_seed(0)
    tried = set[tuple[int, ...]]()
    with torch.inference_mode():
        for name, linear in _products(model.weights):
            out, inner = linear.weight.shape
            kind = (out, inner, linear.bias is not None, linear.scales is not None)
            if kind in tried:
                continue
            tried.add(kind)
            # The head computes sampled rows only.
            sizes = [size for size in rows if size <= HEAD_ROWS or name != "the head"]
            x, weight = _cancelling(sizes[-1], linear.weight, embedding.dtype, generator)
            product = partial(_product, model, replace(linear, weight=weight))
            _try_rows(f"{name}, {inner} to {out}", product, x, sizes)
        norm, width = model.weights.final_norm, embedding.shape[1]
        x = torch.randn(rows[-1], width, generator=generator, device=embedding.device).to(embedding.dtype)
        _try_rows(f"the norm of {width}", partial(_norm, model, norm), x, rows)
        normed = [layer.attention for layer in model.weights.layers if layer.attention is not None]
        if model.arch.qk_norm == "head":
            dim, heads = model.arch.head_dim, model.arch.num_heads + 2 * model.arch.num_kv_heads
            sizes = [size for size in rows if size <= NORM_ROWS]
            x = torch.randn(sizes[-1], heads * dim, generator=generator, device=embedding.device)
            prepare = partial(_prepare_heads, model, normed[0])
            _try_rows(f"the norm of {heads} heads of {dim} values", prepare, x.to(embedding.dtype), sizes)
        for window in dict.fromkeys(layer.window for layer in model.arch.layers if layer.attends):
            attention = _triton_attention if on_gpu else _reference_attention
            try_attention(model.arch, embedding, window, attention, kv_dtype)
    log.info("invariant: %d shapes checked in %.1f s", len(tried) + 1, time.monotonic() - started)


def _product(model: Transformer, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else torch.zeros_like(linear.bias)
    if linear.scales is None:
        return model.ops.linear(x, linear.weight, bias)
    return model.ops.scaled_linear(x, linear.weight, torch.ones_like(linear.scales), bias)


def _norm(model: Transformer, norm: NormWeights, x: torch.Tensor) -> torch.Tensor:
    return model.ops.norm(x, norm.weight, norm.bias, model.arch.norm_eps)


def _prepare_heads(model: Transformer, attention: AttentionWeights, x: torch.Tensor) -> torch.Tensor:
    """Return the query and key heads of ``x`` [T, (Hq + 2 * Hkv) * D] after their norm, [T, (Hq + Hkv) * D]."""
    arch, tokens = model.arch, len(x)
    pool = x.new_empty(-(-tokens // PAGE), 2, arch.num_kv_heads, PAGE, arch.head_dim)
    slots = torch.arange(tokens, device=x.device)
    prep = HeadPrep(query_norm=attention.query_norm, key_norm=attention.key_norm, eps=arch.norm_eps)
    qkv = x.clone().view(tokens, -1, arch.head_dim)
    if x.is_cuda:
        from pensieve.kernels.kv_write import kv_write  # needs Triton

        queries = kv_write(pool, qkv, slots, prep, one_size=True)
    else:
        queries = reference.kv_write(pool, qkv, slots, prep)
    keys = pool[slots // PAGE, 0, :, slots % PAGE]
    return torch.cat((queries, keys), dim=1).flatten(1)


def _cancelling(
    rows: int, like: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [rows, I] of ``dtype`` and a weight of the shape, dtype and layout of ``like`` whose product would
    be 0 without rounding. The remainder shows the order of the additions in every bit; an ordinary product would round
    it away.
    """
    out, inner = like.shape
    half = inner // 2
    order = torch.randperm(inner, generator=generator, device=like.device)
    first, second = order[:half], order[half : 2 * half]
    x = torch.randn(rows, inner, generator=generator, device=like.device)
    x *= torch.exp2(torch.randint(-6, 7, (1, inner), generator=generator, device=like.device).float())
    x = x.to(dtype)
    x[:, second] = -x[:, first]
    x[:, order[2 * half :]] = 0
    values = torch.randn(out, inner, generator=generator, device=like.device)
    values[:, second] = values[:, first]
    return x, torch.empty_like(like).copy_(values)


def use_plain_products() -> None:
    """Make products without split-K and without sums in a lower precision, for this process."""
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
            part, same = function(x[first : first + rows]), whole[first : first + rows]
            if not torch.equal(part, same):
                most = (part.double() - same.double()).abs().max().item()
                raise NotInvariant(
                    f"invariant: {name}: {what} alone differ from the same among {len(x)} by up to {most:.3g} on this "
                    "machine; start without --invariant"
                )


class AttentionOf(Protocol):
    def __call__(
        self,
        arch: Arch,
        q: torch.Tensor,
        pool: torch.Tensor,
        spans: Spans,
        tables: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor: ...


def try_attention(
    arch: Arch, like: torch.Tensor, window: int | None, attend: AttentionOf, kv_dtype: KvDtypeName = "auto"
) -> None:
    """Attend the last tokens of one context together, in spans of a few tokens, and token by token, in the dtype of
    ``like`` and on its device. Raises NotInvariant unless all give the same bits.
    """
    device, dtype = like.device, like.dtype
    generator = torch.Generator(device).manual_seed(0)
    heads, kv_heads, dim = arch.num_heads, arch.num_kv_heads, arch.head_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    first = CONTEXT - TRIED
    pool, q = random(CONTEXT // PAGE, 2, kv_heads, PAGE, dim), random(TRIED, heads, dim)
    if kv_dtype != "auto":
        pool = kv_codec.coded(pool, kv_codec.CODES[kv_dtype])
    tables = torch.arange(CONTEXT // PAGE, dtype=torch.int32, device=device)[None]
    results = {}
    for length in (TRIED, 7, 1):
        starts = np.arange(0, TRIED, length)
        lengths = np.minimum(length, TRIED - starts)
        spans = make_spans(lengths, first + starts, np.zeros_like(starts))
        results[length] = attend(arch, q, pool, spans, tables, window)
    for length, result in results.items():
        if not torch.equal(result, results[TRIED]):
            most = (result.double() - results[TRIED].double()).abs().max().item()
            raise NotInvariant(
                f"invariant: attention of {heads} heads of {dim} values: {TRIED} tokens in spans of {length} differ "
                f"from one span by up to {most:.3g} on this machine; start without --invariant"
            )


def _reference_attention(
    arch: Arch, q: torch.Tensor, pool: torch.Tensor, spans: Spans, tables: torch.Tensor, window: int | None
) -> torch.Tensor:
    plan = invariant.make_plan(q, pool, spans, tables, window=window)
    return invariant.attend(q, pool, plan, Logits(arch.attention_scale, arch.softcap))


def _triton_attention(
    arch: Arch, q: torch.Tensor, pool: torch.Tensor, spans: Spans, tables: torch.Tensor, window: int | None
) -> torch.Tensor:
    from pensieve.kernels.attention.plan import AttentionPlan, geometry_of  # needs Triton
    from pensieve.kernels.ragged_paged_attention import attend

    geometry = replace(geometry_of(q, pool), hopper=False, piece=PIECE_KEYS, window=window)
    plan = AttentionPlan.from_spans(spans, len(q), geometry, q.device)
    return attend(q, pool, plan, tables, Logits(arch.attention_scale, arch.softcap))


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
