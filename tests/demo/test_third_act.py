"""The demo's third act: what it says, and everything that it has to notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
from rich.console import Console

from pensieve.client import Piece
from pensieve.demo import killed
from support.demo.runs import spoil, survived, well, with_usage


def test_a_third_act_without_fault_has_no_problems() -> None:
    assert killed.problems(survived()) == []
    assert killed.result(survived()).startswith(
        "4.2 s after the kill the answer went on where it had stopped."
    )
    assert "45 of 55 tokens were in memory again, 10 were new" in killed.result(survived())
    quick = replace(survived(), cut=None, later=[], items=4)
    assert killed.problems(quick) == [] and "over before" in killed.result(quick)


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        (replace(survived(), items=12), "the history has 12 items, not 10"),
        (replace(survived(), said="Hers"), "the answer began 'Hers' and became 'Your name is Vio.'"),
        (
            replace(survived(), later=well("Pensieve", "recomputed", 0.1, turns=5).exchanges[-2:]),
            "the turn after computed 45 tokens again",
        ),
        (
            replace(survived(), before=spoil(well("", "device", 1, 2), with_usage(new_tokens=7)).exchanges),
            "the receipt does not add up",
        ),
        (
            replace(
                survived(),
                before=spoil(well("", "device", 1, 2), lambda one: replace(one, text="Hm.")).exchanges,
            ),
            "wanted 'Vio', got 'Hm.'",
        ),
    ],
)
def test_the_third_act_notices(spoiled: killed.KilledRun, said: str) -> None:
    (problem,) = killed.problems(spoiled)
    assert said in problem


class OneAnswer:
    """A session, and its stream: these pieces, then the turn of a run without fault."""

    def __init__(self, *pieces: Piece) -> None:
        self.pieces = pieces
        self.turn = survived().before[0].turn

    def stream(self, text: str, **options: object) -> AbstractContextManager[OneAnswer]:
        return nullcontext(self)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)


class NoOwner:
    kills = 0

    def kill(self) -> None:
        self.kills += 1

    def wait_ready(self) -> None:
        pass


@pytest.mark.parametrize("anew", [True, False])
def test_an_answer_that_was_whole_when_the_server_was_killed_was_not_cut(anew: bool) -> None:
    """It is told from the history, so the next turn finds nothing in memory: that is for a later answer to show."""
    later = (
        (Piece(restarted=True), Piece(text="Your"), Piece(text=" name")) if anew else (Piece(text=" name"),)
    )
    session, owner, run = OneAnswer(Piece(text="Your"), *later), NoOwner(), killed.KilledRun()
    said = survived().before[0].said
    exchange = killed.answer_with_a_kill(session, said, owner, run, Console(quiet=True))  # type: ignore[arg-type]
    assert owner.kills == 1 and exchange.turn is session.turn
    assert (run.cut is exchange) == anew and (run.silence_s > 0) == anew
    assert run.said == ("Your" if anew else "")
