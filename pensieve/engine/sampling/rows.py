"""What a step's ``SampleSpec``s come to, as arrays: everything of sampling that needs no logits. No torch.

Made on the CPU while the GPU works on something else, so that choosing the tokens afterwards is a fixed sequence of
operations that never asks the GPU for a value. A step in which every row is greedy costs a walk over the specs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pensieve.core import Floats, Ints, Sampling
from pensieve.engine.plan import SampleSpec
from pensieve.engine.sampling.changes import Array, Changes, changes_of

MAX_TOP_K = 1024
"""Up to here the largest values of a row are selected; beyond it the whole row is sorted."""

_MASK64 = (1 << 64) - 1
_BLOCK = 64
"""Numbers of a stream that are made at a time."""


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Rows ``start … end - 1`` of ``Draws``, and which filters some of them need."""

    start: int
    end: int
    min_p: bool
    top_p: bool
    top_k: bool
    most: int
    """The largest top-k; the vocabulary when a row has none."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows with a temperature, those that need the same filters next to each other. All arrays are [n]."""

    rows: Ints
    temperature: Floats
    uniform: Floats
    """The random number of each row, in [0, 1)."""
    floor: Floats
    """min-p as the least logit that stays, where the row's largest is 0 and after temperature; -inf is off."""
    top_k: Ints
    """1 … vocabulary; the vocabulary is off."""
    top_p: Floats
    """1 is off."""
    groups: tuple[DrawGroup, ...]

    def arrays(self) -> dict[str, Array]:
        """What the device needs, by name."""
        return {
            "draw_rows": self.rows,
            "temperature": self.temperature,
            "uniform": self.uniform,
            "floor": self.floor,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """What ``specs`` ask of the rows ``0 … rows - 1`` of a step's logits."""

    rows: int
    vocab: int
    draws: Draws | None = None
    changes: Changes | None = None
    logprob_rows: tuple[int, ...] = ()
    """Rows whose log-probabilities are wanted."""
    top_logprobs: tuple[int, ...] = ()
    """How many of the most likely tokens each of ``logprob_rows`` wants."""

    @property
    def plain(self) -> bool:
        """Each row takes the token with the largest logit and nothing else is asked."""
        return self.draws is None and self.changes is None and not self.top_logprobs

    def arrays(self) -> dict[str, Array]:
        """What the device needs, by name."""
        arrays: dict[str, Array] = {}
        for part in (self.draws, self.changes):
            if part is not None:
                arrays |= part.arrays()
        if self.logprob_rows:
            arrays["logprob_rows"] = np.array(self.logprob_rows, dtype=np.int64)
        return arrays


def prepare(specs: Sequence[SampleSpec], vocab: int) -> PreparedRows:
    """The arrays of ``specs``, one for each row of logits [rows, vocab].

    Raises ValueError when a token of a spec's prompt or output is no id of the vocabulary.
    """
    if all([spec.sampling.plain for spec in specs]):
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
        changes=changes_of(specs, vocab),
        logprob_rows=tuple(row for row, _ in wanted),
        top_logprobs=tuple(count for _, count in wanted),
    )


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that belongs to output ``index`` of a turn with ``seed``."""
    return float(_numbers(seed & _MASK64, index // _BLOCK)[index % _BLOCK])


@functools.lru_cache(maxsize=4096)
def _numbers(key: int, block: int) -> Floats:
    """The numbers of outputs ``64 * block …`` of a stream; [64]. One number alone would cost as much as all."""
    words = np.random.Philox(key=key, counter=block * _BLOCK).random_raw(4 * _BLOCK)[::4]
    # The first word of each value of the counter. 48 bits: the number times a total stays below the total in float64.
    numbers: Floats = (words >> np.uint64(16)).astype(np.float64) / float(1 << 48)
    numbers.flags.writeable = False
    return numbers


def _draws(specs: Sequence[SampleSpec], vocab: int) -> Draws | None:
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
    return Draws(
        rows=np.array([row for _, row, _ in random], dtype=np.int64),
        temperature=np.array([sampling.temperature for sampling in chosen], dtype=np.float64),
        uniform=np.array([uniform(spec.sampling.seed, spec.output_index) for _, _, spec in random]),
        floor=np.array([_log(sampling.min_p) for sampling in chosen]),
        top_k=np.array([_top_k(sampling, vocab) for sampling in chosen], dtype=np.int64),
        top_p=np.array([min(sampling.top_p, 1.0) for sampling in chosen], dtype=np.float64),
        groups=tuple(groups),
    )


def _need(sampling: Sampling, vocab: int) -> int:
    """0: its values need no order; 1: that of the largest; 2: that of all."""
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
        most=max(top_k),
    )


def _top_k(sampling: Sampling, vocab: int) -> int:
    return sampling.top_k if 0 < sampling.top_k < vocab else vocab


def _log(min_p: float) -> float:
    return math.log(min(min_p, 1.0)) if min_p > 0.0 else -math.inf
