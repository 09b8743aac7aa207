"""Greedy tokens of a model folder, by Pensieve's worker and by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pensieve.core import Sampling
from support.engine.hf_oracle import HfOracle
from support.engine.worker_driver import CHUNK, make_worker, span, step

PROMPT: tuple[int, ...] = (5, 17, 40, 9, 33, 21, 8, 90)


def greedy_tokens(folder: Path, count: int = 8, prompt: Sequence[int] = PROMPT) -> list[int]:
    """``count`` tokens behind ``prompt`` by the worker of a folder, computed anew for each. Raises ModelError."""
    worker = make_worker(folder, host_chunks=0)
    tokens = list(prompt)
    for _ in range(count):
        table = list(range(-(-len(tokens) // CHUNK)))
        result = step(worker, [span(tokens, 0, len(tokens), sampling=Sampling())], [table])
        tokens.append(result.sampled[0].token_id)
    return tokens[len(prompt) :]


def transformers_tokens(folder: Path, count: int = 8, prompt: Sequence[int] = PROMPT) -> list[int]:
    """The same by transformers."""
    return HfOracle(folder).generate(prompt, count)
