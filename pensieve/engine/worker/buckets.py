"""The sizes of a worker's CUDA graphs: which there could be, and which of them are worth having on this device.

How long a step's products take does not rise evenly with its tokens: the library chooses other kernels for other sizes,
and its choice is at times a bad one. So the sizes are timed at start-up, and one that is not faster than a larger one
is left out: its steps are padded to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from pensieve.kernels.attention.kinds import StepKind

WIDE_ALONE_LIMIT = 512
"""Steps without any decode get a graph up to this many tokens: longer ones keep the device busy without one."""
WIDE_ALONE_LIMIT_RANKS = 2048
"""And that many where ranks share the work: each has less of it, and as much to launch. (On two H200s a 13B's step of
1,024 tokens took 45.6 ms without a graph, as long as one of 2,048.)"""
MEASURED_TOKENS: Final = 512
"""Sizes up to this are timed; beyond it products have so many tiles that one more makes no difference."""
LEAST_GAIN: Final = 0.005
"""A size is worth a graph when it saves this share of the next larger one's time: more than the timing is off."""


def buckets(kind: StepKind, max_tokens: int, max_running: int, ranks: int = 1) -> list[int]:
    """Tokens of the graphs of a kind, ascending."""
    if kind is StepKind.NARROW:
        return _rising(min(max_running, max_tokens), ((1, 2), (2, 4), (4, 8), (8, 256), (16, 1 << 30)))
    # Decodes beside turns of a few tokens: common on a busy server.
    if kind in (StepKind.SHORT, StepKind.FEW):
        return _rising(min(max(2 * max_running, 512), max_tokens), ((8, 64), (16, 256), (32, 1 << 30)))
    if kind.is_mixed:
        return _rising(max_tokens, ((32, 512), (64, 1024), (128, 2048), (512, 1 << 30)))
    alone = WIDE_ALONE_LIMIT if ranks == 1 else WIDE_ALONE_LIMIT_RANKS
    return _rising(min(max_tokens, alone), ((32, 128), (64, 512), (128, 1 << 30)))


def _rising(most: int, steps: tuple[tuple[int, int], ...]) -> list[int]:
    """Sizes that rise by ``step`` up to ``until`` for each (step, until), the last one being ``most``."""
    sizes: list[int] = []
    size = 0
    for step, until in steps:
        while size < min(until, most):
            size = min(size + step, most)
            sizes.append(size)
    return sizes


def worth_having(times: Mapping[int, int]) -> set[int]:
    """The sizes that are faster than every larger one, by ``LEAST_GAIN``; ``times``: size → what a step of it takes."""
    kept: set[int] = set()
    best = float("inf")
    for size in sorted(times, reverse=True):
        if times[size] < best * (1 - LEAST_GAIN):
            kept.add(size)
            best = times[size]
    return kept


def in_words(sizes: Sequence[int], kept: set[int]) -> str:
    """Which sizes were left out, for the log: ``73 of 81 sizes up to 512 tokens; 72-120 as 128``."""
    found = f"{len(kept)} of {len(sizes)} sizes up to {max(sizes)} tokens"
    runs = [(left, list(run)) for left, run in groupby(sorted(sizes), key=lambda size: size not in kept)]
    out = [
        f"{_span(run)} as {runs[at + 1][1][0]}" for at, (left, run) in enumerate(runs) if left
    ]  # fmt: skip
    return "; ".join([found, ", ".join(out)]) if out else found


def _span(run: Sequence[int]) -> str:
    return f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}"
