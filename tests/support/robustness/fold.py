"""One session's history, put together again from what its clients were told: a state for each revision.

Every committed change has a revision of its own, so there is nothing to search for but the places of rewinds, whose
answers do not say where they stand: the work is linear in the number of operations as long as few of them overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from support.robustness.history import ItemSeen, Operation, TurnSeen

NEVER = 1 << 62


@dataclass
class Change:
    """A turn that was committed, or a rewind that may have been."""

    request_id: str
    start: int
    """When it was first asked for."""
    known: int = NEVER
    """When somebody first knew that it had been done."""
    at_most: int = NEVER
    """A revision that it cannot be above."""
    item: int | None = None
    """What stays: items up to this number; None: all."""
    text: str = ""
    turn: TurnSeen | None = None


@dataclass
class Folded:
    """``states[r - 1]`` are the live items at revision r, ``changes[r - 2]`` what led there."""

    states: list[tuple[ItemSeen, ...]]
    changes: list[Change] = field(default_factory=list)
    problem: str = ""
    """Why it goes no further than this."""

    @property
    def revision(self) -> int:
        return len(self.states)


Fits = Callable[[int, tuple[ItemSeen, ...]], bool]


def applied(live: tuple[ItemSeen, ...], change: Change) -> tuple[ItemSeen, ...] | None:
    """The live items behind a change; None where it cannot be made."""
    if change.item is not None and change.item not in {0, *(number for number, *_ in live)}:
        return None
    system = live[0][0] if live and live[0][1] == "system" else 0
    keep = NEVER if change.item is None else max(change.item, system)
    kept = tuple(item for item in live if item[0] <= keep)
    turn = change.turn
    if turn is None:
        return kept
    return (*kept, *turn.input, *((turn.output,) if turn.output is not None else ()))


def _numbered_on(here: Folded, change: Change) -> bool:
    """Whether a turn's input has the next number: none is used twice, and a rewind uses none."""
    if change.turn is None or not change.turn.input:
        return True
    used = max((number for state in here.states for number, *_ in state), default=0)
    return change.turn.input[0][0] == used + 1


def fold(
    base: tuple[ItemSeen, ...],
    turns: Mapping[int, Change],
    rewinds: Sequence[Change],
    last: int,
    fits: Fits,
    known_from: Sequence[int],
    explained: Callable[[Change, tuple[ItemSeen, ...]], bool] = lambda change, before: True,
) -> Folded:
    """From revision 1 to ``last``, as far as it goes. Each rewind is used once at most, each known one in the end.

    ``fits`` says whether a state agrees with what was read at that revision; ``known_from[r]`` is when somebody first
    knew of a revision of at least r; ``explained`` whether a turn can be what was answered behind a state.
    """
    best = Folded([base])
    stack: list[tuple[Folded, frozenset[int]]] = [(best, frozenset())]
    while stack:
        here, used = stack.pop()
        if here.revision >= best.revision:
            best = here
        if here.revision == last:
            left = [one for index, one in enumerate(rewinds) if index not in used and one.known < NEVER]
            if not left:
                return here
            here.problem = "a rewind that was acknowledged has no place in it"
            continue
        following = here.revision + 1
        if (turn := turns.get(following)) is not None:
            state = applied(here.states[-1], turn)
            if not _numbered_on(here, turn):
                # Something else was there that this history lacks, such as a turn of which nobody heard.
                here.problem = f"the items of revision {following} do not follow those before"
            elif state is None:
                here.problem = f"revision {following} replaces what is behind an item that is not there"
            elif not fits(following, state):
                here.problem = f"revision {following} was read as something else"
            elif not explained(turn, here.states[-1]):
                here.problem = f"revision {following} does not answer what is behind it"
            else:
                stack.append((Folded([*here.states, state], [*here.changes, turn]), used))
            continue
        here.problem = f"nothing that was asked for can have made revision {following}"
        for index in range(len(rewinds) - 1, -1, -1):
            rewind = rewinds[index]
            state = None if index in used else applied(here.states[-1], rewind)
            in_time = rewind.start <= known_from[following] and following <= rewind.at_most
            if state is not None and in_time and fits(following, state):
                stack.append((Folded([*here.states, state], [*here.changes, rewind]), used | {index}))
    return best


def changes_of(operations: Sequence[Operation]) -> tuple[dict[str, Change], dict[str, Change]]:
    """What was asked of a session that changes it: turns and rewinds by request id, with what is known of each."""
    turns: dict[str, Change] = {}
    rewinds: dict[str, Change] = {}
    for one in operations:
        if one.op in ("send", "edit"):
            change = turns.setdefault(one.request_id, Change(one.request_id, one.start, text=one.text))
            change.start, change.item = min(change.start, one.start), one.item
        elif one.op == "rewind":
            change = rewinds.setdefault(one.request_id, Change(one.request_id, one.start, item=one.item))
            change.start = min(change.start, one.start)
            if one.ok:
                change.known, change.at_most = min(change.known, one.end), min(change.at_most, one.revision)
    return turns, rewinds
