"""Hints of a client that knows when its next turn is due, or that is wrong about it by as much as it is told to be."""

from __future__ import annotations

import math

import numpy as np

from pensieve.core import Hints
from pensieve.replay.load.schedule import Script

_STREAM = 1
"""Numbers the generator's stream, so that it is not the one that input ids are drawn from."""


def hint_of(script: Script, place: int, now_s: float, *, noise: float, seed: int) -> Hints:
    """The hints of the turn at ``place`` in the script, which is sent at ``now_s`` of the replay.

    The pause that is to come is multiplied by a lognormal factor with median 1 and ``noise`` as its sigma; 0: it is
    told as it is. Where turns have recorded times the pause is counted from now, because nobody knows yet how long the
    answer takes. The last turn says that it is the last.
    """
    if place + 1 == len(script.due):
        return Hints(finished=True)
    due = script.due[place + 1]
    pause = max(due.after_answer_s, due.at_s - now_s)
    generator = np.random.default_rng([seed, script.number, script.first_turn + place, 0, _STREAM])
    return Hints(next_turn_s=pause * math.exp(noise * generator.standard_normal()))
