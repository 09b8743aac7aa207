"""Times of the ragged paged attention kernel, as captured graphs of a server run it, beside FlashAttention-3.

Random data and page order; calls take turns over up to four KV sets, so that the L2 cache holds none of them. Our plan
has the capacity of a graph for steps of that kind and size. FlashAttention-3 gets the same numbers in the layout that
suits it best, contiguous [pages, tokens, heads, values] of keys and of values.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from common.gpu_timing import Ceilings, Contender, times
from kernel_ops.flash_attention import Peer

from pensieve.kernels.arguments import Logits
from pensieve.kernels.attention.capacity import capacity_for
from pensieve.kernels.attention.kinds import Geometry, classify
from pensieve.kernels.attention.plan import AttentionPlan, geometry_for, make_words
from pensieve.kernels.attention.tiles import Tile
from pensieve.kernels.kv_codec import CODES, coded
from pensieve.kernels.ragged_paged_attention import attend
from pensieve.kernels.spans import POSITION, Q_LEN, make_spans, num_tokens
from pensieve.kernels.spans import Spans as Rows

PAGE, DIM, BYTES = 32, 128, 2
HEADS = ((40, 40), (40, 10), (32, 8))
AGREEMENT = 6e-3
"""Two bf16 results may differ by at most this share of their norm."""
LONG_US, FEW_CALLS, MANY_CALLS = 400, (8, 9), (20, 15)
"""From this floor on, a graph has few calls and few replays; (calls, replays) either way."""
Spans = list[tuple[int, int]]
"""(query tokens, tokens of context including them)"""
Row = dict[str, Any]


def shapes() -> dict[str, Spans]:
    """The steps that are timed. ``served``: decodes on contexts as conversations have them; ``mixed``: 120 decodes
    beside 8 turns of a served batch."""
    table: dict[str, Spans] = {}
    for past in (512, 2048, 8192):
        table[f"q8_B32_c{past}"] = [(8, past + 8)] * 32
    decodes = ((1, 1024), (1, 4096), (1, 16384), (8, 1024), (8, 4096), (32, 1024), (64, 1024), (64, 4096))
    for batch, context in (*decodes, (256, 1024), (32, 8192)):
        table[f"decode_B{batch}_c{context}"] = [(1, context)] * batch
    for batch in (16, 36, 56, 80):
        draw = random.Random(batch)
        table[f"served_B{batch}"] = [
            (1, 1 + int(min(draw.expovariate(1 / 1100), 8800))) for _ in range(batch)
        ]
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
class Data:
    """One step's tensors: a query, and pools that take turns."""

    q: torch.Tensor
    pools: list[torch.Tensor]
    tables: torch.Tensor
    spans: Rows
    flops: float
    least_bytes: float


def make_data(spans: Spans, heads: int, kv_heads: int, device: str = "cuda", dim: int = DIM) -> Data:
    pages = [-(-context // PAGE) for _, context in spans]
    per_set = sum(pages) * 2 * kv_heads * PAGE * dim * BYTES
    sets = max(1, min(4, int(30e9 // per_set)))
    shape = (sum(pages), 2, kv_heads, PAGE, dim)
    pools = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(sets)]
    tables = torch.zeros(len(spans), max(pages), dtype=torch.int32, device=device)
    for row, part in enumerate(torch.randperm(sum(pages), device=device).int().split(pages)):
        tables[row, : len(part)] = part
    table = make_spans([n for n, _ in spans], [c - n for n, c in spans], range(len(spans)))
    q = torch.randn(num_tokens(table), heads, dim, device=device, dtype=torch.bfloat16)
    pairs = sum(new * context - new * (new - 1) / 2 for new, context in spans)
    kv = 2 * kv_heads * dim * BYTES * sum(context for _, context in spans)
    return Data(q, pools, tables, table, 4 * heads * dim * pairs, kv + 2 * q.nbytes)


def ours(
    data: Data,
    out: torch.Tensor,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    geometry: Geometry | None = None,
) -> Contender:
    """Our kernel with a plan as for a graph. ``geometry``: instead of that which fits the tensors."""
    geometry, spans = replace(geometry or geometry_of_data(data), window=window), data.spans
    kind, longest = classify(spans, geometry), int((spans[:, POSITION] + spans[:, Q_LEN]).max())
    capacity = capacity_for(kind, len(data.q), len(spans), longest, geometry)
    words = make_words(capacity, data.q.device)
    plan = AttentionPlan(len(data.q), geometry, words, kind=kind, capacity=capacity)
    plan.refill(spans)
    logits = Logits(data.q.shape[2] ** -0.5, sinks=sinks)

    def call(index: int) -> object:
        return attend(data.q, data.pools[index], plan, data.tables, logits, out=out)

    return call


def geometry_of_data(data: Data) -> Geometry:
    return geometry_for(data.q.shape[1], data.pools[0], data.q.dtype)


def theirs(data: Data, peer: Peer, out: torch.Tensor) -> Contender:
    """FlashAttention-3 on copies of the same pools."""
    sets = [
        tuple(part.transpose(1, 2).contiguous() for part in pool.unbind(1)) for pool in data.pools
    ]  # keys, values
    forward = peer.prepare(data.spans, data.tables, out, DIM**-0.5)
    return lambda index: forward(data.q, *sets[index])


def in_codec(data: Data, codec: str) -> Data:
    """The same step over pools in 8 bits."""
    return replace(data, pools=[coded(pool, CODES[codec]) for pool in data.pools])


def other_ways(geometry: Geometry) -> dict[str, Geometry]:
    """What could be chosen instead for keys in 8 bits."""
    narrow = geometry.tiles.narrow

    def beside(tile: Tile) -> Geometry:
        return replace(geometry, own_tiles=replace(geometry.tiles, narrow_concurrent=tile))

    return {
        "without copies": geometry.without_copies,
        "narrow beside wide, 5 programs": beside(replace(narrow, stages=2, registers=96, resident=5)),
        "narrow beside wide, 4 programs": beside(replace(narrow, registers=128, resident=4)),
    }


def measure(
    name: str,
    spans: Spans,
    heads: tuple[int, int],
    ceilings: Ceilings,
    peer: Peer | None,
    codecs: Sequence[str] = (),
) -> Row:
    """One row. ``heads``: of queries, of keys. Raises ValueError when the results of the contenders differ."""
    data = make_data(spans, *heads)
    floor, bound = ceilings.floor_us(data.least_bytes, data.flops)
    out = torch.empty_like(data.q)
    contenders = {"pensieve": ours(data, out)}
    for codec in codecs:
        of_codec = in_codec(data, codec)
        contenders[codec] = ours(of_codec, torch.empty_like(out))
        for what, other in other_ways(geometry_of_data(of_codec)).items():
            contenders[f"{codec}, {what}"] = ours(of_codec, torch.empty_like(out), geometry=other)
    if peer is not None:
        reference = torch.empty_like(data.q)
        contenders["fa3"] = theirs(data, peer, reference)
        for contender in ("pensieve", "fa3"):
            contenders[contender](0)
        error = float((out.float() - reference.float()).norm() / reference.float().norm())
        if not error <= AGREEMENT:
            raise ValueError(f"{name} {heads[0]}/{heads[1]}: results differ by {error:.1e} of their norm")
    taken = times(contenders, len(data.pools), *(FEW_CALLS if floor > LONG_US else MANY_CALLS))
    us = taken["pensieve"]
    return {
        "shape": name, "heads": heads[0], "kv_heads": heads[1], "floor_us": round(floor, 1), "bound": bound,
        "us": {contender: round(value, 1) for contender, value in taken.items()},
        "share_of_ceiling": round(floor / us, 2), "tb_per_s": round(data.least_bytes / us / 1e6, 2),
        "tflop_per_s": round(data.flops / us / 1e6, 1),
    }  # fmt: skip


def section(
    ceilings: Ceilings, peer: Peer | None, only: str, codecs: Sequence[str] = ()
) -> tuple[list[Row], str]:
    """All shapes that match ``only``, for every ratio of heads; and the table. ``codecs``: of 8 bits, timed beside."""
    rows = [
        measure(shape, spans, heads, ceilings, peer, codecs)
        for heads in HEADS
        for shape, spans in shapes().items()
        if re.search(only, f"{shape} {heads[0]}/{heads[1]}")
    ]
    return rows, as_markdown(rows) + "".join(f"\n{line}" for line in codec_lines(rows))


def codec_lines(rows: Sequence[Row]) -> list[str]:
    """What attention over codes takes, as shares of its time in bf16."""
    lines = []
    for row in rows:
        us = row["us"]
        shares = [
            f"{name} {value / us['pensieve']:.3f}"
            for name, value in us.items()
            if name not in ("pensieve", "fa3")
        ]
        if shares:
            lines.append(f"* {row['shape']} {row['heads']}/{row['kv_heads']} ÷ bf16: {'; '.join(shares)}\n")
    return lines


def as_markdown(report: list[Row]) -> str:
    """The rows as a table, and what they come to."""
    lines = [
        f"bf16, heads of {DIM}, pages of {PAGE}; floor: the larger of least bytes and operations over the ceilings.",
        "",
        "| shape | heads | floor µs | bound | pensieve µs | floor ÷ pensieve | TB/s | TFLOP/s | FA3 µs | ÷ FA3 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report:
        us, fa3 = row["us"]["pensieve"], row["us"].get("fa3")
        versus = "|  |  |" if fa3 is None else f"| {fa3} | {us / fa3:.2f} |"
        lines.append(
            f"| {row['shape']} | {row['heads']}/{row['kv_heads']} | {row['floor_us']} | {row['bound']} | {us} "
            f"| {row['share_of_ceiling']} | {row['tb_per_s']} | {row['tflop_per_s']} {versus}"
        )
    lines += ["", *_summary(report)]
    return "\n".join(lines) + "\n"


def _summary(report: list[Row]) -> list[str]:
    """Ratios to FA3 by group of shapes: geometric mean and worst."""
    groups = {
        "decode and q=8": ("decode", "q8"),
        "decode, served contexts": ("served",),
        "prefill": ("prefill",),
        "turn": ("turn",),
        "mixed": ("mixed",),
    }
    lines = []
    for name, prefixes in groups.items():
        ratios = [
            row["us"]["pensieve"] / row["us"]["fa3"]
            for row in report
            if row["shape"].startswith(prefixes) and "fa3" in row["us"]
        ]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(f"* {name} ÷ FA3: geometric mean {mean:.3f}, worst {max(ratios):.2f}")
    return lines
