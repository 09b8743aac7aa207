"""Hand-made plans for a worker, and what Hugging Face says about the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pensieve.config import EngineOptions
from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import Copy, Plan, SampleSpec, Span, StepResult
from pensieve.engine.worker.torch_worker import TorchWorker, build_worker
from support.model.newest_models import as_newest

CHUNK = 8


def make_worker(
    folder: Path, *, device_chunks: int = 24, host_chunks: int = 24, **options: Any
) -> TorchWorker:
    """A float32 CPU worker with chunks of ``CHUNK`` tokens whose pools hold NaN until written."""
    chunk = options.pop("chunk_tokens", CHUNK)
    worker = build_worker(
        EngineOptions(
            model=str(folder),
            device="cpu",
            device_cache=f"{device_chunks * chunk}tokens",
            host_cache=f"{host_chunks * chunk}tokens",
            chunk_tokens=chunk,
            **options,
        )
    )
    for memory in (worker.pools.device, worker.pools.host):
        memory.fill_(255 if memory.dtype == torch.uint8 else torch.nan)  # four bytes of 255 are NaN, too
    return worker


def span(
    tokens: Sequence[int], start: int, end: int, *, row: int = 0, sampling: Sampling | None = None
) -> Span:
    """Positions ``[start, end)`` of the context ``tokens``; sampled when ``sampling`` is given."""
    part = np.array(tokens[start:end], dtype=np.int32)
    spec = SampleSpec(sampling, output_index=0) if sampling is not None else None
    return Span(RequestKey(row), start, part, row, spec)


def step(
    worker: TorchWorker,
    spans: Sequence[Span],
    tables: Sequence[Sequence[int]],
    *,
    swap_out: Sequence[tuple[int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
    swap_in: Sequence[tuple[int, int]] = (),
) -> StepResult:
    """Run one plan; copies are (src, dst) pairs."""
    plan = Plan(
        step=0,
        spans=tuple(spans),
        page_tables=tuple(np.array(table, dtype=np.int32) for table in tables),
        swap_out=tuple(Copy(*pair) for pair in swap_out),
        copies=tuple(Copy(*pair) for pair in copies),
        swap_in=tuple(Copy(*pair) for pair in swap_in),
    )
    return worker.run(plan)


EVERYTHING = Sampling(top_logprobs=1_000_000)
"""Greedy, with the log-probability of every token of the vocabulary."""


def logprobs(result: StepResult, index: int = 0) -> torch.Tensor:
    """All log-probabilities after one sampled span, float32 [vocab]."""
    found = result.sampled[index].logprob
    assert found is not None
    values = torch.full((len(found.top),), torch.nan)
    for token, value in found.top:
        values[token] = value
    return values


@cache
def reference_model(folder: Path) -> Any:
    # Some versions compute a softcap only so.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return as_newest(model.eval())


@torch.inference_mode()
def reference_logprobs(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities after each token of one whole, stateless run, float32 [n, vocab]."""
    return torch.log_softmax(reference_model(folder)(torch.tensor([list(tokens)])).logits[0], dim=-1)


@torch.inference_mode()
def reference_greedy(folder: Path, tokens: Sequence[int], count: int) -> list[int]:
    """What ``generate`` appends to ``tokens``, end tokens suppressed."""
    out = reference_model(folder).generate(
        torch.tensor([list(tokens)]), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return [int(token) for token in out[0, len(tokens) :]]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 160, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
