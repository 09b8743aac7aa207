"""Tables for a terminal that lose no column: one that is too wide becomes several below each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_LABEL = 26
"""A name wider than this is folded."""
_BETWEEN = 3
"""What a column takes beside its text: two blanks and a line."""


def print_grid(
    console: Console, title: str, labels: Sequence[str], heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print ``rows``, whose first cells are names under ``labels`` and the others numbers under ``heads``.

    Where the console is too narrow, the columns go on in another table, which has the names again.
    """
    count = len(labels)
    cells = [[head.split() or [""], [row[at] for row in rows]] for at, head in enumerate([*labels, *heads])]
    widths = [max(map(len, [*words, *column]), default=0) for words, column in cells]
    widths[:count] = [min(width, _LABEL) for width in widths[:count]]
    room = console.width - 1 - sum(width + _BETWEEN for width in widths[:count])
    for number, columns in enumerate(_parts(widths[count:], room)):
        table = Table(title=None if number else Text(title), title_justify="left")
        for label, width in zip(labels, widths, strict=False):
            table.add_column(Text(label), overflow="fold", width=width)
        for column in columns:
            width = widths[count + column]
            table.add_column(Text(heads[column]), justify="right", overflow="fold", width=width)
        for row in rows:
            table.add_row(
                *(Text(cell) for cell in (*row[:count], *(row[count + column] for column in columns)))
            )
        console.print(table)


def _parts(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Numbers of the columns that stand together; at least one."""
    part: list[int] = []
    left = room
    for number, width in enumerate(widths):
        if part and width + _BETWEEN > left:
            yield part
            part, left = [], room
        part.append(number)
        left -= width + _BETWEEN
    yield part
