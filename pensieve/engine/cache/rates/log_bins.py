"""Bins of durations that widen with them, found without a logarithm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pensieve.core import Floats, Ints

_MANTISSA_BITS = 52
_BIAS = 1023


@dataclass(frozen=True, slots=True)
class LogBins:
    """``2 ** bits`` bins of equal width from 2^n to 2^(n+1), from ``2 ** least_exponent`` on for so many octaves.

    Exponent and leading bits of the mantissa of a float64, read as an integer, are the bin, up to a constant.
    """

    least_exponent: int
    octaves: int
    bits: int

    @property
    def count(self) -> int:
        return self.octaves << self.bits

    def edges(self) -> Floats:
        """Where the bins begin, and where the last one ends, float64 [count + 1]."""
        steps = 1 << self.bits
        octave, step = np.divmod(np.arange(self.count + 1), steps)
        return np.asarray(2.0 ** (self.least_exponent + octave) * (1 + step / steps), dtype=np.float64)

    def of(self, values: Floats) -> Ints:
        """Bin of each value; of values beyond either end a number beyond either end. The array is a new one."""
        found = values.view(np.int64) >> (_MANTISSA_BITS - self.bits)
        found -= (_BIAS + self.least_exponent) << self.bits
        return found

    def one(self, value: float) -> int:
        """``of`` for one value above zero."""
        mantissa, exponent = math.frexp(value)
        return ((exponent - 1 - self.least_exponent) << self.bits) + int(
            (2 * mantissa - 1) * (1 << self.bits)
        )
