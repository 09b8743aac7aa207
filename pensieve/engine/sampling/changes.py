"""What the ``SampleSpec``s of a step change in the logits before a token is chosen, as arrays. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pensieve.core import Floats, Ints, TokenArray
from pensieve.engine.plan import SampleSpec

Array = Ints | Floats | TokenArray

_NO_TOKENS: TokenArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Penalties:
    """The n rows whose penalties look at their context. The device counts which tokens occur in it, and how often."""

    rows: Ints
    repetition: Floats
    """Divides positive logits of tokens that occur in prompt or output, multiplies negative ones; 1 is off. [n]"""
    frequency: Floats
    """Subtracted for each time that a token occurs in the output; [n]"""
    presence: Floats
    """Subtracted from each token that occurs in the output; [n]"""
    prompt: TokenArray
    """Prompts of all rows, one after the other; empty for rows without repetition penalty."""
    prompt_ends: Ints
    """Where each row's prompt ends; [n]"""
    output: TokenArray
    output_ends: Ints

    def arrays(self) -> dict[str, Array]:
        """The arrays that the device needs, by name."""
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
class Changes:
    """What happens to logits before a token is chosen, in this order. A place is ``row * vocab + token``."""

    penalties: Penalties | None
    biased: Ints
    """Places to which ``bias`` is added, each once; [n]"""
    bias: Floats
    """Infinite for a token that is given: see ``Sampling.opening``."""
    banned: Ints
    """Places that may not be chosen; repeats allowed."""
    everything: Ints
    """Rows in which so much changes that nothing might be left; such a row is then taken unchanged."""

    def arrays(self) -> dict[str, Array]:
        """The arrays that the device needs, by name."""
        arrays: dict[str, Array] = {
            "biased": self.biased,
            "bias": self.bias,
            "banned": self.banned,
            "everything": self.everything,
        }
        if self.penalties is not None:
            arrays |= self.penalties.arrays()
        return arrays


def changes_of(specs: Sequence[SampleSpec], vocab: int) -> Changes | None:
    """All changes of a step, or None if nothing changes.

    Raises ValueError when a token of a prompt or output is not in the vocabulary.
    """
    contexts: list[tuple[int, SampleSpec]] = []
    biased: list[int] = []
    bias: list[float] = []
    banned: list[int] = []
    everything: list[int] = []
    for row, spec in enumerate(specs):
        sampling, first, touched = spec.sampling, row * vocab, 0
        if spec.output_index < len(sampling.opening):
            # Nothing else of the row matters: it is so far above the rest that no draw finds another.
            biased.append(first + sampling.opening[spec.output_index])
            bias.append(math.inf)
            continue
        if sampling.needs_context:
            contexts.append((row, spec))
            touched += sum(len(tokens) for tokens in (spec.prompt, spec.output) if tokens is not None)
        if sampling.logit_bias:
            kept = {token: value for token, value in sampling.logit_bias.items() if token < vocab}
            biased += [first + token for token in kept]
            bias += kept.values()
            touched += len(kept)
        if spec.output_index < sampling.min_output_tokens:
            tokens = [token for token in (*spec.eos_token_ids, *sampling.stop_token_ids) if token < vocab]
            banned += [first + token for token in tokens]
            touched += len(tokens)
        if touched >= vocab:
            everything.append(row)
    if not (contexts or biased or banned):
        return None
    return Changes(
        penalties=_penalties(contexts, vocab) if contexts else None,
        biased=np.array(biased, dtype=np.int64),
        bias=np.array(bias, dtype=np.float64),
        banned=np.array(banned, dtype=np.int64),
        everything=np.array(everything, dtype=np.int64),
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
    """The parts one after the other: copied, because they may grow, and checked, because a GPU does not say who wrote
    out of bounds."""
    tokens = np.concatenate(parts)
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab):
        raise ValueError(f"a token of a prompt or output is not in the vocabulary of {vocab}")
    return tokens
