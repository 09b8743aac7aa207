"""``pensieve profile``: measures ``Cost(l) = Cost_attention(l) + c`` of recomputing one chunk on this machine.

One conversation is built up in the KV pool. At each power of two of its length *l* the chunk that ends there is
computed again several times; the fastest is the total cost at *l*. ``c`` is the total that a context of length 0 would
have, by the line through the two shortest contexts; the rest is attention. ``CostModel.from_json`` reads the file.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pensieve.config import EngineOptions
from pensieve.core import RequestKey, Sampling, TokenArray
from pensieve.doctor_checks import usable_cores
from pensieve.engine.cost import FORMAT
from pensieve.engine.plan import Plan, SampleSpec, Span, StepWorker

if TYPE_CHECKING:
    from pensieve.engine.worker import Worker

REQUEST: Final = RequestKey(1)
LONGEST: Final = 16384
"""Default end of the measurement: beyond its last point a cost model continues the line."""
FILL_TOKENS: Final = 512
"""Tokens per step while the context is built up between two measurements."""


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds to compute the chunk that ends at ``context`` tokens, all before it being cached."""

    context: int
    seconds: float


class Prober:
    """Runs one growing context through a worker."""

    def __init__(
        self,
        worker: StepWorker,
        *,
        chunk_tokens: int,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._worker = worker
        self._chunk_tokens = chunk_tokens
        self._vocab_size = vocab_size
        self._clock = clock
        self._step = 0

    def measure(self, longest: int, repeats: int) -> Iterator[Point]:
        """Points at the powers of two from one chunk to ``longest`` tokens, shortest first."""
        chunk, done, context = self._chunk_tokens, 0, self._chunk_tokens
        while context <= longest:
            while done < context - chunk:
                end = min(done + FILL_TOKENS, context - chunk)
                self._run(done, end)
                done = end
            self._run(context - chunk, context)  # warms up: compiles kernels, fills caches
            times = [self._timed(context - chunk, context) for _ in range(repeats)]
            done = context
            yield Point(context, min(times))  # what else the machine does only ever adds
            context *= 2

    def _timed(self, start: int, end: int) -> float:
        before = self._clock()
        self._run(start, end)
        return self._clock() - before

    def _run(self, start: int, end: int) -> None:
        """Compute tokens ``[start, end)``. A token is sampled after them, so a GPU has finished when this returns."""
        tokens: TokenArray = (np.arange(start, end, dtype=np.int64) * 7919 % self._vocab_size).astype(
            np.int32
        )
        pages = np.arange(-(-end // self._chunk_tokens), dtype=np.int32)
        sample = SampleSpec(Sampling(), output_index=0)
        self._step += 1
        self._worker.run(
            Plan(step=self._step, spans=(Span(REQUEST, start, tokens, 0, sample),), page_tables=(pages,))
        )


def split(points: list[Point]) -> tuple[list[tuple[int, float]], float]:
    """(attention cost at each context, c). Attention never falls as the context grows, and c is never negative."""
    if len(points) < 2:
        raise ValueError("at least two points are needed")
    first, second = points[:2]
    slope = max(0.0, (second.seconds - first.seconds) / (second.context - first.context))
    other = min(max(0.0, first.seconds - slope * first.context), min(point.seconds for point in points))
    attention: list[tuple[int, float]] = []
    highest = 0.0
    for point in points:
        highest = max(highest, point.seconds - other)
        attention.append((point.context, highest))
    return attention, other


def describe(worker: Worker, model: str, points: list[Point]) -> dict[str, Any]:
    """The profile as it is written: what was measured, and on what."""
    attention, other = split(points)
    return {
        "format": FORMAT,
        "model": model,
        "family": worker.arch.family,
        "device": worker.info.device,
        "dtype": worker.info.dtype,
        "chunk_tokens": worker.info.chunk_tokens,
        "attention": attention,
        "other_seconds": other,
        "versions": {name: importlib.metadata.version(name) for name in ("pensieve", "torch", "numpy")},
        "machine": f"{platform.system()} {platform.machine()}, {usable_cores()} cores",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _measure_with_progress(prober: Prober, longest: int, chunk_tokens: int, repeats: int) -> list[Point]:
    steps = (longest // chunk_tokens).bit_length()
    points: list[Point] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("context", total=steps)
        for point in prober.measure(longest, repeats):
            points.append(point)
            progress.update(task, advance=1, description=f"context {point.context}")
    return points


@click.command()
@click.option("--model", default="demo", show_default=True, metavar="MODEL", help="Folder, hub id or `demo`.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
)
@click.option("--chunk-tokens", type=click.IntRange(1, 256), default=32, show_default=True, metavar="N")
@click.option(
    "--longest",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"Longest context to measure.  [default: the model's limit, at most {LONGEST}]",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    metavar="N",
    help="Runs per context length.",
)
@click.option(
    "--threads", type=click.IntRange(0), default=0, metavar="N", help="CPU threads; 0: one per core."
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the JSON goes.  [default: stdout]",
)
def profile(
    model: str,
    device: Literal["auto", "cpu", "cuda"],
    dtype: Literal["auto", "float32", "bfloat16", "float16"],
    chunk_tokens: int,
    longest: int | None,
    repeats: int,
    threads: int,
    output: Path | None,
) -> None:
    """Measure what recomputing a chunk costs on this machine; write JSON for `pensieve serve --cost-profile`."""
    from pensieve.engine.worker import build_worker
    from pensieve.model.arch import ModelError, load_arch
    from pensieve.model.resolve import resolve_model

    try:
        folder = resolve_model(model)
        limit = load_arch(folder).context_limit
        if longest is not None and longest > limit:
            raise click.BadParameter(f"the model takes at most {limit} tokens", param_hint="--longest")
        longest = longest or min(limit, LONGEST)
        if longest < 2 * chunk_tokens:
            raise click.BadParameter(
                f"at least two chunks, {2 * chunk_tokens} tokens", param_hint="--longest"
            )
        worker = build_worker(
            EngineOptions(
                model=str(folder),
                device=device,
                dtype=dtype,
                chunk_tokens=chunk_tokens,
                device_cache=f"{longest}tokens",
                host_cache="0",
                torch_threads=threads,
            )
        )
    except (ModelError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    with contextlib.closing(worker):
        prober = Prober(worker, chunk_tokens=chunk_tokens, vocab_size=worker.arch.vocab_size)
        points = _measure_with_progress(prober, longest, chunk_tokens, repeats)
        text = json.dumps(describe(worker, model, points), indent=2)
    if output is None:
        click.echo(text)
    else:
        output.write_text(text + "\n")
        click.echo(f"wrote {output}", err=True)
