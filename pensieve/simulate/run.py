"""Runs one simulation, or many in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pensieve.lifeline import die_with_parent
from pensieve.simulate.full import FullSimulation
from pensieve.simulate.scenario.load import Load
from pensieve.simulate.scenario.settings import Settings
from pensieve.simulate.scenario.tally import Tally, TimeWindow
from pensieve.simulate.turns.engine import TurnSimulation

EngineName = Literal["full", "turns"]
_counters: Any = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """One policy over one load. It is pickled to worker processes."""

    settings: Settings
    load: Load
    engine: EngineName
    policy: str
    window: TimeWindow | None = None
    """Measured window: turns that end in it, counted from ``load.zero_s``; None: all turns."""
    row_s: float | None = None

    def run(self, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Simulate and return the summary, deterministic except for ``wall_s`` and ``peak_rss_mib``.

        ``progress`` is called with the number of sessions begun. Raises ValueError when a session exceeds the
        context limit: it would wait for ever.
        """
        longest = max(talk.tokens for talk in self.load.conversations)
        if longest > self.settings.context_limit:
            raise ValueError(
                f"a session has {longest} tokens, the context limit is {self.settings.context_limit}"
            )
        started = time.perf_counter()
        bound: float | None = None
        tally = Tally(self.window, self.load.zero_s, self.row_s)
        if self.engine == "full":
            FullSimulation(self.settings, self.policy, progress, tally=tally).run(self.load)
        else:
            turns = TurnSimulation(self.settings, self.policy, progress, tally)
            turns.run(self.load)
            shares = self.load.has_shared_prefixes and self.settings.cache.prefix_sharing
            # The bound is only valid for whole runs without shared chunks.
            if turns.bound is not None and self.window is None and not shares:
                cache = self.settings.cache
                pages = self.settings.replicas * (cache.device_chunks + cache.host_chunks)
                bound = turns.bound.least_recomputed(pages, tally.last_end_s)
        return {
            "target": self.policy,
            **tally.summary(),
            **({"shared_input_tokens": tally.shared} if self.load.has_shared_prefixes else {}),
            "least_recomputed_cost_s": bound,
            "wall_s": time.perf_counter() - started,
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def run_all(work: Sequence[Simulation], jobs: int, progress: Callable[[int], None]) -> list[dict[str, Any]]:
    """Run all simulations, ``jobs`` at a time, each in its own process.

    ``progress`` is called with the sessions begun in all of them. An interrupt kills the processes at once.
    """
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", len(work), lock=False)
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(jobs, context, _init_worker, (counters, os.getpid())) as pool:
        try:
            with _sigint_blocked():
                pending: list[Future[dict[str, Any]]] = [
                    pool.submit(_run_one, simulation, index) for index, simulation in enumerate(work)
                ]
            for future in pending:
                while not future.done():
                    time.sleep(0.1)
                    progress(sum(counters))
            return [future.result() for future in pending]
        except BaseException:  # leaving the pool would wait for all submitted work
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
            raise


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in processes started in this context: the parent receives Ctrl-C and kills them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker(counters: Any, parent: int) -> None:
    global _counters
    _counters = counters
    if not die_with_parent(parent):
        sys.exit("the parent process of this simulation has ended")


def _run_one(work: Simulation, index: int) -> dict[str, Any]:
    def count(sessions: int) -> None:
        _counters[index] = sessions

    return work.run(count)
