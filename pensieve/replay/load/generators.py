"""Built-in workloads: conversations drawn to match the published statistics of real data sets.

Lengths are in tokens, independent from turn to turn. The sources give means; the shapes around the means are
fits, named at each generator, to length statistics of public data: a sample of 521 ShareGPT conversations
(outputs: gamma of shape 1.6; inputs: lognormal, mean ∕ median 2.2, that is σ = 1.26; turns: geometric, which
meets its quantiles 3, 9 and 13 at 50, 95 and 99 %) and the 1,388 dialogues of MT-Bench-101.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from pensieve.core import Floats
from pensieve.replay.load.workload import Conversation, Dataset, TurnLengths


@dataclass(frozen=True, slots=True)
class Published:
    turns: float
    input_tokens: float
    output_tokens: float
    source: str


@dataclass(frozen=True, slots=True)
class ChatShape:
    published: Published
    fewest_turns: int
    more_turns: str
    """Distribution of the turns beyond the fewest: ``geometric`` or ``poisson``, with the published mean."""
    input_mean: float
    """Mean before the context limit takes effect; the published mean is met after it."""
    input_sigma: float
    """Standard deviation of the logarithm of the inputs, which are lognormal."""
    output_mean: float
    output_gamma: float
    """Shape parameter of the outputs, which are gamma distributed."""
    context_limit: int
    """A longer conversation is shrunk, all turns alike, to a uniformly drawn length from ¾ of this up to this."""


_EUROSYS = "Pensieve, EuroSys 2025, table 2"
_DRAFT = "Pensieve, first draft (arXiv 2312.05516v1), table 2: at least 5 turns, contexts of at most 2048"

CHATS = {
    "sharegpt": ChatShape(Published(5.56, 37.77, 204.58, _EUROSYS), 1, "geometric", 37.77, 1.26, 204.58, 1.6, 16384),
    # Synthetic dialogues are more uniform than logged ones: 2 + Poisson turns, σ = 0.6 and gamma 1.4 fit
    # MT-Bench-101, the synthetic set at hand; only the means are UltraChat's.
    "ultrachat": ChatShape(Published(3.86, 51.78, 257.81, _EUROSYS), 2, "poisson", 51.78, 0.6, 257.81, 1.4, 16384),
    # Means before shrinking found by fixed-point iteration over 60,000 conversations; 45 % and 4 % are shrunk.
    "sharegpt-long": ChatShape(Published(7.58, 31.26, 180.44, _DRAFT), 5, "geometric", 42.7, 1.26, 243.0, 1.6, 2048),
    "lmsys": ChatShape(Published(7.73, 22.49, 100.67, _DRAFT), 5, "geometric", 23.65, 1.26, 103.9, 1.6, 2048),
}  # fmt: skip


def _conversations(shape: ChatShape, number: int, generator: np.random.Generator) -> list[Conversation]:
    extra = shape.published.turns - shape.fewest_turns
    if shape.more_turns == "poisson":
        counts = shape.fewest_turns + generator.poisson(extra, number)
    else:
        counts = shape.fewest_turns + generator.geometric(1 / (extra + 1), number) - 1
    found = []
    for index, count in enumerate(counts.tolist()):
        center = np.log(shape.input_mean) - shape.input_sigma**2 / 2
        inputs = generator.lognormal(center, shape.input_sigma, count)
        outputs = generator.gamma(shape.output_gamma, shape.output_mean / shape.output_gamma, count)
        total, share = float(inputs.sum() + outputs.sum()), generator.uniform(0.75, 1.0)
        # Rounding, and the minimum of one token, may exceed the share; the limit leaves room for that.
        room = shape.context_limit - 3 * count
        shrink = share * room / total if total > room else 1.0
        found.append(Conversation(str(index), tuple(_turns(inputs * shrink, outputs * shrink))))
    return found


def _turns(inputs: Floats, outputs: Floats) -> list[TurnLengths]:
    def whole(values: Floats) -> list[int]:
        return [int(value) for value in np.maximum(1, np.round(values))]

    return [TurnLengths(*lengths) for lengths in zip(whole(inputs), whole(outputs), strict=True)]


@dataclass(frozen=True, slots=True)
class Quantiles:
    values: tuple[float, ...]
    at: tuple[float, ...] = (0, 5, 25, 50, 75, 95, 99, 100)
    """The quantiles that ``values`` are, in per cent."""

    def draw(self, generator: np.random.Generator, count: int) -> Floats:
        logs = np.interp(generator.uniform(0, 100, count), self.at, np.log(self.values))
        return np.asarray(np.exp(logs), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class LongContext:
    """A production service with long documents, as in the conversation trace of Mooncake (FAST 2025).

    Fitted to the 3,100 sessions that can be recovered from the trace's prefix hashes. The quantiles below are
    the trace's: of a first turn's input, a later turn's input (half of them a typed line, a quarter long
    documents), the output, and the time between arrivals of turns, in seconds. 28 % of the sessions have a
    second turn; the number of turns after that is Lomax(2.3, 2.07), rounded down, fitted to the shares of 2,
    3 and 4 turns (60, 19 and 9 %) and the quantiles 7 and 15 at 95 and 99 %, with the trace's maximum of 43
    turns. Conversations start as a Poisson process, 3,100 in 1,380 s. A session ends before a context of 128
    Ki tokens. Not in the fit: text that sessions share, and dependence between lengths.
    """

    later_sessions: float = 879 / 3100
    tail: tuple[float, float] = (2.3, 2.07)
    most_turns: int = 43
    starts_per_s: float = 3100 / 1380
    context_limit: int = 131072
    first_input: Quantiles = Quantiles((891, 898, 1741, 6873, 15808, 42525, 93901, 122889))
    later_input: Quantiles = Quantiles(
        (1, 1, 11, 30, 64, 399, 636, 4021, 7665, 19014, 21923, 91467),
        (0, 5, 25, 50, 60, 75, 80, 90, 95, 99, 99.5, 100),
    )
    output: Quantiles = Quantiles((1, 9, 139, 356, 480, 722, 1281, 2000))
    gap: Quantiles = Quantiles((6, 30, 72, 138, 312, 723, 1929, 3030))

    def conversations(self, number: int, generator: np.random.Generator) -> list[Conversation]:
        starts = np.cumsum(generator.exponential(1 / self.starts_per_s, number))
        return [
            self._conversation(index, float(start), generator)
            for index, start in enumerate(starts - starts[:1])
        ]

    def _conversation(self, index: int, start: float, generator: np.random.Generator) -> Conversation:
        count = 1
        if generator.random() < self.later_sessions:
            alpha, scale = self.tail
            count = min(self.most_turns, 2 + int(generator.pareto(alpha) * scale))
        inputs = self.first_input.draw(generator, 1)
        inputs = np.concatenate([inputs, self.later_input.draw(generator, count - 1)])
        times = start + np.concatenate([[0.0], np.cumsum(self.gap.draw(generator, count - 1))])
        turns = _turns(inputs, self.output.draw(generator, count))
        total, kept = 0, []
        for turn, time in zip(turns, times, strict=True):
            total += turn.input_tokens + turn.output_tokens
            if total > self.context_limit:
                break
            kept.append(TurnLengths(turn.input_tokens, turn.output_tokens, float(time)))
        return Conversation(str(index), tuple(kept))


NAMES = (*CHATS, "mooncake")


def generate(name: str, conversations: int, seed: int) -> Dataset:
    """Generate the workload ``name``, one of ``NAMES``. ``sha256`` is that of the lengths and times as JSON."""
    generator = np.random.default_rng([seed, NAMES.index(name)])
    if name == "mooncake":
        found = LongContext().conversations(conversations, generator)
    else:
        found = _conversations(CHATS[name], conversations, generator)
    rows: list[Any] = [
        [[t.input_tokens, t.output_tokens, t.timestamp_s] for t in talk.turns] for talk in found
    ]
    return Dataset(name, tuple(found), hashlib.sha256(json.dumps(rows).encode()).hexdigest())
