"""Cuts that get finer towards the end of a list: while much work remains pieces may be long, and then they get shorter,
so that all programs end together. And what cuts of any kind can make at most."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pensieve.kernels.span_table import Ints


@dataclass(frozen=True, slots=True)
class MostPieces:
    """Upper bounds of what cutting a list can make."""

    more: int
    """Items more than there were before."""
    cut: int
    """Items that are cut."""
    pieces: int
    """And the pieces that these make."""


def guided_pieces(steps: Ints, share: float, least: int, programs: float) -> Ints:
    """Into how many pieces, at least 1, items of so many key tiles [n] are cut, the longest first: each about ``share``
    times a program's part of what remains, and no shorter than ``least`` key tiles."""
    remaining = int(steps.sum()) - np.cumsum(steps) + steps
    longest = np.maximum(least, remaining * share / programs)
    pieces: Ints = np.rint(steps / longest).astype(np.int64).clip(1)
    return pieces


def most_guided_pieces(steps: int, share: float, least: int, programs: float) -> MostPieces:
    """For any number of items of up to ``steps`` key tiles.

    A piece is no shorter than the least, nor than its share of what remains; the integral below sums that over all that
    can remain when an item of the longest context is first cut. The least quotient that is cut is 1.5, which rounding
    can make 4/3 as large.
    """
    if steps < 1.5 * least:
        return MostPieces(0, 0, 0)
    quotients = programs / share * (1 + math.log(steps / (1.5 * least)))
    return MostPieces(*(math.floor(quotients * factor) for factor in (1, 1 / 1.5, 4 / 3)))
