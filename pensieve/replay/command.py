"""``pensieve replay``."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pensieve.replay.report import is_clean
from pensieve.replay.runner import RunOptions, TurnRecord
from pensieve.replay.schedule import Arrivals
from pensieve.replay.session import Plan, run
from pensieve.replay.shaping import Shape
from pensieve.replay.table import show
from pensieve.replay.targets import Target, TurnFailed
from pensieve.replay.workload import CountTokens, Dataset, DatasetError, estimate_tokens, load

_POSITIVE = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_OUTPUT = click.Path(dir_okay=False, path_type=Path)


def parse_target(value: str, api_key: str | None = None) -> Target:
    """Raises BadParameter."""
    scheme, separator, address = value.partition("://")
    host, colon, port = address.rpartition(":")
    if not (separator and host and colon and port.isdigit()):
        raise click.BadParameter(f"{value!r} is not pensieve://HOST:PORT", param_hint="--target")
    if scheme != "pensieve":
        raise click.BadParameter(
            f"{scheme}:// targets cannot be replayed; use pensieve://", param_hint="--target"
        )
    from pensieve.replay.grpc_target import PensieveTarget

    return PensieveTarget(address, name=value, api_key=api_key)


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What is replayed and when: shared with the scripts in bench/."""
    for decorate in reversed(
        (
            click.argument("dataset", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
            click.option("--limit", type=_POSITIVE, metavar="N", help="Only the first N conversations."),
            click.option(
                "--rate",
                type=click.FloatRange(min=0),
                metavar="R",
                help="Offer R turns per second on average: conversations start as a Poisson process. 0: all at once. "
                "Default: the recorded times if the dataset has them, else all at once.",
            ),
            click.option("--think-time", type=_SECONDS, default=0.0, metavar="S", help="Mean of exponential pauses."),
            click.option("--time-scale", type=click.FloatRange(0, min_open=True), default=1.0, metavar="F",
                         help="Multiply recorded times by F."),
            click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", show_default=True,
                         help="Of arrivals, pauses and input tokens."),
            click.option("--max-turns", type=_POSITIVE, metavar="N", help="Per conversation."),
            click.option("--max-input-tokens", type=_POSITIVE, metavar="N", help="Per turn."),
            click.option("--max-output-tokens", type=_POSITIVE, metavar="N", help="Per turn."),
            click.option("--scale-lengths", type=click.FloatRange(0, min_open=True), default=1.0, metavar="F",
                         help="Multiply all lengths by F, for models with short contexts."),
            click.option("--concurrency", type=_POSITIVE, metavar="N", help="At most N conversations at once."),
            click.option("--force-lengths/--no-force-lengths", default=True,
                         help="Answers of exactly the recorded lengths, or at most so long."),
            click.option("--tokenizer", type=_FOLDER, metavar="FOLDER",
                         help="Model folder whose tokenizer counts the text of a ShareGPT file; default: an estimate."),
        )
    ):  # fmt: skip
        command = decorate(command)
    return command


def make_plan(
    dataset: Path, limit: int | None, rate: float | None, think_time: float, time_scale: float, seed: int,
    max_turns: int | None, max_input_tokens: int | None, max_output_tokens: int | None, scale_lengths: float,
    concurrency: int | None, force_lengths: bool, tokenizer: Path | None,
) -> Plan:  # fmt: skip
    """From the values of ``workload_options``. Raises click exceptions."""
    try:
        data: Dataset = load(dataset, _counter(tokenizer), limit=limit)
    except DatasetError as error:
        raise click.UsageError(str(error)) from error
    recorded = rate is None and data.recorded_arrivals
    if time_scale != 1.0 and not recorded:
        raise click.UsageError("--time-scale needs a dataset with timestamps, and no --rate")
    if think_time and recorded:
        raise click.UsageError("--think-time needs --rate: this dataset says itself when turns are sent")
    return Plan(
        data,
        Shape(scale_lengths, max_turns, max_input_tokens, max_output_tokens),
        Arrivals(rate or None, think_time, recorded, time_scale, seed),
        RunOptions(force_lengths, concurrency, seed),
    )


def run_with_progress(plan: Plan, targets: list[Target], console: Console) -> dict[str, Any]:
    """Like ``session.run``, with a bar per target on the terminal. Raises ClickException."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def watch(name: str, turns: int) -> Callable[[TurnRecord], None]:
            bar = progress.add_task(name, total=turns)
            return lambda record: progress.advance(bar)

        try:
            return asyncio.run(run(plan, targets, watch))
        except TurnFailed as failure:
            raise click.ClickException(f"a target cannot be reached: {failure}") from failure
        except ValueError as error:
            raise click.ClickException(str(error)) from error


@click.command()
@workload_options
@click.option("--target", "targets", multiple=True, required=True, metavar="pensieve://HOST:PORT",
              help="Server to replay against; give it again to compare several, one after the other.")  # fmt: skip
@click.option("--api-key", envvar="PENSIEVE_API_KEY", show_envvar=True, help="Bearer token for the servers.")
@click.option("--json", "json_file", type=_OUTPUT, metavar="FILE", help="Write all numbers.")
@click.option("--html", "html_file", type=_OUTPUT, metavar="FILE", help="Write the tables as one page.")
def replay(
    targets: tuple[str, ...],
    api_key: str | None,
    json_file: Path | None,
    html_file: Path | None,
    **workload: Any,
) -> None:
    """Replay multi-turn conversations against servers and report.

    DATASET is ShareGPT JSON or a length trace (JSONL: session_id, turn, input_tokens, output_tokens[, timestamp_s]),
    maybe gzipped. A turn is sent only after the answer to the one before. Exit code 1 when a turn fails or a turn's
    receipt does not add up.
    """
    plan = make_plan(**workload)
    report = run_with_progress(
        plan, [parse_target(value, api_key) for value in targets], Console(stderr=True)
    )
    report["command"] = ["pensieve", *sys.argv[1:]]
    console = wide_console(record=html_file is not None)
    show(report, console)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if html_file is not None:
        console.save_html(str(html_file))
    if not all(is_clean(summary) for summary in report["targets"]):
        click.get_current_context().exit(1)


def wide_console(*, record: bool = False) -> Console:
    """On stdout; where that is no terminal, wide enough for the tables."""
    console = Console(record=record)
    return console if console.is_terminal else Console(record=record, width=140)


def _counter(folder: Path | None) -> CountTokens:
    if folder is None:
        return estimate_tokens
    from pensieve.tokenizer.folder import read_folder

    backend = read_folder(folder).backend
    return lambda text: len(backend.encode(text, add_special_tokens=False).ids)
