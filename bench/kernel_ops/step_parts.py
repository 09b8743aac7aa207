"""Where the time of a decode step goes on one GPU, and what other ways of doing parts of it would give.

    python bench/kernel_ops/step_parts.py --out bench/results --name step_parts_13b_h200

First that the ways agree: about as well as steps of two sizes do, whose products are done in different ways, too. Then
step times, all ways in turns; the parts of a step by the profiler; each product by itself, by
settings of torch's and by every way that cuBLASLt knows. Workspaces of cuBLAS are fixed when it starts, so each is
tried in a process of its own. What fails is told in the report and does not stop the rest. With ``--device cpu`` and
TRITON_INTERPRET=1 all but cuBLASLt runs on a tiny shape, to see that it would.
"""

from __future__ import annotations

import json
import os
import subprocess
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
from common.provenance import commit, gpu_name, portable, table
from kernel_ops import products
from kernel_ops.decode_steps import NOW, WAYS, Steps, other_size
from kernel_ops.kernel_times import profiled, shares

Row = dict[str, Any]
BANDWIDTH = 4.25e12
"""Bytes/s of a device copy on an H200, as in ``bench/engine.py``."""
NEARLY = 2.0
"""Ways may differ by so many times what steps of two sizes differ by."""
LEAST_NOISE = 1e-5
"""Of the norm of all logits: with float32, and where all sizes are done in one way."""
PROFILED = (NOW,)
PROFILED_STEPS = 4
PROCESSES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "": (("steps", "products"), {}),
    "kernels": (("survey",), {}),
    "workspace 4 MiB": (("few",), {"CUBLAS_WORKSPACE_CONFIG": ":4096:1", "CUBLASLT_WORKSPACE_SIZE": "4096"}),
    "workspace 128 MiB": (
        ("few",),
        {"CUBLAS_WORKSPACE_CONFIG": ":131072:1", "CUBLASLT_WORKSPACE_SIZE": "131072"},
    ),
}
"""What is measured in which environment."""
FEW = (NOW, "cuBLASLt")
GPU_ONLY = ("cuBLASLt",)
LARGE = 64
"""Settings of products are tried on batches of this size and more."""
ALL_S, LEAST_S = 235, 25
"""Seconds for all processes together; no process is begun with less than so many left."""


def noise_of(steps: Steps, batches: tuple[int, ...]) -> float:
    """The share of the norm by which the logits of the same rows differ at most between steps of two sizes."""
    found = LEAST_NOISE
    for batch in batches:
        sizes = sorted((batch, other_size(batch)))
        few, many = (steps.answers(steps.made(WAYS[NOW], size), size)[: sizes[0]] for size in sizes)
        found = max(found, float((few - many).norm() / few.norm()))
    return found


def agreement_rows(steps: Steps, made: dict[str, Any], batch: int, noise: float) -> Iterator[Row]:
    want = steps.answers(made[NOW], batch)
    for name, run in made.items():
        if name == NOW or not WAYS[name].right:
            continue
        got = steps.answers(run, batch)
        same, off = torch.equal(got, want), float((got - want).norm() / want.norm())
        yield {
            "batch": batch, "way": name, "merges": steps.merges(batch), "same bits": same,
            "relative difference": float(f"{off:.2g}"), "between two sizes": float(f"{noise:.2g}"),
            "same tokens": f"{int((got.argmax(1) == want.argmax(1)).sum())}/{batch}",
            "as it must be": off <= NEARLY * noise,
        }  # fmt: skip


def step_sections(
    steps: Steps, batch: int, names: tuple[str, ...], rounds: int, noise: float
) -> dict[str, list[Row]]:
    """Agreement, times and parts of a step, for the ways of these names; ``noise``: see ``noise_of``."""
    made, failed = {}, []
    for name in names:
        try:
            made[name] = steps.made(WAYS[name], batch)
        except (AttributeError, RuntimeError) as error:  # a setting that this torch does not have
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
    return {"agreement": agreement, "step": taken, "parts": part_rows(made, batch), "not possible": failed}


def part_rows(made: dict[str, Any], batch: int) -> list[Row]:
    rows = []
    for name in PROFILED:
        if name not in made:
            continue
        for part, share in shares(profiled(made[name], PROFILED_STEPS), PROFILED_STEPS).items():
            rows.append({
                "batch": batch, "way": name, "part": part, "launches": share.launches, "ms": share.ms,
                "alone ms": share.alone_ms,
            })  # fmt: skip
    return rows


def measure(
    steps: Steps, task: str, batch: int, ways: tuple[str, ...], rounds: int, noise: float
) -> dict[str, list[Row]]:
    """The sections of a task for one batch."""
    if task == "steps":
        return step_sections(steps, batch, ways, rounds, noise)
    if task == "products":
        return {"products": products.rows(steps, batch, BANDWIDTH)}
    if batch < LARGE and steps.on_gpu:
        return {}
    if task == "few":
        few = tuple(name for name in FEW if name in ways)
        return {"step": step_sections(steps, batch, few, rounds, noise)["step"]}
    return {"survey": products.survey(steps, batch) if steps.on_gpu else []}


def child(
    shape: str, device: str, tasks: tuple[str, ...], batches: tuple[int, ...], context: int, rounds: int,
    ways: tuple[str, ...], to: Path,
) -> None:  # fmt: skip
    """Measure in this process. What is found goes to a file bit by bit, so that a failure keeps what was before it."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    report: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        steps = Steps(dummy_model.make(shape, Path(folder)), device, dtype, context, batches)
        noise = noise_of(steps, batches) if "steps" in tasks else LEAST_NOISE
        for task in tasks:
            for batch in batches:
                for name, rows in measure(steps, task, batch, ways, rounds, noise).items():
                    report.setdefault(name, []).extend(rows)
                to.write_text(json.dumps(report))


def run_child(name: str, arguments: list[str], to: Path, seconds: float) -> dict[str, Any]:
    """The sections of a process, with ``failed`` when it did not end well."""
    tasks, environment = PROCESSES[name]
    command = [sys.executable, *sys.argv[:1], *arguments, "--to", str(to)]
    for task in tasks:
        command += ["--task", task]
    failed = ""
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True, timeout=seconds
        )
        if done.returncode:
            failed = "\n".join(done.stderr.splitlines()[-12:]) or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        failed = f"not done after {seconds:.0f} s"
    report: dict[str, Any] = json.loads(to.read_text()) if to.exists() else {}
    return report | ({"failed": failed} if failed else {})


def as_markdown(report: dict[str, Any]) -> str:
    lines = [
        f"`{report['command']}`", "",
        f"{report['shape']}, contexts of {report['context']} tokens, on {report['device']}, torch {report['torch']}, "
        f"Triton {report['triton']}, commit {report['commit']}; {report['seconds']} s.", "",
        "Floor: weights and KV over 4.25 TB/s. `ms` of a part are its kernels' times added up, waiting for the one "
        "before included; `alone ms` add up to the step.",
    ]  # fmt: skip
    for process, sections in report["processes"].items():
        for name, rows in sections.items():
            lines += ["", f"## {name}" + (f", {process}" if process else ""), ""]
            lines += ["```", rows, "```"] if name == "failed" else table(rows) if rows else ["none"]
    return "\n".join(lines) + "\n"


@click.command(context_settings={"show_default": True})
@click.option("--shape", default="llama-2-13b-gqa10", help="Of bench/dummy_model.py.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--batch", "batches", type=int, multiple=True, default=(64, 256, 1, 8))
@click.option("--context", default=1024)
@click.option("--rounds", default=5, help="Rounds in which ways take turns; the median counts.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench/results"))
@click.option("--name", default="step_parts", help="Name of the report's files.")
@click.option(
    "--way",
    "ways",
    multiple=True,
    type=click.Choice(list(WAYS)),
    help="Beside the present one. Default: all.",
)
@click.option("--task", "tasks", multiple=True, hidden=True)
@click.option("--to", type=click.Path(path_type=Path), hidden=True)
def main(
    shape: str, device: str, batches: tuple[int, ...], context: int, rounds: int, out: Path, name: str,
    ways: tuple[str, ...], tasks: tuple[str, ...], to: Path | None,
) -> None:  # fmt: skip
    """Measure the parts of a decode step; a report as JSON and as a table."""
    ways = tuple(way for way in WAYS if way == NOW or way in (ways or WAYS))
    if device == "cpu":
        ways = tuple(way for way in ways if way not in GPU_ONLY)
    if to is not None:
        return child(shape, device, tasks, batches, context, rounds, ways, to)
    started = time.monotonic()
    arguments = ["--shape", shape, "--device", device, "--context", str(context), "--rounds", str(rounds)]
    for batch in batches:
        arguments += ["--batch", str(batch)]
    for way in ways:
        arguments += ["--way", way]
    report: dict[str, Any] = {
        "schema": "pensieve.step_parts/1", "command": portable(["python", *sys.argv]), "commit": commit(),
        "device": gpu_name() or device, "torch": torch.__version__, "triton": triton.__version__, "shape": shape,
        "context": context, "processes": {},
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, process in enumerate(PROCESSES):
            left = ALL_S - (time.monotonic() - started)
            found = {"failed": f"not begun: {ALL_S} s are over"}
            if left > LEAST_S:
                found = run_child(process, arguments, Path(folder) / f"{number}.json", left)
            report["processes"][process] = found
            report["seconds"] = round(time.monotonic() - started)
            # Written after each process: what was found stays if the machine goes.
            (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
            (out / f"{name}.md").write_text(as_markdown(report))
    click.echo(as_markdown(report))
    found = report["processes"].values()
    rows = [row for sections in found for row in sections.get("agreement", [])]
    wrong = [row for row in rows if not row["as it must be"]]
    if wrong or any("failed" in sections for sections in found):
        raise click.ClickException(
            f"something failed, or {len(wrong)} results are not as they must be: see above"
        )


if __name__ == "__main__":
    main()
