"""What a step takes by the size of its graph: whether sizes between others are worth having.

    python bench/kernel_ops/graph_sizes.py --out bench/results --name graph_sizes_13b_h200

Two kinds of steps: decodes alone, all contexts of one length; and steps as a server has them, whose contexts differ
(exponentially distributed) and whose pages lie anywhere, alone or beside a turn of a few new tokens on a history. Each
is timed in the graph that the worker would take, whoever makes the products, and in larger ones, whose further rows are
padding, all in turns; the parts of a step are from the profiler. With ``--device cpu`` and TRITON_INTERPRET=1 it
runs on a tiny shape, to see that it would.
"""

from __future__ import annotations

import bisect
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import triton

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

import dummy_model
from common.provenance import commit, gpu_name, portable
from kernel_ops.decode_steps import CHUNK, NOW, WAYS, Steps
from kernel_ops.kernel_times import profiled, shares
from kernel_ops.step_parts import PROFILED_STEPS, Row, table

from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import Plan, SampleSpec, Span
from pensieve.engine.worker.cuda_batch import CudaBatch, make_cuda_batch
from pensieve.engine.worker.graphs import buckets
from pensieve.kernels.attention.kinds import StepKind, classify

MAX_TOKENS, MAX_RUNNING = 8192, 512
"""The server's limits in the evaluation: which graphs there are follows from them."""
SIZES = (16, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 160, 192, 256)
SERVED = (
    (36, 0), (45, 0), (56, 0), (67, 0), (80, 0), (36, 20), (36, 38), (45, 38), (56, 20), (56, 38), (67, 38), (56, 150),
)  # fmt: skip
"""(decodes, new tokens of the turn beside them)."""
ROUND = (64, 128, 192, 256)
"""Sizes that padding goes up to."""
LIBRARIES = ("cuBLAS", "cuBLASLt")
MEAN_CONTEXT, HISTORY, SEED = 1100, 1000, 1
LONGEST = 8
"""Times the mean context."""


def served(steps: Steps, decodes: int, new: int) -> CudaBatch:
    """A step as a server has it. Where there are few pages, contexts are shorter."""
    rng = np.random.default_rng(SEED)
    mean = min(MEAN_CONTEXT, steps.pages * CHUNK // (4 * (decodes + 1)))
    spans = [(int(min(length, LONGEST * mean)) + 1, 1) for length in rng.exponential(mean, decodes)]
    if new:
        spans.append((min(HISTORY, mean), new))
    free, at = rng.permutation(steps.pages).astype(np.int32), 0
    made, tables = [], []
    spec = SampleSpec(Sampling(), 0)
    for row, (start, count) in enumerate(spans):
        pages = -(-(start + count) // CHUNK)
        made.append(Span(RequestKey(row), start, np.ones(count, np.int32), row, spec))
        tables.append(free[at : at + pages])
        at += pages
    assert at <= steps.pages, f"{at} pages wanted, {steps.pages} there"
    return make_cuda_batch(Plan(1, tuple(made), tuple(tables)), CHUNK, {})


def own_size(kind: StepKind, tokens: int) -> int:
    """Tokens of the graph that the worker takes."""
    sizes = buckets(kind, MAX_TOKENS, MAX_RUNNING)
    return sizes[bisect.bisect_left(sizes, tokens)]


def measured(steps: Steps, batch: CudaBatch, rounds: int, named: Row) -> tuple[Row, Row]:
    """Times of one step in several graphs, and the parts of the one that the worker takes."""
    kind, tokens = classify(batch.spans, steps.geometry), len(batch.tokens)
    own = own_size(kind, tokens)
    sizes = [own, *[size for size in ROUND if size > own][:2]]
    made: dict[tuple[int, str], Callable[[], None]] = {}
    for size in sizes:
        for way in (NOW, *LIBRARIES) if steps.on_gpu and size == own else (NOW,):
            made[size, way] = steps.program(WAYS[way], batch, size, kind)
    times = steps.timed({f"{size} {way}": run for (size, way), run in made.items()}, rounds, 6)
    first = times[f"{own} {NOW}"]
    found = named | {"kind": kind.value, "tokens": tokens, "graph": own, "ms": round(first, 3)}
    for size, way in list(made)[1:]:
        which = "own" if size == own else str(size)
        found[f"{which}, {way} ÷"] = round(times[f"{size} {way}"] / first, 4)
    parts = shares(profiled(made[own, NOW], PROFILED_STEPS), PROFILED_STEPS)
    return found, named | {"graph": own} | {part: share.alone_ms for part, share in parts.items()}


def as_markdown(report: dict[str, Any]) -> str:
    lines = [
        f"`{report['command']}`", "",
        f"{report['shape']} on {report['device']}, torch {report['torch']}, Triton {report['triton']}, commit "
        f"{report['commit']}; {report['seconds']} s.", "",
        "`ms`: in the graph that the worker takes (`graph`: its tokens); `÷`: the same step in another graph or by "
        "another library, over that. Parts: milliseconds that the step would be shorter without them, at most.",
    ]  # fmt: skip
    for name, rows in report["sections"].items():
        lines += ["", f"## {name}", "", *(table(rows) if rows else ["none"])]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--shape", default="llama-2-13b-gqa10", show_default=True, help="Of bench/dummy_model.py.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--context", default=1024, show_default=True, help="Of the decodes alone.")
@click.option("--rounds", default=4, show_default=True, help="In which ways take turns; the median counts.")
@click.option("--size", "sizes", type=int, multiple=True, default=SIZES, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench/results"), show_default=True)
@click.option("--name", default="graph_sizes", show_default=True, help="Name of the report's files.")
def main(
    shape: str, device: str, context: int, rounds: int, sizes: tuple[int, ...], out: Path, name: str
) -> None:
    """Measure steps by the size of their graph; a report as JSON and as a table."""
    started = time.monotonic()
    report: dict[str, Any] = {
        "schema": "pensieve.graph_sizes/1", "command": portable(["python", *sys.argv]), "commit": commit(),
        "device": gpu_name() or device, "torch": torch.__version__, "triton": triton.__version__, "shape": shape,
        "sections": {},
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    mixes = [mix for mix in SERVED if mix[0] <= max(sizes)]
    most = max(max(sizes), max(ROUND))
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = dummy_model.make(shape, Path(folder))
        steps = Steps(model, device, dtype, context, (most,), tuple(StepKind))
        batches = [
            ("decodes alone", {"decodes": size}, steps.batch(size)) for size in sizes
        ] + [
            ("as served", {"decodes": decodes, "new": new}, served(steps, decodes, new))
            for decodes, new in mixes
        ]  # fmt: skip
        for section, named, batch in batches:
            times, parts = measured(steps, batch, rounds, named)
            report["sections"].setdefault(section, []).append(times)
            report["sections"].setdefault(f"{section}, parts", []).append(parts)
            report["seconds"] = round(time.monotonic() - started)
            # Written after each: what was found stays if the machine goes.
            (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
            (out / f"{name}.md").write_text(as_markdown(report))
    click.echo(as_markdown(report))


if __name__ == "__main__":
    main()
