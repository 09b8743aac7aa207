"""The demo's third act: what it says, and everything that it has to notice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pensieve.demo.acts import killed
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
