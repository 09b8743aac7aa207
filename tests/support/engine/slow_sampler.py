"""What the sampler means, one row at a time in plain float64: the reference that it is compared with."""

from __future__ import annotations

import math

import numpy as np
import torch

from pensieve.core import Sampling, TokenLogprob
from pensieve.engine.plan import SampleSpec


def slow_sample(row: torch.Tensor, spec: SampleSpec) -> tuple[int, TokenLogprob | None]:
    """The token for one row of logits float32 [vocab], and its log-probabilities if ``spec`` wants them."""
    row = torch.nan_to_num(row, nan=-1e30, posinf=1e30, neginf=-1e30)
    allowed = row
    adjusted = _adjust(row.clone(), spec)
    if spec.mask is not None:
        bits = [bool(int(spec.mask[token // 32]) >> token % 32 & 1) for token in range(len(row))]
        banned = ~torch.tensor(bits)
        allowed, adjusted = row.masked_fill(banned, -torch.inf), adjusted.masked_fill(banned, -torch.inf)
    if bool(torch.isneginf(adjusted).all()):
        adjusted = allowed
    token = int(adjusted.argmax()) if spec.sampling.temperature <= 0.0 else _draw(adjusted, spec)
    if spec.sampling.top_logprobs is None:
        return token, None
    values = torch.log_softmax(row, dim=-1)
    best = torch.topk(values, min(spec.sampling.top_logprobs, len(row)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return token, TokenLogprob(token, float(values[token]), top)


def _adjust(row: torch.Tensor, spec: SampleSpec) -> torch.Tensor:
    sampling = spec.sampling
    prompt = [] if spec.prompt is None else spec.prompt.tolist()
    output = [] if spec.output is None else spec.output.tolist()
    if sampling.repetition_penalty != 1.0:
        for token in {*prompt, *output}:
            value = row[token]
            row[token] = (
                value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
            )
    for token in set(output):
        row[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        if token < len(row):
            row[token] += bias
    if spec.output_index < sampling.min_output_tokens:
        for token in (*spec.eos_token_ids, *sampling.stop_token_ids):
            if token < len(row):
                row[token] = -torch.inf
    return torch.nan_to_num(row, nan=-torch.inf, posinf=1e30, neginf=-torch.inf)


def _draw(row: torch.Tensor, spec: SampleSpec) -> int:
    scaled = (row.double() - row.double().max()) / spec.sampling.temperature
    cumulative = torch.softmax(slow_filter(scaled, spec.sampling), dim=-1).cumsum(dim=-1)
    target = slow_uniform(spec.sampling.seed, spec.output_index) * float(cumulative[-1])
    return int((cumulative <= target).sum())


def slow_filter(row: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """``row``, float64 [vocab] with a maximum of 0, after the filters: what they leave out is -inf."""
    if 0 < sampling.top_k < len(row):
        row = row.masked_fill(row < row.sort(descending=True).values[sampling.top_k - 1], -torch.inf)
    if sampling.top_p < 1.0:
        ordered = row.sort(descending=True).values
        probability = torch.softmax(ordered, dim=-1)
        before = probability.cumsum(dim=-1) - probability
        row = row.masked_fill(row < ordered[max(int((before < sampling.top_p).sum()), 1) - 1], -torch.inf)
    if sampling.min_p > 0.0:
        row = row.masked_fill(row < math.log(min(sampling.min_p, 1.0)), -torch.inf)
    return row


def slow_uniform(seed: int, index: int) -> float:
    """The random number for output ``index``: the first word that Philox gives for that value of its counter."""
    word = int(np.random.Philox(key=seed & (1 << 64) - 1, counter=index).random_raw())
    return (word >> 16) / float(1 << 48)
