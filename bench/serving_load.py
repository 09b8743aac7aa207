"""Sessions with the lengths of ShareGPT conversations, drawn from one random stream.

Statistics as in the paper's Table 2 (5.56 turns of 37.8 tokens in and 204.6 out on average). Conversations start as a
Poisson process; pauses between an answer and the next turn are exponential. The order of the draws is part of the
workload: figures are compared only between runs that drew the same sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MEAN_TURNS = 5.56
MARGIN_TOKENS = 8
"""A session ends before the turn that would leave less of the context than this."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens in, tokens out, and the pause (seconds) between the answer before and this turn."""

    input_tokens: int
    output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation; its first turn is due ``start_s`` seconds after the load began."""

    number: int
    start_s: float
    turns: tuple[Turn, ...]


def sessions(
    rate: float, think_s: float, seconds: float, seed: int, max_context: int = 16384
) -> list[Session]:
    """All sessions that start within ``seconds`` when ``rate`` turns per second are offered in the steady state."""
    draw = np.random.default_rng(seed)
    found: list[Session] = []
    start = 0.0
    while True:
        start += draw.exponential(MEAN_TURNS / rate)
        if start > seconds:
            return found
        found.append(Session(len(found), round(start, 4), _turns(draw, think_s, max_context)))


def _turns(draw: np.random.Generator, think_s: float, max_context: int) -> tuple[Turn, ...]:
    wanted = max(1, round(draw.gamma(1.2, MEAN_TURNS / 1.2)))
    turns: list[Turn] = []
    context = 0
    for index in range(wanted):
        given = int(np.clip(draw.lognormal(2.9, 1.2), 4, 1500))
        answered = int(np.clip(draw.lognormal(5.0, 0.80), 8, 1000))
        context += given + answered
        if context > max_context - MARGIN_TOKENS:
            break
        # Nothing is drawn for the pause before a first turn, nor for one that does not fit.
        turns.append(Turn(given, answered, round(draw.exponential(think_s), 3) if index else 0.0))
    return tuple(turns)


def constant_streams(
    streams: int, input_tokens: int, output_tokens: int, turns: int, ramp_s: float
) -> list[Session]:
    """``streams`` conversations that answer all the time, started evenly over ``ramp_s`` seconds."""
    turn = Turn(input_tokens, output_tokens, 0.0)
    return [Session(number, ramp_s * number / streams, (turn,) * turns) for number in range(streams)]
