"""The hash engine with a brake: slow enough to be met in the middle of a turn, and stoppable at a step.

Steered by two files in the model folder, read in the engine's process: ``pace`` holds the seconds a step takes at
least (read once), and while ``hold`` exists no step ends.
"""

from __future__ import annotations

import time
from pathlib import Path

from pensieve.config import EngineOptions
from pensieve.engine.engine import Engine
from pensieve.engine.plan import PendingStep, Plan, StepWorker
from support.engine import hash_engine
from support.engine.hash_worker import HashWorker

BUILDER = "support.faults.fault_engine:build"
HOLD_LIMIT_S = 30.0


class BrakedWorker:
    """``StepWorker`` around another one. Forgets the plans that the hash worker collects: it runs for long."""

    def __init__(self, worker: StepWorker, folder: Path) -> None:
        self._worker = worker
        self._hold = folder / "hold"
        pace = folder / "pace"
        self._pace_s = float(pace.read_text()) if pace.exists() else 0.0

    def launch(self, plan: Plan) -> PendingStep:
        time.sleep(self._pace_s)
        limit = time.monotonic() + HOLD_LIMIT_S
        while self._hold.exists() and time.monotonic() < limit:
            time.sleep(0.002)
        step = self._worker.launch(plan)
        if isinstance(self._worker, HashWorker):
            self._worker.plans.clear()
        return step

    def close(self) -> None:
        self._worker.close()


def build(options: EngineOptions) -> Engine:
    """See ``hash_engine.build``."""
    engine = hash_engine.build(options)
    return Engine(engine._scheduler, BrakedWorker(engine._worker, Path(options.model)), engine.ready())
