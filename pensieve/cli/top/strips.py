"""A session's chunks as a row of characters: what they are coloured by is told by their shape as well."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from rich.text import Text

PLACES: Final[dict[str, tuple[str, str, str]]] = {
    "d": ("█", "blue", "device"),
    "b": ("▓", "cyan", "both"),
    "h": ("▒", "yellow", "host"),
    "x": ("·", "bright_black", "dropped"),
    "i": (">", "bold green", "coming in"),
    "o": ("<", "bold yellow", "going out"),
    "r": ("r", "bold magenta", "recomputed"),
    "n": ("n", "bold bright_blue", "new"),
}
"""Letter of the feed → character, style, word."""
PLAIN: Final = {"█": "d", "▓": "b", "▒": "h", "·": "x"}
"""For terminals without block characters: the feed's own letters."""
_RUN: Final = re.compile(r"([a-zA-Z])(\d+)")


def runs(strip: str) -> Iterator[tuple[str, int]]:
    """``x7h40B3`` → letters with counts of chunks."""
    for found in _RUN.finditer(strip):
        yield found[1], int(found[2])


@lru_cache(maxsize=1 << 15)
def chunks(strip: str, places: str) -> int:
    """How many chunks are at these places, shared ones as well. Kept: most strips are the same at the next look."""
    wanted = places + places.upper()
    return sum(int(number) for letter, number in _RUN.findall(strip) if letter in wanted)


def draw(strip: str, width: int, *, blocks: bool = True) -> Text:
    """At most ``width`` characters. A chunk is one if they fit; else each is of what most of its chunks are."""
    text = Text()
    for letter in _cells(strip, width):
        shape, style, _ = PLACES.get(letter.lower(), ("?", "", ""))
        text.append(
            shape if blocks else PLAIN.get(shape, shape), f"{style} underline" if letter.isupper() else style
        )
    return text


def legend(*, blocks: bool = True) -> list[Text]:
    """What the characters mean."""
    words = []
    for shape, style, word in PLACES.values():
        words.append(Text.assemble((shape if blocks else PLAIN.get(shape, shape), style), f" {word}"))
    return [*words, Text.assemble(("shared", "underline"))]


def _cells(strip: str, width: int) -> Iterator[str]:
    total = sum(number for _, number in runs(strip))
    if total <= width:
        for letter, number in runs(strip):
            yield from letter * number
        return
    # Cell k stands for the chunks from k·total/width to (k+1)·total/width.
    share: Counter[str] = Counter()
    at, cell = 0, 0
    for letter, number in runs(strip):
        end = at + number
        while at < end:
            border = (cell + 1) * total // width
            taken = min(end, border) - at
            share[letter] += taken
            at += taken
            if at == border:
                yield share.most_common(1)[0][0]
                share.clear()
                cell += 1
