"""The checker on histories made by hand: legal ones pass, and each way of being illegal is found, by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from support.robustness.checker import check
from support.robustness.history import ItemSeen, Operation, Recorder, TurnSeen, read_history

NAME = "sessions/s"
SYSTEM: ItemSeen = (1, "system", "be brief", (1, 2), "")


def answer_of(context: Sequence[int], count: int) -> list[int]:
    """Any pure function will do."""
    return [(sum(context) * 7 + index) % 50 + 10 for index in range(count)]


@dataclass
class Script:
    """A session as an honest server would have it, one operation after another, each 10 long."""

    operations: list[Operation] = field(default_factory=list)
    live: list[ItemSeen] = field(default_factory=lambda: [SYSTEM])
    revision: int = 1
    head: int = 1
    now: int = 0

    def __post_init__(self) -> None:
        self.read()

    def operation(self, op: str, **fields: object) -> Operation:
        self.now += 20
        one = Operation(client=0, op=op, session=NAME, start=self.now, end=self.now + 10, ok=True)
        for name, value in fields.items():
            setattr(one, name, value)
        self.operations.append(one)
        return one

    def read(self) -> Operation:
        return self.operation("read", revision=self.revision, items=tuple(self.live))

    def turn(self, request_id: str, after: int | None = None) -> Operation:
        kept = [item for item in self.live if after is None or item[0] <= after]
        text = f"text of {request_id}"
        question: ItemSeen = (self.head + 1, "user", text, (40 + self.head, 3), request_id)
        context = [token for item in [*kept, question] for token in item[3]] + [9]
        output = answer_of(context, 3)
        answer: ItemSeen = (self.head + 2, "assistant", f"to {request_id}", (9, *output), request_id)
        seen = TurnSeen(
            state="committed", revision=self.revision + 1, base_revision=self.revision,
            context_tokens=len(context), output_tokens=3, input=(question,), output=answer,
        )  # fmt: skip
        self.live = [*kept, question, answer]
        self.revision, self.head = self.revision + 1, self.head + 2
        return self.operation(
            "send" if after is None else "edit", request_id=request_id, text=text, item=after, turn=seen
        )

    def rewind(self, item: int, request_id: str = "back") -> Operation:
        self.live = [one for one in self.live if one[0] <= item]
        self.revision += 1
        return self.operation("rewind", request_id=request_id, item=item, revision=self.revision)

    def kinds(self) -> set[str]:
        return {one.kind for one in check(self.operations, answer_of).violations}


def unknown(one: Operation) -> Operation:
    """Nobody heard how it ended."""
    one.ok, one.turn, one.error, one.revision, one.items = False, None, "TRANSPORT", 0, None
    return one


def test_a_legal_history() -> None:
    script = Script()
    for name in ("a", "b"):
        script.turn(name)
    script.rewind(3)
    script.turn("c", after=2)
    script.read()
    verdict = check(script.operations, answer_of)
    assert verdict.violations == []
    assert (verdict.sessions, verdict.turns, verdict.acknowledged, verdict.answers) == (1, 3, 3, 3)


def test_unknown_outcomes_may_be_there_or_not() -> None:
    script = Script()
    script.turn("a")
    unknown(script.rewind(1))
    script.turn("b")
    script.read()
    assert script.kinds() == set()
    script = Script()
    script.operations.append(
        Operation(client=1, op="send", session=NAME, request_id="never", start=5, end=9, text="?")
    )
    script.turn("a")
    script.read()
    assert script.kinds() == set()


def test_a_turn_of_which_nobody_heard_is_no_rewind() -> None:
    """A turn was left alone and is in history, a rewind was refused, and nobody read before the deletion."""
    script = Script()
    script.turn("a")
    unknown(script.turn("left alone"))
    script.operations.append(
        Operation(client=1, op="rewind", session=NAME, request_id="r", start=30, end=35, item=1, error="BUSY")
    )
    script.turn("b")
    script.operation("delete")
    assert script.kinds() == set()


def test_of_two_rewinds_the_one_that_explains_the_answers_was_done() -> None:
    """Nobody heard how either ended, and nobody read before the deletion."""
    script = Script()
    script.turn("a")
    for item, name in ((1, "first"), (3, "second")):
        script.operations.append(
            Operation(
                client=1,
                op="rewind",
                session=NAME,
                request_id=name,
                start=45,
                end=50,
                item=item,
                error="TRANSPORT",
            )
        )
    script.revision += 1  # the second was, and changed nothing
    script.turn("b")
    script.operation("delete")
    assert script.kinds() == set()


def test_an_acknowledged_turn_is_missing() -> None:
    script = Script()
    script.turn("a")
    before, revision, head = script.live, script.revision, script.head
    script.turn("b")
    script.live, script.revision, script.head = before, revision, head
    script.read()
    assert script.kinds() >= {"stale"}
    script.turn("c")
    script.read()
    assert "order" in script.kinds(), "two turns at one revision"
    script.operation("get_turn", request_id="b", ok=False, error="TURN_NOT_FOUND")
    assert "lost" in script.kinds()


def test_a_session_is_missing() -> None:
    script = Script()
    script.turn("a")
    script.operation("look", ok=False, error="SESSION_NOT_FOUND")
    assert script.kinds() == {"lost"}
    script.operations.append(Operation(client=1, op="delete", session=NAME, start=1, end=500))
    assert script.kinds() == set(), "somebody may have deleted it"


def test_a_retry_was_appended_twice() -> None:
    script = Script()
    first = script.turn("a")
    assert first.turn is not None
    script.turn("a")
    script.operations.pop()
    script.read()
    assert "doubled" in script.kinds()


def test_one_request_has_two_outcomes() -> None:
    script = Script()
    script.turn("a")
    script.turn("a")
    assert "doubled" in script.kinds()


def test_a_commit_lost_its_input() -> None:
    script = Script()
    one = script.turn("a")
    assert one.turn is not None
    one.turn = replace(one.turn, input=())
    assert script.kinds() == {"torn"}


def test_an_output_is_missing() -> None:
    script = Script()
    one = script.turn("a")
    assert one.turn is not None
    one.turn = replace(one.turn, output=None)
    assert script.kinds() == {"torn"}


def test_an_answer_to_a_history_that_never_was() -> None:
    script = Script()
    script.turn("a")
    one = script.turn("b")
    assert one.turn is not None and one.turn.output is not None
    number, role, text, tokens, request_id = one.turn.output
    one.turn = replace(one.turn, output=(number, role, text, (*tokens[:-1], 99), request_id))
    assert script.kinds() == {"answer"}


def test_two_turns_overlapped() -> None:
    script = Script()
    script.turn("a")
    one = script.turn("b")
    assert one.turn is not None
    one.turn = replace(one.turn, base_revision=1)
    assert script.kinds() == {"order"}


def test_a_change_that_nobody_asked_for() -> None:
    script = Script()
    script.turn("a")
    script.turn("ghost")
    script.operations.pop()
    script.turn("b")
    assert "lost" in script.kinds()


def test_order_against_real_time() -> None:
    script = Script()
    script.turn("a")
    late = script.turn("b")
    script.turn("c")
    late.start = late.end = script.now + 100
    assert script.kinds() == {"order"}


def test_a_stale_read() -> None:
    script = Script()
    before = script.live
    script.turn("a")
    script.operation("read", revision=1, items=tuple(before))
    assert script.kinds() == {"stale"}


def test_a_read_from_the_future() -> None:
    script = Script()
    early = script.operation("look", revision=2)
    script.turn("a")
    assert early.end < script.operations[-1].start
    assert script.kinds() == {"order"}


def test_a_read_of_something_else() -> None:
    script = Script()
    script.turn("a")
    script.operation("read", revision=2, items=(SYSTEM, *script.live[2:]))
    assert "order" in script.kinds()


def test_an_acknowledged_rewind_is_missing() -> None:
    script = Script()
    script.turn("a")
    before, revision = script.live, script.revision
    script.rewind(1)
    script.live, script.revision = before, revision
    script.turn("b")
    script.read()
    assert script.kinds() == {"order"}


def test_something_went_well_after_a_deletion() -> None:
    script = Script()
    script.operation("delete")
    script.turn("a")
    assert "order" in script.kinds()


def test_a_fork_of_what_never_was() -> None:
    script = Script()
    script.turn("a")
    script.turn("b")
    fork = Operation(
        client=0, op="fork", session="sessions/t", text=NAME, item=3, start=200, end=210, ok=True
    )
    copied = Operation(
        client=0,
        op="read",
        session="sessions/t",
        revision=1,
        items=tuple(script.live[:3]),
        start=220,
        end=230,
        ok=True,
    )
    script.operations += [fork, copied]
    assert script.kinds() == set()
    copied.items = tuple(script.live[:2])
    assert script.kinds() == {"order"}


@pytest.mark.parametrize("reason", ["HISTORY_REGRESSED", "BUG", "CRASHED ValueError: x"])
def test_refusals_that_no_fault_excuses(reason: str) -> None:
    script = Script()
    script.operation("look", ok=False, error=reason)
    assert script.kinds() == {"refused"}


def test_a_history_survives_its_file(tmp_path: Path) -> None:
    script = Script()
    script.turn("a")
    script.rewind(1)
    recorder = Recorder(tmp_path / "history.jsonl")
    for one in script.operations:
        recorder.done(one)
    recorder.close()
    assert list(read_history(tmp_path / "history.jsonl")) == recorder.operations
