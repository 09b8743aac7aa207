"""One whole replay: open the targets, shape the workload to all of them, play it to each, report."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from pensieve.replay.report import SCHEMA, environment, summarise
from pensieve.replay.runner import RunOptions, TurnRecord, replay
from pensieve.replay.schedule import Arrivals, scripts
from pensieve.replay.shaping import Shape, Shaped, shape
from pensieve.replay.targets import Target
from pensieve.replay.workload import Dataset

Watch = Callable[[str, int], Callable[[TurnRecord], None]]
"""Target's name and number of turns → what to call with each finished turn."""


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


def _ignore(name: str, turns: int) -> Callable[[TurnRecord], None]:
    return lambda record: None


async def run(plan: Plan, targets: Sequence[Target], watch: Watch = _ignore) -> dict[str, Any]:
    """The report, ready for JSON. All targets get the same token ids at the same times, one target after the other.

    Raises TurnFailed when a target cannot be reached, ValueError when nothing is left to replay.
    """
    async with AsyncExitStack() as stack:
        infos = []
        for target in targets:
            stack.push_async_callback(target.close)
            infos.append(await target.open())
        limits = [info.context_limit for info in infos] + [plan.context_limit or 2**31]
        shaped = shape(plan.dataset.conversations, plan.shape, min(limits))
        if not shaped.conversations:
            raise ValueError(f"no conversation fits into {min(limits)} tokens; see --scale-lengths")
        vocab = min([info.vocab_size for info in infos] + [plan.vocab_size or 2**31])
        script = scripts(shaped.conversations, plan.arrivals)
        summaries = []
        for target, info in zip(targets, infos, strict=True):
            seen = replace(info, vocab_size=vocab)
            outcome = await replay(target, seen, script, plan.run, watch(target.name, shaped.turns))
            summaries.append(summarise(replace(outcome, info=info)))
    return {
        "schema": SCHEMA,
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        **environment(),
        "dataset": {"name": plan.dataset.name, "sha256": plan.dataset.sha256},
        "options": {"shape": asdict(plan.shape), "arrivals": asdict(plan.arrivals), "run": asdict(plan.run)},
        "workload": _workload(shaped, min(limits), vocab),
        "targets": summaries,
    }


def _workload(shaped: Shaped, context_limit: int, vocab_size: int) -> dict[str, int]:
    turns = [turn for talk in shaped.conversations for turn in talk.turns]
    return {
        "conversations": len(shaped.conversations),
        "turns": shaped.turns,
        "input_tokens": sum(turn.input_tokens for turn in turns),
        "output_tokens": sum(turn.output_tokens for turn in turns),
        "cut_conversations": shaped.cut_conversations,
        "dropped_conversations": shaped.dropped_conversations,
        "dropped_turns": shaped.dropped_turns,
        "context_limit": context_limit,
        "vocab_size": vocab_size,
    }
