"""Where the time of a decode step goes on one GPU, and what other ways of doing parts of it would give.

    python bench/kernel_ops/step_parts.py --out bench/results --name step_parts

First that the ways agree: about as well as steps of two sizes do, whose products are done in different ways, too. Then
step times, all ways in turns; the parts of a step by the profiler; each product by itself, by settings of torch's.
With ``--device cpu`` and TRITON_INTERPRET=1 all but cuBLASLt runs on a tiny shape, to see that it would.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
import triton

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

import dummy_model
from common.provenance import commit, gpu_name, portable, table, write_report
from kernel_ops import products
from kernel_ops.decode_steps import NOW, PRODUCTS, WAYS, Steps, other_size
from kernel_ops.kernel_times import profiled, shares

Row = dict[str, Any]
BANDWIDTH = 4.25e12
"""Bytes/s of a device copy on an H200, as in ``bench/engine.py``."""
NEARLY = 2.0
"""Ways may differ by so many times what steps of two sizes differ by."""
LEAST_NOISE = 1e-5
"""Of the norm of all logits: with float32, and where all sizes are done in one way."""
PROFILED_STEPS = 4


def noise_of(steps: Steps, batches: tuple[int, ...]) -> float:
    """Return the share of the norm by which the logits of the same rows differ at most between steps of two sizes."""
    found = LEAST_NOISE
    for batch in batches:
        sizes = sorted((batch, other_size(batch)))
        few, many = (steps.answers(steps.made(WAYS[NOW], size), size)[: sizes[0]] for size in sizes)
        found = max(found, float((few - many).norm() / few.norm()))
    return found


def agreement_rows(steps: Steps, made: dict[str, Any], batch: int, noise: float) -> Iterator[Row]:
    """Compare the logits of each way with those of ``NOW``."""
    want = steps.answers(made[NOW], batch)
    for name, run in made.items():
        if name == NOW or not WAYS[name].right:
            continue
        got = steps.answers(run, batch)
        off = float((got - want).norm() / want.norm())
        yield {
            "batch": batch, "way": name, "merges": steps.merges(batch), "same bits": torch.equal(got, want),
            "relative difference": float(f"{off:.2g}"), "between two sizes": float(f"{noise:.2g}"),
            "same tokens": f"{int((got.argmax(1) == want.argmax(1)).sum())}/{batch}",
            "as it must be": off <= NEARLY * noise,
        }  # fmt: skip


def step_sections(
    steps: Steps, batch: int, names: tuple[str, ...], rounds: int, noise: float
) -> dict[str, list[Row]]:
    """Return agreement, times and parts of a step, for the ways of these names; ``noise``: see ``noise_of``."""
    made, failed = {}, []
    for name in names:
        try:
            made[name] = steps.made(WAYS[name], batch)
        except (AttributeError, RuntimeError) as error:  # a setting that this torch does not have
            if name == NOW:
                raise
            failed.append({"batch": batch, "way": name, "error": str(error).splitlines()[0]})
    agreement = list(agreement_rows(steps, made, batch, noise))
    floor = steps.least_bytes(batch) / BANDWIDTH * 1e3
    times = steps.timed(made, rounds, 10 if steps.on_gpu else 1)
    taken = [
        {
            "batch": batch, "way": name, "step ms": round(ms, 4), "÷ now": round(ms / times[NOW], 4),
            "÷ floor": round(ms / floor, 3),
        }
        for name, ms in times.items()
    ]  # fmt: skip
    parts = [
        {"batch": batch, "part": part, "launches": share.launches, "ms": share.ms, "alone ms": share.alone_ms}
        for part, share in shares(profiled(made[NOW], PROFILED_STEPS), PROFILED_STEPS).items()
    ]
    return {"agreement": agreement, "step": taken, "parts": parts, "not possible": failed}


@click.command(context_settings={"show_default": True})
@click.option("--shape", default="llama-2-13b-gqa10", help="Of bench/dummy_model.py.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--batch", "batches", type=int, multiple=True, default=(64, 256, 1, 8))
@click.option("--context", default=1024)
@click.option("--rounds", default=5, help="Rounds in which ways take turns; the median counts.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench/results"))
@click.option("--name", default="step_parts", help="Name of the report's files.")
def main(
    shape: str, device: str, batches: tuple[int, ...], context: int, rounds: int, out: Path, name: str
) -> None:
    """Measure the parts of a decode step; a report as JSON and as a table."""
    started = time.monotonic()
    on_gpu = device == "cuda"
    ways = tuple(way for way in WAYS if on_gpu or way not in PRODUCTS)
    sections: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        dtype = torch.bfloat16 if on_gpu else torch.float32
        steps = Steps(dummy_model.make(shape, Path(folder)), device, dtype, context, batches)
        noise = noise_of(steps, batches)
        for batch in batches:
            found = step_sections(steps, batch, ways, rounds, noise)
            found["products"] = products.rows(steps, batch, BANDWIDTH)
            for section, rows in found.items():
                sections.setdefault(section, []).extend(rows)
    report = {
        "schema": "pensieve.step_parts/2", "command": portable(["python", *sys.argv]), "commit": commit(),
        "device": gpu_name() or device, "torch": torch.__version__, "triton": triton.__version__, "shape": shape,
        "context": context, "seconds": round(time.monotonic() - started), "sections": sections,
    }  # fmt: skip
    lines = [
        f"`{report['command']}`", "",
        f"{shape}, contexts of {context} tokens, on {report['device']}, torch {report['torch']}, Triton "
        f"{report['triton']}, commit {report['commit']}; {report['seconds']} s.", "",
        "Floor: weights and KV over 4.25 TB/s. `ms` of a part are its kernels' times added up, waiting for the one "
        "before included; `alone ms` add up to the step.",
    ]  # fmt: skip
    for section, rows in sections.items():
        lines += ["", f"## {section}", "", *(table(rows) if rows else ["none"])]
    write_report(out, name, report, lines)
    click.echo("\n".join(lines))
    wrong = [row for row in sections["agreement"] if not row["as it must be"]]
    if wrong:
        raise click.ClickException(f"{len(wrong)} results are not as they must be: see above")


if __name__ == "__main__":
    main()
