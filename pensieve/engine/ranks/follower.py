"""The loop of a rank other than rank 0: execute the plans that rank 0 sends until it sends a stop."""

from __future__ import annotations

from collections import deque
from typing import Final

from pensieve.engine.plan import PendingStep, StepWorker
from pensieve.engine.ranks.codec import decode
from pensieve.engine.ranks.ring import RingReader

MAX_IN_FLIGHT: Final = 2
"""Most steps launched but not yet waited for: as many as the engine on rank 0 has."""
IDLE_S: Final = 0.002
"""Without a plan for this long, wait for the launched steps, so that none of their memory is held."""


def follow(reader: RingReader, worker: StepWorker) -> None:
    """Execute plans in order. Propagates the worker's exceptions: then this rank must exit, and all others too."""
    in_flight: deque[PendingStep] = deque()
    while True:
        message = reader.receive(IDLE_S if in_flight else None)
        plan = None
        if message is not None:
            plan = decode(message)
            if plan is None:
                break
            in_flight.append(worker.launch(plan))
        while len(in_flight) > (MAX_IN_FLIGHT - 1 if message is not None else 0):
            result = in_flight.popleft().result()
            reader.report_backlog(result.swap_out_backlog)
            if result.memory is not None:
                reader.report_memory(result.memory)
        if plan is not None and plan.chooses_late:
            # Only now: it may wait for rank 0, which may wait for the reports of the step before.
            in_flight[-1].choose(plan.specs)
    while in_flight:
        in_flight.popleft().result()
