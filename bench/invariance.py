"""What ``--invariant`` keeps and costs: bits of logits, keys and values on a GPU, and times of steps there or on a CPU.

    python bench/invariance.py --out OUT
    python bench/invariance.py --cpu --shape tiny-llama-gqa8 --out OUT

Both workers have the same random weights and are timed in turns. Bits are those of contexts that are computed alone,
each in one step, against the same contexts in other steps: many at once, in chunks of any length, token by token, over
pages that others have computed, and again from the middle.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import dummy_model
import msgspec
import numpy as np
import torch
from common.engine_steps import CHUNK, GREEDY, Bench
from common.provenance import commit, gpu_name, portable, table, write_report

from pensieve.config import EngineOptions
from pensieve.core import RequestKey
from pensieve.engine.plan import Plan, Span
from pensieve.engine.worker import invariance
from pensieve.engine.worker.cuda_worker import CudaWorker
from pensieve.engine.worker.sizing import worker_info
from pensieve.engine.worker.torch_worker import TorchWorker
from pensieve.model.folder import load_arch
from pensieve.model.ops import INVARIANT_OPS, TORCH_OPS, triton_ops
from pensieve.model.transformer import Transformer
from pensieve.model.weights import load_weights

SHARED = 1024
"""Tokens with which every second context begins."""


@contextmanager
def plain_products(on: bool) -> Iterator[None]:
    """The settings of an invariant worker's process, or those of an ordinary one."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, torch.backends.cuda.preferred_blas_library()
    if on:
        invariance.use_plain_products()
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before[0]
        torch.backends.cuda.preferred_blas_library(before[1])


@dataclass
class Seen:
    """Bits of each context, by its tokens."""

    worker: CudaWorker
    logits: dict[bytes, torch.Tensor] = field(default_factory=dict)
    pages: dict[bytes, torch.Tensor] = field(default_factory=dict)
    values: int = 0
    differing: int = 0

    def run(
        self, spans: list[tuple[int, int, int]], contexts: list[np.ndarray], tables: list[np.ndarray]
    ) -> None:
        """Compute spans (context, start, end), and compare the logits after each."""
        made = [
            Span(RequestKey(which + 1), start, contexts[which][start:end].astype(np.int32), row, GREEDY)
            for row, (which, start, end) in enumerate(spans)
        ]
        used = [tables[which][: -(-end // CHUNK)] for which, _, end in spans]
        self.worker.run(Plan(0, tuple(made), tuple(used)))
        logits = self.worker._programs.shared.logits[: len(spans)].view(torch.int32).cpu()
        for row, (which, _, end) in enumerate(spans):
            self._compare(self.logits, contexts[which][:end].tobytes(), logits[row].clone())

    def read(self, context: np.ndarray, table: np.ndarray) -> None:
        """Compare the keys and values of a context, by a sum of each token and layer over its bits."""
        positions = np.arange(len(context))
        pages = torch.from_numpy(table[positions // CHUNK].astype(np.int64)).cuda()
        slots = torch.from_numpy(positions % CHUNK).cuda()
        sums = []
        for layer in range(self.worker.arch.num_layers):
            held = self.worker.pools.attention(layer)[pages, :, :, slots].contiguous()
            bits = held.view(torch.int16).flatten(1).long()
            odd = torch.arange(bits.shape[1], device="cuda") * 0x9E3779B97F4A7C1 | 1
            sums.append((bits * odd).sum(1))
        self._compare(self.pages, context.tobytes(), torch.stack(sums).cpu(), bits.shape[1])

    def _compare(
        self, known: dict[bytes, torch.Tensor], key: bytes, found: torch.Tensor, each: int = 1
    ) -> None:
        before = known.setdefault(key, found)
        if before is not found:
            self.values += found.numel() * each
            self.differing += int((before != found).sum()) * each


def bits(worker: CudaWorker, seed: int, count: int, longest: int) -> dict[str, Any]:
    """Return how many values were compared, and how many differ."""
    rng = np.random.default_rng(seed)
    seen, vocabulary = Seen(worker), worker.arch.vocab_size
    common = rng.integers(0, vocabulary, SHARED)
    contexts = []
    for index in range(count):
        length = int(rng.integers(3, longest))
        tokens = rng.integers(0, vocabulary, length)
        if index % 2 and length > SHARED + 1:
            tokens[:SHARED] = common
        contexts.append(tokens)
    sizes = [-(-len(context) // CHUNK) for context in contexts]
    if sum(sizes) > worker.info.device_chunks:
        raise click.UsageError(
            f"{sum(sizes)} pages for the contexts, the device cache has {worker.info.device_chunks}"
        )
    ends = np.cumsum(sizes)
    own = [np.arange(end - size, end, dtype=np.int32) for size, end in zip(sizes, ends, strict=True)]
    for which, context in enumerate(contexts):  # alone: the stateless run
        for end in range(len(context) - 3, len(context) + 1):
            spans = [(which, 0, end)]
            seen.run(spans, contexts, own)
        seen.read(context, own[which])
    ways = {
        "chunks of any length, many at once": lambda left: int(
            rng.choice([1, 2, 17, 63, 64, 200, 513, left])
        ),
        "token by token at the end": lambda left: left - 3 if left > 3 else 1,
        "chunks of 512": lambda left: 512,
    }
    for length in ways.values():
        poison(worker)
        done = [0] * count
        while any(at < len(context) for at, context in zip(done, contexts, strict=True)):
            room, spans = worker.info.max_batch_tokens, []
            for which in rng.permutation(count).tolist():
                left = len(contexts[which]) - done[which]
                step = min(max(1, length(left)), left, room)
                if step > 0:
                    spans.append((which, done[which], done[which] + step))
                    done[which] += step
                    room -= step
            seen.run(spans[: worker.info.max_running], contexts, own)
            for which, start, _ in spans[worker.info.max_running :]:
                done[which] = start
        for which, context in enumerate(contexts):
            seen.read(context, own[which])
    # Leading pages computed again from the beginning, and the last tokens over pages of another context.
    starts = [table.copy() for table in own]
    first = next(index for index in range(count) if np.array_equal(contexts[index][:SHARED], common))
    for index in range(count):
        if np.array_equal(contexts[index][:SHARED], common):
            starts[index][: SHARED // CHUNK] = own[first][: SHARED // CHUNK]
    for back in (3, 2, 1):
        spans = [
            (which, len(context) - back, len(context) - back + 1) for which, context in enumerate(contexts)
        ]
        for at in range(0, count, worker.info.max_running):
            seen.run(spans[at : at + worker.info.max_running], contexts, starts)
    for which, context in enumerate(contexts):
        seen.run([(which, 0, len(context) // 2)], contexts, own)
        seen.read(context, own[which])
    return {
        "contexts": count,
        "tokens": sum(map(len, contexts)),
        "values compared": seen.values,
        "differing": seen.differing,
    }


def poison(worker: CudaWorker) -> None:
    for layer in range(worker.arch.num_layers):
        worker.pools.attention(layer).fill_(torch.nan)


def costs(benches: dict[str, Bench], rounds: int) -> list[dict[str, Any]]:
    """Time steps of both workers in turns."""
    found: dict[str, dict[str, list[float]]] = {}

    def note(what: str, name: str, seconds: float) -> None:
        found.setdefault(what, {}).setdefault(name, []).append(seconds)

    for _ in range(rounds):
        for name, bench in benches.items():
            with plain_products(name == "invariant"):
                for batch, context in ((1, 1024), (1, 8192), (8, 4096), (64, 1024), (256, 256)):
                    note(
                        f"decode, {batch} x {context}",
                        name,
                        bench.steady(bench.decodes(batch, context, 40)).wall,
                    )
                for new in (512, 2048, 8192):
                    taken = [bench.turn(0, new, swapped=False) for _ in range(5)][1:]
                    note(f"prefill of {new}", name, statistics.median(taken))
                taken = [bench.turn(8192 - 256, 256, swapped=False) for _ in range(5)][1:]
                note("256 tokens after 7,936", name, statistics.median(taken))
                note("64 decodes and 448 new", name, mixed(bench))
    return _rows(found)


def mixed(bench: Bench) -> float:
    first = 64 * -(-1064 // CHUNK)
    pages = np.arange(first, first + -(-960 // CHUNK), dtype=np.int32)
    turn = Span(RequestKey(9999), 512, np.arange(448, dtype=np.int32), 64, GREEDY)
    return bench.steady(
        bench.plan([*plan.spans, turn], [*plan.page_tables, pages]) for plan in bench.decodes(64, 1024, 30)
    ).wall


def cpu_costs(workers: dict[str, TorchWorker], rounds: int) -> list[dict[str, Any]]:
    """Time steps in seconds of processor time."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, worker in workers.items():
            bench = Bench(worker)
            steps = {f"decode, {batch} x 512": list(bench.decodes(batch, 512, 8)) for batch in (1, 8, 32)}
            for new in (512, 2048):
                pages = np.arange(-(-new // CHUNK), dtype=np.int32)
                turn = Span(RequestKey(1), 0, np.arange(new, dtype=np.int32) % 1000, 0, GREEDY)
                steps[f"prefill of {new}"] = [bench.plan([turn], [pages])] * 4
            for what, plans in steps.items():
                times = []
                for plan in plans:
                    begin = time.process_time()
                    worker.run(plan)
                    times.append(time.process_time() - begin)
                found.setdefault(what, {}).setdefault(name, []).append(statistics.median(times[1:]))
    return _rows(found)


def _rows(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    return [
        {
            "step": what,
            **{f"{name} ms": round(1e3 * statistics.median(times), 3) for name, times in of.items()},
            "ratio": round(statistics.median(of["invariant"]) / statistics.median(of["ordinary"]), 3),
        }
        for what, of in found.items()
    ]


def measure_cpu(path: Path, rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    arch = load_arch(path)
    weights = load_weights(path, arch, dtype=torch.float32, load_format="dummy")
    workers = {}
    for name, ops in (("invariant", INVARIANT_OPS), ("ordinary", TORCH_OPS)):
        options = EngineOptions(
            model=str(path), device="cpu", dtype="float32", device_cache="32768tokens", host_cache="0",
            invariant=name == "invariant", max_batch_tokens=2048,
        )  # fmt: skip
        workers[name] = TorchWorker(Transformer(arch, weights, ops), worker_info(options, arch))
    return cpu_costs(workers, rounds)


@click.command(context_settings={"show_default": True})
@click.option("--shape", default="llama-2-13b-gqa10", type=click.Choice(list(dummy_model.SHAPES)))
@click.option("--device-cache", default="16GiB", help="Of each worker.")
@click.option("--rounds", default=2)
@click.option("--contexts", default=24)
@click.option("--longest", default=4096, help="Most tokens of a context.")
@click.option("--seed", default=1)
@click.option("--cost/--no-cost", default=True)
@click.option("--cpu", is_flag=True, help="Only the cost, in processor time of one thread, in float32.")
@click.option("--bits/--no-bits", "with_bits", default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("build"))
@click.option("--name", default="invariance")
def main(
    shape: str, device_cache: str, rounds: int, contexts: int, longest: int, seed: int, cost: bool, cpu: bool,
    with_bits: bool, out: Path, name: str,
) -> None:  # fmt: skip
    """Compare the bits of an invariant worker, and its times with those of an ordinary one."""
    with tempfile.TemporaryDirectory() as folder:
        path = dummy_model.make(shape, Path(folder))
        if cpu:
            rows = measure_cpu(path, rounds)
            write_report(out, name, {"command": portable(["python", *sys.argv]), "cost": rows}, table(rows))
            click.echo("\n".join(table(rows)))
            return
        options = EngineOptions(
            model=str(path), load_format="dummy", device="cuda", dtype="bfloat16", device_cache=device_cache,
            host_cache="0", max_batch_tokens=8192, max_running=256, cost_profile="estimate",
        )  # fmt: skip
        arch = load_arch(path)
        weights = load_weights(path, arch, dtype=torch.bfloat16, device="cuda", load_format="dummy")
        model = Transformer(arch, weights, triton_ops(invariant=True))
        report: dict[str, Any] = {"schema": "pensieve.invariance/1", "shape": shape}
        lines: list[str] = []
        workers = {}
        for one in ("invariant", "ordinary") if cost else ("invariant",):
            with plain_products(one == "invariant"):
                if one == "invariant":
                    try:
                        invariance.check(model, 8192)
                        report["check"] = "passed"
                    except invariance.NotInvariant as error:
                        report["check"] = str(error)
                    click.echo(f"check: {report['check']}")
                own = msgspec.structs.replace(options, invariant=one == "invariant")
                workers[one] = CudaWorker(model, worker_info(own, arch), own)
                workers[one].warm_up()
        if with_bits:
            with plain_products(True):
                report["bits"] = bits(workers["invariant"], seed, contexts, longest)
            lines += ["", "## Bits", "", *table([report["bits"]])]
            click.echo("\n".join(lines))
        if cost:
            report["cost"] = costs({one: Bench(worker) for one, worker in workers.items()}, rounds)  # type: ignore[arg-type]
            lines += ["", "## Cost", "", *table(report["cost"])]
        for worker in workers.values():
            with closing(worker):
                pass
    report |= {"command": portable(["python", *sys.argv]), "commit": commit(), "device": gpu_name()}
    head = [
        f"`{report['command']}`",
        "",
        f"{shape}, bfloat16, {report['device']}, torch {torch.__version__}, commit {report['commit']}.",
    ]
    write_report(out, name, report, [*head, *lines])
    click.echo("\n".join([*head, *lines]))


if __name__ == "__main__":
    main()
