"""``pensieve simulate``."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pensieve.config import BATCH_LIMITS, CacheConfig
from pensieve.engine.cost import CostModel, CostProfileError
from pensieve.errors import PensieveError
from pensieve.replay.load.generators import generate
from pensieve.replay.load.schedule import Gaps
from pensieve.replay.load.workload import Conversation, Dataset, DatasetError, Shaping, load, shape
from pensieve.replay.parameters import DatasetName, Outputs, number_list, output_options
from pensieve.simulate import history
from pensieve.simulate.report import build_report, print_report
from pensieve.simulate.run import EngineName, Simulation, run_all
from pensieve.simulate.scenario import policies
from pensieve.simulate.scenario.load import Load, with_run_in
from pensieve.simulate.scenario.machine import Machine, MachineError, cache_config
from pensieve.simulate.scenario.settings import LEASE_S, RING_POINTS, ClientHints, Routing, Settings
from pensieve.simulate.scenario.tally import TimeWindow

_POSITIVE = click.IntRange(min=1)
_ABOVE_ZERO = click.FloatRange(min=0, min_open=True)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SLACK_SHARE = 0.08
_MAX_GENERATED = 20_000
"""Maximum number of conversations drawn from a built-in workload; more sessions are sampled from these."""
_HISTORY_TOKEN_COST = 1.5
"""Guessed cost of one history token in units of ``token_s``: above 1 because of attention."""


@dataclass(frozen=True, slots=True)
class Flags:
    trace: Path | str | None
    store: str | None
    engine: EngineName
    names: tuple[str, ...]
    sessions: int | None
    rate: float | None
    rates: tuple[float, ...]
    think_time: float | None
    think_from: Path | None
    seed: int
    seeds: tuple[int, ...]
    run_in: float
    warm_up: float | None
    window: float | None
    row_s: float | None
    device_cache: str
    host_cache: str
    prefix_sharing: bool
    system_tokens: int
    chunk_tokens: int
    swap_watermark: float
    decode_reserve: float
    context_limit: int
    max_batch_tokens: int
    max_running: int
    replicas: int
    routing: Routing
    ring_points: int
    hints: float | None
    lose_replica_at: float | None
    replica_returns_at: float | None
    lease_s: float
    machine_file: Path | None
    cost_profile: Path | None
    exact: bool
    jobs: int | None


@click.command(context_settings={"show_default": True, "max_content_width": 110})
@click.argument("trace", type=DatasetName(), required=False)
@click.option(
    "--store",
    metavar="URL",
    help="Simulate the turns in this history store at their recorded times, instead of TRACE. The store is only read.",
)
@click.option(
    "--engine",
    type=click.Choice(["turns", "full"]),
    default="turns",
    help="Whole turns as events, or the real engine step by step.",
)
@click.option(
    "--policy",
    "names",
    multiple=True,
    type=click.Choice(policies.NAMES),
    metavar="NAME",
    help=f"{', '.join(policies.NAMES)}; give it again to compare several.  [default: all]",
)
@click.option(
    "--sessions", type=_POSITIVE, metavar="N", help="Draw N sessions from the trace; default: each once."
)
@click.option(
    "--rate", type=_ABOVE_ZERO, metavar="R", help="Turns per second offered; default: the recorded times."
)
@click.option("--rates", callback=number_list(float), metavar="R,R,…", help="A run for each of these rates.")
@click.option(
    "--think-time",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Mean of exponential pauses; default: the recorded gaps.",
)
@click.option(
    "--think-from",
    type=_FILE,
    metavar="TRACE",
    help="Draw the pauses from the times between the turns of this trace.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N")
@click.option(
    "--seeds",
    callback=number_list(int),
    metavar="N,N,…",
    help="A run for each of these seeds, and 95 % confidence intervals.",
)
@click.option(
    "--run-in",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="S",
    help="Simulate exactly the turns of `pensieve replay --run-in S` with the same options, each session once.",
)
@click.option(
    "--warm-up",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Measure only what ends after S virtual seconds, and before the last session starts.",
)
@click.option("--window", type=_ABOVE_ZERO, metavar="S", help="Measure for S virtual seconds; default: all.")
@click.option(
    "--row",
    "row_s",
    type=_ABOVE_ZERO,
    metavar="S",
    help="Add statistics of every S virtual seconds to the JSON (`timeline`).",
)
@click.option("--device-cache", default="400000tokens", metavar="SIZE", help="Per replica.")
@click.option("--host-cache", default="1600000tokens", metavar="SIZE", help="Per replica.")
@click.option(
    "--sharing/--no-sharing",
    "prefix_sharing",
    default=CacheConfig.prefix_sharing,
    help="Cache chunks that sessions have in common once, or once per session.",
)
@click.option(
    "--system-tokens",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Put N tokens before each session's first input, the same ones for all.",
)
@click.option("--chunk-tokens", type=_POSITIVE, default=CacheConfig.chunk_tokens, metavar="N")
@click.option("--swap-watermark", type=click.FloatRange(0, 1), default=CacheConfig.swap_watermark)
@click.option("--decode-reserve", type=click.FloatRange(0, 1), default=CacheConfig.decode_reserve)
@click.option("--context-limit", type=_POSITIVE, default=131072, metavar="N", help="Longer sessions are cut.")
@click.option("--max-batch-tokens", type=_POSITIVE, default=BATCH_LIMITS["cuda"][0], metavar="N")
@click.option("--max-running", type=_POSITIVE, default=BATCH_LIMITS["cuda"][1], metavar="N")
@click.option("--replicas", type=_POSITIVE, default=1, metavar="N")
@click.option(
    "--routing",
    type=click.Choice(["affine", "hash", "bounded", "random"]),
    default="affine",
    help="affine: a session stays on one replica, evenly spread; hash: by a consistent hash; bounded: the same with "
    "bounded loads; random: each turn goes to any replica.",
)
@click.option(
    "--ring-points",
    type=_POSITIVE,
    default=RING_POINTS,
    metavar="N",
    help="Ring points of each replica, for hash and bounded; HAProxy has 16 per unit of a server's weight.",
)
@click.option(
    "--hints",
    type=click.FloatRange(0, 3),
    metavar="NOISE",
    help="Clients announce when their next turn comes and which turn is the last. 0: exactly; 0.5: times a lognormal "
    "error of sigma 0.5.",
)
@click.option(
    "--lose-replica-at",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Replica 0 fails after S virtual seconds.",
)
@click.option(
    "--replica-returns-at",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Replica 0 returns after S virtual seconds with an empty cache; default: never.",
)
@click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(min=0),
    default=LEASE_S,
    metavar="S",
    help="Turns that ran on the lost replica restart elsewhere after S seconds.",
)
@click.option(
    "--machine", "machine_file", type=_FILE, metavar="FILE", help="JSON with the fields of a machine."
)
@click.option("--cost-profile", type=_FILE, metavar="FILE", help="Compute rates from `pensieve profile`.")
@click.option(
    "--exact/--no-exact",
    default=False,
    help="turns engine: rank sessions at every eviction instead of slightly ahead; slower.",
)
@click.option(
    "--jobs", type=_POSITIVE, metavar="N", help="Policies simulated at the same time; default: one per core."
)
@output_options
def simulate(outputs: Outputs, **given: Any) -> None:
    """Run scheduler and cache under a virtual clock and compare eviction policies.

    TRACE is a length trace (JSONL: session_id, turn, input_tokens, output_tokens[, timestamp_s]; the first
    row of a session may name its shared beginning with prefix and prefix_tokens, or with hash_ids), ShareGPT
    JSON, either optionally gzipped, or a built-in workload of `pensieve replay`. The report has the format of
    a replay's report, so `pensieve replay compare` reads it. For a trace written by `pensieve serve
    --record`, or a --store, it also states how much less a clairvoyant policy would have recomputed. Exit
    code 1 when a receipt does not add up.
    """
    outputs.require()
    flags = Flags(**given)
    if flags.rate is not None and flags.rates:
        raise click.UsageError("give --rate or --rates")
    settings = make_settings(flags)
    if flags.run_in:
        _check_run_in(flags)
    try:
        data = _read_dataset(flags)
        shaped = shape(data.conversations, Shaping(system_tokens=flags.system_tokens), settings.context_limit)
        loads = _make_loads(flags, shaped.conversations, settings)
    except (DatasetError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    except PensieveError as error:
        raise click.ClickException(error.message) from error
    spans = [_window(offered, flags.warm_up, flags.window) for offered in loads]
    simulations = [
        Simulation(settings, offered, flags.engine, name, span, flags.row_s)
        for offered, span in zip(loads, spans, strict=True)
        for name in flags.names or policies.NAMES
    ]
    report = build_report(
        data, shaped, simulations, _run_with_progress(simulations, flags.jobs), flags.system_tokens
    )
    report["command"] = ["pensieve", *sys.argv[1:]]
    out = Console()
    print_report(report, out if out.is_terminal else Console(width=150))
    outputs.write(report)
    if any(row["receipts"]["violations"] for row in report["targets"]):
        click.get_current_context().exit(1)


def _check_run_in(flags: Flags) -> None:
    if isinstance(flags.trace, str) and flags.seeds:
        raise click.UsageError(
            "--run-in with a built-in workload takes one --seed: a replay draws new conversations for each seed"
        )
    if not isinstance(flags.trace, str) and flags.sessions is not None:
        raise click.UsageError("--run-in takes each session of a trace once: remove --sessions")
    if flags.sessions is not None and flags.sessions > _MAX_GENERATED:
        raise click.UsageError(f"--run-in takes at most {_MAX_GENERATED:,} --sessions")
    if flags.lose_replica_at is not None:
        raise click.UsageError("--run-in and --lose-replica-at count from different times: give one of them")


def _read_dataset(flags: Flags) -> Dataset:
    if flags.store is not None and flags.trace is None:
        return history.from_store(flags.store)
    if flags.store is not None or flags.trace is None:
        raise click.UsageError("give TRACE or --store")
    if isinstance(flags.trace, Path):
        return load(flags.trace)
    if flags.sessions is None:
        raise click.UsageError(f"{flags.trace} is drawn at random: say how many --sessions")
    return generate(flags.trace, min(flags.sessions, _MAX_GENERATED), flags.seed)


def _make_loads(flags: Flags, conversations: Sequence[Conversation], settings: Settings) -> list[Load]:
    """One load for each rate and seed. Raises DatasetError and ValueError."""
    gaps = None if flags.think_from is None else Gaps.from_dataset(load(flags.think_from))
    sessions = None if flags.run_in else flags.sessions
    loads = [
        Load(conversations, sessions, rate, flags.think_time, seed, gaps)
        for rate, seed in itertools.product(flags.rates or (flags.rate,), flags.seeds or (flags.seed,))
    ]
    if flags.run_in:
        loads = [
            with_run_in(offered, flags.run_in, _HISTORY_TOKEN_COST * settings.machine.token_s)
            for offered in loads
        ]
    return loads


def _window(offered: Load, warm_up: float | None, window: float | None) -> TimeWindow | None:
    """The measured window; None: all. It ends by default with the last session start, after which load falls."""
    if warm_up is None and window is None:
        return None
    start = warm_up or 0.0
    end = max(session.start for session in offered) - offered.zero_s if window is None else start + window
    if end <= start:
        raise click.UsageError(
            f"nothing is left to measure: the last session starts at {end:.0f} s, the warm-up ends at {start:g} s"
        )
    return start, end


def _run_with_progress(simulations: Sequence[Simulation], jobs: int | None) -> list[dict[str, Any]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(
            "sessions", total=sum(simulation.load.session_count for simulation in simulations)
        )
        return run_all(
            simulations,
            min(jobs or os.cpu_count() or 1, len(simulations)),
            lambda done: progress.update(bar, completed=done),
        )


def make_settings(flags: Flags) -> Settings:
    if flags.lose_replica_at is not None and flags.replicas < 2:
        raise click.UsageError("--lose-replica-at needs --replicas 2 or more")
    if flags.replica_returns_at is not None and not (flags.lose_replica_at or 0.0) < flags.replica_returns_at:
        raise click.UsageError("--replica-returns-at has to be later than --lose-replica-at")
    if flags.replica_returns_at is not None and flags.lose_replica_at is None:
        raise click.UsageError("--replica-returns-at needs --lose-replica-at")
    try:
        machine = Machine.from_json(flags.machine_file) if flags.machine_file else Machine()
        if flags.cost_profile is not None:
            machine = machine.with_profile(CostModel.from_json(flags.cost_profile))
        cache = cache_config(
            machine,
            flags.device_cache,
            flags.host_cache,
            chunk_tokens=flags.chunk_tokens,
            context_limit=flags.context_limit,
            policy="retention",
            swap_watermark=flags.swap_watermark,
            decode_reserve=flags.decode_reserve,
            prefix_sharing=flags.prefix_sharing,
        )
    except (MachineError, CostProfileError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if machine.groups and flags.engine != "full":
        raise click.UsageError(
            f"{machine.name} has windows or recurrent layers, which --engine turns does not know: use --engine full"
        )
    limit = min(flags.context_limit, cache.device_chunks * flags.chunk_tokens)
    return Settings(
        machine=machine,
        cache=cache,
        cost=machine.cost_model(flags.chunk_tokens, limit),
        context_limit=limit,
        max_batch_tokens=flags.max_batch_tokens,
        max_running=flags.max_running,
        replicas=flags.replicas,
        routing=flags.routing,
        ring_points=flags.ring_points,
        lose_replica_at=flags.lose_replica_at,
        replica_returns_at=flags.replica_returns_at,
        lease_s=flags.lease_s,
        seed=flags.seed,
        hints=None if flags.hints is None else ClientHints(flags.hints),
        slack=0 if flags.exact else int(_SLACK_SHARE * cache.device_chunks),
    )
