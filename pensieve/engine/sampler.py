"""From logits to tokens. A token depends on its own row, its seed and its output index, never on the batch.

Randomness is a counter, not a state: output ``i`` of a turn uses the number that (seed, i) names, so suspension,
recomputation and another batch give the same token. All filters are thresholds on the row's values and the choice
inverts the cumulative distribution in vocabulary order; both are independent of how equal values are sorted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from pensieve.core import Sampling, TokenLogprob
from pensieve.engine.plan import SampleSpec

log = logging.getLogger(__name__)

_MASK64 = (1 << 64) - 1


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[tuple[int, TokenLogprob | None]]:
    """One token for each row of ``logits`` float32 [S, vocab]; ``specs[i]`` says how. ``logits`` is not changed."""
    if not specs:
        return []
    logits = _finite(logits)
    adjusted = _adjust(logits, specs)
    chosen = torch.argmax(adjusted, dim=-1)  # the lowest id on a tie
    random = [index for index, spec in enumerate(specs) if spec.sampling.temperature > 0.0]
    if random:
        rows = torch.tensor(random, device=logits.device)
        chosen[rows] = _draw(adjusted[rows], [specs[index] for index in random])
    tokens: list[int] = chosen.tolist()
    logprobs = _logprobs(logits, tokens, specs)
    return [(token, logprobs.get(index)) for index, token in enumerate(tokens)]


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that belongs to output ``index`` of a turn with ``seed``."""
    bits = np.random.Philox(key=seed & _MASK64, counter=index).random_raw()
    return (int(bits) >> 16) / float(1 << 48)  # 48 bits: u * total stays below total in float64


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """The logits without NaN or infinity, which a broken model may give: NaN counts as impossible."""
    if bool(torch.isfinite(logits).all()):
        return logits
    log.warning("the model gave logits that are not finite; its weights or its dtype may be at fault")
    return torch.nan_to_num(logits, nan=-1e30, posinf=1e30, neginf=-1e30)


def _adjust(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Logits after penalties, bias and bans; a row in which nothing is left is taken back unadjusted."""
    touched = [index for index, spec in enumerate(specs) if _touches(spec)]
    if not touched:
        return logits
    adjusted = logits.clone()
    for index in touched:
        row, spec = adjusted[index], specs[index]
        if spec.sampling.needs_context:
            _penalise(row, spec)
        for token, bias in spec.sampling.logit_bias.items():
            if token < len(row):
                row[token] += bias
        banned = [token for token in _banned(spec) if token < len(row)]
        if banned:
            row[banned] = -torch.inf
        torch.nan_to_num_(row, nan=-torch.inf, posinf=1e30, neginf=-torch.inf)
        if bool(torch.isneginf(row).all()):
            row.copy_(logits[index])
    return adjusted


def _touches(spec: SampleSpec) -> bool:
    return bool(spec.sampling.needs_context or spec.sampling.logit_bias or _banned(spec))


def _banned(spec: SampleSpec) -> tuple[int, ...]:
    """Tokens that may not come yet."""
    if spec.output_index >= spec.sampling.min_output_tokens:
        return ()
    return (*spec.eos_token_ids, *spec.sampling.stop_token_ids)


def _penalise(row: torch.Tensor, spec: SampleSpec) -> None:
    """Repetition penalty over prompt and output, frequency and presence penalties over the output; in place."""
    none = np.empty(0, dtype=np.int32)
    prompt = none if spec.prompt is None else spec.prompt
    output = none if spec.output is None else spec.output
    sampling = spec.sampling
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([prompt, output])).astype(np.int64)
        at = torch.from_numpy(seen).to(row.device)
        values, penalty = row[at], sampling.repetition_penalty
        row[at] = torch.where(values > 0, values / penalty, values * penalty)
    if len(output) and (sampling.frequency_penalty or sampling.presence_penalty):
        tokens, counts = np.unique(output, return_counts=True)
        cost = sampling.frequency_penalty * counts + sampling.presence_penalty
        at = torch.from_numpy(tokens.astype(np.int64)).to(row.device)
        row[at] -= torch.from_numpy(cost.astype(np.float32)).to(row.device)


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """A random token for each row [n, vocab], after temperature and filters; int64 [n]."""
    device = logits.device
    temperature = torch.tensor([[spec.sampling.temperature] for spec in specs], device=device).double()
    # The maximum goes to 0 before the division: a tiny temperature then overflows to -inf, never to NaN.
    scaled = (logits.double() - logits.max(dim=-1, keepdim=True).values.double()) / temperature
    scaled = _filter(scaled, [spec.sampling for spec in specs])
    cumulative = torch.softmax(scaled, dim=-1).cumsum(dim=-1)
    numbers = [[uniform(spec.sampling.seed, spec.output_index)] for spec in specs]
    target = torch.tensor(numbers, dtype=torch.float64, device=device) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _filter(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Rows with everything outside top-k, then top-p, then min-p at -inf. Ties with the last kept token are kept."""
    vocab = scaled.shape[1]
    for index, sampling in enumerate(samplings):
        if 0 < sampling.top_k < vocab:
            row = scaled[index]
            row.masked_fill_(row < torch.topk(row, sampling.top_k).values[-1], -torch.inf)
        if sampling.top_p < 1.0:
            row = scaled[index]
            kept = row[row > -torch.inf]  # after top-k only a few are left to sort
            ordered = torch.sort(kept, descending=True).values
            probability = torch.softmax(ordered, dim=-1)
            before = probability.cumsum(dim=-1) - probability
            last = max(int((before < sampling.top_p).sum()), 1) - 1
            row.masked_fill_(row < ordered[last], -torch.inf)
        if sampling.min_p > 0.0:
            row = scaled[index]  # its maximum is 0
            row.masked_fill_(row < np.log(min(sampling.min_p, 1.0)), -torch.inf)
    return scaled


def _logprobs(
    logits: torch.Tensor, tokens: Sequence[int], specs: Sequence[SampleSpec]
) -> dict[int, TokenLogprob]:
    """Row → log-probabilities under the raw logits, for the rows that ask for them."""
    wanted = {
        index: spec.sampling.top_logprobs
        for index, spec in enumerate(specs)
        if spec.sampling.top_logprobs is not None
    }
    if not wanted:
        return {}
    rows = torch.log_softmax(logits[list(wanted)], dim=-1)
    best = torch.topk(rows, min(max(wanted.values()), rows.shape[1]), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    chosen = rows.gather(1, torch.tensor([[tokens[index]] for index in wanted], device=rows.device)).tolist()
    return {
        index: TokenLogprob(
            tokens[index], chosen[at][0], tuple(zip(ids[at][:count], values[at], strict=False))
        )
        for at, (index, count) in enumerate(wanted.items())
    }
