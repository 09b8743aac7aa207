"""Finds stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """What a piece of text came to."""

    text: str
    """The part that may be shown: nothing in it belongs to a stop string that was found or could still be completed."""
    stop: str | None = None
    """The stop string that was found; everything from its first character on is withheld."""


class StopMatcher:
    """Finds the stop string that is completed first, however the text is cut into pieces.

    Of two that end at the same character the one that starts earlier wins. After a match every push returns nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError on an empty stop string."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> StopResult:
        """Take in more text; return what is certainly not part of a stop string."""
        if self._found is not None:
            return StopResult("", self._found)
        if not self._stops:
            return StopResult(text)
        text = self._held + text
        hit = self._first_match(text)
        if hit is not None:
            start, self._found = hit
            self._held = ""
            return StopResult(text[:start], self._found)
        keep = self._possible_start(text)
        self._held = text[keep:]
        return StopResult(text[:keep])

    def flush(self) -> str:
        """The withheld beginning of a stop string that never came; call it once, when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        starts = ((text.find(stop), stop) for stop in self._stops)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_start(self, text: str) -> int:
        """Smallest index from which ``text`` is a proper beginning of a stop string; its length if there is none."""
        longest = max(len(stop) for stop in self._stops) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
