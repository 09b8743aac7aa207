"""Pensieve, Pensieve without state and transformers on the same conversations at the same times, in one run.

    python bench/replay_compare.py DATASET --model FOLDER --limit 50 --rate 2 --think-time 5 --name cpu-tiny

Each system runs alone, one after the other, so that none takes the machine from another. Writes
``bench/results/NAME.json`` and ``NAME.md``: all numbers, the ratios, machine, versions and command. Exit code 1 when a
turn failed or a receipt does not add up.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from hf_baseline import HuggingFaceTarget
from rich.console import Console

from pensieve.replay.command import make_plan, run_with_progress, wide_console, workload_options
from pensieve.replay.grpc_target import PensieveTarget
from pensieve.replay.report import is_clean
from pensieve.replay.session import Plan
from pensieve.replay.table import show
from pensieve.spawn import ServerProcess, SpawnError

RESULTS = Path(__file__).parent / "results"
RATIOS: dict[str, tuple[str, bool]] = {
    "turns/s": ("turns_per_s", True),
    "output tokens/s": ("output_tokens_per_s", True),
    "mean normalised latency": ("normalised_latency_s.mean", False),
    "p90 normalised latency": ("normalised_latency_s.p90", False),
    "mean cold TTFT": ("ttft_s.cold.mean", False),
    "mean warm TTFT": ("ttft_s.warm.mean", False),
    "p99 inter-token": ("inter_token_s.p99", False),
}
"""Name → path in a target's summary, and whether more is better."""


def portable(arguments: Sequence[str]) -> str:
    """A command line without folders of this machine: absolute paths are cut to their last part."""
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in arguments)


def measured_value(summary: dict[str, Any], path: str) -> float | None:
    """The number at a dotted path."""
    value: Any = summary
    for key in path.split("."):
        value = value[key]
    return None if value is None else float(value)


def ratios(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, float | None]:
    """How many times better ``ours`` is: above 1 is better for every line."""
    found: dict[str, float | None] = {}
    for name, (path, more_is_better) in RATIOS.items():
        mine, theirs = measured_value(ours, path), measured_value(other, path)
        better, worse = (mine, theirs) if more_is_better else (theirs, mine)
        found[name] = better / worse if better and worse else None
    return found


def markdown(report: dict[str, Any]) -> str:
    """The comparison as a page."""
    summaries, machine = report["targets"], report["machine"]
    head = [s["target"] for s in summaries]
    lines = [
        f"# Replay: {report['dataset']['name']}",
        "",
        f"`{report['command_line']}`",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; "
        + ", ".join(
            f"{name} {version}" for name, version in report["versions"].items() if version != "absent"
        )
        + f"; {report['created']}",
        "",
        "Workload: " + ", ".join(f"{name} {value}" for name, value in report["workload"].items()) + ".",
        "",
        "| | " + " | ".join(head) + " |",
        "|---" * (len(head) + 1) + "|",
    ]
    for name, (path, _) in RATIOS.items():
        scale, unit, digits = (1, "", ".2f") if path.endswith("_per_s") else (1000, " [ms]", ".1f")
        cells = (measured_value(s, path) for s in summaries)
        lines.append(
            f"| {name}{unit} | "
            + " | ".join("–" if c is None else format(c * scale, digits) for c in cells)
            + " |"
        )
    for source in ("context", "gpu_cached", "swapped_in", "recomputed", "new", "output"):
        lines.append(
            f"| tokens {source.replace('_', ' ')} | "
            + " | ".join(str(s["tokens"][source]) for s in summaries)
            + " |"
        )
    others = list(report["ratios"])
    lines += [
        "",
        f"How many times better {head[0]} is (above 1: better):",
        "",
        "| | than " + " | than ".join(others) + " |",
        "|---" * (len(others) + 1) + "|",
    ]
    for name in RATIOS:
        values = (report["ratios"][other][name] for other in others)
        lines.append(f"| {name} | " + " | ".join("–" if v is None else f"{v:.2f}" for v in values) + " |")
    return "\n".join(lines) + "\n"


def run_server(
    plan: Plan, name: str, model: Path, arguments: tuple[str, ...], console: Console
) -> dict[str, Any]:
    """Replay against a server of its own."""
    try:
        with ServerProcess(*arguments) as server:
            report = run_with_progress(plan, [PensieveTarget(server.target, name=name)], console)
    except SpawnError as error:
        raise click.ClickException(str(error)) from error
    report["targets"][0]["details"] |= {"model": model.name, "serve": portable(arguments)}
    return report


@click.command()
@workload_options
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--serve", default="", metavar="ARGUMENTS", help="More options for both `pensieve serve`, quoted."
)
@click.option("--context-limit", type=click.IntRange(min=2), default=2048, show_default=True, metavar="N",
              help="Of the workload; all systems must hold it.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=0), default=0, metavar="N",
              help="CPU threads of each model; 0: one per core.")  # fmt: skip
@click.option("--without-hf", is_flag=True, help="Leave transformers out: it may take long.")
@click.option("--name", default="replay_compare", show_default=True, help="Of the two result files.")
@click.option(
    "--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Their folder."
)
def main(
    model: Path, dtype: str, device: str, serve: str, context_limit: int, without_hf: bool, threads: int, name: str,
    results: Path, **workload: Any,
) -> None:  # fmt: skip
    """Compare on DATASET."""
    plan = replace(make_plan(**workload), context_limit=context_limit, vocab_size=_vocab_size(model))
    console = Console(stderr=True)
    common = (
        *("--model", str(model), "--store", "memory:", "--device", device, "--dtype", dtype),
        *("--threads", str(threads), *shlex.split(serve)),
    )
    systems: list[Callable[[], dict[str, Any]]] = [
        lambda: run_server(plan, "Pensieve", model, common, console),
        lambda: run_server(plan, "Pensieve --stateless", model, (*common, "--stateless"), console),
    ]
    if not without_hf:
        systems.append(
            lambda: run_with_progress(
                plan, [HuggingFaceTarget(model, dtype=dtype, device=device, threads=threads)], console
            )
        )
    reports = [system() for system in systems]
    workloads = [report["workload"] for report in reports]
    if any(seen != workloads[0] for seen in workloads):
        raise click.ClickException(
            f"the systems did not get the same work; lower --context-limit: {workloads}"
        )
    report = reports[0] | {"targets": [report["targets"][0] for report in reports]}
    report["command_line"] = portable(["python", "bench/replay_compare.py", *sys.argv[1:]])
    ours, *others = report["targets"]
    report["ratios"] = {other["target"]: ratios(ours, other) for other in others}
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (results / f"{name}.md").write_text(markdown(report), encoding="utf-8")
    show(report, wide_console())
    if not all(map(is_clean, report["targets"])):
        sys.exit(1)


def _vocab_size(model: Path) -> int:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


if __name__ == "__main__":
    main()
