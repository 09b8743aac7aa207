"""How far decode attention of sessions that share a prefix is from its floor, and what a shared-prefix path would gain.

    python bench/sharing/prefix_attention.py --out OUT

For each shape, one layer, bf16, heads of a 13B model with 10 KV heads, pages of 32, inside CUDA graphs:

* ``private``: every session has a copy of the prefix of its own; the kernel and its plan as a server has them.
* ``shared``: the same, but the page tables name the same pages.
* ``product``: the plan that a server makes of these page tables (``pensieve.kernels.attention.prefixes``).
* ``planned``: the kernels as they are, with a plan by hand (``shared_plan``) that reads the prefix once for all.
* ``kernel + torch``: our kernel for the prefix, our kernel for the suffixes, merged by torch; and ``flash + torch``,
  ``cudnn + torch``: PyTorch's attention over a contiguous copy of the prefix instead.
* ``floor``: keys and values read once at the rate of a large copy, or the operations at that of a large product.

All results are compared before any is timed. A whole decode step is 40 layers of attention, matrix products as measured
here, and the head; norms, rotation and sampling are left out. Parts that fail say so in the report.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
import torch

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

from common.gpu_timing import Ceilings, Contender, measure_ceilings, times
from common.provenance import commit, gpu_name, portable
from kernel_ops import attention as ops_attention
from kernel_ops.attention import BYTES, DIM
from sharing.prefix_report import LAYERS, Row, as_markdown, with_ratios, with_step
from sharing.prefix_ways import (
    HEADS,
    KV_HEADS,
    Step,
    make_step,
    parties_of,
    prefix_by_kernel,
    prefix_by_torch,
    private,
    product,
    suffix_part,
    today,
    two_parts,
)
from sharing.shared_plan import Cut, SharedStep, cuts, planned

from pensieve.kernels.attention.plan import geometry_for
from pensieve.kernels.reference import ragged_paged_attention as reference_attention

HIDDEN, INTERMEDIATE, VOCABULARY = 5120, 13824, 32000
"""Of the model whose heads ``prefix_ways`` has."""
SHAPES = [
    SharedStep(sessions, prefix, suffix)
    for prefix in (2048, 8192) for sessions in (64, 256) for suffix in (256, 1024)
]  # fmt: skip
FEW = [SharedStep(sessions, prefix, 256) for prefix in (1024, 4096) for sessions in (4, 8, 16, 32)]
"""Around the least that a server takes for worth it."""
SMALL = [SharedStep(7, 256, 50), SharedStep(40, 512, 131)]
"""Checked against the oracle in float32."""
TRIED, REPLAYS = 4, 4
"""Calls and replays of each cut that is tried."""
Note = Callable[[str, BaseException], None]


def error_of(out: torch.Tensor, want: torch.Tensor) -> float:
    """‖out − want‖ ∕ ‖want‖; NaN stays NaN."""
    return float((out.float() - want.float()).norm() / want.float().norm())


def check_small(shape: SharedStep) -> Row:
    """Today's kernel and the plan by hand against the oracle in float32. Raises ValueError when they differ."""
    step = make_step(shape)
    want = reference_attention(
        step.q.float(), step.pools[0].float(), step.spans, step.tables, scale=step.q.shape[2] ** -0.5
    )
    geometry = geometry_for(step.q.shape[1], step.pools[0])
    errors: Row = {}
    out = torch.full_like(step.q, torch.nan)
    today(step, out)(0)
    errors["shared"] = error_of(out, want)
    out.fill_(torch.nan)
    product(step, out)[0](0)
    errors["product"] = error_of(out, want)
    for cut in (Cut(1, 1, 0), Cut(2, 1, 0), Cut(2, 1, geometry.multiprocessors // 2), Cut(2, 2, 30)):
        out.fill_(torch.nan)
        planned(shape, cut, step.q, step.pools, step.tables, step.spans, out, geometry)(0)
        errors[f"planned {cut.prefix_pieces}/{cut.suffix_pieces}/{cut.beside}"] = error_of(out, want)
    worst = {name: value for name, value in errors.items() if not value <= ops_attention.AGREEMENT}
    if worst:
        raise ValueError(f"{shape} differs from the oracle: {worst}")
    return {"shape": asdict(shape), "errors": errors}


def best_cut(
    step: Step, make: Callable[[Cut], Contender], tried: list[Cut], seconds: float
) -> tuple[Cut, dict[Cut, float]]:
    """The fastest of ``tried`` and the microseconds of all that were tried, in at most so many seconds."""
    taken: dict[Cut, float] = {}
    begun = time.monotonic()
    for cut in tried:
        if time.monotonic() - begun > seconds and taken:
            break
        taken[cut] = times({"it": make(cut)}, len(step.pools), TRIED, REPLAYS)["it"]
    return min(taken, key=taken.__getitem__), taken


def measure(shape: SharedStep, ceilings: Ceilings, note: Note, tune_s: float, *, few: bool = False) -> Row:
    """One row; ``few``: only what servers do. What fails is noted, and left out."""
    step = make_step(shape)
    geometry = geometry_for(HEADS, step.pools[0])
    per_token = 2 * KV_HEADS * DIM * BYTES
    least = per_token * (shape.prefix + shape.sessions * shape.suffix) + 2 * step.q.nbytes
    apart = per_token * shape.sessions * shape.context + 2 * step.q.nbytes
    flops = 4 * HEADS * DIM * shape.sessions * shape.context
    floor, bound = ceilings.floor_us(least, flops)
    row: Row = {
        **asdict(shape), "distinct_mb": round(least / 1e6, 1), "floor_us": round(floor, 1), "bound": bound,
        "private_floor_us": round(ceilings.floor_us(apart, flops)[0], 1), "us": {}, "errors": {}, "cuts": {},
        "served": parties_of(step) is not None,
    }  # fmt: skip
    out = torch.full_like(step.q, torch.nan)
    contenders: dict[str, Contender] = {"shared": today(step, out)}
    contenders["shared"](0)
    torch.cuda.synchronize()
    want = out.clone()  # when it is timed, that writes the results of other pools

    def add(name: str, make: Callable[[torch.Tensor], Contender]) -> None:
        try:
            out = torch.full_like(step.q, torch.nan)
            contender = make(out)
            contender(0)
            error = error_of(out, want)
            row["errors"][name] = error
            if not error <= ops_attention.AGREEMENT:
                raise ValueError(f"the result differs from today's by {error:.1e} of its norm")
            contenders[name] = contender
        except Exception as failure:
            note(f"{shape} {name}", failure)

    def served(out: torch.Tensor) -> Contender:
        call, row["cuts"]["product"] = product(step, out)
        return call

    def hand(out: torch.Tensor) -> Contender:
        def make(cut: Cut) -> Contender:
            return planned(shape, cut, step.q, step.pools, step.tables, step.spans, out, geometry)

        cut, tried = best_cut(step, make, cuts(shape, geometry), tune_s)
        row["cuts"]["planned"] = {**asdict(cut), "tried": len(tried)}
        row["tried"] = {
            f"{one.prefix_pieces}/{one.suffix_pieces}/{one.beside}": round(us, 1) for one, us in tried.items()
        }
        return make(cut)

    def by_kernel(out: torch.Tensor) -> Contender:
        def make(cut: Cut) -> Contender:
            return two_parts(prefix_by_kernel(step, cut), suffix_part(step), out)

        alone = [cut for cut in cuts(shape, geometry) if cut.beside == 0 and cut.suffix_pieces == 1]
        cut, tried = best_cut(step, make, alone, tune_s)
        row["cuts"]["kernel + torch"] = {"prefix_pieces": cut.prefix_pieces, "tried": len(tried)}
        return make(cut)

    add("product", served)
    if not few:
        add("planned", hand)
        add("kernel + torch", by_kernel)
    for which in () if few else ("flash", "cudnn"):
        add(
            f"{which} + torch",
            lambda out, which=which: two_parts(prefix_by_torch(step, which), suffix_part(step), out),
        )
    rounds = ops_attention.FEW_CALLS if floor > ops_attention.LONG_US else (12, 11)
    taken = times(contenders, len(step.pools), *rounds)
    row["us"] = {name: round(us, 1) for name, us in taken.items()}
    contenders.clear()
    try:
        row["us"]["private"] = round(_private_us(step, want, rounds), 1)
    except Exception as failure:
        note(f"{shape} private", failure)
    return with_ratios(row)


def _private_us(step: Step, want: torch.Tensor, rounds: tuple[int, int]) -> float:
    own = private(step)
    out = torch.full_like(step.q, torch.nan)
    contender = today(own, out)
    contender(0)
    error = error_of(out, want)
    if not error <= ops_attention.AGREEMENT:
        raise ValueError(f"the result differs from that on shared pages by {error:.1e} of its norm")
    return times({"private": contender}, len(own.pools), *rounds)["private"]


def products_ms(tokens: int) -> float:
    """The matrix products of a decode step of so many tokens, weights not in the cache."""
    sizes = [
        (HIDDEN, (HEADS + 2 * KV_HEADS) * DIM), (HEADS * DIM, HIDDEN), (HIDDEN, 2 * INTERMEDIATE),
        (INTERMEDIATE, HIDDEN),
    ]  # fmt: skip
    inputs = {n: torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) for n in {n for n, _ in sizes}}
    layers = [[torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for n, m in sizes] for _ in range(4)]
    head = [torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def layer(index: int) -> object:
        return [torch.nn.functional.linear(inputs[weight.shape[1]], weight) for weight in layers[index]]

    taken = times(
        {"layer": layer, "head": lambda index: torch.nn.functional.linear(inputs[HIDDEN], head[index])},
        4,
        8,
        11,
    )
    return (LAYERS * taken["layer"] + taken["head"]) / 1e3


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("bench/results"), help="Folder of the reports."
)
@click.option(
    "--name", default="prefix_attention", show_default=True, help="Of the files: NAME.json and NAME.md."
)
@click.option(
    "--only", default="", metavar="SxP+Q", help="Only the shape of S sessions, prefix P and suffix Q."
)
@click.option("--seconds", type=float, default=300.0, show_default=True, help="No shape is begun after that.")
@click.option(
    "--tune-seconds", type=float, default=12.0, show_default=True, help="To find a cut, for each way."
)
@click.option("--few", is_flag=True, help="Few sessions instead, and only what servers do.")
def main(out: Path, name: str, only: str, seconds: float, tune_seconds: float, few: bool) -> None:
    """Time decode attention over a shared prefix on this machine's GPU."""
    if not torch.cuda.is_available():
        raise click.ClickException("torch sees no CUDA device here")
    import triton

    begun = time.monotonic()
    report: Row = {
        "schema": "pensieve.prefix_attention/1", "command": f"python {portable(sys.argv)}", "commit": commit(),
        "device": gpu_name(), "torch": torch.__version__, "triton": triton.__version__, "checked": [], "rows": [],
        "failures": [],
    }  # fmt: skip

    def write() -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (out / f"{name}.md").write_text(as_markdown(report), encoding="utf-8")

    def note(what: str, failure: BaseException) -> None:
        report["failures"].append(f"{what}: {type(failure).__name__}: {str(failure)[:400]}")
        click.echo(report["failures"][-1], err=True)
        write()

    for shape in SMALL:
        try:
            report["checked"].append(check_small(shape))
        except Exception as failure:
            note(f"check of {shape}", failure)
    ceilings = measure_ceilings()
    report["copy_tb_per_s"] = round(ceilings.copy_bytes_per_s / 1e12, 2)
    report["matrix_tflop_per_s"] = round(ceilings.matrix_flops / 1e12)
    products: dict[int, float] = {}
    shapes = FEW if few else SHAPES
    for sessions in sorted({shape.sessions for shape in shapes}):
        try:
            products[sessions] = products_ms(sessions)
        except Exception as failure:
            note(f"products of {sessions} tokens", failure)
    write()
    for shape in shapes:
        if only not in f"{shape.sessions}x{shape.prefix}+{shape.suffix}":
            continue
        if time.monotonic() - begun > seconds:
            report["failures"].append(f"{shape}: not run, no time was left")
            continue
        try:
            report["rows"].append(with_step(measure(shape, ceilings, note, tune_seconds, few=few), products))
        except Exception as failure:
            note(str(shape), failure)
        gc.collect()
        torch.cuda.empty_cache()
        write()
        click.echo(f"{time.monotonic() - begun:.0f} s: {shape}")
    click.echo(as_markdown(report))
    if report["failures"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
