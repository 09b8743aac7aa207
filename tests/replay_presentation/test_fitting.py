"""Tables in a terminal of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pensieve.replay.presentation.table import print_grid, print_report
from support.replay.replay_reports import sweep


def lines(console: Console) -> list[str]:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, color_system=None)


@pytest.mark.parametrize("width", [60, 80, 150])
def test_no_column_is_lost(width: int) -> None:
    console = terminal(width)
    heads = [f"number {at}" for at in range(9)]
    rows = [
        (f"a system with a name of its own {row}", *(f"{row}{at}00,000.5" for at in range(9))) for row in "45"
    ]
    print_grid(console, "a title", ["system"], heads, rows)
    text = lines(console)
    assert max(map(len, text)) <= width
    for row in rows:
        assert all(any(cell in line for line in text) for cell in row[1:])
    tables = sum("system" in line and "┃" in line for line in text)
    assert tables == {60: 5, 80: 3, 150: 1}[width], "one table where there is room"
    assert sum("a title" in line for line in text) == 1


def test_reports_at_80_columns() -> None:
    """Of a sweep and of one run: each number that a wide terminal shows, a narrow one shows as well."""
    for report in (sweep(), sweep(rates=(1.0,))):
        wide, narrow = terminal(250), terminal(80)
        print_report(report, wide)
        print_report(report, narrow)
        assert max(map(len, lines(narrow))) <= 80
        numbers = {word for line in lines(wide) for word in line.split() if any(map(str.isdigit, word))}
        assert numbers <= {word for line in lines(narrow) for word in line.split()}
