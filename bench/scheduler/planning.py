"""Time that the scheduler needs for one step: plan, launched and commit, around a worker that does nothing.

    python bench/scheduler/planning.py --running 64 --running 256

Nothing is shared here. Processor time of this process, because machines have other work as well. The last line of
stdout is one JSON document.
"""

from __future__ import annotations

import json
import statistics
import time

import click
import numpy as np

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import Sampling, pack_tokens
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost.model import CostModel
from pensieve.engine.messages import Submit
from pensieve.engine.plan import Plan, Sampled, StepResult
from pensieve.engine.scheduling.scheduler import Scheduler

COST = CostModel(((0, 0.0), (4096, 1.0)), 0.2, 32)
PROMPT = 1000


def decoding(running: int, steps: int) -> Scheduler:
    """A scheduler all of whose requests decode, for ``steps`` steps at least."""
    chunks = running * (-(-(PROMPT + steps) // 32) + 2)
    scheduler = Scheduler(
        SchedulerConfig(context_limit=PROMPT + steps + 64, max_batch_tokens=1 << 20, max_running=running),
        CacheManager(CacheConfig(chunks * 2, host_chunks=chunks), COST),
    )
    rng = np.random.default_rng(0)
    for number in range(running):
        tokens = pack_tokens(rng.integers(0, 30_000, PROMPT, dtype=np.int32))
        sampling = Sampling(max_output_tokens=steps + 8, ignore_eos=True)
        scheduler.submit(Submit(number, f"s{number}", tokens, PROMPT, sampling), 0.0)
    for _ in range(2):
        scheduler.commit(*planned(scheduler, 1.0), 1.0)
    return scheduler


def planned(scheduler: Scheduler, now: float) -> tuple[Plan, StepResult]:
    """One launched step, and what a worker may have sampled in it."""
    plan = scheduler.plan(now)
    scheduler.on_launched(plan)
    return plan, StepResult(tuple(Sampled(span.request, 7) for span in plan.spans if span.sample is not None))


def measure(running: int, steps: int) -> float:
    """Median seconds of processor time for one step."""
    scheduler = decoding(running, steps)
    times: list[float] = []
    for step in range(steps):
        now = 2.0 + step * 0.02
        started = time.process_time()
        plan, result = planned(scheduler, now)
        scheduler.commit(plan, result, now)
        times.append(time.process_time() - started)
        assert plan.num_tokens == running
    return statistics.median(times)


@click.command(context_settings={"show_default": True})
@click.option("--running", multiple=True, type=int, default=(64, 256))
@click.option("--steps", default=400, help="Steps to measure.")
@click.option("--rounds", default=3, help="Times that each measurement is made anew; the lowest counts.")
def main(running: tuple[int, ...], steps: int, rounds: int) -> None:
    """Measure planning."""
    rows = [
        {"running": count, "step_us": min(measure(count, steps) for _ in range(rounds)) * 1e6}
        for count in running
    ]
    print(json.dumps({"steps": steps, "rounds": rounds, "rows": rows}))


if __name__ == "__main__":
    main()
