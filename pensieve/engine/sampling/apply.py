"""Penalties, bias and bans, for all rows at once and without asking the device for a value."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pensieve.core import Ints
from pensieve.engine.sampling.changes import Changes, Penalties
from pensieve.engine.sampling.draw import row_ranges

MOST = 1e30
"""What an infinite logit counts as; minus this for one that is minus infinite or not a number."""


def apply_changes(logits: torch.Tensor, changes: Changes, sent: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A copy of the logits [S, vocab] with ``changes``, whose arrays are ``sent`` to the device."""
    result = logits.clone(memory_format=torch.contiguous_format)
    if changes.penalties is not None:
        _penalise(result, changes.penalties, sent)
    flat = result.view(-1)
    if len(changes.biased):
        places = sent["biased"]
        flat[places] = _in_range(flat[places] + sent["bias"].float())
    if len(changes.banned):
        flat.index_fill_(0, sent["banned"], -torch.inf)
    if len(changes.everything):
        rows = sent["everything"]
        values = result.index_select(0, rows)
        nothing = torch.isneginf(values).all(dim=-1, keepdim=True)
        result.index_copy_(0, rows, torch.where(nothing, logits.index_select(0, rows), values))
    return result


def _in_range(values: torch.Tensor) -> torch.Tensor:
    """What left the range comes back, except that -inf stays: it is a ban."""
    return torch.nan_to_num(values, nan=-torch.inf, posinf=MOST, neginf=-torch.inf)


def _penalise(logits: torch.Tensor, penalties: Penalties, sent: Mapping[str, torch.Tensor]) -> None:
    """Repetition penalty over prompt and output, frequency and presence penalties over the output; in place."""
    vocab, device = logits.shape[1], logits.device
    some_repetition = bool((penalties.repetition != 1.0).any())
    some_cost = bool(penalties.frequency.any() or penalties.presence.any())
    for start, end in row_ranges(0, len(penalties.rows), vocab, device):
        rows = sent["penalty_rows"][start:end]
        values = logits.index_select(0, rows)
        output = _places(sent["output"], sent["output_lengths"], penalties.output_ends, start, end, vocab)
        if some_repetition:
            prompt = _places(sent["prompt"], sent["prompt_lengths"], penalties.prompt_ends, start, end, vocab)
            seen = torch.cat((prompt, output))
            row_penalty = sent["repetition"][start:end].float()
            # 1 for tokens that did not occur; a token that occurred twice gets the same value twice.
            penalty = torch.ones(values.numel(), device=device)
            penalty.scatter_(0, seen, row_penalty[seen // vocab])
            penalty = penalty.view_as(values)
            values = values.clamp(min=0.0).div_(penalty).add_(values.clamp(max=0.0).mul_(penalty))
        if some_cost:
            # Whole numbers in float32: exact in whatever order a GPU adds them.
            counts = torch.zeros(values.numel(), device=device)
            counts.index_add_(0, output, counts.new_ones(1).expand(len(output)))
            counts = counts.view_as(values).double()
            each, once = sent["frequency"][start:end, None], sent["presence"][start:end, None]
            values -= counts.mul(each).add_(counts.clamp_(max=1.0).mul_(once)).float()
        logits.index_copy_(0, rows, _in_range(values))


def _places(
    tokens: torch.Tensor, lengths: torch.Tensor, ends: Ints, start: int, end: int, vocab: int
) -> torch.Tensor:
    """Where the tokens of the rows ``start … end - 1`` lie in a [end - start, vocab] matrix of these rows; int64."""
    first, last = int(ends[start - 1]) if start else 0, int(ends[end - 1])
    offsets = torch.arange(0, (end - start) * vocab, vocab, device=tokens.device)
    # With its size given, nothing waits for the device to add the lengths up.
    return tokens[first:last] + torch.repeat_interleave(offsets, lengths[start:end], output_size=last - first)
