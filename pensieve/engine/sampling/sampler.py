"""From logits to tokens. A token depends on its own row, its seed and its output index, never on the batch.

Sampling has stages, so that nothing waits for a GPU: ``rows.prepare`` turns the specs into arrays; ``choose`` queues
the choice, whose results stay on the device; ``SampledTokens.fetch`` queues their copy to the host;
``TokenFetch.resolve`` waits for it. ``sample`` does all of it in one call.

Randomness is a counter, not a state: output ``i`` of a turn uses the number for (seed, i), so suspension,
recomputation and another batch give the same token.

``draw`` draws random tokens: temperature, top-k, top-p, min-p, then the inverse cumulative distribution. A row's token
must not depend on the batch, down to the last bit, but the order in which a GPU adds floating-point numbers depends on
the batch's shape. So each token gets an integer weight, ``exp(logit - largest)`` scaled up: sums of integers are the
same in every order. All filters are thresholds on a row's values, so equal values stay together and the order among
them does not matter. The draw goes through the vocabulary in order. No function waits for a GPU; ``_nucleus_of_row``
reads values, but runs on the CPU only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from pensieve.core import Floats, Ints, RequestKey, TokenLogprob
from pensieve.engine.plan import SampleSpec
from pensieve.engine.sampling.rows import (
    MAX_TOP_K,
    Array,
    DrawGroup,
    LogitChanges,
    Penalties,
    PreparedRows,
    RandomRows,
    prepare,
)

log = logging.getLogger(__name__)


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


LOGIT_LIMIT = 1e30
"""Replaces an infinite logit; its negative replaces -inf and NaN."""

ALIGNED_COLUMNS = 8
"""Rows of this many float32, or a multiple, all begin at addresses that a GPU reads in the same way."""

_TORCH = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the n rows in ``PreparedRows.logprob_rows``."""

    chosen: torch.Tensor
    """float32 [n]"""
    top_values: torch.Tensor
    """float32 [n, largest ``top_logprobs``], descending"""
    top_ids: torch.Tensor
    """int64, as ``top_values``"""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A step's tokens on the logits' device; S may exceed the rows of ``prepared``."""

    prepared: PreparedRows
    tokens: torch.Tensor
    """int64 [S]"""
    finite: torch.Tensor
    """bool [S]: whether all logits of the row were finite."""
    logprobs: Logprobs | None = None

    def fetch(self) -> TokenFetch:
        """Queue the copies to the host on the current stream, without waiting for them."""
        rows = self.prepared.rows
        parts = [self.tokens[:rows], self.finite[:rows]]
        if self.logprobs is not None:
            parts += [self.logprobs.chosen, self.logprobs.top_values, self.logprobs.top_ids]
        if self.tokens.device.type != "cuda":
            return TokenFetch(self.prepared, parts, None)
        host = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
        for to, part in zip(host, parts, strict=True):
            to.copy_(part, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return TokenFetch(self.prepared, host, done)


@dataclass(frozen=True, slots=True)
class TokenFetch:
    """The tokens of a step, on their way to the host."""

    prepared: PreparedRows
    parts: list[torch.Tensor]
    """Tokens, finite, and the three of ``Logprobs``; on the CPU."""
    done: torch.cuda.Event | None
    """Recorded after the last copy; None on a CPU."""

    def resolve(self, requests: Sequence[RequestKey] = ()) -> list[tuple[int, TokenLogprob | None]]:
        """Wait for the copies; return the token of each row, and its log-probabilities if requested.
        ``requests``: the request of each row, for warnings."""
        if self.done is not None:
            self.done.synchronize()
        tokens: list[int] = self.parts[0].tolist()
        finite: list[bool] = self.parts[1].tolist()
        if not all(finite):
            log.warning(
                "the model produced logits that are not finite; check its weights and dtype",
                extra={"requests": [one for one, well in zip(requests, finite, strict=False) if not well]},
            )
        result: list[tuple[int, TokenLogprob | None]] = [(token, None) for token in tokens]
        if len(self.parts) > 2:
            wanted = zip(self.prepared.logprob_rows, self.prepared.top_logprobs, strict=True)
            lists = [part.tolist() for part in self.parts[2:]]
            for (row, count), chosen, values, ids in zip(wanted, *lists, strict=True):
                top = tuple(zip(ids[:count], values[:count], strict=True))
                result[row] = (tokens[row], TokenLogprob(tokens[row], chosen, top))
        return result


def sample(
    logits: torch.Tensor, specs: Sequence[SampleSpec], requests: Sequence[RequestKey] = ()
) -> list[tuple[int, TokenLogprob | None]]:
    """Return one token for each row of ``logits`` float32 [S, vocab], as ``specs[i]`` asks. ``logits`` is not
    changed. ``requests``: see ``TokenFetch.resolve``."""
    if not specs:
        return []
    return choose(logits, prepare(specs, logits.shape[1])).fetch().resolve(requests)


def sanitize(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [S, vocab] without NaN or infinity, and which rows had none, bool [S]. A token whose logit is
    NaN becomes impossible. May be captured in a CUDA graph. The first result may be ``logits`` itself."""
    if logits.device.type == "cpu":
        # One fast pass in the common case; the sum may overflow although no logit is infinite.
        if math.isfinite(logits.sum().item()):
            return logits, torch.ones(len(logits), dtype=torch.bool)
        finite = torch.isfinite(logits).all(dim=-1)
    else:
        least, most = torch.aminmax(logits, dim=-1)  # NaN if a logit is NaN
        finite = torch.isfinite(least) & torch.isfinite(most)
    return torch.nan_to_num(logits, nan=-LOGIT_LIMIT, posinf=LOGIT_LIMIT, neginf=-LOGIT_LIMIT), finite


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's token with the largest (sanitized) logit, the lowest id on a tie; int64 [S]."""
    if logits.device.type == "cpu":  # numpy vectorises this: ten times as fast
        return torch.from_numpy(np.asarray(logits.numpy().argmax(axis=-1), dtype=np.int64))
    return torch.argmax(logits, dim=-1)


def choose(logits: torch.Tensor, prepared: PreparedRows, finite: torch.Tensor | None = None) -> SampledTokens:
    """Queue the choice of a token for each row of ``logits`` float32 [S, vocab] without waiting for a device.
    ``finite`` is given when the logits are already sanitized. Rows past those of ``prepared`` are greedy.
    ``logits`` is not changed."""
    if finite is None:
        logits, finite = sanitize(logits)
    # The common step: nothing to upload, and only the largest logit is needed.
    if prepared.plain:
        return SampledTokens(prepared, greedy_tokens(logits), finite)
    arrays = _upload(prepared.arrays(), logits.device)
    # Log-probabilities are those of the model's own logits, so changes go to a copy.
    adjusted = logits if prepared.changes is None else _apply_changes(logits, prepared.changes, arrays)
    # Every row gets its greedy token first; it is then replaced in random rows, whose weights are relative to
    # it.
    tokens = greedy_tokens(adjusted)
    if prepared.draws is not None:
        _draw_into(tokens, adjusted, prepared.draws, arrays)
    logprobs = None
    if prepared.logprob_rows:
        logprobs = _logprobs(logits, tokens, arrays["logprob_rows"], max(prepared.top_logprobs))
    return SampledTokens(prepared, tokens, finite, logprobs)


def workspace_bytes(rows: int, vocab: int) -> int:
    """Most temporary GPU memory of ``choose`` for this many rows; contexts of penalties come on top."""
    copies = 4  # sanitized, with changes, and two for the log-probabilities
    return (
        copies * rows * (vocab + -vocab % ALIGNED_COLUMNS) * 4
        + min(rows * vocab, max(GPU_ELEMENTS, vocab)) * BYTES_PER_ELEMENT
    )


def _upload(arrays: Mapping[str, Array], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the arrays as tensors on ``device``, by one copy, without waiting for it."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    starts = list(accumulate((-(-array.nbytes // 8) * 8 for array in arrays.values()), initial=0))
    # The allocator of pinned memory does not reuse this block before the copy has read it.
    pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    host = pinned.numpy()
    for start, array in zip(starts, arrays.values(), strict=False):  # the last start is the end
        host[start : start + array.nbytes] = array.view(np.uint8)
    packed = pinned.to(device, non_blocking=True)
    return {
        name: packed[start : start + array.nbytes].view(_TORCH[array.dtype.name])
        for start, (name, array) in zip(starts, arrays.items(), strict=False)
    }


def _apply_changes(
    logits: torch.Tensor, changes: LogitChanges, arrays: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return a copy of the logits [S, vocab] with ``changes`` applied. ``arrays``: theirs on the device."""
    result = logits.clone(memory_format=torch.contiguous_format)
    if changes.penalties is not None:
        _penalise(result, changes.penalties, arrays)
    flat = result.view(-1)
    if len(changes.biased):
        places = arrays["biased"]
        flat[places] = _in_range(flat[places] + arrays["bias"].float())
    if len(changes.banned):
        flat.index_fill_(0, arrays["banned"], -torch.inf)
    if len(changes.mask_rows):
        _mask(result, logits, changes, arrays)
    if len(changes.fallback_rows):
        rows = arrays["fallback_rows"]
        values = result.index_select(0, rows)
        nothing = torch.isneginf(values).all(dim=-1, keepdim=True)
        result.index_copy_(0, rows, torch.where(nothing, logits.index_select(0, rows), values))
    return result


def _mask(
    result: torch.Tensor, logits: torch.Tensor, changes: LogitChanges, arrays: Mapping[str, torch.Tensor]
) -> None:
    """Ban what the masks do not allow; in place. ``logits``: the model's own, where nothing else is left."""
    vocab, device = result.shape[1], result.device
    words = len(changes.masks) // len(changes.mask_rows)
    # Made on the device: a copy from the host would wait for it.
    places = torch.arange(8, dtype=torch.uint8, device=device)
    bits = torch.bitwise_left_shift(torch.ones_like(places), places)
    packed = arrays["masks"].view(torch.uint8).view(len(changes.mask_rows), 4 * words, 1)
    for start, end in row_ranges(0, len(changes.mask_rows), vocab, device):
        rows = arrays["mask_rows"][start:end]
        banned = ((packed[start:end] & bits) == 0).flatten(1)[:, :vocab]
        values = result.index_select(0, rows).masked_fill_(banned, -torch.inf)
        if changes.masks_alone:
            nothing = torch.isneginf(values).all(dim=-1, keepdim=True)
            alone = logits.index_select(0, rows).masked_fill_(banned, -torch.inf)
            values = torch.where(nothing, alone, values)
        result.index_copy_(0, rows, values)


def _in_range(values: torch.Tensor) -> torch.Tensor:
    """Clamp values to the finite range, except -inf: it is a ban."""
    return torch.nan_to_num(values, nan=-torch.inf, posinf=LOGIT_LIMIT, neginf=-torch.inf)


def _penalise(logits: torch.Tensor, penalties: Penalties, arrays: Mapping[str, torch.Tensor]) -> None:
    """Apply repetition penalty (prompt and output), frequency and presence penalties (output); in place."""
    vocab, device = logits.shape[1], logits.device
    some_repetition = bool((penalties.repetition != 1.0).any())
    some_cost = bool(penalties.frequency.any() or penalties.presence.any())
    for start, end in row_ranges(0, len(penalties.rows), vocab, device):
        rows = arrays["penalty_rows"][start:end]
        values = logits.index_select(0, rows)
        output = _places(arrays["output"], arrays["output_lengths"], penalties.output_ends, start, end, vocab)
        if some_repetition:
            prompt = _places(
                arrays["prompt"], arrays["prompt_lengths"], penalties.prompt_ends, start, end, vocab
            )
            seen = torch.cat((prompt, output))
            row_penalty = arrays["repetition"][start:end].float()
            # 1 for tokens that did not occur; a token that occurred twice gets the same value twice.
            penalty = torch.ones(values.numel(), device=device)
            penalty.scatter_(0, seen, row_penalty[seen // vocab])
            penalty = penalty.view_as(values)
            values = values.clamp(min=0.0).div_(penalty).add_(values.clamp(max=0.0).mul_(penalty))
        if some_cost:
            # Integers in float32: exact in whatever order a GPU adds them.
            counts = torch.zeros(values.numel(), device=device)
            counts.index_add_(0, output, counts.new_ones(1).expand(len(output)))
            counts = counts.view_as(values).double()
            each, once = arrays["frequency"][start:end, None], arrays["presence"][start:end, None]
            values -= counts.mul(each).add_(counts.clamp_(max=1.0).mul_(once)).float()
        logits.index_copy_(0, rows, _in_range(values))


def _places(
    tokens: torch.Tensor, lengths: torch.Tensor, ends: Ints, start: int, end: int, vocab: int
) -> torch.Tensor:
    """Return the places of the tokens of rows ``start … end - 1`` in a matrix of just these rows; int64."""
    first, last = int(ends[start - 1]) if start else 0, int(ends[end - 1])
    offsets = torch.arange(0, (end - start) * vocab, vocab, device=tokens.device)
    # With a given size, nothing waits for the device to add the lengths.
    return tokens[first:last] + torch.repeat_interleave(offsets, lengths[start:end], output_size=last - first)


def _draw_into(
    tokens: torch.Tensor, logits: torch.Tensor, draws: RandomRows, arrays: Mapping[str, torch.Tensor]
) -> None:
    """Draw tokens for the random rows. On entry ``tokens`` holds each row's greedy token."""
    names = ("temperature", "uniform", "floor", "top_k", "top_p")
    parameters = Parameters(*(arrays[name][:, None] for name in names))
    # Rows of a group need the same filters; a range is as many of them as fit into memory at once.
    for group in draws.groups:
        for start, end in row_ranges(group.start, group.end, logits.shape[1], logits.device):
            rows = arrays["draw_rows"][start:end]
            values = logits.index_select(0, rows)
            top = values.gather(1, tokens.index_select(0, rows)[:, None])
            tokens.index_copy_(0, rows, draw(values, top, parameters.rows(start, end), group))


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, most: int) -> Logprobs:
    """Return log-probabilities of the chosen and of the ``most`` likely tokens of ``rows``, under the raw logits.

    A row gets the same bits in any batch.
    """
    values, vocab = logits.index_select(0, rows), logits.shape[1]
    if logits.device.type == "cuda" and vocab % ALIGNED_COLUMNS:
        # A GPU's softmax adds a row in an order that follows from the alignment of its address.
        values = F.pad(values, (0, -vocab % ALIGNED_COLUMNS), value=-torch.inf)
    values = torch.log_softmax(values, dim=-1)
    # All logits are finite, so that no padding is among the likely tokens.
    best = torch.topk(values, min(most, vocab), dim=-1)
    chosen = values.gather(1, tokens.index_select(0, rows)[:, None]).squeeze(1)
    return Logprobs(chosen, best.values, best.indices)
