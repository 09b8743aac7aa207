"""``pensieve profile``: measure the cost of recomputing a chunk on this machine."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pensieve.cli.output import BadModel
from pensieve.config import CacheConfig, DeviceName, DtypeName, EngineOptions, KvDtypeName, LoadFormat
from pensieve.engine.cost_profiles import (
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
KV_ERROR_TOKENS: Final = 1024
"""Longest text for ``--kv-error``."""
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


def _show_kv_error(options: EngineOptions, text: Path | None) -> None:
    """Measure the codecs of keys and values on this model and print a table. Raises ModelError and ValueError."""
    import torch

    from pensieve.demo.conversations import material
    from pensieve.engine.worker.kv_error import kv_errors
    from pensieve.engine.worker.sizing import DTYPES, resolve_device
    from pensieve.machine import usable_cores
    from pensieve.model.folder import load_arch
    from pensieve.model.transformer import Transformer
    from pensieve.model.weights import load_weights
    from pensieve.tokenizer.folder import read_folder

    torch.set_num_threads(options.torch_threads or usable_cores())
    folder = Path(options.model)
    arch, tokenizer = load_arch(folder), read_folder(folder)
    place = resolve_device(options, arch)
    if text is None:
        facts = [
            sentence for life in material().lives for fact in life for sentence in (fact.tell, *fact.ask)
        ]
        words = " ".join([*material().remarks, *material().notes, *facts])
    else:
        words = text.read_text(errors="replace")
    first = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else []
    tokens = [*first, *tokenizer.backend.encode(words, add_special_tokens=False).ids]
    tokens = tokens[: min(KV_ERROR_TOKENS, arch.context_limit)]
    if len(tokens) < 2:
        raise ValueError(f"--text {text}: at least two tokens are needed")
    weights = load_weights(
        folder, arch, dtype=DTYPES[place.dtype], device=place.device, load_format=options.load_format
    )
    found = kv_errors(Transformer(arch, weights), tokens)
    click.echo(f"{len(tokens)} tokens in {place.dtype} on {place.device}, against KV in {place.dtype}")
    click.echo("kv dtype  logits apart (mean, worst)  greedy tokens changed  loss per token")
    for one in found:
        apart = f"{one.spread:.2e}, {one.worst:.2e} of spread"
        click.echo(f"{one.codec:<8}  {apart:<26}  {one.changed:>7} of {len(tokens)}  {one.loss:+.1e} nats")


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
@click.option("--kv-dtype", type=click.Choice(get_args(KvDtypeName)), default="auto", show_default=True)
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
    "--threads",
    "torch_threads",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="CPU threads; 0: one per core.",
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
@click.option(
    "--kv-error",
    is_flag=True,
    help="Instead, show how much `--kv-dtype fp8` and `int8` change this model's logits on a text.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Text for --kv-error.  [default: sentences of the demo]",
)
def profile(
    longest: int | None,
    repeats: int,
    output: Path | None,
    machine_file: Path | None,
    kv_error: bool,
    text: Path | None,
    **engine: Any,
) -> None:
    """Measure the cost of recomputing a chunk on this machine.

    `pensieve serve` uses the result, stored per model, device, dtypes, chunk size and number of GPUs. Pass a
    file stored elsewhere with `pensieve serve --cost-profile FILE`.
    """
    from pensieve.engine.ranks.leader import build_workers
    from pensieve.model.arch import ModelError
    from pensieve.model.folder import load_arch
    from pensieve.model.resolve import display_name, resolve_model

    if machine_file is not None and not os.access(machine_file.parent, os.W_OK):
        # Fail now, not after minutes of measuring.
        raise click.ClickException(
            f"cannot write {machine_file}: its folder does not exist or is not writable"
        )
    try:
        folder = resolve_model(engine["model"])
        options = EngineOptions(**engine | {"model": str(folder)})
        chunk_tokens = options.chunk_tokens
        if kv_error:
            return _show_kv_error(options, text)
        limit = load_arch(folder).context_limit
        if longest is not None and longest > limit:
            raise click.BadParameter(f"the model's context limit is {limit} tokens", param_hint="--longest")
        longest = longest or min(limit, MAX_CONTEXT)
        if longest < 2 * chunk_tokens:
            raise click.BadParameter(
                f"must be at least two chunks, {2 * chunk_tokens} tokens", param_hint="--longest"
            )
        worker = build_workers(
            msgspec.structs.replace(
                options,
                device_cache=f"{max(longest, MACHINE_TOKENS if machine_file else 0)}tokens",
                host_cache=f"{HOST_CHUNKS * chunk_tokens}tokens" if machine_file else "0",
            )
        )
    except ModelError as error:
        raise BadModel(str(error)) from error
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    with contextlib.closing(worker):
        points = _measure_with_progress(prober(worker), longest, chunk_tokens, repeats)
        name = device_name(worker.info)
        shown = display_name(engine["model"])
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
