"""The prose keeps to `docs/style.md`, as far as a program can see. The budget only falls."""

from __future__ import annotations

from support import prose
from support.sources import ROOT

BUDGET = {
    "docs long sentence": 9,
    "docs nobody": 8,
    "docs so many": 1,
    "docs what is": 11,
    "word what is": 24,
}
"""What is left of each count of `tests/support/prose.py`. Lower it with the text; never raise it."""


def test_prose_keeps_to_its_budget() -> None:
    counts, places = prose.count(ROOT)
    over = {name: number for name, number in counts.items() if number > BUDGET.get(name, 0)}
    shown = [place for place in places if place.partition(": ")[2] in over]
    assert not over, "write it in plain English (docs/style.md):\n" + "\n".join(shown)
    spare = {name: counts[name] for name, number in BUDGET.items() if counts[name] < number}
    assert not spare, f"there is less of it now: lower BUDGET to {spare}"


def test_what_is_counted() -> None:
    assert [
        text for _, text in prose.docstrings('"""M"""\nclass A:\n    """C"""\n    x: int\n    """X"""\n')
    ] == [
        "M",
        "C",
        "X",
    ]
    assert prose.is_long("word " * 41 + ".") and not prose.is_long("word " * 40 + ".")
    assert list(prose.sentences("One thing. Another:\n* a list\n* of two")) == [
        "One thing.",
        "Another:",
        "a list",
        "of two",
    ]
