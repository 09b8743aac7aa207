"""Times of the ragged paged attention kernel on this GPU, beside FlashAttention-3 where it can be imported.

Each time is the median replay of a CUDA graph of 20 calls (8 of long ones) that take turns over up to four KV sets, so
that the L2 cache holds none of them; random data and page order; contenders are replayed in turn. The floor is the
larger of bytes over the device's copy rate and operations over its matrix rate, both measured here.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from pensieve.kernels.ragged_paged_attention import ragged_paged_attention
from pensieve.kernels.span_table import SpanTable

PAGE, DIM, BYTES = 32, 128, 2
HEADS = ((40, 40), (40, 10), (32, 8))
Spans = list[tuple[int, int]]
"""(query tokens, tokens of context including them)"""
Contender = Callable[[int], object]


def shapes() -> dict[str, Spans]:
    """The steps that are timed. ``mixed``: 120 decodes beside 8 turns of a served batch."""
    table: dict[str, Spans] = {}
    for past in (512, 2048, 8192):
        table[f"q8_B32_c{past}"] = [(8, past + 8)] * 32
    decodes = ((1, 1024), (1, 4096), (1, 16384), (8, 1024), (8, 4096), (32, 1024), (64, 1024), (64, 4096))
    for batch, context in (*decodes, (256, 1024), (32, 8192)):
        table[f"decode_B{batch}_c{context}"] = [(1, context)] * batch
    table["prefill_1k"] = [(1024, 1024)]
    table["prefill_4k"] = [(4096, 4096)]
    table["turn_8x256_hist4k"] = [(256, 4352)] * 8
    dice = random.Random(1)
    turns = [dice.randint(16, 512) for _ in range(8)]
    contexts = [dice.randint(64, 4096) for _ in range(128)]
    table["mixed_120dec_8pre"] = [
        *((1, context) for context in contexts[:120]),
        *((new, past + new) for new, past in zip(turns, contexts[120:], strict=True)),
    ]
    return table


@dataclass(frozen=True, slots=True)
class Ceilings:
    copy_bytes_per_s: float
    matrix_flops: float


@dataclass(frozen=True, slots=True)
class Data:
    """One step's tensors: a query, and pools that take turns."""

    q: torch.Tensor
    pools: list[torch.Tensor]
    tables: torch.Tensor
    spans: SpanTable
    flops: float
    least_bytes: float


def make_data(spans: Spans, heads: int, kv_heads: int) -> Data:
    pages = [-(-context // PAGE) for _, context in spans]
    per_set = sum(pages) * 2 * kv_heads * PAGE * DIM * BYTES
    sets = max(1, min(4, int(30e9 // per_set)))
    shape = (sum(pages), 2, kv_heads, PAGE, DIM)
    pools = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    tables = torch.zeros(len(spans), max(pages), dtype=torch.int32, device="cuda")
    for row, part in enumerate(torch.randperm(sum(pages), device="cuda").int().split(pages)):
        tables[row, : len(part)] = part
    table = SpanTable.build([n for n, _ in spans], [c - n for n, c in spans], range(len(spans)), "cuda")
    q = torch.randn(table.num_tokens, heads, DIM, device="cuda", dtype=torch.bfloat16)
    pairs = sum(new * context - new * (new - 1) / 2 for new, context in spans)
    kv = 2 * kv_heads * DIM * BYTES * sum(context for _, context in spans)
    return Data(q, pools, tables, table, 4 * heads * DIM * pairs, kv + 2 * q.nbytes)


def contenders(data: Data) -> dict[str, Contender]:
    """Everything that can compute the step, as functions of the KV set."""
    out, scale = torch.empty_like(data.q), DIM**-0.5

    def ours(index: int) -> object:
        return ragged_paged_attention(
            data.q, data.pools[index], data.spans, data.tables, scale=scale, out=out
        )

    found: dict[str, Contender] = {"pensieve": ours}
    if importlib.util.find_spec("flash_attn_interface"):
        flash: Any = importlib.import_module("flash_attn_interface")
        starts = torch.cat([data.spans.q_start, data.spans.q_start[-1:] + data.spans.q_len[-1:]])
        seen = data.spans.position + data.spans.q_len

        def fa3(index: int) -> object:
            keys, values = data.pools[index].transpose(2, 3).unbind(1)
            return flash.flash_attn_with_kvcache(
                data.q, keys, values, page_table=data.tables, cache_seqlens=seen, cu_seqlens_q=starts,
                max_seqlen_q=data.spans.max_q_len, softmax_scale=scale, causal=True,
            )  # fmt: skip

        found["fa3"] = fa3
    return found


def times(functions: dict[str, Contender], sets: int, calls: int, replays: int) -> dict[str, float]:
    """Median microseconds of one call of each."""
    graphs = {}
    for name, function in functions.items():
        function(0)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in range(calls):
                function(call % sets)
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for replay in range(replays + 2):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 2:
                taken[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return {name: sorted(values)[len(values) // 2] for name, values in taken.items()}


def measure_ceilings() -> Ceilings:
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    # Not `target.copy_(source)`: captured, it becomes a copy node that runs at two thirds of the rate.
    taken = times({"copy": lambda _: torch.neg(source, out=target), "product": lambda _: a @ b}, 1, 4, 9)
    return Ceilings(2 * source.nbytes / taken["copy"] * 1e6, 2 * 8192**3 / taken["product"] * 1e6)


def measure(name: str, spans: Spans, heads: int, kv_heads: int, ceilings: Ceilings) -> dict[str, Any]:
    data = make_data(spans, heads, kv_heads)
    by_memory = data.least_bytes / ceilings.copy_bytes_per_s * 1e6
    by_matrix = data.flops / ceilings.matrix_flops * 1e6
    floor = max(by_memory, by_matrix)
    calls, replays = (8, 9) if floor > 400 else (20, 15)
    taken = times(contenders(data), len(data.pools), calls, replays)
    return {
        "shape": name, "heads": heads, "kv_heads": kv_heads, "floor_us": round(floor, 1),
        "bound": "memory" if by_memory > by_matrix else "matrix", "us": {k: round(v, 1) for k, v in taken.items()},
        "tb_per_s": round(data.least_bytes / taken["pensieve"] / 1e6, 2),
        "tflop_per_s": round(data.flops / taken["pensieve"] / 1e6, 1),
    }  # fmt: skip


def as_markdown(report: dict[str, Any], peers: dict[str, float]) -> str:
    """The report as a table; ``peers``: recorded microseconds of FlashAttention-3 by ``heads/kv_heads shape``."""
    lines = [
        f"`{report['command']}`",
        "",
        f"{report['device']}, torch {report['torch']}, Triton {report['triton']}; copy "
        f"{report['copy_tb_per_s']} TB/s, bf16 product {report['matrix_tflop_per_s']} TFLOP/s. bf16, heads of {DIM}, "
        f"pages of {PAGE}. Times of FA3 "
        + ("were recorded on another day." if peers else "were taken in turn with ours."),
        "",
        "| shape | heads | floor µs | bound | pensieve µs | ÷ floor | TB/s | TFLOP/s | FA3 µs | ÷ FA3 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        ours = row["us"]["pensieve"]
        fa3 = row["us"].get("fa3", peers.get(f"{row['heads']}/{row['kv_heads']} {row['shape']}"))
        versus = "|  |  |" if fa3 is None else f"| {fa3} | {ours / fa3:.2f} |"
        lines.append(
            f"| {row['shape']} | {row['heads']}/{row['kv_heads']} | {row['floor_us']} | {row['bound']} | {ours} "
            f"| {ours / row['floor_us']:.2f} | {row['tb_per_s']} | {row['tflop_per_s']} {versus}"
        )
    return "\n".join(lines) + "\n"


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("bench/results"), help="Folder of the report."
)
@click.option("--name", default="ops_attention", help="Name of the report's files.")
@click.option("--only", default="", help="Only shapes whose name contains this.")
@click.option(
    "--peers", type=click.Path(exists=True, path_type=Path), help="JSON with recorded times of FA3."
)
def main(out: Path, name: str, only: str, peers: Path | None) -> None:
    """Time the attention kernel on this machine's GPU."""
    import triton

    ceilings = measure_ceilings()
    report: dict[str, Any] = {
        "schema": "pensieve.ops/1", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "command": " ".join(["python", "bench/ops.py", *sys.argv[1:]]),
        "triton": triton.__version__, "copy_tb_per_s": round(ceilings.copy_bytes_per_s / 1e12, 2),
        "matrix_tflop_per_s": round(ceilings.matrix_flops / 1e12), "rows": [],
    }  # fmt: skip
    for heads, kv_heads in HEADS:
        for shape, spans in shapes().items():
            if only in shape:
                report["rows"].append(measure(shape, spans, heads, kv_heads, ceilings))
    recorded = json.loads(peers.read_text())["us"] if peers else {}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / f"{name}.md").write_text(as_markdown(report, recorded))
    click.echo(as_markdown(report, recorded))


if __name__ == "__main__":
    main()
