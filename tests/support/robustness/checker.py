"""Decides whether a history of operations is one that the promises allow.

Per session: committed turns are in one order that agrees with real time; a turn is there with input and output or not
at all; no request id is there twice; nothing that was acknowledged is missing later; a read shows all that was
acknowledged before it began and nothing that had not been asked for; each answer is the one that a stateless run over
the history at its base gives. An operation whose outcome is unknown may have been done or not. Sessions are independent
of each other but for forks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from support.engine.hash_engine import expected_output
from support.robustness.fold import NEVER, Change, Folded, changes_of, fold
from support.robustness.history import ItemSeen, Operation, TurnSeen, by_session

FORBIDDEN = frozenset(
    {
        *("HISTORY_CORRUPT", "HISTORY_REGRESSED", "SESSION_DAMAGED", "BUG", "REQUEST_ID_REUSED"),
        *("STORE_REPLACED", "STORE_FOREIGN", "STREAM_INCONSISTENT", "TURN_QUARANTINED"),
    }
)
"""Reasons that no fault of ours can excuse: the faults harm processes and connections, never what a store holds."""
CRASHED = "CRASHED "
"""Begins the error of an operation in which the SDK raised what it does not promise to raise."""
GONE = frozenset({"SESSION_NOT_FOUND", "SESSION_DELETED", "SESSION_EXPIRED"})
Oracle = Callable[[Sequence[int], int], list[int]]


@dataclass(frozen=True)
class Violation:
    """One thing that no legal history has."""

    kind: str
    """lost, doubled, torn, order, stale, answer, refused."""
    session: str
    what: str


@dataclass
class Verdict:
    """What was found."""

    violations: list[Violation]
    sessions: int = 0
    turns: int = 0
    """Committed turns."""
    acknowledged: int = 0
    """Committed turns that some client held an acknowledgement of."""
    answers: int = 0
    """Answers that were computed again."""

    def count(self, kind: str) -> int:
        return sum(one.kind == kind for one in self.violations)


class SessionCheck:
    """The check of one session. ``folded`` is its history as far as it could be put together."""

    def __init__(self, name: str, operations: Sequence[Operation], oracle: Oracle = expected_output) -> None:
        self.name = name
        self._operations = sorted(operations, key=lambda one: one.end)
        self._oracle = oracle
        self.violations: list[Violation] = []
        self.asked, self._rewinds = changes_of(operations)
        self.committed: dict[int, Change] = {}
        self.acknowledged = self.answers = 0
        self._reads = [one for one in self._operations if one.ok and one.items is not None]
        self._deletes = [one for one in self._operations if one.op == "delete"]
        self._tokens: dict[int, tuple[int, ...]] = {}
        self.known_from: list[int] = []
        self.folded: Folded | None = None

    def run(self) -> None:
        """All of it but forks."""
        self._refusals()
        for one in self._operations:
            self._learn(one)
        self._by_revision()
        self._twice()
        base = next((one for one in self._reads if one.revision == 1), None)
        if base is None or base.items is None:
            return
        last = max([one.revision for one in self._reads], default=1)
        last = max([last, *self.committed])
        self._when_known(last)
        reads: dict[int, list[tuple[ItemSeen, ...]]] = {}
        for read in self._reads:
            reads.setdefault(read.revision, []).append(read.items or ())

        def fits(revision: int, state: tuple[ItemSeen, ...]) -> bool:
            return all(_same(state, seen) for seen in reads.get(revision, ()))

        start = tuple(self._whole(item) for item in base.items)
        rewinds = list(self._rewinds.values())
        # Where several of them may stand in one place, the answers behind tell which did; a history in which no choice
        # explains the answers is put together without them, so that it can be said what is wrong.
        folded = fold(start, self.committed, rewinds, last, fits, self.known_from, self._explained)
        if folded.problem:
            folded = fold(start, self.committed, rewinds, last, fits, self.known_from)
        self.folded = folded
        if folded.problem and not self._deletes:
            self._found("lost" if "nothing that" in folded.problem else "order", folded.problem)
        for revision, change in enumerate(folded.changes, 2):
            self._change(revision, change, folded.states[revision - 2])
        self._real_time(folded)

    # ---- evidence

    def _found(self, kind: str, what: str) -> None:
        self.violations.append(Violation(kind, self.name, what))

    def _refusals(self) -> None:
        over = min((one.end for one in self._deletes if one.ok), default=NEVER)
        asked = min((one.start for one in self._deletes), default=NEVER)
        for one in self._operations:
            if one.error in FORBIDDEN or one.error.startswith(CRASHED):
                self._found("refused", f"{one.op} of {one.request_id} was answered {one.error}")
            if one.error in GONE and one.end < asked:
                self._found("lost", f"{one.op} was answered {one.error}, and nobody had deleted the session")
            if one.ok and one.start > over and one.op != "delete":
                self._found("order", f"{one.op} went well after the session had been deleted")

    def _learn(self, one: Operation) -> None:
        """Take in what an operation tells of a turn."""
        for item in (*(one.items or ()), *(one.turn.input if one.turn else ())):
            self._remember(item)
        change = self.asked.get(one.request_id)
        if one.ok and one.turn is not None and one.turn.state == "committed":
            if one.turn.output is not None:
                self._remember(one.turn.output)
            if change is None:
                self._found("order", f"turn {one.request_id} was never asked for")
                return
            self.acknowledged += change.turn is None
            if change.turn is not None and _outcome(change.turn) != _outcome(one.turn):
                self._found("doubled", f"turn {one.request_id} had two outcomes")
            if change.turn is None or (one.turn.output and one.turn.output[3]):
                change.turn = one.turn
            change.known = min(change.known, one.end)
        elif change is not None and change.known < one.start and one.op in ("get_turn", "cancel"):
            missing = one.error == "TURN_NOT_FOUND" or (one.ok and one.turn is not None)
            if missing:
                self._found("lost", f"turn {one.request_id} was acknowledged, and later it was not there")

    def _remember(self, item: ItemSeen) -> None:
        if item[3]:
            self._tokens.setdefault(item[0], item[3])

    def _whole(self, item: ItemSeen) -> ItemSeen:
        """With its tokens, if anybody ever saw them."""
        return (item[0], item[1], item[2], self._tokens.get(item[0], ()), item[4])

    def _by_revision(self) -> None:
        for change in self.asked.values():
            if change.turn is None:
                continue
            turn = change.turn
            output = None if turn.output is None else self._whole(turn.output)
            change.turn = replace(turn, input=tuple(self._whole(item) for item in turn.input), output=output)
            other = self.committed.setdefault(turn.revision, change)
            if other is not change:
                ids = f"{other.request_id} and {change.request_id}"
                self._found("order", f"turns {ids} are both revision {turn.revision}")

    def _twice(self) -> None:
        for read in self._reads:
            answers = Counter(item[4] for item in read.items or () if item[1] == "assistant" and item[4])
            for request_id, count in answers.items():
                if count > 1:
                    self._found("doubled", f"turn {request_id} stands {count} times in history")
                    return

    def _when_known(self, last: int) -> None:
        """``known_from[r]``: when somebody first knew of a revision of r or more."""
        self.known_from = [NEVER] * (last + 2)
        seen = [(change.turn.revision, change.known) for change in self.asked.values() if change.turn]
        for revision, when in [*seen, *((one.revision, one.end) for one in self._observations())]:
            if revision <= last:
                self.known_from[revision] = min(self.known_from[revision], when)
        for revision in range(last - 1, -1, -1):
            self.known_from[revision] = min(self.known_from[revision], self.known_from[revision + 1])

    def _observations(self) -> list[Operation]:
        return [one for one in self._operations if one.ok and one.op in ("read", "look")]

    # ---- judgement

    def _change(self, revision: int, change: Change, before: tuple[ItemSeen, ...]) -> None:
        turn = change.turn
        if turn is None:
            return
        name = f"turn {change.request_id} (revision {revision})"
        said = [item[2] for item in turn.input if item[1] == "user"]
        if turn.output is None or said != ([change.text] if change.text else []):
            self._found("torn", f"{name} is not in history with its input and its output")
            return
        if turn.base_revision != revision - 1:
            self._found("order", f"{name} says that it was based on revision {turn.base_revision}")
        complaint = self._complaint(change, before)
        self.answers += complaint is not None
        if complaint:
            self._found("answer", f"{name} {complaint}")

    def _explained(self, change: Change, before: tuple[ItemSeen, ...]) -> bool:
        return not self._complaint(change, before)

    def _complaint(self, change: Change, before: tuple[ItemSeen, ...]) -> str | None:
        """What is wrong with an answer behind these items, "" if nothing is; None: nobody saw all of the tokens."""
        turn = change.turn
        if turn is None or turn.output is None:
            return None
        kept = [
            item for item in before if change.item is None or item[0] <= change.item or item[1] == "system"
        ]
        parts = [*kept, *turn.input, turn.output]
        if not all(item[3] or not item[2] for item in parts) or not turn.output[3]:
            return None
        count = turn.output_tokens
        ids = turn.output[3]
        context = [token for item in parts[:-1] for token in item[3]] + list(ids[: len(ids) - count])
        if list(ids[len(ids) - count :]) != self._oracle(context, count):
            return "does not answer the history that it stands behind"
        if turn.context_tokens != len(context):
            return f"had {turn.context_tokens} tokens of context, not {len(context)}"
        return ""

    def _real_time(self, folded: Folded) -> None:
        starts = [0, 0, *(change.start for change in folded.changes)]  # by revision
        for revision, change in enumerate(folded.changes, 2):
            if change.turn is None and change.known < NEVER:
                self._known(revision, change.known)
        for revision, change in enumerate(folded.changes, 2):
            if self.known_from[revision] < change.start:
                self._found("order", f"revision {revision} was there before it was asked for")
        for one in self._observations():
            if one.revision + 1 < len(self.known_from) and self.known_from[one.revision + 1] < one.start:
                self._found("stale", f"a {one.op} showed revision {one.revision} when more was acknowledged")
            if one.revision < len(starts) and max(starts[: one.revision + 1]) > one.end:
                self._found("order", f"a {one.op} showed revision {one.revision} before it was asked for")

    def _known(self, revision: int, when: int) -> None:
        for lower in range(revision + 1):
            self.known_from[lower] = min(self.known_from[lower], when)

    def states_during(self, start: int, end: int) -> list[tuple[ItemSeen, ...]]:
        """The states that an operation between these times may have seen."""
        if self.folded is None:
            return []
        starts = [0, *(change.start for change in self.folded.changes)]
        return [
            state
            for revision, state in enumerate(self.folded.states, 1)
            if starts[revision - 1] <= end
            and self.known_from[min(revision + 1, len(self.known_from) - 1)] >= start
        ]


def _outcome(turn: TurnSeen) -> object:
    output = None if turn.output is None else (turn.output[0], turn.output[2])
    return turn.revision, turn.base_revision, output, [(item[0], item[2]) for item in turn.input]


def _same(state: tuple[ItemSeen, ...], seen: tuple[ItemSeen, ...]) -> bool:
    return [item[:3] for item in state] == [item[:3] for item in seen]


def _content(state: Iterable[ItemSeen]) -> list[tuple[str, str]]:
    return [(item[1], item[2]) for item in state]


def _check_fork(one: Operation, sessions: dict[str, SessionCheck]) -> Violation | None:
    """``one`` made ``session`` out of the session in ``text``."""
    source, copy = sessions.get(one.text), sessions.get(one.session)
    if (
        source is None
        or copy is None
        or copy.folded is None
        or source.folded is None
        or source.folded.problem
    ):
        return None
    got = _content(copy.folded.states[0])
    for state in source.states_during(one.start, one.end):
        if one.item is None or one.item in {item[0] for item in state}:
            wanted = [
                item for item in state if one.item is None or item[0] <= one.item or item[1] == "system"
            ]
            if _content(wanted) == got:
                return None
    return Violation("order", one.session, f"is no copy of {one.text} as it ever was then")


def check(operations: Iterable[Operation], oracle: Oracle = expected_output) -> Verdict:
    """Check a whole run."""
    operations = list(operations)
    sessions = {name: SessionCheck(name, ops, oracle) for name, ops in by_session(operations).items()}
    verdict = Verdict([], sessions=len(sessions))
    for session in sessions.values():
        session.run()
        verdict.violations += session.violations
        verdict.turns += len(session.committed)
        verdict.acknowledged += session.acknowledged
        verdict.answers += session.answers
    for one in operations:
        if one.op == "fork" and one.ok and (violation := _check_fork(one, sessions)):
            verdict.violations.append(violation)
    return verdict
