"""A turn's hints: what of them goes to the engine, and the receipt that says so. Pure."""

from __future__ import annotations

from typing import Final

from pensieve.core import HintReceipt, Hints
from pensieve.engine.messages import EngineReady
from pensieve.server.values import TurnHints

LONGEST_NEXT_TURN_S: Final = 7 * 24 * 3600.0
"""A session that is to come back later than this is as good as one that comes back then."""
LEAST_IMPORTANCE: Final = 1 / 16
MOST_IMPORTANCE: Final = 16.0
"""Within these no number given is as good as a pin, nor as an eviction."""


def take(given: TurnHints, engine: EngineReady) -> tuple[Hints | None, HintReceipt | None]:
    """What the engine is told (None: nothing), and the receipt (None: no hint was given). Values are clipped."""
    names = _names(given)
    if not names:
        return None, None
    if not engine.uses_hints:
        return None, HintReceipt(ignored=names)
    # A session that is finished has no next turn.
    contradicted = given.finished and given.next_turn_s is not None
    next_turn_s = None
    if given.next_turn_s is not None and not contradicted:
        next_turn_s = min(given.next_turn_s, LONGEST_NEXT_TURN_S)
    importance = None
    if given.importance is not None:
        importance = min(max(given.importance, LEAST_IMPORTANCE), MOST_IMPORTANCE)
    receipt = HintReceipt(
        next_turn_s=next_turn_s,
        importance=importance,
        finished=given.finished,
        ignored=("next_turn_in",) if contradicted else (),
    )
    if importance is None:
        return Hints(next_turn_s=next_turn_s, finished=given.finished), receipt
    return Hints(next_turn_s=next_turn_s, importance=importance, finished=given.finished), receipt


def _names(given: TurnHints) -> tuple[str, ...]:
    """The hints that were given, by their names on the wire."""
    said = {
        "next_turn_in": given.next_turn_s is not None,
        "importance": given.importance is not None,
        "session_finished": given.finished,
    }
    return tuple(name for name, is_given in said.items() if is_given)
