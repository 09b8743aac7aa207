"""One whole replay: open the targets, fit the workload to all of them, play every run on each, report."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pensieve.replay.load.schedule import Arrivals, Script, apply_run_in, scripts
from pensieve.replay.load.workload import Dataset, Shaped, Shaping, shape
from pensieve.replay.measure import (
    SCHEMA,
    Window,
    client_lag,
    cut_to_window,
    environment,
    intervals,
    receipt_violations,
    running_turns,
    sent_turns,
    summarise,
)
from pensieve.replay.play import player_pool, runner
from pensieve.replay.play.runner import ReplayWatcher
from pensieve.replay.records import Outcome, RunOptions
from pensieve.replay.targets.base import RemoteTarget, Target, TargetInfo, TurnFailed, empty_cache
from pensieve.replay.targets.started_target import Counters, StartedTarget, counter_growth


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    dataset: Dataset
    shape: Shaping
    arrivals: Arrivals
    run: RunOptions
    vocab_size: int = 0
    """Upper bound of input ids; 0: the smallest vocabulary of all targets."""
    context_limit: int = 0
    """Upper bound of contexts, in addition to the limits of all targets; 0: none."""
    window: Window = field(default_factory=Window)


@dataclass(frozen=True, slots=True)
class _Prepared:
    plan: ReplayPlan
    shaped: Shaped
    scripts: list[Script]
    vocab_size: int
    context_limit: int


@dataclass(frozen=True, slots=True)
class _LostTarget:
    failure: TurnFailed
    run: int | None


_NO_WATCHER = ReplayWatcher()


async def run(
    plan: ReplayPlan, targets: Sequence[Target], watch: ReplayWatcher = _NO_WATCHER
) -> dict[str, Any]:
    return await run_all([plan], targets, watch)


async def run_all(
    plans: Sequence[ReplayPlan],
    targets: Sequence[Target],
    watch: ReplayWatcher = _NO_WATCHER,
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Play all plans on all targets and return the report for JSON.

    All targets get the same token ids at the same times. Each target plays all plans before the next target
    starts. ``keep`` gets the report so far after each run.

    No run finds the state of an earlier one in a server: sessions are deleted, token ids differ, and the
    prefix cache is emptied if the server allows it. The plans share ``vocab_size`` and ``context_limit``. If
    only some targets cannot be reached they are listed in ``unreached``, and so are started servers that end
    during a run; their finished runs count.

    Raises TurnFailed when no target can be reached; ValueError when no conversation fits, or a target does
    not support several processes or hints that the plan needs.
    """
    async with AsyncExitStack() as stack:
        for target in targets:
            stack.push_async_callback(target.close)
        lost: dict[int, _LostTarget] = {}
        infos = await _query_targets(targets, plans[0], lost, watch)
        prepared = [_prepare(plan, list(infos.values())) for plan in plans]
        results: list[tuple[int, int, dict[str, Any]]] = []
        for number, target in enumerate(targets):
            if number in lost:
                continue
            run_index: int | None = None
            try:
                info = await _open_for_runs(target, infos.get(number), prepared[0], len(targets), watch)
                for index, ready in enumerate(prepared):
                    run_index = index
                    results.append((index, number, await _play_run(target, info, index, ready, watch)))
                    keep(_build_report(prepared, results, targets, lost))
            except TurnFailed as failure:
                lost[number] = _LostTarget(failure, run_index)
            if isinstance(target, StartedTarget):
                await target.close()
    if len(lost) == len(targets) and all(entry.run is None for entry in lost.values()):
        raise lost[max(lost)].failure
    return _build_report(prepared, results, targets, lost)


async def _query_targets(
    targets: Sequence[Target], plan: ReplayPlan, lost: dict[int, _LostTarget], watch: ReplayWatcher
) -> dict[int, TargetInfo]:
    """Query the limits of each target; skip targets that must be started if the plan has both limits.

    A started target is stopped again unless it is the only one.
    """
    infos: dict[int, TargetInfo] = {}
    for number, target in enumerate(targets):
        started = isinstance(target, StartedTarget) and len(targets) > 1
        if started and plan.vocab_size and plan.context_limit:
            continue
        try:
            infos[number] = await _open(target, plan.run, watch)
        except TurnFailed as failure:
            lost[number] = _LostTarget(failure, None)
            continue
        if started:
            await target.close()
    if len(lost) == len(targets):
        raise lost[0].failure
    return infos


async def _open(target: Target, options: RunOptions, watch: ReplayWatcher) -> TargetInfo:
    if isinstance(target, StartedTarget):
        with watch.starting(target.name):
            info = await target.open()
    else:
        info = await target.open()
    if options.needs_hints and not info.takes_hints:
        raise ValueError(
            f"{target.name} takes no hints: --hints and --warm-ahead are for pensieve:// targets"
        )
    return info


def _prepare(plan: ReplayPlan, infos: Sequence[TargetInfo]) -> _Prepared:
    limit = min([info.context_limit for info in infos if info.context_limit] + [plan.context_limit or 2**31])
    vocab = min([info.vocab_size for info in infos if info.vocab_size] + [plan.vocab_size or 2**31])
    if 2**31 in (limit, vocab):
        raise ValueError(
            "no target reports its vocabulary size and context limit; give --vocab-size and --context-limit"
        )
    shaped = shape(plan.dataset.conversations, plan.shape, limit)
    if not shaped.conversations:
        raise ValueError(f"no conversation fits into {limit} tokens; see --scale-lengths")
    planned = scripts(shaped.conversations, plan.arrivals)
    if plan.arrivals.run_in_s:
        planned = apply_run_in(planned, plan.arrivals.run_in_s)
        if all(script.is_over for script in planned):
            raise ValueError("no conversation outlasts --run-in: ask for more conversations")
        shaped = replace(shaped, conversations=tuple(script.conversation for script in planned))
    return _Prepared(plan, shaped, planned, vocab, limit)


async def _open_for_runs(
    target: Target, info: TargetInfo | None, work: _Prepared, targets: int, watch: ReplayWatcher
) -> TargetInfo:
    """Open a target for its runs. Raises TurnFailed, also if its limits are below the workload's."""
    if isinstance(target, StartedTarget) and targets > 1:
        info = await _open(target, work.plan.run, watch)
    assert info is not None
    if 0 < info.context_limit < work.context_limit or 0 < info.vocab_size < work.vocab_size:
        await target.close()
        raise TurnFailed(
            "TOO_SMALL", f"holds {info.context_limit} tokens of a vocabulary of {info.vocab_size}"
        )
    return info


async def _play_run(
    target: Target, info: TargetInfo, index: int, work: _Prepared, watch: ReplayWatcher
) -> dict[str, Any]:
    """Play a run and return its ``targets`` entry. Raises TurnFailed when a started server ends during the run."""
    cache = "as found"
    if index:
        try:
            cache = await empty_cache(target)
        except TurnFailed as failure:
            cache = f"not emptied: {failure}"
    plan = work.plan
    before = await _counters(target)
    playing = _replay(target, replace(info, vocab_size=work.vocab_size), work, watch)
    full_outcome = await (target.while_up(playing) if isinstance(target, StartedTarget) else playing)
    after = await _counters(target)
    outcome, window = cut_to_window(replace(full_outcome, info=info), plan.window)
    in_flight = running_turns(sent_turns(full_outcome), window["start_s"], window["end_s"], 200)
    client = client_lag(full_outcome, plan.run.max_lag_s)
    broken = receipt_violations(full_outcome.records)
    summary = summarise(outcome)
    summary["receipts"] |= {"violations": len(broken), "examples": broken[:20]}
    if before is not None and after is not None:
        summary |= counter_growth(before, after)
    if plan.run.warm_ahead_s is not None:
        summary["warm_calls"] = full_outcome.warm_calls
    if isinstance(target, StartedTarget) and summary["turns"]["failed"]:
        summary["server_log"] = target.last_output
    return summary | {
        "run": index,
        "rate": plan.arrivals.rate,
        "clients": plan.arrivals.clients,
        "seed": plan.run.seed,
        "cache_before": cache,
        "leftover": full_outcome.leftover,
        "window": window,
        "running_turns": {"mean": float(in_flight.mean()), "max": float(in_flight.max())},
        "client": client,
        "valid": client["valid"],
    }


async def _replay(target: Target, info: TargetInfo, work: _Prepared, watch: ReplayWatcher) -> Outcome:
    options, line = work.plan.run, watch.run(target.name, work.shaped.turns)
    if options.processes == 1:
        return await runner.replay(target, info, work.scripts, options, line.on_turn_end, line.on_send)
    if not isinstance(target, RemoteTarget):
        raise ValueError(f"{target.name} runs in this process: it cannot be replayed with --processes")
    return await player_pool.replay(target, info, work.scripts, options, line.on_turn_end, line.on_send)


async def _counters(target: Target) -> Counters | None:
    return await target.counters() if isinstance(target, StartedTarget) else None


def _build_report(
    prepared: Sequence[_Prepared],
    results: list[tuple[int, int, dict[str, Any]]],
    targets: Sequence[Target],
    lost: dict[int, _LostTarget],
) -> dict[str, Any]:
    """Build the report; ``results`` has (run, target, summary)."""
    plan = prepared[0].plan
    summaries = [summary for _, _, summary in sorted(results, key=lambda entry: entry[:2])]
    invalid = [summary for summary in summaries if not summary["valid"]]
    return {
        "schema": SCHEMA,
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        **environment(),
        "dataset": {"name": plan.dataset.name, "sha256": plan.dataset.sha256},
        "options": {
            "shape": asdict(plan.shape),
            "arrivals": _arrivals_json(plan.arrivals),
            "run": asdict(plan.run),
            "window": asdict(plan.window),
        },
        "workload": _workload_json(prepared[0]),
        "runs": [
            {
                "rate": work.plan.arrivals.rate,
                "seed": work.plan.run.seed,
                "clients": work.plan.arrivals.clients,
                "dataset_sha256": work.plan.dataset.sha256,
                "workload": _workload_json(work),
            }
            for work in prepared
        ],
        "targets": summaries,
        "intervals": intervals(summaries),
        "valid": not invalid,
        "invalid_reasons": [f"{s['target']}, run {s['run']}: {s['client']['reason']}" for s in invalid],
        "unreached": [
            {"target": targets[number].name, "error": str(entry.failure), "run": entry.run}
            for number, entry in sorted(lost.items())
        ],
    }


def _arrivals_json(arrivals: Arrivals) -> dict[str, Any]:
    fields = asdict(replace(arrivals, think_gaps=None))
    if arrivals.think_gaps is not None:
        gaps = arrivals.think_gaps
        fields["think_gaps"] = {"name": gaps.name, "sha256": gaps.sha256, "count": len(gaps.seconds)}
    return fields


def _workload_json(work: _Prepared) -> dict[str, int]:
    shaped = work.shaped
    turns = [turn for talk in shaped.conversations for turn in talk.turns]
    return {
        "conversations": len(shaped.conversations),
        "turns": shaped.turns,
        "input_tokens": sum(turn.input_tokens for turn in turns),
        "output_tokens": sum(turn.output_tokens for turn in turns),
        "cut_conversations": shaped.cut_conversations,
        "dropped_conversations": shaped.dropped_conversations,
        "dropped_turns": shaped.dropped_turns,
        "context_limit": work.context_limit,
        "vocab_size": work.vocab_size,
    }
