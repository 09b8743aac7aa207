"""``pensieve replay``: the command line of a replay, of a sweep over rates and seeds, and of ``replay compare``."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Final, Self

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pensieve.options.commands import GroupedCommand, print_error
from pensieve.replay.load.generators import generate
from pensieve.replay.load.schedule import Arrivals, Gaps
from pensieve.replay.load.workload import CountTokens, Dataset, DatasetError, Shaping, estimate_tokens, load
from pensieve.replay.measure import Window, is_clean
from pensieve.replay.parameters import (
    FILE,
    FOLDER,
    OUTPUT,
    OUTPUT_FOLDER,
    POSITIVE,
    DatasetName,
    Outputs,
    number_list,
    output_options,
    wide_console,
    writing,
)
from pensieve.replay.play.player_pool import ClientFailed
from pensieve.replay.play.runner import ReplayWatcher, RunWatcher
from pensieve.replay.presentation.curves import NotAReport, comparison, names_of, read_report
from pensieve.replay.presentation.html import write_html
from pensieve.replay.presentation.plots import write_plots
from pensieve.replay.presentation.table import print_curves, print_report
from pensieve.replay.records import MAX_LAG_S, RunOptions, TurnRecord
from pensieve.replay.session import ReplayPlan, run_all
from pensieve.replay.targets.base import Target, TurnFailed
from pensieve.replay.targets.options import target_options

_RECENT_S = 10.0
"""Averaging time of tokens per second, by the ends of turns."""


class LiveProgress(ReplayWatcher):
    """A context manager with a line for each run, and for each server while it starts.

    Silent if the console is not a terminal.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[running]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[errors]}", style="red"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    @contextmanager
    def starting(self, target: str) -> Iterator[None]:
        task = self.progress.add_task(f"{target} is starting", total=None, running="", speed="", errors="")
        try:
            yield
        finally:
            self.progress.remove_task(task)

    def run(self, target: str, turns: int) -> RunLine:
        return RunLine(self.progress, target, turns, self._clock)


class RunLine(RunWatcher):
    def __init__(self, progress: Progress, name: str, turns: int, clock: Callable[[], float]) -> None:
        self._progress, self._clock = progress, clock
        self._recent: deque[tuple[float, int]] = deque()
        self._sent = self._ended = self._unsent = self._errors = 0
        self._start = clock()
        self._task: TaskID = progress.add_task(name, total=turns, running="", speed="", errors="")

    def on_send(self) -> None:
        self._sent += 1
        self._show()

    def on_turn_end(self, record: TurnRecord) -> None:
        now = self._clock()
        self._ended += 1
        self._unsent += not record.sent_s  # its conversation could not be opened
        self._errors += bool(record.error)
        self._recent.append((now, record.output_tokens))
        while self._recent[0][0] < now - _RECENT_S:
            self._recent.popleft()
        self._progress.advance(self._task)
        self._show()

    def _show(self) -> None:
        span = min(_RECENT_S, self._clock() - self._start)
        speed = sum(tokens for _, tokens in self._recent) / span if span > 0 else 0.0
        self._progress.update(
            self._task,
            running=f"{self._sent - self._ended + self._unsent} running",
            speed=f"{speed:,.0f} tok/s",
            errors=f"{self._errors} errors" if self._errors else "",
        )


GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Targets": ("target", "start", "name", "api-key", "start-timeout", "vocab-size", "context-limit"),
    "What is replayed": (
        "conversations", "limit", "max-turns", "max-input-tokens", "max-output-tokens", "scale-lengths",
        "force-lengths", "system-tokens", "hints", "warm-ahead", "tokenizer", "seed", "seeds",
    ),
    "When turns are sent": (
        "rate", "rates", "clients", "concurrency", "think-time", "think-per-token", "think-minimum", "think-from",
        "time-scale",
    ),
    "What is measured": (
        "run-in", "warm-up", "window", "steady", "stop-after-window", "processes", "max-lag",
    ),
    "Reports": ("json", "html", "plots", "help"),
}  # fmt: skip
_SECONDS = click.FloatRange(min=0)


@click.command()
@click.argument("files", metavar="A.json [B.json ...]", type=FILE, nargs=-1, required=True)
@click.option("--at-latency", "latency_ms", type=click.FloatRange(0, min_open=True), metavar="MS",
              help="Take ratios of throughput at this normalised latency, in milliseconds per token. Default, for each "
              "pair of systems: the geometric middle of the latencies that both reached.")  # fmt: skip
@click.option("--json", "json_file", type=OUTPUT, metavar="FILE", help="Write the curves and the ratios.")
@click.option("--html", "html_file", type=OUTPUT, metavar="FILE",
              help="Write one page with plots, tables and configurations.")  # fmt: skip
@click.option("--plots", "plots_folder", type=OUTPUT_FOLDER, metavar="FOLDER",
              help="Write the plots as PNG and SVG.")  # fmt: skip
def compare(
    files: tuple[Path, ...], latency_ms: float | None, json_file: Path | None, html_file: Path | None,
    plots_folder: Path | None,
) -> None:  # fmt: skip
    """Compare several reports of `pensieve replay --json`.

    Reports of the same workload and model share a panel; other reports get panels of their own. In a panel,
    targets of the same name are one curve when the reports differ only in the load and in the address where a
    server listens; otherwise each report has its own curve.
    """
    reports, names = [read_report(path) for path in files], names_of(files)
    if not any(report["targets"] for report in reports):
        raise NotAReport("no report has a measured target")
    latency_s = None if latency_ms is None else latency_ms / 1000
    print_curves(reports, names, wide_console(), latency_s)
    if json_file is not None:
        text = json.dumps(comparison(reports, names, latency_s), indent=1, allow_nan=False)
        with writing(json_file):
            json_file.write_text(text + "\n", encoding="utf-8")
    if html_file is not None:
        with writing(html_file):
            write_html(reports, html_file, names, latency_s)
    if plots_folder is not None:
        with writing(plots_folder):
            write_plots(reports, plots_folder, names, latency_s)


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for what is replayed and when; programs in bench/ use them, too."""
    for decorate in reversed(
        (
            click.argument("dataset", type=DatasetName()),
            click.option("--conversations", type=POSITIVE, metavar="N",
                         help="Number of conversations of a built-in workload; default 100."),
            click.option("--limit", type=POSITIVE, metavar="N", help="Only the first N conversations."),
            click.option(
                "--rate",
                type=click.FloatRange(min=0),
                metavar="R",
                help="Offer R turns per second on average: conversations start as a Poisson process. 0: all at once. "
                "Default: the recorded times if the dataset has them, else all at once.",
            ),
            click.option("--clients", type=POSITIVE, metavar="N",
                         help="Closed loop: N clients, each with one conversation after the other."),
            click.option("--think-time", type=_SECONDS, default=0.0, metavar="S", help="Mean of exponential pauses."),
            click.option("--think-per-token", type=_SECONDS, default=0.0, metavar="S",
                         help="Pauses of S seconds per token of the answer, at least --think-minimum."),
            click.option("--think-minimum", type=_SECONDS, default=5.0, metavar="S", show_default=True),
            click.option("--think-from", type=FILE, metavar="TRACE",
                         help="Draw pauses from the times between the turns of a trace."),
            click.option("--run-in", type=_SECONDS, default=0.0, metavar="S",
                         help="Begin as if the load of --rate had been running for S seconds: the histories of open "
                         "and recently ended conversations are played first, before the clock starts."),
            click.option("--warm-up", type=_SECONDS, metavar="S", help="Measure only turns that end after S seconds."),
            click.option("--window", type=click.FloatRange(0, min_open=True), metavar="S",
                         help="Measure for S seconds; default: until the last conversation starts."),
            click.option("--steady", is_flag=True,
                         help="Detect the warm-up, and report whether the load was steady after it."),
            click.option("--stop-after-window", is_flag=True,
                         help="End the replay with the window: turns in flight are cut short and do not count."),
            click.option("--processes", type=POSITIVE, default=1, metavar="N", show_default=True,
                         help="Client processes that share the conversations, for loads that one cannot keep up with."),
            click.option("--max-lag", type=click.FloatRange(0, min_open=True), default=MAX_LAG_S,
                         metavar="S", show_default=True, help="Results are void if this program was later itself."),
            click.option("--time-scale", type=click.FloatRange(0, min_open=True), default=1.0, metavar="F",
                         help="Multiply recorded times by F."),
            click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", show_default=True,
                         help="Seed of arrivals, pauses and input tokens."),
            click.option("--max-turns", type=POSITIVE, metavar="N", help="Maximum turns of a conversation."),
            click.option("--max-input-tokens", type=POSITIVE, metavar="N", help="Maximum input of a turn."),
            click.option("--max-output-tokens", type=POSITIVE, metavar="N", help="Maximum output of a turn."),
            click.option("--scale-lengths", type=click.FloatRange(0, min_open=True), default=1.0, metavar="F",
                         help="Multiply all lengths by F, for models with short contexts."),
            click.option("--hints", type=click.FloatRange(0, 3), metavar="NOISE",
                         help="Announce to the server when the next turn comes and which turn is the last. 0: exactly; "
                         "0.5: times a lognormal error of sigma 0.5. Pensieve only."),
            click.option("--warm-ahead", type=_SECONDS, metavar="S",
                         help="Ask the server to warm a session S seconds before its next turn is due. Pensieve only."),
            click.option("--system-tokens", type=click.IntRange(min=0), default=0, metavar="N",
                         help="Put N tokens before each conversation's first input, the same ones for all."),
            click.option("--concurrency", type=POSITIVE, metavar="N", help="At most N conversations at the same time."),
            click.option("--force-lengths/--no-force-lengths", default=True,
                         help="Answers of exactly, or at most, the recorded lengths."),
            click.option("--tokenizer", type=FOLDER, metavar="FOLDER",
                         help="Model folder whose tokenizer counts the text of a ShareGPT file; default: an estimate."),
        )
    ):  # fmt: skip
        command = decorate(command)
    return command


def make_plan(options: Mapping[str, Any]) -> ReplayPlan:
    """Make a plan from the values of ``workload_options``. Raises click exceptions."""
    given = SimpleNamespace(**options)
    _check_combinations(given)
    try:
        if isinstance(given.dataset, str):
            conversations = min(given.conversations or 100, given.limit or 2**31)
            data = generate(given.dataset, conversations, given.seed)
        else:
            data = _load_cached(given.dataset, given.tokenizer, given.limit)
        gaps = Gaps.from_dataset(_load_cached(given.think_from, None, None)) if given.think_from else None
    except DatasetError as error:
        raise click.UsageError(str(error)) from error
    recorded = given.rate is None and given.clients is None and data.recorded_arrivals
    if given.time_scale != 1.0 and not recorded:
        raise click.UsageError("--time-scale needs a dataset with timestamps, and no --rate")
    if (given.think_time or given.think_per_token or gaps) and recorded:
        raise click.UsageError("pauses need --rate or --clients: this dataset has its own times of turns")
    shaping = Shaping(
        given.scale_lengths,
        given.max_turns,
        given.max_input_tokens,
        given.max_output_tokens,
        given.system_tokens,
    )
    arrivals = Arrivals(
        given.rate or None,
        given.think_time,
        recorded,
        given.time_scale,
        given.seed,
        given.clients,
        given.think_per_token,
        given.think_minimum if given.think_per_token else 0.0,
        gaps,
        given.run_in,
    )
    run = RunOptions(
        given.force_lengths,
        given.concurrency or given.clients,
        given.seed,
        max_lag_s=given.max_lag,
        processes=given.processes,
        stop_s=(given.warm_up or 0.0) + given.window if given.stop_after_window and given.window else None,
        hints=given.hints,
        warm_ahead_s=given.warm_ahead,
    )
    return ReplayPlan(data, shaping, arrivals, run, window=Window(given.warm_up, given.window, given.steady))


def _check_combinations(given: SimpleNamespace) -> None:
    """Raise click.UsageError for options that are wrong only in combination."""
    if given.clients and (given.rate is not None or given.concurrency):
        raise click.UsageError("--clients cannot be combined with --rate or --concurrency")
    if (given.think_time > 0) + (given.think_per_token > 0) + (given.think_from is not None) > 1:
        raise click.UsageError("give one of --think-time, --think-per-token, --think-from")
    if given.steady and (given.warm_up is not None or given.window is not None):
        raise click.UsageError("--steady detects the window: remove --warm-up and --window")
    if given.run_in and not given.rate:
        raise click.UsageError("--run-in needs --rate or --rates")
    if given.stop_after_window and given.window is None:
        raise click.UsageError("--stop-after-window needs a --window")
    if given.processes > (given.clients or given.concurrency or given.processes):
        raise click.UsageError("--processes must not exceed --clients or --concurrency, which they share")
    if given.conversations and isinstance(given.dataset, Path):
        raise click.UsageError("--conversations is for built-in workloads; --limit cuts a file")


@lru_cache(maxsize=4)
def _load_cached(path: Path, tokenizer: Path | None, limit: int | None) -> Dataset:
    """Load a dataset, cached because a sweep makes many plans of it."""
    return load(path, _token_counter(tokenizer), limit=limit)


def run_with_progress(
    plans: Sequence[ReplayPlan],
    targets: Sequence[Target],
    console: Console,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Like ``session.run_all``, with a line per run on the terminal. Raises ClickException."""
    with LiveProgress(console) as live:
        try:
            return asyncio.run(_cancel_on_sigterm(run_all(plans, targets, live, keep)))
        except asyncio.CancelledError:
            sys.exit(128 + signal.SIGTERM)
        except TurnFailed as failure:
            raise click.ClickException(f"a target cannot be reached: {failure}") from failure
        except (ValueError, ClientFailed) as error:
            raise click.ClickException(str(error)) from error


async def _cancel_on_sigterm(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Run ``work``; SIGTERM cancels it as Ctrl-C does, so that started servers are stopped first."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


class _Replay(GroupedCommand):
    """Makes ``pensieve replay compare …`` a command; any other first word is a dataset or an option."""

    @property
    def commands(self) -> dict[str, click.Command]:
        return {"compare": compare}

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["compare"]:
            return self.commands["compare"].make_context(f"{info_name} compare", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@click.command(cls=_Replay, groups=GROUPS)
@workload_options
@target_options
@click.option("--rates", callback=number_list(float), metavar="R,R,…", help="A run for each of these rates.")
@click.option(
    "--seeds",
    callback=number_list(int),
    metavar="N,N,…",
    help="A run for each of these seeds, and 95 % confidence intervals.",
)
@click.option(
    "--vocab-size", type=POSITIVE, metavar="N", help="Vocabulary size, for servers that do not report it."
)
@click.option("--context-limit", type=POSITIVE, metavar="N", help="Keep contexts below N tokens.")
@output_options
def replay(
    targets: list[Target], rates: tuple[float, ...], seeds: tuple[int, ...], vocab_size: int | None,
    context_limit: int | None, outputs: Outputs, **workload: Any,
) -> None:  # fmt: skip
    """Replay multi-turn conversations against servers and report.

    DATASET is ShareGPT JSON, a length trace (JSONL: session_id, turn, input_tokens, output_tokens[,
    timestamp_s]; the first row of a session may name its shared beginning with prefix and prefix_tokens, or
    with hash_ids), either optionally gzipped, or a built-in workload: sharegpt, ultrachat, lmsys,
    sharegpt-long, mooncake. A turn is sent only after the answer to the one before. `replay compare` compares
    the results of several replays.

    Exit code 1 when a turn fails, a turn's receipt does not add up, a target cannot be reached, or this
    program itself was too late for a valid measurement. The file of --json is written after each run, so a
    replay that is stopped leaves its finished runs.
    """
    outputs.require()
    plans = _make_plans(workload, rates, seeds, vocab_size or 0, context_limit or 0)
    command = {"command": ["pensieve", *sys.argv[1:]]}
    kept = 0

    def keep(report: dict[str, Any]) -> None:
        nonlocal kept
        kept = len(report["targets"]) if outputs.write_partial(report | command) else 0

    try:
        report = run_with_progress(plans, targets, Console(stderr=True), keep) | command
    except (KeyboardInterrupt, SystemExit):
        if kept:
            print_error(f"stopped: {outputs.json_file} has {kept} of {len(plans) * len(targets)} runs")
        raise
    shown = bool(report["valid"] and report["targets"])
    if shown:
        print_report(report, wide_console())
    outputs.write(report, draw=shown)
    _report_problems(report)
    clean = all(
        is_clean(summary) and not summary["window"]["failed_outside"] for summary in report["targets"]
    )
    if not (clean and report["valid"]) or report["unreached"]:
        click.get_current_context().exit(1)


def _make_plans(
    workload: dict[str, Any],
    rates: tuple[float, ...],
    seeds: tuple[int, ...],
    vocab_size: int,
    context_limit: int,
) -> list[ReplayPlan]:
    if rates and (workload["rate"] is not None or workload["clients"]):
        raise click.UsageError("--rates cannot be combined with --rate or --clients")
    plans: list[ReplayPlan] = []
    for rate in rates or (workload["rate"],):
        for seed in seeds or (workload["seed"],):
            plan = make_plan(workload | {"rate": rate, "seed": seed})
            run = replace(plan.run, ids=len(plans))
            plans.append(replace(plan, run=run, vocab_size=vocab_size, context_limit=context_limit))
    return plans


def _report_problems(report: dict[str, Any]) -> None:
    for entry in report["unreached"]:
        problem = "cannot be reached" if entry["run"] is None else f"was lost in run {entry['run']}"
        print_error(f"{entry['target']} {problem}: {entry['error']}")
    for summary in report["targets"]:
        if summary["window"]["steady"] is False:
            print_error(f"{summary['target']}, run {summary['run']}: the load was not steady")
    if not report["valid"]:
        print_error("no results: the client was too late, so its timings do not describe the servers")
        for reason in report["invalid_reasons"]:
            click.echo(f"  {reason}", err=True)
        click.echo(
            "Give the client a core of its own, or a lighter load: fewer --conversations, a lower --rate.",
            err=True,
        )


def _token_counter(folder: Path | None) -> CountTokens:
    if folder is None:
        return estimate_tokens
    from pensieve.tokenizer.folder import read_folder

    backend = read_folder(folder).backend
    return lambda text: len(backend.encode(text, add_special_tokens=False).ids)
