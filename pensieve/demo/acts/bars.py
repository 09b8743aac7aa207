"""Rows of upright bars made of characters, eighths of a character high."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


def bar(value: float, top: float, height: int) -> str:
    """One bar from its lowest character to its highest. A value above 0 shows, however small it is."""
    if not top > 0:
        return " " * height
    eighths = min(height * 8, max(round(value / top * height * 8), 1 if value > 0 else 0))
    return "".join(_EIGHTHS[max(0, min(8, eighths - 8 * row))] for row in range(height))


def bars(values: Sequence[float], top: float, height: int, pitch: int) -> list[str]:
    """Lines from the top down: a bar every ``pitch`` columns, a column narrower than that where there is room."""
    width = max(1, pitch - 1)
    upright = [bar(value, top, height) for value in values]
    return [
        "".join(one[row] * width + " " * (pitch - width) for one in upright).rstrip()
        for row in reversed(range(height))
    ]


def fitting_pitch(count: int, columns: int) -> int:
    """Columns per bar, at most 3, so that ``count`` bars fit."""
    return max(1, min(3, columns // max(1, count)))
