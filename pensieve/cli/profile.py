"""``pensieve profile``: measure the cost of recomputing a chunk on this machine."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pensieve.cli.server_errors import BadModel
from pensieve.config import CacheConfig, DeviceName, DtypeName, EngineOptions, LoadFormat
from pensieve.engine.cost.profiles import (
    MAX_CONTEXT,
    CostPoint,
    Prober,
    describe,
    device_name,
    prober,
    profile_path,
    write_profile,
)
from pensieve.options.commands import models
from pensieve.simulate.calibrate import SWAP_PAGES, calibrate_machine

if TYPE_CHECKING:  # importing it imports torch
    from pensieve.engine.worker.torch_worker import Worker

HOST_CHUNKS: Final = max(SWAP_PAGES)
MACHINE_TOKENS: Final = 32768
"""Size of the device tier, in tokens, while timing steps: enough for large batches."""


def _measure_with_progress(running: Prober, longest: int, chunk_tokens: int, repeats: int) -> list[CostPoint]:
    steps = (longest // chunk_tokens).bit_length()
    points: list[CostPoint] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("context", total=steps)
        for point in running.measure(longest, repeats):
            points.append(point)
            progress.update(task, advance=1, description=f"context {point.context}")
    return points


def _measure_machine(worker: Worker, name: str, longest: int, path: Path) -> None:
    """Time steps, fit a formula, write it, and report its error."""
    console = Console(stderr=True)
    with console.status("steps") as status:
        try:
            machine = calibrate_machine(
                worker, name, longest, lambda design: status.update(f"steps: {design}")
            )
        except ValueError as error:
            raise click.ClickException(str(error)) from error
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(machine), indent=1) + b"\n")
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
    click.echo(
        f"wrote {path}: its formula errs by {machine.mean_error:.1%} on average, {machine.worst_error:.1%} at worst",
        err=True,
    )


@click.command()
@click.option(
    "--model",
    default="demo",
    show_default=True,
    metavar="MODEL",
    help="Model folder, GGUF file, hub id, `smollm2` or `demo`.",
    shell_complete=models,
)
@click.option("--device", type=click.Choice(get_args(DeviceName)), default="auto", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(get_args(DtypeName)),
    default="auto",
    show_default=True,
)
@click.option(
    "--load-format",
    type=click.Choice(get_args(LoadFormat)),
    default="auto",
    show_default=True,
    help="`dummy`: random weights, if only the model's config is present.",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(1, 256),
    default=CacheConfig.chunk_tokens,
    show_default=True,
    metavar="N",
)
@click.option(
    "--longest",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"Longest context to measure.  [default: the model's limit, at most {MAX_CONTEXT}]",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    metavar="N",
    help="Measurements per context length.",
)
@click.option(
    "--threads", type=click.IntRange(0), default=0, metavar="N", help="CPU threads; 0: one per core."
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Divide the model over N GPUs, as `pensieve serve` does.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Output file; `-`: stdout.  [default: in the user's cache folder, where `pensieve serve` finds it]",
)
@click.option(
    "--machine",
    "machine_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also time whole steps, and write this machine's file for `pensieve simulate --machine`.",
)
def profile(
    model: str,
    device: DeviceName,
    dtype: DtypeName,
    load_format: LoadFormat,
    chunk_tokens: int,
    longest: int | None,
    repeats: int,
    threads: int,
    tensor_parallel: int,
    output: Path | None,
    machine_file: Path | None,
) -> None:
    """Measure the cost of recomputing a chunk on this machine.

    `pensieve serve` uses the result, stored per model, device, dtype, chunk size and number of GPUs. Pass a
    file stored elsewhere with `pensieve serve --cost-profile FILE`.
    """
    from pensieve.engine.ranks.build import build_workers
    from pensieve.model.arch import ModelError
    from pensieve.model.folder import load_arch
    from pensieve.model.resolve import display_name, resolve_model

    if machine_file is not None and not os.access(machine_file.parent, os.W_OK):
        # Fail now, not after minutes of measuring.
        raise click.ClickException(
            f"cannot write {machine_file}: its folder does not exist or is not writable"
        )
    try:
        folder = resolve_model(model)
        limit = load_arch(folder).context_limit
        if longest is not None and longest > limit:
            raise click.BadParameter(f"the model's context limit is {limit} tokens", param_hint="--longest")
        longest = longest or min(limit, MAX_CONTEXT)
        if longest < 2 * chunk_tokens:
            raise click.BadParameter(
                f"must be at least two chunks, {2 * chunk_tokens} tokens", param_hint="--longest"
            )
        worker = build_workers(
            EngineOptions(
                model=str(folder),
                device=device,
                dtype=dtype,
                load_format=load_format,
                chunk_tokens=chunk_tokens,
                device_cache=f"{max(longest, MACHINE_TOKENS if machine_file else 0)}tokens",
                host_cache=f"{HOST_CHUNKS * chunk_tokens}tokens" if machine_file else "0",
                torch_threads=threads,
                tensor_parallel=tensor_parallel,
            )
        )
    except ModelError as error:
        raise BadModel(str(error)) from error
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    with contextlib.closing(worker):
        points = _measure_with_progress(prober(worker), longest, chunk_tokens, repeats)
        name = device_name(worker.info)
        shown = display_name(model)
        result = describe(worker, shown, points, device_name=name, repeats=repeats)
        path = output or profile_path(worker, name)
        if machine_file is not None:
            _measure_machine(worker, f"{shown} on {name}", longest, machine_file)
    if str(path) == "-":
        click.echo(json.dumps(result, indent=2))
        return
    try:
        write_profile(path, result)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
    click.echo(f"wrote {path}", err=True)
