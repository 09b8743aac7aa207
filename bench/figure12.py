"""Figure 12 of the EuroSys paper: a few new tokens attend to a long past that lies in pages, four ways.

* ``pensieve``: our kernel reads the pages, in one launch.
* ``copy out``: the pages are copied to contiguous memory, which fused attention then reads.
* ``multi-round``: our kernel once per new token, each time with one query per request, as a kernel for decoding alone
  makes it.
* ``ideal``: fused attention, and keys and values are contiguous already.

Each straw man gets the best parts at hand: pages in the layout that fused attention reads, copied by the kernel that
swaps chunks, with enough programs for all of the device; our own decode launches; plans made ahead. Fused attention is
FlashAttention-3 (``--fa3``), without it PyTorch's. As in the paper: 32 requests with 8 new tokens each. All four must
agree before any is timed; calls take turns over sets of data that the L2 cache does not hold, inside CUDA graphs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import triton
from common.gpu_timing import Ceilings, Contender, measure_ceilings, times
from common.provenance import commit, portable
from kernel_ops import attention as ops_attention
from kernel_ops import flash_attention
from kernel_ops.attention import DIM, PAGE
from torch.nn.attention.bias import causal_lower_right

from pensieve.kernels.attention.plan import multiprocessors_of
from pensieve.kernels.chunk_copy import ChunkCopy, runs_of
from pensieve.kernels.span_table import SpanTable
from pensieve.replay.presentation import plot_style, plots

MODELS = {"OPT-13B": (40, 40), "Llama-2-13B GQA": (40, 10)}
"""Query and KV heads."""
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
WAYS = ("pensieve", "copy out", "multi-round", "ideal")
COPY_PROGRAMS = 16
"""Per multiprocessor, of the copy: 16 KiB each on their way are enough for the device's own memory."""
ENOUGH_BYTES, MOST_SETS = 500e6, 4
"""Of KV that calls take turns over: many times the L2 cache."""
COLOURS = ("#25a17f", "#e0662a", "#c967a5", "#3b8bd0")
"""Of the ways, told apart by the colour-blind."""
Row = dict[str, Any]
Way = Callable[[int], torch.Tensor]
"""One call on a set of data; the result is [B, T, H, D]."""


@dataclass(frozen=True, slots=True)
class Shape:
    context: int
    """Tokens of each request, with the new ones: whole pages, so that contiguous copies have no gaps."""
    heads: int
    kv_heads: int
    batch: int = 32
    new: int = 8
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.context % PAGE or self.context < self.new:
            raise ValueError(
                f"{self.context} tokens, {self.new} of them new, are not a context of whole pages"
            )

    @property
    def num_pages(self) -> int:
        return self.batch * self.context // PAGE

    def spans(self, device: torch.device, first: int = 0, count: int = 0) -> SpanTable:
        """Of every request ``count`` (0: all) new tokens from the ``first`` on."""
        position = self.context - self.new + first
        requests = range(self.batch)
        return SpanTable.build(
            [count or self.new for _ in requests], [position for _ in requests], requests, device
        )

    @property
    def kv_bytes(self) -> int:
        """Keys and values that a call must read."""
        return 2 * self.batch * self.context * self.kv_heads * DIM * self.dtype.itemsize

    @property
    def flops(self) -> float:
        pairs = self.batch * (self.new * self.context - self.new * (self.new - 1) / 2)
        return 4 * self.heads * DIM * pairs


@dataclass(frozen=True, slots=True)
class Step:
    """The same keys and values in every layout that a way reads; lists have one entry per set of data."""

    shape: Shape
    q: torch.Tensor
    """[B, T, H, D]"""
    tables: torch.Tensor
    """int32 [B, pages of a request]"""
    pools: list[torch.Tensor]
    """[P, 2, Hkv, N, D], as the server has them."""
    paged: list[torch.Tensor]
    """[2, P, N, Hkv, D]: the same pages as fused attention reads them."""
    contiguous: list[torch.Tensor]
    """[2, B · S, Hkv, D]: contexts of S tokens, one after the other"""


def make_step(shape: Shape, device: str) -> Step:
    """Random data, pages in random order."""
    sets = max(1, min(MOST_SETS, round(ENOUGH_BYTES / shape.kv_bytes)))
    tables = torch.randperm(shape.num_pages, device=device).int().view(shape.batch, -1)
    size = (shape.num_pages, 2, shape.kv_heads, PAGE, DIM)
    pools = [torch.randn(size, device=device, dtype=shape.dtype) for _ in range(sets)]
    paged = [pool.permute(1, 0, 3, 2, 4).contiguous() for pool in pools]
    contiguous = [both[:, tables.flatten().long()].flatten(1, 2) for both in paged]
    q = torch.randn(shape.batch, shape.new, shape.heads, DIM, device=device, dtype=shape.dtype)
    return Step(shape, q, tables, pools, paged, contiguous)


def ways(step: Step, peer: flash_attention.Peer | None) -> dict[str, Way]:
    """The four, with everything prepared that does not depend on the layer."""
    made = pensieve(step), copy_out(step, peer), multi_round(step), ideal(step, peer)
    return dict(zip(WAYS, made, strict=True))


def pensieve(step: Step) -> Way:
    rows = step.q.flatten(0, 1)
    out = torch.full_like(rows, torch.nan)
    attend = _paged(step, step.shape.spans(rows.device), rows, out)

    def call(index: int) -> torch.Tensor:
        attend(index)
        return out.view_as(step.q)

    return call


def copy_out(step: Step, peer: flash_attention.Peer | None) -> Way:
    copied = torch.full_like(
        step.contiguous[0], torch.nan
    )  # one buffer, as the layers of a server would share it
    copy, fused = copies(step, copied), _fused(step, peer)

    def call(index: int) -> torch.Tensor:
        copy(index)
        return fused(copied)

    return call


def copies(step: Step, copied: torch.Tensor) -> Contender:
    """The first half of ``copy out``: gathers the pages of all requests in ``copied``."""
    shape = step.shape
    target = copied.view(2, shape.num_pages, PAGE, shape.kv_heads, DIM)
    programs = COPY_PROGRAMS * multiprocessors_of(copied.device)
    made = [ChunkCopy(runs_of(target), runs_of(paged), programs=programs) for paged in step.paged]
    sources = step.tables.flatten()
    pairs = torch.stack([sources, torch.arange(len(sources), device=sources.device).int()], 1).contiguous()
    return lambda index: made[index](pairs)


def multi_round(step: Step) -> Way:
    queries = step.q.transpose(0, 1).contiguous()  # [T, B, H, D]
    out = torch.full_like(queries, torch.nan)
    spans = [step.shape.spans(queries.device, i, 1) for i in range(step.shape.new)]
    rounds = [_paged(step, each, q, o) for each, q, o in zip(spans, queries, out, strict=True)]

    def call(index: int) -> torch.Tensor:
        for attend in rounds:
            attend(index)
        return out.transpose(0, 1)

    return call


def ideal(step: Step, peer: flash_attention.Peer | None) -> Way:
    fused = _fused(step, peer)
    return lambda index: fused(step.contiguous[index])


def _paged(step: Step, spans: SpanTable, q: torch.Tensor, out: torch.Tensor) -> Contender:
    """Our kernel for queries [B · T, H, D], as a captured graph of a server has it."""
    return ops_attention.ours(ops_attention.Data(q, step.pools, step.tables, spans, 0.0, 0.0), out)


def _fused(step: Step, peer: flash_attention.Peer | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Attention over contiguous keys and values [2, B · S, Hkv, D]."""
    scale = DIM**-0.5
    if peer is not None:
        rows = step.q.flatten(0, 1)
        out = torch.full_like(rows, torch.nan)
        forward = peer.prepare_contiguous(step.shape.spans(rows.device), out, scale)
        return lambda both: forward(rows, both[0], both[1]).view_as(step.q)
    queries, mask = step.q.transpose(1, 2), causal_lower_right(step.shape.new, step.shape.context)

    def call(both: torch.Tensor) -> torch.Tensor:
        keys, values = both.unflatten(1, (step.shape.batch, -1)).transpose(2, 3)
        out: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    return call


def check(found: dict[str, Way], most: float = ops_attention.AGREEMENT) -> None:
    """Raises ValueError when a result differs from the ideal one by more than ``most`` of its norm."""
    want = found["ideal"](0).float()
    for name, way in found.items():
        error = float((way(0).float() - want).norm() / want.norm())
        if not error <= most:
            raise ValueError(f"{name} differs from the ideal result by {error:.1e} of its norm")


def measure(shape: Shape, ceilings: Ceilings, peer: flash_attention.Peer | None) -> Row:
    """One row: microseconds of one call of each. Raises ValueError when the results differ."""
    step = make_step(shape, "cuda")
    found = ways(step, peer)
    check(found)
    floor, _ = ceilings.floor_us(shape.kv_bytes + 2 * step.q.nbytes, shape.flops)
    rounds = ops_attention.FEW_CALLS if floor > ops_attention.LONG_US else ops_attention.MANY_CALLS
    copy = copies(step, torch.empty_like(step.contiguous[0]))
    taken = times({**found, "copy": copy}, len(step.pools), *rounds)
    copied_bytes = 2 * step.paged[0].nbytes
    return {
        "context": shape.context, "heads": shape.heads, "kv_heads": shape.kv_heads, "batch": shape.batch,
        "new": shape.new, "floor_us": round(floor, 1), "us": {way: round(taken[way], 1) for way in WAYS},
        "copy_tb_per_s": round(copied_bytes / taken["copy"] / 1e6, 2),
    }  # fmt: skip


def as_markdown(rows: Sequence[Row]) -> str:
    """The rows as a table for each model."""
    lines = []
    for model, heads in MODELS.items():
        lines += [f"{model}: {heads[0]} heads, {heads[1]} KV heads", ""]
        lines.append(f"| context | floor µs | {' | '.join(f'{way} µs' for way in WAYS)} | copy TB/s "
                     f"| {' | '.join(f'{way} ÷ ideal' for way in WAYS[:-1])} |")  # fmt: skip
        lines.append("|---" * (2 * len(WAYS) + 2) + "|")
        for row in of_model(rows, heads):
            us = row["us"]
            ratios = [f"{us[way] / us['ideal']:.2f}" for way in WAYS[:-1]]
            cells = [
                row["context"],
                row["floor_us"],
                *(us[way] for way in WAYS),
                row["copy_tb_per_s"],
                *ratios,
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        lines.append("")
    return "\n".join(lines)


def of_model(rows: Sequence[Row], heads: tuple[int, int]) -> list[Row]:
    return [row for row in rows if (row["heads"], row["kv_heads"]) == heads]


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel of bars for each model, like the paper's figure. Raises PlotsMissing."""
    plots.require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(plot_style.WIDE_IN, 3.6), layout="constrained")
    for axes, (model, heads) in zip(figure.subplots(1, len(MODELS)), MODELS.items(), strict=True):
        shown = of_model(rows, heads)
        for number, way in enumerate(WAYS):
            places = [place + (number - (len(WAYS) - 1) / 2) * 0.2 for place in range(len(shown))]
            axes.bar(places, [row["us"][way] / 1e3 for row in shown], 0.2, color=COLOURS[number], label=way)
        axes.set_yscale("log")
        axes.set_xticks(range(len(shown)), [str(row["context"]) for row in shown])
        axes.set(
            title=f"{model} ({heads[0]}/{heads[1]} heads)", xlabel="context [tokens]", ylabel="time [ms]"
        )
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(WAYS), frameon=False)
    figure.savefig(path, dpi=130)


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("bench/results"), help="Folder of the results."
)
@click.option("--name", default="figure12", show_default=True, help="Of the files: NAME.json, .md and .png.")
@click.option(
    "--fa3",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="vLLM's FlashAttention-3 extension, _vllm_fa3_C*.so or that packed as .xz; found by itself if installed.",
)
def main(out: Path, name: str, fa3: Path | None) -> None:
    """Time the four ways on this machine's GPU, for the heads of the paper's two 13B models."""
    if not torch.cuda.is_available():
        raise click.ClickException("torch sees no CUDA device here")
    plots.require()
    peer, ceilings = flash_attention.find(fa3), measure_ceilings()
    rows = [
        measure(Shape(context, *heads), ceilings, peer) for heads in MODELS.values() for context in CONTEXTS
    ]
    report = {
        "schema": "pensieve.figure12/1", "command": f"python {portable(sys.argv)}", "commit": commit(),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "fused": "FlashAttention-3" if peer else "scaled_dot_product_attention",
        "copy_tb_per_s": round(ceilings.copy_bytes_per_s / 1e12, 2), "rows": rows,
    }  # fmt: skip
    table = head(report) + as_markdown(rows)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(table, encoding="utf-8")
    draw(rows, out / f"{name}.png")
    click.echo(table)


def head(report: Row) -> str:
    """What stands above the tables."""
    return (
        f"`{report['command']}`\n\n{report['device']}, torch {report['torch']}, Triton {report['triton']}, commit "
        f"{report['commit'] or 'unknown'}; a large copy moves {report['copy_tb_per_s']} TB/s. bf16, 32 requests with 8 "
        f"new tokens each, heads of 128, pages of 32; fused attention: {report['fused']}. One layer's call, inside a "
        "CUDA graph, its plan made before.\n\n"
    )


if __name__ == "__main__":
    main()
