"""Times of the engine on this GPU: decode steps, prefill, returning turns by where their history lies, and swapping.

Steps go straight to the worker, as plans made here, over KV whose content does not matter for time. Two are always in
flight, as in the server; ``gap`` is what the device idles between two. The section ``loop`` runs the whole engine,
scheduler included. Weights are random (``--load-format dummy``).

With ``--tensor-parallel N`` the model is divided over N GPUs. Floors and rates are then those of one of them, and the
section ``kernels`` has the all-reduces among its rows. For the gain, run it with 1 and with N under two ``--name``s.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import click
import dummy_model
import numpy as np
import torch
import triton
from common.engine_steps import CHUNK, GREEDY, Bench, Recorder
from common.gpu_timing import measure_ceilings
from common.provenance import commit, gpu_name, portable, table
from rich.console import Console
from rich.progress import track

from pensieve.config import AllReduce, EngineOptions, KvDtypeName, SwapMechanism, WeightsName
from pensieve.core import RequestKey, Sampling, pack_tokens
from pensieve.engine.build import cache_config, scheduler_config
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel
from pensieve.engine.engine import Engine
from pensieve.engine.messages import EngineReady, Submit
from pensieve.engine.plan import Span
from pensieve.engine.ranks.leader import build_workers
from pensieve.engine.scheduling.scheduler import Scheduler
from pensieve.engine.worker.cuda_worker import CudaWorker

SECTIONS = ("decode", "prefill", "ttft", "swap", "loop", "kernels")
ONE_GPU = ("swap",)
"""Sections that look at the copies of a single worker."""
BANDWIDTH, MATRIX = 4.25e12, 785e12
"""Ceilings of one H200: bytes/s of a device copy, bf16 operations/s of a large product (see ops_attention_h200.md)."""


def decode_rows(bench: Bench) -> Iterator[dict[str, Any]]:
    for context in (1024, 4096):
        for batch in (1, 8, 16, 64, 128, 256):
            if batch * (context + 64) > bench.worker.info.device_chunks * CHUNK:
                continue
            taken = bench.steady(bench.decodes(batch, context, 46))
            floor = bench.step_bytes(batch, context) / BANDWIDTH
            yield {
                "batch": batch, "context": context, "step ms": ms(taken.wall), "p99 ms": ms(taken.wall_p99),
                "device ms": ms(taken.device), "gap µs": us(taken.gap), "gap p99 µs": us(taken.gap_p99),
                "floor ms": ms(floor), "limit ms": ms(1.15 * floor + 1e-3),
                "÷ limit": round(taken.wall / (1.15 * floor + 1e-3), 3),
            }  # fmt: skip


def prefill_rows(bench: Bench) -> Iterator[dict[str, Any]]:
    arch = bench.arch
    for new in (512, 1024, 2048, 4096, 8192):
        if new > bench.worker.info.max_batch_tokens:
            continue
        taken = median([bench.turn(0, new, swapped=False) for _ in range(7)][2:])
        pairs = new * (new + 1) / 2
        flops = 2 * (arch.active_parameters - arch.vocab_size * arch.hidden_size) * new
        flops += 4 * arch.num_heads * arch.head_dim * pairs * arch.num_layers
        yield {
            "new tokens": new, "ms": ms(taken), "tokens/s": round(new / taken),
            "TFLOP/s": round(flops / taken / 1e12, 1), "% of 785": round(100 * flops / taken / MATRIX, 1),
        }  # fmt: skip


def ttft_rows(bench: Bench) -> Iterator[dict[str, Any]]:
    budget = bench.worker.info.max_batch_tokens
    for history in (512, 2048, 8192):
        for new in (32, 256):
            on_device = median([bench.turn(history, new, swapped=False) for _ in range(9)][2:])
            on_host = median([bench.turn(history, new, swapped=True) for _ in range(9)][2:])
            again = median([bench.recomputed(history, new, budget) for _ in range(5)][1:])
            yield {
                "history": history, "new": new, "on device ms": ms(on_device), "on host ms": ms(on_host),
                "recomputed ms": ms(again), "host ÷ device": round(on_host / on_device, 3),
                "host ÷ recomputed": round(on_host / again, 3),
            }  # fmt: skip


def swap_rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """Decode steps alone, and with so many chunks copied beside each step as the link can move meanwhile."""
    batch, context, steps = 64, 1024, 146
    alone = bench.steady(bench.decodes(batch, context, steps))
    chunks = int(0.95 * 50e9 * alone.wall / (CHUNK * bench.bytes_per_token))
    for name, into, out in (("alone", 0, 0), ("in", chunks, 0), ("out", 0, chunks), ("both", chunks, chunks)):
        taken = bench.steady(bench.decodes(batch, context, steps, swap_in=into, swap_out=out))
        moved = (into + out) * CHUNK * bench.bytes_per_token / taken.wall
        yield {
            "swapping": name, "chunks a step": into + out, "GB/s": round(moved / 1e9, 1), "step ms": ms(taken.wall),
            "p99 ms": ms(taken.wall_p99), "p99 ÷ alone": round(taken.wall_p99 / alone.wall_p99, 3),
        }  # fmt: skip
        assert isinstance(bench.worker, CudaWorker)
        bench.worker.swap.drain()


def loop_rows(bench: Bench, options: EngineOptions) -> Iterator[dict[str, Any]]:
    """The whole engine, scheduler and all, on generations of 1k tokens of context, beside the time that their bytes
    take at the rate of a copy on this device."""
    rate = measure_ceilings().copy_bytes_per_s
    for batch in (1, 8, 64, 256):
        if batch > options.max_running:
            continue
        info, recorder = bench.worker.info, Recorder(bench.worker)
        cost = CostModel(((0, 0.0), (1024, 1.0)), 1.0, CHUNK)
        scheduler = Scheduler(
            scheduler_config(options, bench.arch, info), CacheManager(cache_config(options, info), cost)
        )
        ready = EngineReady(scheduler.context_limit, bench.arch.vocab_size, "cuda", info.dtype, 0, 0, CHUNK)
        engine = Engine(scheduler, recorder, ready, overlapped=True)
        for request in range(batch):
            tokens = pack_tokens((np.arange(1024) + 7 * request) % 1000)
            sampling = Sampling(max_output_tokens=240, ignore_eos=True)
            engine.handle(Submit(request + 1, f"s{request}", tokens, 1024, sampling))
        while engine.has_work:
            engine.step()
        full = [one for one in recorder.steps if one.tokens == batch][10:]
        if not full:  # they do not fit into the cache together
            continue
        gaps = [one.timings["gap"] for one in full]
        walls = [one.timings["device"] + one.timings["gap"] for one in full]
        host = [one.host for one in full]
        floor = bench.step_bytes(batch, 1024 + 240 // 2) / rate
        yield {
            "batch": batch, "steps": len(full), "step ms": ms(median(walls)), "gap µs": us(median(gaps)),
            "gap p99 µs": us(float(np.quantile(gaps, 0.99))), "host ms": ms(median(host)),
            "floor ms": ms(floor), "÷ floor": round(median(walls) / floor, 3),
        }  # fmt: skip


def kernel_rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """What the kernels of a decode step and of a mixed step take, the longest first."""
    for batch, new in ((64, 0), (256, 0), (64, 448)):
        plans = list(bench.decodes(batch, 1024, 9))
        if new:
            first = batch * -(-1033 // CHUNK)
            table = np.arange(first, first + -(-(512 + new) // CHUNK), dtype=np.int32)
            turn = Span(RequestKey(9999), 512, np.arange(new, dtype=np.int32), batch, GREEDY)
            plans = [bench.plan([*plan.spans, turn], [*plan.page_tables, table]) for plan in plans]
        for plan in plans[:5]:
            bench.worker.run(plan)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for plan in plans[5:]:
                bench.worker.run(plan)
            torch.cuda.synchronize()
        for row in sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)[:9]:
            yield {
                "step": f"{batch} decodes" + (f" + {new} new" if new else ""), "kernel": row.key[:60],
                "launches": row.count // 4, "ms a step": round(row.device_time_total / 4e3, 3),
            }  # fmt: skip


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


@click.command(context_settings={"show_default": True})
@click.option("--shape", default="llama-2-13b-gqa10", type=click.Choice(list(dummy_model.SHAPES)))
@click.option("--section", "sections", multiple=True, type=click.Choice(SECTIONS), help="Default: all.")
@click.option("--device-cache", default="auto")
@click.option("--host-cache", default="16GiB")
@click.option("--max-batch-tokens", default=8192)
@click.option("--max-running", default=256)
@click.option("--weights", type=click.Choice(get_args(WeightsName)), default="auto", help="As of the server.")
@click.option("--swap-mechanism", type=click.Choice(get_args(SwapMechanism)), default="auto")
@click.option("--kv-dtype", type=click.Choice(get_args(KvDtypeName)), default="auto")
@click.option("--tensor-parallel", default=1, metavar="N", help="GPUs that share the model.")
@click.option("--all-reduce", type=click.Choice(get_args(AllReduce)), default="auto")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench/results"))
@click.option("--name", default="engine", help="Name of the report's files.")
def main(
    shape: str, sections: tuple[str, ...], device_cache: str, host_cache: str, max_batch_tokens: int,
    max_running: int, weights: WeightsName, swap_mechanism: SwapMechanism, kv_dtype: KvDtypeName, tensor_parallel: int,
    all_reduce: AllReduce, out: Path, name: str,
) -> None:  # fmt: skip
    """Time the engine on this machine's GPU, or GPUs."""
    sections = sections or tuple(one for one in SECTIONS if tensor_parallel == 1 or one not in ONE_GPU)
    if tensor_parallel > 1 and set(sections) & set(ONE_GPU):
        raise click.BadParameter(f"{ONE_GPU[0]} is for one GPU", param_hint="--section")
    with tempfile.TemporaryDirectory() as folder:
        options = EngineOptions(
            model=str(dummy_model.make(shape, Path(folder))), load_format="dummy", device="cuda", dtype="bfloat16",
            device_cache=device_cache, host_cache=host_cache, max_batch_tokens=max_batch_tokens,
            max_running=max_running, swap_mechanism=swap_mechanism, cost_profile="estimate",
            tensor_parallel=tensor_parallel, all_reduce=all_reduce, weights=weights, kv_dtype=kv_dtype,
        )  # fmt: skip
        started = time.perf_counter()
        worker = build_workers(options)
        start_up = time.perf_counter() - started
        with closing(worker):
            report = _measure(Bench(worker), options, sections)
    report = {
        "schema": "pensieve.engine/1", "shape": shape, "weights": weights, "kv_dtype": kv_dtype,
        "gpus": tensor_parallel, "start_up_s": round(start_up, 1), **report,
    }  # fmt: skip
    report |= {
        "command": portable(["python", *sys.argv]), "commit": commit(), "device": gpu_name(),
        "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip
    lines = [
        f"`{report['command']}`", "",
        f"{shape}, bfloat16{', fp8 weights' * (weights == 'fp8')}, KV in {kv_dtype}, on {tensor_parallel} "
        f"{report['device']}, torch {report['torch']}, Triton {report['triton']}, commit {report['commit']}; "
        f"start-up {report['start_up_s']} s.",
    ]  # fmt: skip
    for section, rows in report["sections"].items():
        lines += ["", f"## {section}", "", *(table(rows) if rows else ["nothing fits"])]
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / f"{name}.md").write_text("\n".join(lines) + "\n")
    click.echo("\n".join(lines))


def _measure(bench: Bench, options: EngineOptions, sections: Sequence[str]) -> dict[str, Any]:
    makers = {
        "decode": lambda: decode_rows(bench), "prefill": lambda: prefill_rows(bench),
        "ttft": lambda: ttft_rows(bench), "swap": lambda: swap_rows(bench), "loop": lambda: loop_rows(bench, options),
        "kernels": lambda: kernel_rows(bench),
    }  # fmt: skip
    console = Console(stderr=True)
    found = {}
    for section in track(sections, "measuring", console=console, transient=True):
        found[section] = list(makers[section]())
        console.print(section, *(str(row) for row in found[section]), sep="\n")
    return {"sections": found}


if __name__ == "__main__":
    main()
