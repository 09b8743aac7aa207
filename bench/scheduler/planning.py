"""Time that the scheduler needs for one step: plan, launched and commit, around a worker that does nothing.

    python bench/scheduler/planning.py --running 64 --running 256
    python bench/scheduler/planning.py --drafts missed --drafts accepted

Nothing is shared here. With drafts, a step may have as many of them as requests run, which is a CPU's limit. No step
has a price, so every draft is tried. Processor time of this process, because machines have other work as well. The last
line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Literal, get_args

import click

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import Sampling, pack_tokens
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel
from pensieve.engine.messages import Submit
from pensieve.engine.plan import Plan, Sampled, StepResult
from pensieve.engine.scheduling.drafts import MOST_DRAFTS
from pensieve.engine.scheduling.scheduler import Scheduler

COST = CostModel(((0, 0.0), (4096, 1.0)), 0.2, 32)
PROMPT = 1000

Drafts = Literal["off", "missed", "accepted"]
"""``missed``: answers repeat nothing, so the index finds nothing. ``accepted``: they repeat their prompt."""


class Bench:
    """A scheduler all of whose requests decode, for ``steps`` steps at least."""

    def __init__(self, running: int, steps: int, drafts: Drafts = "off") -> None:
        self.drafts = drafts
        answer = steps * (1 + MOST_DRAFTS * (drafts == "accepted")) + 8
        chunks = running * (-(-(PROMPT + answer) // 32) + 2)
        config = SchedulerConfig(
            context_limit=PROMPT + answer + 64, max_batch_tokens=1 << 20, max_running=running,
            max_drafts=0 if drafts == "off" else running,
        )  # fmt: skip
        cache = CacheManager(CacheConfig(chunks * 2, host_chunks=chunks), COST)
        self.scheduler = Scheduler(config, cache)
        self.period = PROMPT if drafts == "accepted" else config.context_limit
        """Each token is its position modulo this."""
        for number in range(running):
            sampling = Sampling(max_output_tokens=answer, ignore_eos=True)
            submit = Submit(number, f"s{number}", pack_tokens(range(PROMPT)), PROMPT, sampling)
            self.scheduler.submit(submit, 0.0)
        for _ in range(2):
            self.step(1.0)

    def step(self, now: float) -> tuple[Plan, StepResult]:
        """Plan, launch and commit one step; return its plan, and what a worker may have chosen in it."""
        plan = self.scheduler.plan(now)
        self.scheduler.on_launched(plan)
        if self.drafts == "off":
            sampled = tuple(Sampled(span.request, 7) for span in plan.spans if span.sample is not None)
        else:
            sampled = tuple(
                Sampled(span.request, (span.end - span.drafts + row) % self.period)
                for span in plan.spans
                for row in range(span.num_chosen)
            )
        result = StepResult(sampled)
        self.scheduler.commit(plan, result, now)
        return plan, result


def measure(running: int, steps: int, drafts: Drafts) -> tuple[float, float]:
    """Return the median seconds of processor time for one step, and its tokens."""
    bench = Bench(running, steps, drafts)
    times: list[float] = []
    chosen = 0
    for step in range(steps):
        started = time.process_time()
        plan, result = bench.step(2.0 + step * 0.02)
        times.append(time.process_time() - started)
        chosen += len(result.sampled)
        assert len(plan.spans) == running and (drafts == "accepted" or chosen == running * (step + 1))
    return statistics.median(times), chosen / steps


@click.command(context_settings={"show_default": True})
@click.option("--running", multiple=True, type=int, default=(64, 256))
@click.option("--steps", default=400, help="Steps to measure.")
@click.option("--rounds", default=3, help="Times that each measurement is made anew; the lowest counts.")
@click.option(
    "--drafts",
    "ways",
    multiple=True,
    type=click.Choice(get_args(Drafts)),
    default=("off",),
    help="Drafts from the history: none, looked for but not found, or all accepted.",
)
def main(running: tuple[int, ...], steps: int, rounds: int, ways: tuple[Drafts, ...]) -> None:
    """Measure planning."""
    rows = []
    for drafts in ways:
        for count in running:
            seconds, tokens = min(measure(count, steps, drafts) for _ in range(rounds))
            rows.append({"running": count, "drafts": drafts, "step_us": seconds * 1e6, "tokens": tokens})
    print(json.dumps({"steps": steps, "rounds": rounds, "rows": rows}))


if __name__ == "__main__":
    main()
