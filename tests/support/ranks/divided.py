"""``python -P -m support.ranks.divided …``: random schedules on ranks of their own processes, checked by transformers.

With ``--invariant`` the bits of all steps are compared instead.

The workers are what serves, made by ``build_workers``; one set of ranks plays all schedules. Prints one JSON object:
near ties and tokens that were looked at, and how many tokens came from where. Fails at the first wrong answer.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

from pensieve.config import CacheConfig, EngineOptions, SchedulerConfig
from pensieve.engine.plan import PendingStep, Plan, StepWorker
from pensieve.engine.ranks.leader import build_workers
from pensieve.engine.worker.sizing import DTYPES
from support.engine.bits import Bits, BitWorker, alone
from support.engine.checkpoints import FAMILIES, Family, tiny_checkpoint
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.exactness import LIMIT
from support.engine.hf_oracle import NEAR_TIE, HfOracle

SHAPES: dict[str, dict[str, Any]] = {
    "": {},
    "wide": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 163},
    "real": {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 163},
}
"""``wide``: for four ranks, with fewer KV heads. ``real``: heads as models of use have them, for the GPU kernels."""


CACHE = CacheConfig(device_chunks=14, host_chunks=20, chunk_tokens=8)
SCHEDULER = SchedulerConfig(context_limit=LIMIT, max_batch_tokens=64, max_running=6)
"""Tiers so small that sessions push each other out, to the host and beyond."""


class Kept:
    """A worker that outlives its engine."""

    def __init__(self, worker: StepWorker) -> None:
        self._worker = worker

    def launch(self, plan: Plan) -> PendingStep:
        return self._worker.launch(plan)

    def close(self) -> None: ...


@click.command()
@click.option("--family", type=click.Choice(FAMILIES), required=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--ranks", default=2)
@click.option("--seed", default=12)
@click.option("--schedules", default=6)
@click.option("--near-tie", default=NEAR_TIE)
@click.option("--graphs/--no-graphs", default=True)
@click.option("--all-reduce", type=click.Choice(["auto", "nccl"]), default="auto")
@click.option("--invariant/--no-invariant", default=False)
def main(
    family: Family, shape: str, device: Any, dtype: Any, ranks: int, seed: int, schedules: int, near_tie: float,
    graphs: bool, all_reduce: Any, invariant: bool,
) -> None:  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = False
    cache, scheduler = CACHE, SCHEDULER
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_checkpoint(family, Path(folder), **SHAPES[shape])
        oracle = HfOracle(model, weights=DTYPES[dtype], near_tie=near_tie)
        worker = build_workers(
            EngineOptions(
                model=str(model), device=device, dtype=dtype, tensor_parallel=ranks, torch_threads=ranks,
                chunk_tokens=cache.chunk_tokens, device_cache=f"{cache.device_chunks * cache.chunk_tokens}tokens",
                host_cache=f"{cache.host_chunks * cache.chunk_tokens}tokens", context_limit=LIMIT,
                max_batch_tokens=scheduler.max_batch_tokens, max_running=scheduler.max_running,
                cuda_graphs=graphs, verify_swap=True, all_reduce=all_reduce, invariant=invariant,
            )
        )  # fmt: skip
    bits, contexts = Bits(), set[tuple[int, ...]]()

    def note(context: Sequence[int], output: Sequence[int], seed: int = 0) -> None:
        contexts.add((*context, *output[:-1]))

    paths = {"device": 0, "host": 0, "recomputed": 0, "suspended": 0}
    for number in range(schedules):
        rng, clock = random.Random(1000 * seed + number), Clock()
        checked = BitWorker(worker, cache, bits) if invariant else None
        engine = make_engine(
            cache,
            scheduler,
            Kept(checked or worker),
            clock,
            worker.arch.vocab_size,
            overlapped=number % 2 == 1,
        )
        limit = min(LIMIT, cache.device_chunks * cache.chunk_tokens)
        verify = note if invariant else oracle.verify
        driver = Driver(engine, clock, rng, verify, worker.arch.vocab_size, limit)
        for _ in range(14):
            driver.act()
            for _ in range(rng.randrange(4)):
                driver.step()
        driver.run_until_idle()
        engine.close()
        if checked is not None:
            checked.leave()
        for turn in driver.finished:
            assert turn.usage is not None and turn.usage.reconciles
            paths["device"] += turn.usage.gpu_cached_tokens
            paths["host"] += turn.usage.swapped_in_tokens
            paths["recomputed"] += turn.usage.recomputed_tokens
        paths["suspended"] += engine.stats().suspensions_total
    if invariant:
        checked = BitWorker(worker, cache, bits)
        alone(checked, cache.chunk_tokens, sorted(contexts))
        checked.leave()
        paths["compared"] = bits.compared
    worker.close()
    seen = {"near_ties": oracle.near_ties, "largest_gap": oracle.largest_gap, "tokens": oracle.tokens}
    print(json.dumps({**seen, **paths}))


if __name__ == "__main__":
    main()
