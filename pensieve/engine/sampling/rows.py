"""The ``SampleSpec``s of a step as arrays: the part of sampling that needs no logits. No torch.

The arrays are made on the CPU while the GPU does other work. Sampling is then a fixed sequence of operations
that never waits for the GPU. A step in which every row is greedy costs one loop over the specs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pensieve.core import Floats, Ints, Sampling, TokenArray
from pensieve.engine.plan import SampleSpec, TokenMask

Array = Ints | Floats | TokenArray

MAX_TOP_K = 1024
"""Up to this top-k the largest values of a row are selected; beyond it the whole row is sorted."""

_NO_TOKENS: TokenArray = np.empty(0, dtype=np.int32)
_MASK64 = (1 << 64) - 1
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Rows ``start … end - 1`` of ``RandomRows``, and the filters that some of them need."""

    start: int
    end: int
    min_p: bool
    top_p: bool
    top_k: bool
    max_top_k: int
    """The largest top-k; the vocabulary size if a row has none."""


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows with a temperature, grouped by the filters that they need. All arrays are [n]."""

    rows: Ints
    temperature: Floats
    uniform: Floats
    """The random number of each row, in [0, 1)."""
    floor: Floats
    """min-p as the least logit to keep, relative to the row's largest and after temperature; -inf is off."""
    top_k: Ints
    """1 … vocabulary; the vocabulary is off."""
    top_p: Floats
    """1 is off."""
    groups: tuple[DrawGroup, ...]

    def arrays(self) -> dict[str, Array]:
        return {
            "draw_rows": self.rows,
            "temperature": self.temperature,
            "uniform": self.uniform,
            "floor": self.floor,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


@dataclass(frozen=True, slots=True)
class Penalties:
    """The n rows with penalties. The device counts which tokens occur in their context, and how often."""

    rows: Ints
    repetition: Floats
    """Divides positive logits of tokens that occur in prompt or output, multiplies negative ones; 1 is off. [n]"""
    frequency: Floats
    """Subtracted once per occurrence of a token in the output; [n]"""
    presence: Floats
    """Subtracted from each token that occurs in the output; [n]"""
    prompt: TokenArray
    """Concatenated prompts of all rows; empty for rows without repetition penalty."""
    prompt_ends: Ints
    """End of each row's prompt; [n]"""
    output: TokenArray
    output_ends: Ints

    def arrays(self) -> dict[str, Array]:
        return {
            "penalty_rows": self.rows,
            "repetition": self.repetition,
            "frequency": self.frequency,
            "presence": self.presence,
            "prompt": self.prompt,
            "prompt_lengths": np.diff(self.prompt_ends, prepend=0),
            "output": self.output,
            "output_lengths": np.diff(self.output_ends, prepend=0),
        }


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Changes of logits before a token is chosen, applied in this order. A place is ``row * vocab + token``.

    A mask comes last, so no penalty, bias or ban lets a token through that a grammar does not allow. Where the other
    changes leave no allowed token, the mask alone is applied to the model's own logits.
    """

    penalties: Penalties | None
    biased: Ints
    """Places to which ``bias`` is added, each once; [n]"""
    bias: Floats
    banned: Ints
    """Places that must not be chosen; repeats allowed."""
    fallback_rows: Ints
    """Rows without a mask in which the changes may ban every token; such a row is then taken unchanged."""
    mask_rows: Ints
    """Rows with a mask; [n]"""
    masks: TokenMask
    """Masks of ``mask_rows``, concatenated: [n * words]"""
    masks_alone: bool
    """Whether another change may ban every token that a mask allows."""

    def arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {
            "biased": self.biased,
            "bias": self.bias,
            "banned": self.banned,
            "fallback_rows": self.fallback_rows,
            "mask_rows": self.mask_rows,
            "masks": self.masks,
        }
        if self.penalties is not None:
            arrays |= self.penalties.arrays()
        return arrays


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """The specs of the rows ``0 … rows - 1`` of a step's logits, as arrays."""

    rows: int
    vocab: int
    draws: RandomRows | None = None
    changes: LogitChanges | None = None
    logprob_rows: tuple[int, ...] = ()
    top_logprobs: tuple[int, ...] = ()
    """Number of most likely tokens for each of ``logprob_rows``."""

    @property
    def plain(self) -> bool:
        """Whether every row is greedy, without changes or log-probabilities."""
        return self.draws is None and self.changes is None and not self.top_logprobs

    def arrays(self) -> dict[str, Array]:
        """The arrays that the device needs, by name."""
        arrays: dict[str, Array] = {}
        for part in (self.draws, self.changes):
            if part is not None:
                arrays |= part.arrays()
        if self.logprob_rows:
            arrays["logprob_rows"] = np.array(self.logprob_rows, dtype=np.int64)
        return arrays


def prepare(specs: Sequence[SampleSpec], vocab: int) -> PreparedRows:
    """Return the arrays of ``specs``, one for each row of logits [rows, vocab]. Raises ValueError when a
    token of a spec's prompt or output is not in the vocabulary, or a mask is not as long as that."""
    for spec in specs:
        if spec.mask is not None and len(spec.mask) != mask_words(vocab):
            raise ValueError(f"a mask of {len(spec.mask)} words for a vocabulary of {vocab}")
    if all([spec.sampling.plain and spec.mask is None for spec in specs]):
        return PreparedRows(len(specs), vocab)
    wanted = [
        (row, spec.sampling.top_logprobs)
        for row, spec in enumerate(specs)
        if spec.sampling.top_logprobs is not None
    ]
    return PreparedRows(
        len(specs),
        vocab,
        draws=_draws(specs, vocab),
        changes=_changes(specs, vocab),
        logprob_rows=tuple(row for row, _ in wanted),
        top_logprobs=tuple(count for _, count in wanted),
    )


def mask_words(vocab: int) -> int:
    """Return the words of a mask over ``vocab`` tokens."""
    return -(-vocab // 32)


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) for output ``index`` of a turn with ``seed``."""
    return float(_numbers(seed & _MASK64, index // _BLOCK)[index % _BLOCK])


@functools.lru_cache(maxsize=4096)
def _numbers(key: int, block: int) -> Floats:
    """Return the numbers of outputs ``64 * block …`` of a turn, [64]. One number costs as much as all of them."""
    words = np.random.Philox(key=key, counter=block * _BLOCK).random_raw(4 * _BLOCK)[::4]
    # The first word of each counter value. With 48 bits, the number times a total stays below the total in
    # float64.
    numbers: Floats = (words >> np.uint64(16)).astype(np.float64) / float(1 << 48)
    numbers.flags.writeable = False
    return numbers


def _draws(specs: Sequence[SampleSpec], vocab: int) -> RandomRows | None:
    # Rows that need the same filters become adjacent, so that a group is one range of every array.
    random: list[tuple[int, int, SampleSpec]] = []
    for row, spec in enumerate(specs):
        if spec.sampling.temperature > 0.0:
            random.append((_need(spec.sampling, vocab), row, spec))
    if not random:
        return None
    random.sort(key=lambda entry: entry[0])  # stable
    chosen = [spec.sampling for _, _, spec in random]
    groups = []
    for need in dict.fromkeys(need for need, _, _ in random):
        members = [at for at, entry in enumerate(random) if entry[0] == need]
        groups.append(_group(members[0], members[-1] + 1, chosen[members[0] : members[-1] + 1], vocab))
    return RandomRows(
        rows=np.array([row for _, row, _ in random], dtype=np.int64),
        temperature=np.array([sampling.temperature for sampling in chosen], dtype=np.float64),
        uniform=np.array([uniform(spec.sampling.seed, spec.output_index) for _, _, spec in random]),
        floor=np.array([_log(sampling.min_p) for sampling in chosen]),
        top_k=np.array([_top_k(sampling, vocab) for sampling in chosen], dtype=np.int64),
        top_p=np.array([min(sampling.top_p, 1.0) for sampling in chosen], dtype=np.float64),
        groups=tuple(groups),
    )


def _need(sampling: Sampling, vocab: int) -> int:
    """Return how much of a row has to be sorted: 0 nothing, 1 its largest values, 2 everything."""
    if 0 < sampling.top_k < vocab:
        return 1 if sampling.top_k <= MAX_TOP_K else 2
    return 2 if sampling.top_p < 1.0 else 0


def _group(start: int, end: int, samplings: Sequence[Sampling], vocab: int) -> DrawGroup:
    top_k = [_top_k(sampling, vocab) for sampling in samplings]
    return DrawGroup(
        start,
        end,
        min_p=any(sampling.min_p > 0.0 for sampling in samplings),
        top_p=any(sampling.top_p < 1.0 for sampling in samplings),
        top_k=min(top_k) < vocab,
        max_top_k=max(top_k),
    )


def _top_k(sampling: Sampling, vocab: int) -> int:
    return sampling.top_k if 0 < sampling.top_k < vocab else vocab


def _log(min_p: float) -> float:
    return math.log(min(min_p, 1.0)) if min_p > 0.0 else -math.inf


def _changes(specs: Sequence[SampleSpec], vocab: int) -> LogitChanges | None:
    contexts: list[tuple[int, SampleSpec]] = []
    biased: list[Ints] = []
    bias: list[Floats] = []
    banned: list[int] = []
    fallback_rows: list[int] = []
    masks: list[tuple[int, TokenMask]] = []
    masks_alone = False
    for row, spec in enumerate(specs):
        sampling, first, touched = spec.sampling, row * vocab, 0
        if sampling.needs_context:
            contexts.append((row, spec))
            touched += sum(len(tokens) for tokens in (spec.prompt, spec.output) if tokens is not None)
        if sampling.logit_bias:
            tokens, values = sampling.bias
            kept = len(tokens) if tokens[-1] < vocab else int(np.searchsorted(tokens, vocab))
            biased.append(first + tokens[:kept])
            bias.append(values[:kept])
            touched += kept
        if spec.output_index < sampling.min_output_tokens:
            ends = [token for token in (*spec.eos_token_ids, *sampling.stop_token_ids) if token < vocab]
            banned += [first + token for token in ends]
            touched += len(ends)
        if spec.mask is not None:
            masks.append((row, spec.mask))
            masks_alone |= touched > 0
        elif touched >= vocab:
            fallback_rows.append(row)
    if not (contexts or biased or banned or masks):
        return None
    return LogitChanges(
        penalties=_penalties(contexts, vocab) if contexts else None,
        biased=np.concatenate(biased, dtype=np.int64) if biased else np.empty(0, np.int64),
        bias=np.concatenate(bias, dtype=np.float64) if bias else np.empty(0, np.float64),
        banned=np.array(banned, dtype=np.int64),
        fallback_rows=np.array(fallback_rows, dtype=np.int64),
        mask_rows=np.array([row for row, _ in masks], dtype=np.int64),
        masks=np.concatenate([mask for _, mask in masks]) if masks else _NO_TOKENS,
        masks_alone=masks_alone,
    )


def _penalties(contexts: Sequence[tuple[int, SampleSpec]], vocab: int) -> Penalties:
    samplings = [spec.sampling for _, spec in contexts]
    prompts = [
        spec.prompt if spec.prompt is not None and spec.sampling.repetition_penalty != 1.0 else _NO_TOKENS
        for _, spec in contexts
    ]
    outputs = [_NO_TOKENS if spec.output is None else spec.output for _, spec in contexts]
    return Penalties(
        rows=np.array([row for row, _ in contexts], dtype=np.int64),
        repetition=np.array([sampling.repetition_penalty for sampling in samplings], dtype=np.float64),
        frequency=np.array([sampling.frequency_penalty for sampling in samplings], dtype=np.float64),
        presence=np.array([sampling.presence_penalty for sampling in samplings], dtype=np.float64),
        prompt=_joined(prompts, vocab),
        prompt_ends=np.cumsum([len(tokens) for tokens in prompts], dtype=np.int64),
        output=_joined(outputs, vocab),
        output_ends=np.cumsum([len(tokens) for tokens in outputs], dtype=np.int64),
    )


def _joined(parts: Sequence[TokenArray], vocab: int) -> TokenArray:
    """Copy the parts, since they may grow, and check them, since a GPU does not report a write out of bounds."""
    tokens = np.concatenate(parts)
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab):
        raise ValueError(f"a token of a prompt or output is not in the vocabulary of {vocab}")
    return tokens
