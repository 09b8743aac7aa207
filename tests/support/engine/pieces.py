"""One context computed in several ways by a worker on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import RequestKey, Sampling, TokenArray
from pensieve.engine.plan import Copy, PageTable, Plan, SampleSpec, Span, StepResult
from pensieve.engine.worker.cuda_worker import CudaWorker
from support.engine.exactness import Bench

CHUNK = 8
EVERYTHING = Sampling(top_logprobs=1_000_000)
"""Greedy, with the log-probability of every token of the vocabulary."""


def context_of(bench: Bench) -> TokenArray:
    return np.random.default_rng(3).integers(3, bench.vocabulary, 60).astype(np.int32)


def logprobs_of_pieces(bench: Bench) -> list[torch.Tensor]:
    """Compute a context in one piece; in three, with its first chunks swapped out and in between; token by token.
    Returns the log-probabilities of the next token, each float32 [vocab]."""
    cache = CacheConfig(device_chunks=32, host_chunks=16, chunk_tokens=CHUNK)
    worker = bench.worker(cache, SchedulerConfig(context_limit=160, max_batch_tokens=128, max_running=4))
    assert isinstance(worker, CudaWorker)
    tokens, first = context_of(bench), np.arange(10, dtype=np.int32)
    pieces = (((0, 60),), ((0, 24), (24, 41), (41, 60)), tuple((n, n + 1) for n in range(60)))
    found: list[torch.Tensor] = []
    for count, spans in enumerate(pieces):
        table: PageTable = first + 10 * count
        swapped: tuple[Copy, ...] = ()
        for index, (start, end) in enumerate(spans):
            if index == 1 and count == 1:  # chunks 0 to 2 leave, and come back to other pages
                worker.run(Plan(1, swap_out=tuple(Copy(int(table[n]), 3 * n) for n in range(3))))
                table = np.concatenate([np.array([30, 31, 29], np.int32), table[3:]])
                swapped = tuple(Copy(3 * n, int(table[n])) for n in range(3))
            spec = SampleSpec(EVERYTHING, 0) if end == 60 else None
            span = Span(RequestKey(count), start, tokens[start:end], 0, spec)
            result = worker.run(Plan(2, (span,), (table,), swap_in=swapped))
            swapped = ()
        found.append(every_logprob(result, bench.vocabulary))
    worker.close()
    return found


def every_logprob(result: StepResult, vocabulary: int) -> torch.Tensor:
    """Return the log-probabilities from which the one token was sampled, float32 [vocab]."""
    found = result.sampled[0].logprob
    assert found is not None and len(found.top) == vocabulary
    values = torch.empty(vocabulary)
    for token, value in found.top:
        values[token] = value
    return values
