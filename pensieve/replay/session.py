"""One whole replay: open the targets, shape the workload to all of them, play every run to each, report."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from pensieve.replay.receipts import violations
from pensieve.replay.report import SCHEMA, environment, summarise
from pensieve.replay.runner import RunOptions, TurnRecord, replay
from pensieve.replay.schedule import Arrivals, Script, scripts
from pensieve.replay.shaping import Shape, Shaped, shape
from pensieve.replay.started_target import StartedTarget
from pensieve.replay.targets import Target, TargetInfo, TurnFailed
from pensieve.replay.validity import client_lag, intervals
from pensieve.replay.windows import Window, cut, running_turns
from pensieve.replay.workload import Dataset

Watch = Callable[[str, int], Callable[[TurnRecord], None]]
"""Target's name and number of turns → what to call with each finished turn."""


@runtime_checkable
class SeesSends(Protocol):
    """A watcher that also wants to know when a turn is sent; every sent turn ends, or fails."""

    def __call__(self, record: TurnRecord) -> None: ...

    def sent(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What to replay, and how."""

    dataset: Dataset
    shape: Shape
    arrivals: Arrivals
    run: RunOptions
    vocab_size: int = 0
    """Input ids stay below this; 0: below the smallest of all targets."""
    context_limit: int = 0
    """Contexts stay below this and below the limit of every target; 0: only the latter."""
    window: Window = field(default_factory=Window)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A plan, cut to what all targets hold."""

    plan: Plan
    shaped: Shaped
    scripts: list[Script]
    vocab_size: int
    context_limit: int


def _ignore(name: str, turns: int) -> Callable[[TurnRecord], None]:
    return lambda record: None


def _nothing() -> None:
    """Of a watcher that does not care for sends."""


async def run(plan: Plan, targets: Sequence[Target], watch: Watch = _ignore) -> dict[str, Any]:
    """``run_all`` of one plan."""
    return await run_all([plan], targets, watch)


async def run_all(plans: Sequence[Plan], targets: Sequence[Target], watch: Watch = _ignore) -> dict[str, Any]:
    """The report, ready for JSON. All targets get the same token ids at the same times, one target after the other.

    Each target plays all plans before the next one does. No run finds the last one's state in a server: its sessions
    are deleted, its token ids are others, and a server that can empty its prefix cache is asked to. The plans share
    ``vocab_size`` and ``context_limit``. Targets that cannot be reached when others can are listed in ``unreached``.

    Raises TurnFailed when no target can be reached, ValueError when nothing is left to replay.
    """
    async with AsyncExitStack() as stack:
        for target in targets:
            stack.push_async_callback(target.close)
        unreached: dict[int, TurnFailed] = {}
        infos = await _meet(targets, plans[0], unreached)
        prepared = [_prepare(plan, list(infos.values())) for plan in plans]
        found: list[tuple[int, int, dict[str, Any]]] = []
        for number, target in enumerate(targets):
            if number in unreached:
                continue
            try:
                info = await _ready(target, infos.get(number), prepared[0], len(targets))
            except TurnFailed as failure:
                unreached[number] = failure
                continue
            for index, ready in enumerate(prepared):
                found.append((index, number, await _play(target, info, index, ready, watch)))
            if isinstance(target, StartedTarget):
                await target.close()
    if not found:
        raise unreached[max(unreached)]
    summaries = [summary for _, _, summary in sorted(found, key=lambda entry: entry[:2])]
    return _report(prepared, summaries) | {
        "unreached": [{"target": targets[n].name, "error": str(e)} for n, e in sorted(unreached.items())]
    }


async def _meet(
    targets: Sequence[Target], plan: Plan, unreached: dict[int, TurnFailed]
) -> dict[int, TargetInfo]:
    """What each target can hold. One that is started for this, and is not the only one, is stopped again.

    Where the plan says all that is to be known, targets that would have to be started are left for later.
    """
    infos: dict[int, TargetInfo] = {}
    for number, target in enumerate(targets):
        started = isinstance(target, StartedTarget) and len(targets) > 1
        if started and plan.vocab_size and plan.context_limit:
            continue
        try:
            infos[number] = await target.open()
        except TurnFailed as failure:
            unreached[number] = failure
            continue
        if started:
            await target.close()
    if len(unreached) == len(targets):
        raise unreached[0]
    return infos


def _prepare(plan: Plan, infos: Sequence[TargetInfo]) -> _Prepared:
    limit = min([info.context_limit for info in infos if info.context_limit] + [plan.context_limit or 2**31])
    vocab = min([info.vocab_size for info in infos if info.vocab_size] + [plan.vocab_size or 2**31])
    if 2**31 in (limit, vocab):
        raise ValueError(
            "no target says its vocabulary size and context limit; give --vocab-size and --context-limit"
        )
    shaped = shape(plan.dataset.conversations, plan.shape, limit)
    if not shaped.conversations:
        raise ValueError(f"no conversation fits into {limit} tokens; see --scale-lengths")
    return _Prepared(plan, shaped, scripts(shaped.conversations, plan.arrivals), vocab, limit)


async def _ready(target: Target, info: TargetInfo | None, work: _Prepared, targets: int) -> TargetInfo:
    """The target is open after this. Raises TurnFailed, also when it cannot hold what it is to replay."""
    if isinstance(target, StartedTarget) and targets > 1:
        info = await target.open()
    assert info is not None
    if 0 < info.context_limit < work.context_limit or 0 < info.vocab_size < work.vocab_size:
        await target.close()
        raise TurnFailed(
            "TOO_SMALL", f"holds {info.context_limit} tokens of a vocabulary of {info.vocab_size}"
        )
    return info


async def _play(
    target: Target, info: TargetInfo, index: int, work: _Prepared, watch: Watch
) -> dict[str, Any]:
    cache = "as found"
    if index:
        evict = getattr(target, "evict", None)
        try:
            cache = "sessions deleted" if evict is None else await evict()
        except TurnFailed as failure:
            cache = f"not emptied: {failure}"
    plan = work.plan
    on_turn = watch(target.name, work.shaped.turns)
    seen = replace(info, vocab_size=work.vocab_size)
    on_send = on_turn.sent if isinstance(on_turn, SeesSends) else _nothing
    before = await _swap_bytes(target)
    whole = await replay(target, seen, work.scripts, plan.run, on_turn, on_send)
    after = await _swap_bytes(target)
    outcome, window = cut(replace(whole, info=info), plan.window)
    flight = running_turns(whole.records, window["start_s"], window["end_s"], 200)
    client = client_lag(whole, plan.run.max_lag_s)
    broken = violations(whole.records)
    summary = summarise(outcome)
    summary["receipts"] |= {"violations": len(broken), "examples": broken[:20]}
    if before is not None and after is not None:
        summary["swap"] = {name: after[name] - before[name] for name in after}
    return summary | {
        "run": index,
        "rate": plan.arrivals.rate,
        "clients": plan.arrivals.clients,
        "seed": plan.run.seed,
        "cache_before": cache,
        "leftover": whole.leftover,
        "window": window,
        "running_turns": {"mean": float(flight.mean()), "max": float(flight.max())},
        "client": client,
        "valid": client["valid"],
    }


async def _swap_bytes(target: Target) -> dict[str, float] | None:
    return await target.swap_bytes() if isinstance(target, StartedTarget) else None


def _report(prepared: Sequence[_Prepared], summaries: list[dict[str, Any]]) -> dict[str, Any]:
    plan = prepared[0].plan
    late = [summary for summary in summaries if not summary["valid"]]
    return {
        "schema": SCHEMA,
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        **environment(),
        "dataset": {"name": plan.dataset.name, "sha256": plan.dataset.sha256},
        "options": {
            "shape": asdict(plan.shape),
            "arrivals": _arrivals(plan.arrivals),
            "run": asdict(plan.run),
            "window": asdict(plan.window),
        },
        "workload": _workload(prepared[0]),
        "runs": [
            {
                "rate": work.plan.arrivals.rate,
                "seed": work.plan.run.seed,
                "clients": work.plan.arrivals.clients,
                "dataset_sha256": work.plan.dataset.sha256,
                "workload": _workload(work),
            }
            for work in prepared
        ],
        "targets": summaries,
        "intervals": intervals(summaries),
        "valid": not late,
        "invalid_reasons": [f"{s['target']}, run {s['run']}: {s['client']['reason']}" for s in late],
    }


def _arrivals(arrivals: Arrivals) -> dict[str, Any]:
    told = asdict(replace(arrivals, think_gaps=None))
    if arrivals.think_gaps is not None:
        gaps = arrivals.think_gaps
        told["think_gaps"] = {"name": gaps.name, "sha256": gaps.sha256, "count": len(gaps.seconds)}
    return told


def _workload(work: _Prepared) -> dict[str, int]:
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
