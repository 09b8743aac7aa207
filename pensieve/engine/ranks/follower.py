"""What a rank other than the first does: the steps that rank 0 tells it to, until it tells it to leave."""

from __future__ import annotations

from collections import deque
from typing import Final

from pensieve.engine.plan import PendingStep, StepWorker
from pensieve.engine.ranks.codec import decode
from pensieve.engine.ranks.ring import RingReader

AHEAD: Final = 2
"""Steps that are launched and not yet waited for, at most: as many as the engine on rank 0 has."""
IDLE_S: Final = 0.002
"""Without a plan for so long, what was launched is waited for, so that nothing of it is held on to."""


def follow(reader: RingReader, worker: StepWorker) -> None:
    """Execute plans in their order. Raises whatever the worker raises: then the rank must end, and all others too."""
    under_way: deque[PendingStep] = deque()
    while True:
        message = reader.receive(IDLE_S if under_way else None)
        if message is not None:
            plan = decode(message)
            if plan is None:
                break
            under_way.append(worker.launch(plan))
        while len(under_way) > (AHEAD - 1 if message is not None else 0):
            reader.report_backlog(under_way.popleft().result().swap_out_backlog)
    while under_way:
        under_way.popleft().result()
