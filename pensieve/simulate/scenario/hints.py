"""Hints of clients that know when their next turn is due, or that are wrong about it by as much as they are told to be.

The same as in ``pensieve.replay.play.runner``, but that the pause is counted from the end of the answer: a simulated
client knows that as well.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from pensieve.core import Hints
from pensieve.simulate.scenario.load import NEVER, Life
from pensieve.simulate.scenario.settings import Settings

_STREAM: Final = 1
"""Numbers the generator's stream: no other draws of a simulation are these."""


def hints_of(settings: Settings, life: Life, turn: int, now: float) -> Hints | None:
    """What the client says of the session when ``turn`` ends ``now``; None: nothing.

    The true pause times a lognormal factor with median 1 and ``noise`` as its sigma. The last turn says that it is the
    last.
    """
    told = settings.hints
    if told is None:
        return None
    due = life.due(turn + 1, now)
    if due == NEVER:
        return Hints(finished=True) if told.ends else None
    if not told.pauses:
        return None
    factor = 1.0
    if told.noise:
        generator = np.random.default_rng([settings.seed, life.number, turn, 0, _STREAM])
        factor = math.exp(told.noise * generator.standard_normal())
    return Hints(next_turn_s=max(due - now, 0.0) * factor)
