"""Draws random tokens from logits: temperature, top-k, top-p, min-p, then the inverse cumulative
distribution.

A row's token must not depend on the batch, down to the last bit, but the order in which a GPU adds
floating-point numbers depends on the batch's shape. So each token gets an integer weight, ``exp(logit -
largest)`` scaled up: sums of integers are the same in every order. All filters are thresholds on a row's
values, so equal values stay together and the order among them does not matter. The draw goes through the
vocabulary in order.

No function waits for a GPU; ``_nucleus_of_row`` reads values, but runs on the CPU only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from pensieve.core import Floats, Ints
from pensieve.engine.sampling.rows import MAX_TOP_K, DrawGroup


@dataclass(frozen=True, slots=True)
class Parameters:
    """Sampling parameters of n rows, from ``rows.RandomRows``: float64 and int64 [n, 1] on the logits' device."""

    temperature: torch.Tensor
    uniform: torch.Tensor
    floor: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor

    def rows(self, start: int, end: int) -> Parameters:
        if start == 0 and end == len(self.temperature):
            return self
        return Parameters(
            self.temperature[start:end],
            self.uniform[start:end],
            self.floor[start:end],
            self.top_k[start:end],
            self.top_p[start:end],
        )


def draw(
    logits: torch.Tensor, largest: torch.Tensor, parameters: Parameters, group: DrawGroup
) -> torch.Tensor:
    """Draw a token per row of ``logits`` float32 [n, vocab] with maxima ``largest`` [n, 1]; returns int64 [n]."""
    cumulative = token_weights(logits, largest, parameters, group).cumsum_(dim=-1)
    total = cumulative[:, -1:].double()  # never 0, because of the largest weight
    return torch.searchsorted(cumulative, (parameters.uniform * total).long(), right=True).squeeze(1)


def token_weights(
    logits: torch.Tensor, largest: torch.Tensor, parameters: Parameters, group: DrawGroup
) -> torch.Tensor:
    """Return weights proportional to the tokens' probabilities, 0 for filtered tokens; int64 [n, vocab]."""
    # Subtract the maximum before the division: a tiny temperature then overflows to -inf, never to NaN.
    scaled = logits.double().sub_(largest.double()).div_(parameters.temperature)
    filtered = group.min_p or group.top_p or group.top_k
    exponentials = scaled.exp() if filtered else scaled.exp_()
    weights = exponentials.mul_(_scale(logits.shape[1])).long()
    if filtered:
        weights.masked_fill_(scaled < _floor(logits, scaled, weights, parameters, group), 0)
    return weights


def _scale(vocab: int) -> float:
    """Weight of a row's largest logit: a power of two, chosen so that no row's sum exceeds 2^62."""
    return float(1 << min(52, 62 - vocab.bit_length()))


def _floor(
    logits: torch.Tensor,
    scaled: torch.Tensor,
    weights: torch.Tensor,
    parameters: Parameters,
    group: DrawGroup,
) -> torch.Tensor:
    """Return the least value of ``scaled`` that each row keeps; [n, 1]. Changes ``weights``."""
    if not group.top_k and not group.top_p:
        return parameters.floor
    cpu = logits.device.type == "cpu"
    if cpu and not group.top_k:
        kept = [
            _nucleus_of_row(*row)
            for row in zip(scaled.numpy(), weights.numpy(), parameters.top_p[:, 0].tolist(), strict=True)
        ]
        return torch.maximum(torch.tensor(kept, dtype=torch.float64)[:, None], parameters.floor)
    # Sort the logits: they take half the bytes of the scaled values and have the same order.
    if group.max_top_k <= MAX_TOP_K or (cpu and group.max_top_k < logits.shape[1]):
        best = torch.topk(logits, group.max_top_k, dim=-1).indices
    else:
        best = torch.sort(logits, dim=-1, descending=True).indices
    ordered = scaled.gather(1, best)
    floor = ordered.gather(1, parameters.top_k - 1)
    if group.top_p:
        weights.masked_fill_(scaled < floor, 0)
        total = weights.sum(dim=-1, keepdim=True)
        floor = _nucleus(ordered, weights.gather(1, best), total, parameters.top_p)
    return torch.maximum(floor, parameters.floor)


def _nucleus(
    ordered: torch.Tensor, weights: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return the last of the ``ordered`` values, descending, with less than ``top_p`` of ``total`` before it."""
    limit = (total.double() * top_p).ceil().long()
    kept = (weights.cumsum(dim=-1).sub_(weights) < limit).sum(dim=-1, keepdim=True)
    return ordered.gather(1, kept.clamp_(min=1) - 1)


def _nucleus_of_row(scaled: Floats, weights: Ints, top_p: float) -> float:
    """``_nucleus`` for one whole row [vocab]; sorts only tokens that can be in the nucleus. Tokens of at most
    some weight come last and together weigh at most that times the vocabulary. If this is no more than the
    nucleus leaves out, none of them is in it. Few tokens remain unless the distribution is flat."""
    total = int(weights.sum())
    limit = math.ceil(total * top_p)
    candidates = np.flatnonzero(weights > (total - limit) // len(weights))
    if not len(candidates):
        return 0.0  # only the largest
    values = scaled[candidates]
    order = np.argsort(-values)
    ordered = weights[candidates[order]]
    kept = int(((np.cumsum(ordered) - ordered) < limit).sum())
    return float(values[order[max(kept, 1) - 1]])


CPU_ELEMENTS, GPU_ELEMENTS = 1 << 17, 1 << 22
"""Logits processed at once: they fit a CPU's cache, or the memory of a GPU beside weights and KV."""
BYTES_PER_ELEMENT = 128
"""Most temporary memory per logit: float64 and int64 values, and the workspace of a sort."""


def row_ranges(start: int, end: int, vocab: int, device: torch.device) -> list[tuple[int, int]]:
    """Split rows ``start … end - 1`` into ranges to process at once."""
    step = max(1, (CPU_ELEMENTS if device.type == "cpu" else GPU_ELEMENTS) // vocab)
    return [(at, min(at + step, end)) for at in range(start, end, step)]
